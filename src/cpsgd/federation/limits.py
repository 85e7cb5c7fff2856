"""`Limits`: what a client asks of a round before it sends anything."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.correlated.turns import run_rules
from cpsgd.errors import CpsgdError, FingerprintError, ParameterError, RoundRefusedError
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol
from cpsgd.secagg import SecureParameters, risk
from cpsgd.secagg.parameters import MAX_CLIENTS

# The most that an unlucky draw of the graph may have for a probability to protect less than it should.
_INSECURITY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's own conditions. A server that does not meet them gets nothing.

    A protocol without noise is always refused. With `epsilon` and `delta` the client computes the guarantee itself,
    from the protocol, the number of rounds the server announces and the fewest clients whose sum it will unmask. A
    replace-one distance that the protocol states is taken for true only where `fingerprint` names that very protocol:
    somebody then knew the reason. From a server that just says so, 2D counts.

    Attributes:
        epsilon: ε that all rounds together may cost at most, or None for no limit; needs `delta`. What a server
            announces must keep it by itself, and each round together with all that were answered before, of
            whatever protocol (`cpsgd.federation.spending`). With a `Memory` that holds over all runs and restarts,
            without for one run.
        delta: δ of that guarantee.
        rounds: Rounds that a server may announce and the client answers at most, counted in the same way; or None.
        colluding: Other clients whose noise does not count: they may tell it to the server, and each of them knows
            its own and sees the next model. So at least one.
        adjacency: "replace-one" or "zero-out": which data sets are neighbours.
        examples: Protects single examples, and no more of them than this in a client's sum; None protects the whole
            client.
        disjoint: With `examples`: each of them is in at most one round of a run, which the train function sees to (a
            share of the examples for each round). Needed where the noise is correlated for that.
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
    disjoint: bool = field(default=False, repr=False)  # what is remembered rests on how limits were written before

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise ParameterError("Give epsilon and delta together: neither means anything without the other.")
        if self.epsilon is not None:
            _validate.positive("epsilon", self.epsilon)
            _validate.probability("delta", self.delta)
        if self.rounds is not None:
            _validate.integer("rounds", self.rounds, low=1)
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1)
        elif self.disjoint:
            raise ParameterError("disjoint is about the examples of a client: give examples, too.")
        _validate.integer("colluding", self.colluding, low=1)
        _validate.integer("min_clients", self.min_clients, low=2)
        # As plain text: `digest` rests on how a client's limits are written, and clients' memories on the digest.
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency).value)

    def check(self, protocol: Protocol, *, rounds: int, surviving: int) -> None:
        """Returns if a run of `rounds` rounds, each with at least `surviving` clients, is acceptable.

        Raises:
            RoundRefusedError: It is not; the message says why.
            FingerprintError: Another protocol was agreed on.
        """
        if self.fingerprint is not None and protocol.fingerprint != self.fingerprint:
            raise FingerprintError("The server's protocol is not the one this client was set up for.")
        if protocol.mechanism.grid is None:
            raise RoundRefusedError(
                f"The server asks for the {protocol.name} protocol, which sends floats; only integers can be summed."
            )
        if not protocol.mechanism.is_noisy:
            raise RoundRefusedError("The server's protocol adds no noise, so nothing would be private.")
        if not self.min_clients <= surviving <= protocol.clients:
            raise RoundRefusedError(
                f"The server would release the sum of {surviving} of {protocol.clients} clients; this client asks for "
                f"at least {self.min_clients}."
            )
        if protocol.clients > MAX_CLIENTS:
            # What the guarantee takes to compute grows with their number, which is the server's word.
            raise RoundRefusedError(
                f"The server announces {protocol.clients} clients; this client takes part among {MAX_CLIENTS} at most."
            )
        if rounds < 1 or (self.rounds is not None and rounds > self.rounds):
            raise RoundRefusedError(
                f"The server announces {rounds} rounds; this client answers {self.rounds or 'some'}."
            )
        rules = run_rules(protocol.mechanism)
        rules.check_announced(rounds, examples=self.examples is not None, disjoint=self.disjoint)
        # Also without a limit on ε: this refuses sums of examples whose share the protocol could not tell.
        accounted = protocol if self.examples is None else _example_level(protocol, self.examples)
        if self.fingerprint is None:
            accounted = replace(accounted, replace_one_distance=None, distance_reason=None)
        if self.epsilon is None or self.delta is None:
            return
        from cpsgd.privacy.guarantees import guarantee_over_rounds

        try:
            found = guarantee_over_rounds(
                accounted,
                self.delta,
                rounds=rounds,
                participation=rules.participation,
                adjacency=self.adjacency,
                surviving=surviving,
                colluding=self.colluding,
            )
        except CpsgdError as error:
            raise RoundRefusedError(f"Nothing is proved about the server's protocol: {error}") from None
        if found.epsilon > self.epsilon:
            raise RoundRefusedError(
                f"The server's protocol costs ε = {rounded_up(found.epsilon)} at δ = {self.delta:g} in {found.rounds} "
                f"rounds; this client's limit is {rounded_up(self.epsilon)}."
            )

    def check_secure(
        self, protocol: Protocol, proposed: SecureParameters, *, round: int, surviving: int
    ) -> SecureParameters:
        """The parameters of secure aggregation that are agreed to: the graph and threshold are the server's choice.

        Raises:
            RoundRefusedError: The choice would let so many colluding clients and the server see more than the sum.
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
        """16 bytes that stand for the question `check` answers, so that the answer can be remembered."""
        disjoint = " disjoint" if self.disjoint else ""
        text = f"cpsgd limits v1 {self!r}{disjoint} {protocol.fingerprint.hex()} {rounds} {surviving}"
        return hashlib.sha256(text.encode()).digest()[:16]


def _example_level(protocol: Protocol, examples: int) -> Protocol:
    """The protocol whose clients are as far apart as one example moves a silo's sum; for the accounting only."""
    from cpsgd.privacy.examples import example_protocol

    try:
        return example_protocol(protocol, examples)
    except ParameterError as error:
        raise RoundRefusedError(f"The server's protocol does not protect single examples: {error}") from None
