"""A client's conditions: `Limits` for a round, for all rounds that it has answered, and its operator's settings.

A client's history is how often it answered each *kind* of round (`RoundKind`). Rounds of one kind cost what
`cpsgd.guarantee` proves. No round is refused for being different from those before: a client that raises its ε, or took
part in a rehearsal with another plan, goes on with what is left. From the second kind on a privacy filter decides, so
that a server may have chosen each plan by all it has seen (docs/proofs/adaptive.md, "A client's own limit").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from cpsgd import _plain, _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError, CpsgdError, FingerprintError, ParameterError, RoundRefusedError, WireError
from cpsgd.federation.client_files import FILE_KEYS, IDENTITY_KEY, MEMORY_KEY, ROSTER_KEY, Memory, Signing
from cpsgd.federation.messages import read_protocol
from cpsgd.mechanisms.memory import NoiseMemory
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from cpsgd.secagg import SecureParameters, risk
from cpsgd.secagg.parameters import MAX_CLIENTS

# Largest probability that the graph protects less than it should.
_INSECURITY = 1e-6
# Share of δ for the tails of each round by the filter, the same for all: a history does not know in which order rounds
# came. There is enough for 200,000 rounds.
_OCTAVE = 10
_SENSE = " (of a filter, for plans may have been chosen by results)"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's own conditions. A server that does not meet them gets nothing.

    A protocol without noise is always refused. With `epsilon` and `delta` the client computes the guarantee itself,
    from the protocol, the number of rounds the server announces and the fewest clients whose sum it will unmask. A
    replace-one distance that the protocol states is taken for true only where `fingerprint` names that very protocol:
    somebody then knew the reason. From a server that just says so, 2D counts.

    Attributes:
        epsilon: ε that all rounds together may cost at most, or None for no limit; needs `delta`. The run that a server
            announces must keep it by itself, and so must each round together with all that were answered before. With a
            `Memory` that holds over all runs and restarts, without for one run.
        delta: δ of that guarantee, for rounds of one plan. Against a server that changes plans by what it has seen, ε
            holds at twice this δ.
        rounds: Rounds that a server may announce and the client answers at most, counted in the same way; or None.
        colluding: Other clients whose noise does not count: they may tell it to the server, and each of them knows
            its own and sees the next model. So at least one.
        adjacency: "replace-one" or "zero-out": which data sets are neighbours.
        examples: Protects single examples, of which the client has no more than this; None protects the whole client.
        disjoint: With `examples`: each of them is in at most one round of a run, which the train function sees to (a
            share of the examples for each round). Needed where the noise is correlated for that.
        rate: With `examples`: the probability with which each of them is drawn for a round, in secret, by `silo_sum`.
            Less noise then keeps the same ε (docs/proofs/sampled-examples.md). Needs adjacency="zero-out".
        min_clients: The fewest clients in a sum.
        fingerprint: `Protocol.fingerprint` of the one protocol that is accepted, or None.

    Example:
        >>> silent = Protocol.binomial(clients=10, dim=5, clip_norm=1.0, levels=16, trials=0)
        >>> Limits(epsilon=1.0, delta=1e-6).check(silent, rounds=5, surviving=9)
        Traceback (most recent call last):
        cpsgd.errors.RoundRefusedError: The server's protocol adds no noise, so nothing would be private.
    """

    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None
    colluding: int = 1
    adjacency: str = "replace-one"
    examples: int | None = None
    min_clients: int = 2
    fingerprint: bytes | None = None
    disjoint: bool = field(default=False, repr=False)  # `digest` rests on how limits were written before
    rate: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise ParameterError("Give epsilon and delta together: neither means anything without the other.")
        if self.epsilon is not None:
            _validate.positive("epsilon", self.epsilon)
            _validate.fraction("delta", self.delta)
        if self.rounds is not None:
            _validate.integer("rounds", self.rounds, low=1)
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1)
        elif self.disjoint or self.rate != 1.0:
            raise ParameterError("disjoint and rate are about the examples of a client: give examples, too.")
        if self.rate != 1.0:
            self.sampling.check(self.adjacency)
            if self.disjoint:
                raise ParameterError("Examples that are drawn by chance are not disjoint: give rate or disjoint.")
        _validate.integer("colluding", self.colluding, low=1)
        _validate.integer("min_clients", self.min_clients, low=2)
        # As plain text: `digest` rests on how a client's limits are written, and clients' memories on the digest.
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency).value)

    @property
    def sampling(self) -> Participation:
        """The rounds that an example, or the whole client, is in where noise is independent."""
        return Participation.poisson(self.rate) if self.rate != 1.0 else Participation.every()

    def check(self, protocol: Protocol, *, rounds: int, surviving: int) -> None:
        """Checks that a run of `rounds` rounds, each with at least `surviving` clients, is acceptable.

        Raises:
            RoundRefusedError: It is not; the message says why.
            FingerprintError: Another protocol was agreed on.
        """
        self._check_protocol(protocol)
        if not self.min_clients <= surviving <= protocol.clients:
            raise RoundRefusedError(
                f"The server would release the sum of {surviving} of {protocol.clients} clients; this client asks for "
                f"at least {self.min_clients}."
            )
        if rounds < 1 or (self.rounds is not None and rounds > self.rounds):
            raise RoundRefusedError(
                f"The server announces {rounds} rounds; this client answers {self.rounds or 'some'}."
            )
        memory = protocol.mechanism.memory
        memory.check_announced(rounds, examples=self.examples is not None, disjoint=self.disjoint)
        if self.examples is not None:
            _check_examples(protocol, self.examples, self.sampling)
        if self.epsilon is None or self.delta is None:
            return
        if memory.steerable:
            raise RoundRefusedError(
                f"The proof about {protocol.name} needs a server that names the next holders of seeds by no results, "
                "and nobody but the server sees to that: a client with a limit on ε does not take its word."
            )
        # Imported here, for a client without a limit is a process per message that needs no accountant.
        from cpsgd.privacy.guarantees import guarantee

        try:
            run = Run.of(
                self.believed(protocol),
                rounds=rounds,
                participation=self.sampling if self.rate != 1.0 or memory.separation == 1 else "once",
                adjacency=self.adjacency,
                surviving=surviving,
                colluding=self.colluding,
                examples=self.examples,
            )
            found = guarantee(run, self.delta)
        except CpsgdError as error:
            raise RoundRefusedError(f"Nothing is proved about the server's protocol: {error}") from None
        if found.epsilon > self.epsilon:
            raise RoundRefusedError(
                f"The server's protocol costs ε = {rounded_up(found.epsilon)} at δ = {self.delta:g} in {found.rounds} "
                f"rounds; this client's limit is {rounded_up(self.epsilon)}."
            )

    def _check_protocol(self, protocol: Protocol) -> None:
        """Refuses a protocol that is not the expected one, sends floats, adds no noise or has too many clients."""
        if self.fingerprint is not None and protocol.fingerprint != self.fingerprint:
            raise FingerprintError("The server's protocol is not the one this client was set up for.")
        if protocol.mechanism.grid is None:
            raise RoundRefusedError(
                f"The server asks for the {protocol.name} protocol, which sends floats; only integers can be summed."
            )
        if not protocol.mechanism.is_noisy:
            raise RoundRefusedError("The server's protocol adds no noise, so nothing would be private.")
        if protocol.clients > MAX_CLIENTS:
            # The time to compute the guarantee grows with their number, which is the server's word.
            raise RoundRefusedError(
                f"The server announces {protocol.clients} clients; this client takes part among {MAX_CLIENTS} at most."
            )

    def believed(self, protocol: Protocol) -> Protocol:
        """Returns the protocol without its promise, and without a stated distance unless `fingerprint` confirms it."""
        protocol = replace(protocol, promise=None)
        if self.fingerprint is None:
            protocol = replace(protocol, replace_one_distance=None, replace_one_l1_distance=None, distance_reason=None)
        return protocol

    def check_secure(
        self, protocol: Protocol, proposed: SecureParameters, *, round: int, surviving: int
    ) -> SecureParameters:
        """Returns the parameters of secure aggregation to agree to: the server chooses the graph and the threshold.

        Raises:
            RoundRefusedError: The choice would let the server and the colluding clients see more than the sum.
        """
        if protocol.modulus is None or proposed.clients > protocol.clients:
            raise RoundRefusedError("The server's protocol does not fit secure aggregation.")
        expected = replace(
            proposed,
            dim=protocol.dim,
            bits=(protocol.modulus - 1).bit_length(),
            modulus=protocol.modulus,
            fingerprint=protocol.fingerprint,
            round=round,
            surviving=surviving,
        )
        dropout = 1.0 - expected.surviving / expected.clients
        if risk(expected, dropout=dropout, colluding=min(self.colluding, expected.clients)).insecurity > _INSECURITY:
            raise RoundRefusedError(
                f"With threshold={expected.threshold} and neighbours={expected.neighbours} the server and "
                f"{self.colluding} colluding clients could see more than the sum."
            )
        return expected

    def digest(self, protocol: Protocol, *, rounds: int, surviving: int) -> bytes:
        """Returns 16 bytes that identify a question to `check`, so that its answer can be remembered."""
        added = " disjoint" if self.disjoint else "" if self.rate == 1.0 else f" rate={self.rate!r}"
        text = f"cpsgd limits v1 {self!r}{added} {protocol.fingerprint.hex()} {rounds} {surviving}"
        return hashlib.sha256(text.encode()).digest()[:16]


