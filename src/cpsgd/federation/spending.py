"""What a client's rounds cost together, whichever protocols they had: by the ledger's composition.

A client's history is how often it answered each *kind* of round (`RoundKind`). Rounds of one kind cost what
`guarantee_over_rounds` proves; kinds add up by `cpsgd.ledger.charging`. Nothing is refused because it is
different from what was before: a client that raises its ε, or took part in a rehearsal with another plan, goes on with
what is left. As in a ledger, that is proved for kinds that are not chosen by looking at earlier results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cpsgd._numbers import rounded_up
from cpsgd.correlated.turns import RunRules, run_rules
from cpsgd.errors import CpsgdError, RoundRefusedError, WireError
from cpsgd.federation.limits import Limits
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class RoundKind:
    """All that a round's cost depends on, but for what the client itself assumes.

    Attributes:
        protocol: Its parameters as JSON, without a replace-one distance that is only the server's word.
        surviving: The fewest clients whose sum it may have ended with.
        examples: The most examples of a client's sum, or 0 where whole clients were protected.
    """

    protocol: str
    surviving: int
    examples: int

    @classmethod
    def of(cls, limits: Limits, protocol: Protocol, surviving: int) -> RoundKind:
        """The kind of round that a client with these limits is asked for."""
        # What was promised costs nothing: rounds of another promise are of the same kind.
        protocol = replace(protocol, promise=None)
        if limits.fingerprint is None:
            protocol = replace(protocol, replace_one_distance=None, distance_reason=None)
        return cls(protocol.to_json(), surviving, limits.examples or 0)

    def to_text(self) -> str:
        """As one line."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> RoundKind:
        """What `to_text` wrote.

        Raises:
            WireError: It is something else.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        expected = {"protocol": str, "surviving": int, "examples": int}
        if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != expected:
            raise WireError("What this client remembers of its rounds is damaged.")
        return cls(**fields)

    @property
    def rules(self) -> RunRules:
        """How rounds of this kind belong together."""
        return run_rules(Protocol.from_json(self.protocol).mechanism)

    @property
    def digest(self) -> str:
        """16 bytes that stand for it, in hexadecimal."""
        return hashlib.sha256(f"cpsgd round kind v1 {self.to_text()}".encode()).hexdigest()[:32]


History = Mapping[RoundKind, int]
"""How many rounds of each kind were answered."""


def check_affordable(limits: Limits, before: History, kind: RoundKind, rounds: int) -> None:
    """Returns if one more round of this kind keeps the client's ε, after those before.

    `Limits.check` has found that `rounds` rounds of this kind are acceptable by themselves.

    Raises:
        RoundRefusedError: It does not; the message says what all would cost.
    """
    if limits.epsilon is None or limits.delta is None:
        return
    if before.keys() <= {kind} and before.get(kind, 0) < rounds:
        return  # The first of `rounds` rounds cost no more than all of them.
    # Imported here: rounds of one plan, as most are, need no accountant, and a client is a process per message.
    from cpsgd.ledger.charging import total
    from cpsgd.ledger.entries import Budget, RoundEvent

    events = []
    try:
        for each, count in {**before, kind: before.get(kind, 0) + 1}.items():
            protocol = Protocol.from_json(each.protocol)
            # Who protects whole clients counts what rounds for single examples cost a whole client.
            examples = each.examples if limits.examples is not None and each.examples else None
            event = RoundEvent(protocol, survivors=each.surviving, colluding=limits.colluding, examples=examples)
            events += [event] * count
        adjacency = Adjacency(limits.adjacency)
        budget = Budget(population="self", epsilon=limits.epsilon, delta=limits.delta, adjacency=adjacency)
        found = total(budget, (), events).epsilon
    except CpsgdError as error:
        raise RoundRefusedError(f"Nothing is proved about this round after those before: {error}") from None
    if found > limits.epsilon:
        raise RoundRefusedError(
            f"This client has answered {sum(before.values())} rounds, and one more would bring their cost to "
            f"ε = {rounded_up(found)} at δ = {limits.delta:g}; its limit is {rounded_up(limits.epsilon)}."
        )
