"""`Terms`: the plan of a run, how its sums are made, and the ledger; `Settlement`: a round's charge and release."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import (
    BudgetExceededError,
    BudgetExpiredError,
    ImplausibleMeanError,
    LedgerError,
    ParameterError,
    StageError,
    ThresholdError,
)
from cpsgd.federation.one_message import PairServers
from cpsgd.federation.plausibility import FALSE_ALARM, Bounds, bounds
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.mechanisms.memory import NoiseMemory
from cpsgd.planner import Plan
from cpsgd.protocol import Protocol as PlannedProtocol
from cpsgd.secagg import SecureParameters
from cpsgd.secagg.keys import as_roster


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that a server holds all rounds to.

    Attributes:
        plan: From `cpsgd.plan(..., secure=True, colluding=1)`, or `plan_examples` for single examples. Clients see the
            released models, and each can subtract its own noise: the plan's guarantee must not count it.
        secure: Sums by secure aggregation. Without, the server sees each client's noisy message, and clients must
            agree to that.
        examples: With a plan for single examples, how many a client has at most. Clients that are set up for another
            number, or draw among them with another probability than the plan has, refuse.
        roster: Public keys of all clients, as many as the plan has. What clients sign is then signed by them, and not
            by keys that they make for a round. It protects clients that have the same roster; those without one refuse.
        ledger: Where every round's cost is written down before its mean is handed out.
        population: The ledger's name of the clients; needed with a ledger.
        engine: The ledger's name of the transport.
        pair: Both servers, where clients send one message to two (`cpsgd.engines.pair.in_federation.PairLeader`), in
            place of secure aggregation among them.
        protocol: The plan's; `protocol_text` is how requests carry it.
        rounds: Rounds that the plan's guarantee covers.
        surviving: The fewest clients of which a sum is released.
        colluding: Clients that may lie together, and whose noise does not count.
    """

    plan: Plan
    secure: bool = True
    examples: int | None = None
    roster: Iterable[bytes] | None = None
    ledger: Ledger | None = None
    population: str | None = None
    engine: str = "federation"
    pair: PairServers | None = None
    protocol: PlannedProtocol = field(init=False, repr=False)
    protocol_text: str = field(init=False, repr=False)
    rounds: int = field(init=False)
    surviving: int = field(init=False)
    colluding: int = field(init=False)
    _agreed: dict[int, SecureParameters] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        for name in ("protocol", "rounds", "surviving", "colluding"):
            object.__setattr__(self, name, getattr(plan, name))
        object.__setattr__(self, "protocol_text", plan.protocol.to_json())
        if self.pair is not None:
            object.__setattr__(self, "secure", False)
            self._check_pair(self.pair)
        self.memory.check_plan(self.rounds, plan.participation, examples=self.examples is not None)
        if plan.participation.sampled and self.examples != plan.examples:
            raise ParameterError(
                f"The plan is for clients that draw among {plan.examples} examples, got examples={self.examples}."
            )
        if self.colluding < 1:
            raise ParameterError(
                "The plan has colluding=0: its guarantee is for outsiders only. Every client sees the released models, "
                "and can subtract its own noise; plan with colluding=1 or more."
            )
        if (self.ledger is None) != (self.population is None):
            raise ParameterError("Give ledger and population together.")
        if self.roster is not None:
            roster = as_roster(self.roster)
            if not self.secure or len(roster) != self.protocol.clients:
                raise ParameterError(
                    f"A roster is for secure aggregation among everybody on it: {len(roster)} are, and the plan is "
                    f"for clients={self.protocol.clients} with secure={self.secure}."
                )
            object.__setattr__(self, "roster", roster)
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1)
        if self.secure:
            self.parameters(0, self.protocol.clients)

    def _check_pair(self, pair: PairServers) -> None:
        """Refuses a task of another protocol, or of fewer rounds."""
        if pair.task.protocol.fingerprint != self.protocol.fingerprint or pair.rounds < self.rounds:
            raise ParameterError(
                f"The two servers' task is of another protocol than the plan, or of fewer than {self.rounds} "
                "rounds: make it from this plan's protocol."
            )

    def parameters(self, round: int, clients: int) -> SecureParameters:
        """Returns the parameters of a round of secure aggregation, which tolerates the plan's dropouts.

        With a roster, every client is a neighbour of every other one, whatever their number.

        Raises:
            ParameterError: The plan was not made for secure aggregation.
            InfeasibleError: Secure aggregation does not tolerate the plan's dropouts and colluding clients.
        """
        if clients not in self._agreed:
            found = SecureParameters.for_protocol(
                self.protocol,
                round=0,
                clients=clients,
                dropout=1.0 - self.surviving / clients,
                colluding=self.colluding,
                surviving=self.surviving,
            )
            if self.roster is not None:
                most = (clients + self.colluding) // 2 + 1
                found = replace(found, neighbours=clients - 1, threshold=most, quorum=most)
            self._agreed[clients] = found
        return replace(self._agreed[clients], round=round)

    @property
    def memory(self) -> NoiseMemory:
        """The rules by which the noise of a round depends on other rounds of the run."""
        return self.protocol.mechanism.memory

    @property
    def apart(self) -> int | None:
        """Smallest distance between two rounds of one node: 1 if it may be in all, None if it may be in one only."""
        # Where single examples are protected, nodes see to it that these are apart, and may be in every round.
        return 1 if self.examples is not None else self.memory.separation

    @property
    def way(self) -> str:
        """Text for messages that says how sums are made."""
        signed = ", signed" if self.roster is not None else ""
        if self.pair is not None:
            return "by one message to two servers"
        return f"by secure aggregation{signed}" if self.secure else "in the server's sight"

    def event(self, round: int, name: str) -> RoundEvent:
        """Returns the ledger's event of a round, of the run that the ledger knows by this name."""
        participation, partition = self.memory.charging(self.plan.participation, name, round)
        return RoundEvent(
            self.protocol,
            survivors=self.surviving,
            participation=participation,
            partition=partition,
            colluding=self.colluding,
            round=round,
            run=name,
            examples=self.examples,
        )

    def check_ledger(self) -> None:
        """Refuses a ledger that would withhold every round of the plan, whatever is left of its budget.

        A budget that is spent or expired withholds rounds when they begin: a run that goes on has paid for some.

        Raises:
            ParameterError: The budget is for another unit or adjacency than the plan.
            LedgerError: The population has no budget, or the ledger cannot be read.
            ConditionError: Nothing is proved about such rounds.
        """
        if self.ledger is None or self.population is None:
            return
        with suppress(BudgetExceededError, BudgetExpiredError):
            self.ledger.quote(self.population, [self.event(1, f"{self.engine}-")])

    def check_rounds(self, rounds: int) -> None:
        """Refuses a run of more rounds than the plan's guarantee covers."""
        if rounds > self.rounds:
            raise ParameterError(
                f"{rounds} rounds are more than the plan's guarantee covers; plan with rounds={rounds}."
            )