def _check_examples(protocol: Protocol, examples: int, sampling: Participation) -> None:
    """Refuses a round in which the privacy of a single example cannot be proved, even if no limit on ε is set.

    Nor may the server promise another rate than that by which this client draws: one of them would be wrong.
    """
    from cpsgd.privacy.one_example import example_protocol, most_drawn

    planned = 1.0 if protocol.promise is None else protocol.promise.conditions.participation.rate
    if planned != sampling.rate:
        raise RoundRefusedError(
            f"The server's plan is for examples drawn with probability {planned:g}, and this client draws each of its "
            f"own with {sampling.rate:g}: plan with participation='poisson:{sampling.rate:g}', or set rate={planned:g}."
        )
    try:
        if sampling.sampled:
            protocol.mechanism.memory.check_run(1, sampling)
        example_protocol(protocol, most_drawn(examples, sampling))
    except (ConditionError, ParameterError) as error:
        raise RoundRefusedError(f"The server's protocol does not protect single examples: {error}") from None


# ---------------------------------------------------------------------- all rounds together


@dataclass(frozen=True)
class RoundKind:
    """Everything that a round's cost depends on, except the client's own assumptions.

    Attributes:
        protocol: Its parameters as JSON, without a replace-one distance that is only the server's word.
        surviving: The fewest clients whose sum it may have ended with.
        examples: The most examples of the client, or 0 where whole clients were protected.
        rate: The probability with which each example was drawn.
    """

    protocol: str
    surviving: int
    examples: int
    rate: float = 1.0

    @classmethod
    def of(cls, limits: Limits, protocol: Protocol, surviving: int) -> RoundKind:
        """Returns the kind of round that a client with these limits is asked for."""
        return cls(limits.believed(protocol).to_json(), surviving, limits.examples or 0, limits.rate)

    def to_text(self) -> str:
        """Returns the kind as one line; omits the rate if unused, as in memories of older releases."""
        return _plain.canonical(_plain.to_dict(self, without=["rate"] if self.rate == 1.0 else []))

    @classmethod
    def from_text(cls, text: str) -> RoundKind:
        """Reads a line of `to_text`.

        Raises:
            WireError: The text is not a kind.
        """
        try:
            data = _plain.parse(text, "A kind of round")
            return _plain.build(cls, {"rate": 1.0, **data} if isinstance(data, dict) else data)
        except ParameterError:
            raise WireError("What this client remembers of its rounds is damaged.") from None

    @property
    def memory(self) -> NoiseMemory:
        """The rules by which rounds of this kind belong together."""
        return read_protocol(self.protocol).mechanism.memory

    @property
    def digest(self) -> str:
        """16 bytes that identify it, in hexadecimal."""
        return hashlib.sha256(f"cpsgd round kind v1 {self.to_text()}".encode()).hexdigest()[:32]


