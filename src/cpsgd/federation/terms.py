"""`Terms`: what a server offers its clients for a whole run: the plan, the way of adding up, and who is charged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.neighbours import Participation
from cpsgd.planner import Plan
from cpsgd.secagg import SecureParameters
from cpsgd.secagg.identity import as_roster


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a server holds all rounds to.

    Attributes:
        plan: From `cpsgd.plan(..., secure=True, colluding=1)`, or `plan_examples` for single examples. Clients see the
            released models, and each can subtract its own noise: the plan's guarantee must not count it.
        secure: Sums by secure aggregation. Without, the server sees each client's noisy message, and clients must
            agree to that.
        examples: With a plan for single examples, how many a client's sum holds at most. Clients that are set up for
            another number refuse.
        roster: Public keys of all clients, as many as the plan has. What clients sign is then signed by them, and not
            by keys that they make for a round. It protects clients that have the same roster; those without one refuse.
        ledger: Where every round's cost is written down before its mean is handed out.
        population: The ledger's name of the clients; needed with a ledger.
        engine: The ledger's name of the transport.
    """

    plan: Plan
    secure: bool = True
    examples: int | None = None
    roster: Iterable[bytes] | None = None
    ledger: Ledger | None = None
    population: str | None = None
    engine: str = "federation"

    def __post_init__(self) -> None:
        plan, correlation = self.plan, self.plan.protocol.mechanism.correlation
        if correlation is not None and plan.rounds > correlation.rounds:
            raise ParameterError(
                f"The plan has {plan.rounds} rounds, and its noise is correlated over {correlation.rounds}; plan again."
            )
        if correlation is None and plan.participation.scheme != "every":
            raise ParameterError(
                f"The plan is for participation {str(plan.participation)!r}, and here the same nodes may be in every "
                'round; plan with participation="every".'
            )
        if plan.colluding < 1:
            raise ParameterError(
                "The plan has colluding=0: its guarantee is for outsiders only. Every client sees the released models, "
                "and can subtract its own noise; plan with colluding=1 or more."
            )
        if (self.ledger is None) != (self.population is None):
            raise ParameterError("Give ledger and population together.")
        if self.roster is not None:
            roster = as_roster(self.roster)
            if not self.secure or len(roster) != plan.protocol.clients:
                raise ParameterError(
                    f"A roster is for secure aggregation among everybody on it: {len(roster)} are, and the plan is "
                    f"for clients={plan.protocol.clients} with secure={self.secure}."
                )
            object.__setattr__(self, "roster", roster)
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1)
        if self.secure:
            self.parameters(0, plan.protocol.clients)

    def parameters(self, round: int, clients: int) -> SecureParameters:
        """What a round of secure aggregation with so many clients agrees on; it tolerates the plan's dropouts.

        With a roster all are each other's neighbours, however many they are.

        Raises:
            ParameterError: The plan was not made for secure aggregation.
            InfeasibleError: So many dropouts and colluding clients are more than secure aggregation tolerates.
        """
        found = SecureParameters.for_protocol(
            self.plan.protocol,
            round=round,
            clients=clients,
            dropout=1.0 - self.plan.surviving / clients,
            colluding=self.plan.colluding,
            surviving=self.plan.surviving,
        )
        if self.roster is None:
            return found
        most = (clients + self.plan.colluding) // 2 + 1
        return replace(found, neighbours=clients - 1, threshold=most, quorum=most)

    @property
    def apart(self) -> int | None:
        """How many rounds apart a node may take part at least; None if once only.

        Where single examples are protected, it is for the nodes to see to it that these are apart.
        """
        correlation = self.plan.protocol.mechanism.correlation
        return 1 if correlation is None or self.examples is not None else correlation.separation

    @property
    def way(self) -> str:
        """How sums are made, in words."""
        signed = ", signed" if self.roster is not None else ""
        return f"by secure aggregation{signed}" if self.secure else "in the server's sight"

    def check_rounds(self, rounds: int) -> None:
        """Refuses a run of more rounds than the plan's guarantee covers."""
        if rounds > self.plan.rounds:
            raise ParameterError(
                f"{rounds} rounds are more than the plan's guarantee covers; plan with rounds={rounds}."
            )

    def reserve(self, round: int, run: str, charged_to: str | None = None, course: str = "") -> Entry | None:
        """Charges a round, or raises `BudgetExceededError`; None without a ledger.

        `charged_to` is a run that was to charge the round and then stopped before anything was revealed: its entry
        pays, and is made if it has not come to that. Where noise is correlated, the first round pays for all; which
        these are is known by `course`, the name of the run that began with the first of them. A round of it that is on
        the ledger and is run all the same, by a server that was set back to an older file, belongs to another run.
        """
        if self.ledger is None or self.population is None:
            return None
        correlated = self.plan.protocol.mechanism.correlation is not None
        name = f"{self.engine}-{charged_to or run}"
        names = [f"{self.engine}-{course}", name] if correlated and course else [name]
        for each in names:
            found = self.ledger.find(self.population, run=each, round=round)
            if found is None:
                name = each
                break
            if charged_to is not None and not found.released:
                return found
        event = RoundEvent(
            self.plan.protocol,
            survivors=self.plan.surviving,
            participation=Participation.once() if correlated else self.plan.participation,
            partition=name if correlated else "",
            colluding=self.plan.colluding,
            round=round,
            run=name,
            examples=self.examples,
        )
        return self.ledger.reserve(self.population, event)
