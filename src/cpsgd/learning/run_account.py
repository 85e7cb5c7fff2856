"""The privacy that a run spends, and its charges to a ledger.

`Spending` is the guarantee of the rounds so far, and decides whether the run may go on. `RunCharges` puts the same
rounds on a ledger, each charged once however often the run is interrupted. `RunAccount` does both.

A round is reserved on the ledger, written to the run's log of charges, released on the ledger, and only then computed.
So a round that is on the ledger and not in the run's log has not been computed, and is continued with its entry. A
round that is *released* on the ledger and not in the log was computed in a folder that an older copy has replaced
since. With a seed it has the same result again and costs nothing more. Without a seed it would be a second release of
the same clients, and is charged as one.

A run whose noise is correlated over rounds is one event. Its first round is charged the cost of all of them; later
rounds, in the same partition, cost nothing more. An older copy of its folder is refused: it would use noise again that
was released with other models.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cpsgd._numbers import rounded_up
from cpsgd.errors import CheckpointError, ConditionError, InfeasibleError, ParameterError
from cpsgd.learning.checkpoints import RunFolder
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.estimators import Estimator, is_private, protocol_of
from cpsgd.learning.option_groups import AccountOptions
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.privacy.one_example import example_protocol
from cpsgd.protocol import Protocol
from cpsgd.run import Run

SAMPLED_SIZES = 50
"""With sampling, sizes of rounds are rounded down to multiples of the planned size over this number."""


class Spending:
    """The guarantee of the rounds that were released.

    A round counts with the messages that really arrived: the noise of clients who dropped out protects nobody. With
    Poisson sampling, δ pays for each round's probability of drawing more clients than there is room for. That
    probability is all that must be added: the draws of others are independent of one client's draw, and if they leave
    room, the noise is the same with the client and without.

    Attributes:
        run: One round as planned; a guarantee is about such rounds with the messages that arrived.
        sizes: Number of rounds charged so far, by their number of messages.
    """

    def __init__(
        self, protocol: Protocol, cohorts: Cohorts, account: AccountOptions, *, examples: int | None = None
    ) -> None:
        """Starts with nothing spent; raises `ParameterError` without a δ, or if nothing is proved about such rounds."""
        if account.delta is None:
            raise ParameterError("A private protocol is accounted at some delta: give delta, or a plan, which has one.")
        if examples is not None:
            example_protocol(protocol, examples)  # refuses a grid that is too coarse
        self.run = Run.of(
            protocol,
            participation=cohorts.participation,
            adjacency=account.adjacency or cohorts.adjacency,
            surviving=cohorts.messages,
            colluding=account.colluding or 0,
            examples=examples,
        )
        self.delta = account.delta
        self.epsilon = account.epsilon
        self.sampled, self._once = cohorts.participation.sampled, cohorts.scheme == "once"
        self.sizes: Counter[int] = Counter()
        self._messages = cohorts.messages
        self._overflow = cohorts.overflow
        self._floor = 0
        # The last sizes and their guarantee: rounds repeat.
        self._found: tuple[tuple[float, Counter[int]], Guarantee] | None = None

    def guarantee(self, survivors: Iterable[int] | None = None) -> Guarantee | None:
        """Returns the guarantee of the rounds so far, or of rounds with these survivors; None before the first.

        Raises `ConditionError` if nothing is proved about them.
        """
        sizes = self.sizes if survivors is None else Counter(survivors)
        found = self.cost(sizes)
        return replace(found, run=self._rounds(sizes)) if found is not None and self._once else found

    def cost(self, sizes: Counter[int]) -> Guarantee | None:
        """Returns the guarantee of rounds with these sizes; if each client is in one round, of the costliest round."""
        if not sizes:
            return None
        if self._once:
            return self._proved(self.delta, Counter([min(sizes)]))
        left = self.delta - sizes.total() * self._overflow
        if left <= 0.0:
            raise ConditionError(f"{sizes.total():,} rounds spend δ={self.delta:g} on draws of too many clients alone.")
        rounded: Counter[int] = Counter()
        for size, count in sorted(sizes.items()):
            rounded[self.rounded_down(size)] += count
        found = self._proved(left, rounded)
        return replace(found, claim=replace(found.claim, delta=self.delta), tail=found.tail + self.delta - left)

    def check(self, rounds: int, survivors: int) -> None:
        """Raises `InfeasibleError` if the budget does not pay for `rounds` in all; the message says for how many.

        Raises `ConditionError` if nothing is proved about such rounds.
        """
        cost = "more than any ε that is proved"
        try:
            found = self.guarantee(self._with(rounds, survivors))
        except ConditionError:
            if self.epsilon is None or not self._holds(self._with(1, survivors)):
                raise
            affordable = False
        else:
            affordable = self.epsilon is None or found is None or found.epsilon <= self.epsilon
            cost = f"ε={rounded_up(found.epsilon)}" if found is not None else cost
        if not affordable and self.epsilon is not None:
            missing = self._messages - survivors
            dropout = math.ceil(1e4 * missing / self._messages) / 1e4
            most = bisect_left(range(1, rounds), True, key=lambda count: not self._holds(self._with(count, survivors)))
            remedy = f" Of {self._messages:,} messages {missing:,} may not arrive: plan with dropout={dropout:g}."
            raise InfeasibleError(
                f"{rounds:,} rounds of {survivors:,} messages cost {cost} at δ={self.delta:g}; "
                f"the budget ε={rounded_up(self.epsilon)} buys {most:,}. "
                f"Run fewer rounds, plan with more noise, or allow more.{remedy if missing > 0 else ''}"
            )
        self._floor = survivors

    def affords(self, survivors: int, rounds_left: int) -> bool:
        """Returns whether the budget pays for a round with this many messages and `rounds_left` more as planned.

        The answer is no for a round that nothing is proved about.
        """
        if survivors <= self.run.conditions.colluding:
            return False
        if 0 < self._floor <= survivors:
            return True
        return self._holds(self.sizes + Counter([survivors]) + Counter({self._floor: rounds_left}))

    def charge(self, survivors: int) -> None:
        """Counts a round that is about to be released."""
        self.sizes[survivors] += 1

    def _proved(self, delta: float, sizes: Counter[int]) -> Guarantee:
        if self._found is None or self._found[0] != (delta, sizes):
            self._found = (delta, sizes), guarantee(self._rounds(sizes), delta)
        return self._found[1]

    def _rounds(self, sizes: Counter[int]) -> Run:
        return replace(self.run, conditions=replace(self.run.conditions, sizes=tuple(sorted(sizes.items()))))

    def rounded_down(self, survivors: int) -> int:
        """Rounds a number of messages down if rounds are sampled, to save time; this never lowers ε."""
        step = max(1, self._messages // SAMPLED_SIZES) if self.sampled else 1
        missing = self._messages - survivors
        return max(1, self._messages - -(-missing // step) * step)

    def _with(self, rounds: int, survivors: int) -> Counter[int]:
        return self.sizes + Counter({survivors: rounds - self.sizes.total()})

    def _holds(self, sizes: Counter[int]) -> bool:
        """Returns whether a guarantee of rounds with these sizes is proved and within the budget."""
        try:
            found = self.guarantee(sizes)
        except ConditionError:
            return False
        return found is None or self.epsilon is None or found.epsilon <= self.epsilon


class RunCharges:
    """A run's charges to a population's budget.

    Attributes:
        run: The run's name on the ledger: random for a new run, and kept when a run is resumed.
    """

    def __init__(
        self, ledger: Ledger, population: str, protocol: Protocol, spending: Spending, *, repeatable: bool
    ) -> None:
        """Checks that the budget has the run's neighbours and unit; a `repeatable` run has a seed."""
        self.run = secrets.token_hex(8)
        self._ledger = ledger
        self._population = population
        self._protocol = protocol
        self._spending = spending
        self._repeatable = repeatable
        self._entry: Entry | None = None
        budget = ledger.budget(population)
        terms = spending.run.conditions
        if budget.adjacency != terms.adjacency:
            raise ParameterError(
                f"The budget of {population!r} is for {budget.adjacency} neighbours and the run for "
                f"{terms.adjacency} ones; choose another participation or adjacency, or another budget."
            )
        if budget.unit != terms.unit:
            raise ParameterError(f"The budget of {population!r} protects one {budget.unit}, and the run does not.")

    def check(self, cohorts: Cohorts, *, charged: Collection[int], rounds: range, survivors: int) -> None:
        """Checks that the budget pays for `rounds`, those still to be run; `charged` are those in the run's log.

        Raises `CheckpointError` if charged rounds are not on this ledger, or the folder is an older copy and correlated
        noise cannot be drawn again.
        """
        known = self._ledger.rounds(self._population, self.run)
        if missing := sorted(set(charged) - known):
            raise CheckpointError(
                f"Round {missing[0]} of the run is not on the ledger {self._ledger.path}: resume with the ledger that "
                "the run was started with."
            )
        for number in sorted(known.intersection(rounds)):
            self._find(number)
        planned = [self._event(cohorts, number, survivors) for number in rounds if number not in known]
        self._ledger.quote(self._population, planned)

    def reserve(self, cohorts: Cohorts, number: int, survivors: int) -> None:
        """Charges a round, unless it was charged before an interruption."""
        event = self._event(cohorts, number, survivors)
        entry = self._find(number)
        if entry is None:
            entry = self._ledger.reserve(self._population, event)
        elif entry.released and not self._repeatable:
            # Its clients are in the sum a second time, so that it belongs to no partition.
            again = replace(event, run="", partition="", label=f"run {self.run} again, from an older copy")
            entry = self._ledger.reserve(self._population, again)
        self._entry = entry

    def release(self, survivors: int) -> None:
        """Records the release of the round that was reserved last; call it before the mean is computed."""
        assert self._entry is not None
        if not self._entry.released:
            self._ledger.release(self._entry, survivors)
        elif self._entry.survivors != survivors:
            number, before = self._entry.event.round, self._entry.survivors
            raise CheckpointError(f"Round {number} was released with {before} messages and has {survivors} now.")

    def _find(self, number: int) -> Entry | None:
        """Returns the round's entry; raises `CheckpointError` if its correlated noise was released before."""
        entry = self._ledger.find(self._population, run=self.run, round=number)
        if entry is not None and entry.released and self._protocol.mechanism.memory.one_event and not self._repeatable:
            raise CheckpointError(
                f"Round {number} of the run was released, as entry {entry.number} of the ledger {self._ledger.path}, "
                "and the folder does not know of it: it is an older copy. Noise that is correlated over rounds must "
                "not be used again with other models: resume the newest copy, or start a new run."
            )
        return entry

    def _event(self, cohorts: Cohorts, number: int, survivors: int) -> RoundEvent:
        """Returns a round as the ledger records it."""
        # The cohorts of one run are disjoint, or its rounds one event; those of two runs are not.
        participation, partition = self._protocol.mechanism.memory.charging(cohorts.participation, self.run, number)
        return RoundEvent(
            self._protocol,
            survivors=self._spending.rounded_down(survivors),
            participation=participation,
            colluding=self._spending.run.colluding,
            round=number,
            run=self.run,
            partition=partition,
            examples=self._spending.run.examples,
            overflow=cohorts.overflow,
            label="cpsgd train, a simulation: its noise follows from a seed" if self._repeatable else "cpsgd train",
        )