History = Mapping[RoundKind, int]
"""Number of rounds of each kind that were answered."""


def check_affordable(limits: Limits, before: History, kind: RoundKind, rounds: int) -> None:
    """Checks that one more round of this kind, after those before, keeps the client's ε.

    `Limits.check` has found that `rounds` rounds of this kind are acceptable by themselves.

    Raises:
        RoundRefusedError: It does not; the message says what all would cost.
    """
    if limits.epsilon is None or limits.delta is None:
        return
    if before.keys() <= {kind} and before.get(kind, 0) < rounds:
        return  # The first of `rounds` rounds cost no more than all of them.
    # Imported here: rounds of one plan, as most are, need no accountant, and a client is a process per message.
    from cpsgd.ledger.charging import spent
    from cpsgd.ledger.entries import Budget, RoundEvent
    from cpsgd.ledger.kinds import Account

    # Rounds of several plans may have been chosen by results. Pure ε add up, however they were chosen.
    changed = not before.keys() <= {kind} and limits.delta > 0.0
    account = Account()
    try:
        for each, count in {**before, kind: before.get(kind, 0) + 1}.items():
            protocol = read_protocol(each.protocol)
            # A client that protects itself as a whole counts what rounds for single examples cost a whole client.
            examples = each.examples if limits.examples is not None and each.examples else None
            event = RoundEvent(
                protocol,
                survivors=each.surviving,
                participation="every" if examples is None or each.rate == 1.0 else Participation.poisson(each.rate),
                colluding=limits.colluding,
                examples=examples,
            )
            for _ in range(count):
                account.reserve(event, octave=_OCTAVE if changed else None)
        budget = Budget(
            population="self",
            epsilon=limits.epsilon,
            delta=limits.delta,
            adjacency=Adjacency(limits.adjacency),
            accounting=("adaptive-renyi" if limits.rate != 1.0 else "adaptive") if changed else "planned",
        )
        found = spent(budget, [account]).epsilon
    except CpsgdError as error:
        raise RoundRefusedError(f"Nothing is proved about this round after those before: {error}") from None
    if found > limits.epsilon:
        raise RoundRefusedError(
            f"This client has answered {sum(before.values())} rounds, and one more would bring their cost to "
            f"ε = {rounded_up(found)} at δ = {limits.delta:g}{_SENSE if changed else ''}; its limit is "
            f"{rounded_up(limits.epsilon)}."
        )