class RoundTotal(Protocol):
    """The sum of a round, at its end."""

    @property
    def survivors(self) -> int:
        """Number of clients whose messages are in the sum."""

    def mean(self) -> NDArray[np.float32]:
        """Returns the decoded mean."""


class Settlement:
    """A round's account: charges it before anything about the data is asked for, and releases its mean.

    Attributes:
        charged: Whether the round is charged, if there is a ledger.
        entry: The ledger's entry that pays, if there is one.
        total: The round's sum; None until its exchanges are made.
    """

    def __init__(self, terms: Terms, round: int, run: str, course: str = "") -> None:
        """Charges nothing yet. `course` is the name under which the run began; `run` differs if it was resumed."""
        self._terms, self._round, self._run, self._course = terms, round, run, course
        self.entry: Entry | None = None
        self._asked = False  # whether anything about the data was asked for
        self._reveal: Callable[[], None] | None = None
        self.charged = False
        self.total: RoundTotal | None = None

    def charge(self, charged_to: str | None = None, revealing: Callable[[], None] | None = None) -> None:
        """Reserves the round's cost in the ledger, if there is one. It counts as spent even if the round never ends.

        With noise that makes a run one event, the run is charged under the name it began with, also after it was
        resumed. That name may have paid for this round already, if a server was set back to an older file. The round is
        then charged under the present run's name.

        Args:
            charged_to: An earlier run that stopped in this round, before the sum was revealed. If it has charged the
                round, nothing is charged again; if not, it is charged under its name.
            revealing: Called by `reveal`, before anything is asked for that reveals the sum.

        Raises:
            BudgetExceededError: The budget does not pay for the round.
        """
        self.charged, self._reveal = True, revealing
        # An earlier run that charged the round may have asked for something.
        self._asked |= charged_to is not None
        terms = self._terms
        if terms.ledger is None or terms.population is None:
            return
        together = terms.memory.one_event
        name = f"{terms.engine}-{charged_to or self._run}"
        names = [f"{terms.engine}-{self._course}", name] if together and self._course else [name]
        for each in names:
            found = terms.ledger.find(terms.population, run=each, round=self._round)
            if found is None:
                name = each
                break
            if charged_to is not None and not found.released:
                self.entry = found
                return
        self.entry = terms.ledger.reserve(terms.population, terms.event(self._round, name))

    def ask(self) -> None:
        """Records that clients are now asked for something about their data.

        Raises:
            StageError: The round is not charged yet.
        """
        if not self.charged:
            raise StageError("Nothing about the data is asked for before the round is charged.")
        self._asked = True

    def reveal(self) -> None:
        """Calls the `revealing` that `charge` was given: from now on the sum may be revealed."""
        if self._reveal is not None:
            self._reveal()

    def abandon(self) -> None:
        """Cancels the charge of a withheld round if clients were asked for nothing about their data."""
        if self._terms.ledger is not None and self.entry is not None and not self._asked:
            # No client has drawn noise or sent anything that depends on its data. If the ledger does not take it, the
            # round stays spent.
            with suppress(LedgerError):
                self._terms.ledger.abandon(self.entry, "withheld before anything about the data was asked for")

    @property
    def survivors(self) -> int:
        """Number of clients whose messages are in the sum."""
        return 0 if self.total is None else self.total.survivors

    def release(self) -> NDArray[np.float32]:
        """Records the release on the ledger, if there is one, and only then returns the mean.

        Raises:
            ThresholdError: Fewer clients are left than the plan needs.
            ImplausibleMeanError: The mean is larger than that of honest clients can be.
            LedgerError: The ledger does not permit it.
        """
        terms, survivors = self._terms, self.survivors
        if self.total is None or survivors < terms.surviving:
            raise ThresholdError(f"{survivors} clients are left, and the plan needs {terms.surviving}")
        mean = self.total.mean()
        if (reason := implausible(mean, bounds(terms.protocol, survivors))) is not None:
            raise ImplausibleMeanError(reason)
        if terms.ledger is not None and self.entry is not None:
            terms.ledger.release(self.entry, survivors=survivors)
        return mean


def implausible(mean: NDArray[np.float32], bounds: Bounds) -> str | None:
    """Returns why a mean cannot come from honest clients, or None if it keeps their bounds."""
    squares = np.square(mean, dtype=np.float64)
    found = [("The mean", math.sqrt(squares.sum()), bounds.norm)]
    for size, most in bounds.blocks.items():
        sums = squares if size == 1 else np.add.reduceat(squares, np.arange(0, len(squares), size))
        name = "A coordinate of the mean" if size == 1 else f"A block of {size} coordinates of the mean"
        found.append((name, math.sqrt(sums.max()), most))
    for name, norm, most in found:
        if not norm <= most:
            return (
                f"{name} has norm {norm:.4g}, and that of honest clients has more than {most:.4g} with a "
                f"probability of at most {FALSE_ALARM:g} only: some client sent what no honest one sends"
            )
    return None