@dataclass(frozen=True)
class RunAccount:
    """A run's account: `spending` if it is private, `charges` if there is a ledger."""

    spending: Spending | None
    charges: RunCharges | None

    @classmethod
    def open(
        cls,
        estimator: Estimator,
        cohorts: Cohorts,
        account: AccountOptions,
        *,
        examples: int | None,
        repeatable: bool,
        on_gpu: bool,
    ) -> RunAccount:
        """Opens the account of a run; raises `ParameterError` if a ledger would pay for one that protects nobody."""
        protocol = protocol_of(estimator)
        spending = None
        if protocol is not None and is_private(estimator):
            spending = Spending(protocol, cohorts, account, examples=examples)
        if account.ledger is None or account.population is None:
            return cls(spending, None)
        if protocol is None or spending is None:
            raise ParameterError("Only a run that is private at all is charged to a ledger: leave the ledger out.")
        if on_gpu:
            raise ParameterError(
                "A ledger pays for noise that protects people; on a GPU it comes from a counter and protects nobody. "
                "Use device cpu, or no ledger."
            )
        given = account.ledger
        ledger = given if isinstance(given, Ledger) else Ledger(given, witness=account.witness)
        return cls(spending, RunCharges(ledger, account.population, protocol, spending, repeatable=repeatable))

    @property
    def config(self) -> dict[str, Any]:
        """Settings that a resumed run must share with the one that was started."""
        if self.spending is None:
            return dict.fromkeys(("delta", "adjacency", "colluding"))
        run = self.spending.run
        return {"delta": self.spending.delta, "adjacency": str(run.adjacency), "colluding": run.colluding}

    @property
    def run(self) -> str | None:
        """The run's name on the ledger, if there is one."""
        return None if self.charges is None else self.charges.run

    def guarantee(self) -> Guarantee | None:
        """Returns the guarantee of the rounds so far; None without privacy or before the first round."""
        return None if self.spending is None else self.spending.guarantee()

    def figures(self, *, evaluated: bool) -> dict[str, Any]:
        """Returns ε, δ and method for a round's metrics; with sampling ε is computed for `evaluated` rounds only."""
        spending = self.spending
        if spending is None:
            return {"epsilon": None, "delta": None, "method": None}
        if spending.sampled and not evaluated:
            return {"epsilon": None, "delta": spending.delta, "method": None}
        found = spending.cost(spending.sizes)
        epsilon, method = (0.0, None) if found is None else (found.claim.epsilon, found.method)
        return {"epsilon": epsilon, "delta": spending.delta, "method": method}

    def check(self, cohorts: Cohorts, folder: RunFolder | None, rounds: range, survivors: int) -> None:
        """Checks that the budget pays for `rounds`, those still to be run; see `Spending` and `RunCharges`."""
        if self.spending is not None:
            self.spending.check(rounds.stop, survivors)
        if self.charges is not None:
            charged = () if folder is None else folder.charged.keys()
            self.charges.check(cohorts, charged=charged, rounds=rounds, survivors=survivors)

    def affords(self, survivors: int, rounds_left: int) -> bool:
        """Returns whether a round with this many messages may be released, and `rounds_left` more after it."""
        return survivors > 0 if self.spending is None else self.spending.affords(survivors, rounds_left)

    def reserve(self, cohorts: Cohorts, number: int, survivors: int) -> None:
        """Charges a round to the ledger; raises `BudgetExceededError` if too little is left."""
        if self.charges is not None:
            self.charges.reserve(cohorts, number, survivors)

    def charge(self, folder: RunFolder | None, number: int, survivors: int) -> None:
        """Counts a round that is about to be released, in the run's folder, on the ledger and here."""
        if self.spending is None:
            return
        if folder is not None:
            folder.charge(number, survivors)
        if self.charges is not None:
            self.charges.release(survivors)
        self.spending.charge(survivors)