# ---------------------------------------------------------------------- the operator's settings


def open_client_files(
    settings: Mapping[str, object], *, require_memory: bool = False, require_roster: bool = False
) -> tuple[Memory | None, Signing]:
    """Returns the memory, and the identity and roster, that a client's operator has set.

    Args:
        settings: The operator's settings: Flower's node configuration, or NVFlare's `local/cpsgd.json`.
        require_memory: Refuses every round without a memory.
        require_roster: Refuses every round without an identity and a roster.

    Raises:
        RoundRefusedError: A setting with our prefix is unknown, so a protection would be missing without a word; a file
            cannot be used; or a required one is not set.
    """
    check_names((key for key in settings if key.lower().startswith("cpsgd")), FILE_KEYS)
    path = settings.get(MEMORY_KEY)
    memory = None if path is None else Memory.of(path)
    signing = Signing.of(settings) if settings.keys() & {IDENTITY_KEY, ROSTER_KEY} else Signing()
    if require_memory and memory is None:
        raise RoundRefusedError(f"This client requires a memory, and {MEMORY_KEY} is not set.")
    if require_roster and signing.roster is None:
        raise RoundRefusedError(f"This client requires a roster, and {IDENTITY_KEY} and {ROSTER_KEY} are not set.")
    return memory, signing


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses settings that are not known, with the right spelling.

    Raises:
        RoundRefusedError: One of the names is not known.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            (meant,) = get_close_matches(name.lower().replace("_", "-"), known, 1, 0.0) or ("",)
            # The server is told this text. A name may be anything, so no more than a word of it is quoted.
            shown = "".join(letter for letter in name[:40] if letter.isprintable())
            raise RoundRefusedError(
                f"This client's setting {shown!r} is unknown. Did its operator mean {meant!r}? "
                f"Known are {', '.join(known)}."
            )
