"""What a run spends of its privacy budget, and what it charges to a ledger.

`Spending` is a run's own account: what the rounds so far cost, and whether it may go on. `RunCharges` puts the same
rounds on a ledger, each charged once however often the run is interrupted. The order of things in a round is: reserve
on the ledger, write the run's own log of charges, release on the ledger, and only then compute the mean. So a round
that is on the ledger and not in the run's log has not been computed, and is taken up with the entry it has. One that is
*released* on the ledger and not in the log was computed once, in a folder that has since been replaced by an older
copy. With a seed it has the same result again and costs nothing more; without, it would be a second release of the same
clients, and is charged as one.

A run whose noise is correlated over rounds is one event. Its first round is charged what all of them cost, so that the
later ones, in the same partition, cost nothing more, and a run that stops early has paid for all. An older copy of its
folder would use noise again that the ledger has seen released with other models: that is refused.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from cpsgd._numbers import rounded_up
from cpsgd.errors import CheckpointError, ConditionError, InfeasibleError, ParameterError
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.mechanisms import Mechanism, is_private, protocol_of
from cpsgd.learning.options import AccountOptions
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.examples import example_protocol
from cpsgd.privacy.guarantees import Guarantee, guarantee_over_rounds
from cpsgd.protocol import Protocol

SAMPLED_SIZES = 50
"""With sampling, sizes of rounds are told apart in steps of the planned size over this."""


class Spending:
    """The guarantee of the rounds that were released.

    A round counts with the messages that really arrived: the noise of clients who dropped out protects nobody. With
    Poisson sampling, each round's chance of drawing more clients than messages were set aside for is taken off δ.
    Draws of the others are independent of one client's, and given that they leave room, the noise is the same whether
    the client is drawn or not; so that chance is all that has to be added.

    Attributes:
        sizes: How many of the rounds charged so far had how many messages. Rounds repeat, so that what a round costs to
            account for does not grow with their number.
        examples: The most examples of a client where one of them is protected; None where the whole client is.
    """

    def __init__(
        self, protocol: Protocol, cohorts: Cohorts, account: AccountOptions, *, examples: int | None = None
    ) -> None:
        """Starts with nothing spent. With `examples`, the most of a client, it is about the privacy of one of them.

        Raises:
            ParameterError: There is no δ, or nothing is proved about such cohorts and neighbours.
        """
        if account.delta is None:
            raise ParameterError("A private protocol is accounted at some delta: give delta, or a plan, which has one.")
        self.protocol = protocol if examples is None else example_protocol(protocol, examples)
        self.examples = examples
        self.delta = account.delta
        self.epsilon = account.epsilon
        self.participation = cohorts.participation
        self.adjacency: Adjacency = account.adjacency or cohorts.adjacency
        self.participation.check(self.adjacency)
        self.colluding = account.colluding or 0
        self.sizes: Counter[int] = Counter()
        self._messages = cohorts.messages
        self._overflow = cohorts.overflow
        self._floor = 0
        # Rounds repeat, and so does the question what they cost.
        self._found: tuple[tuple[float, Counter[int]], Guarantee] | None = None

    def guarantee(self, survivors: Iterable[int] | None = None) -> Guarantee | None:
        """The guarantee of the rounds so far, or of rounds with these survivors; None before the first.

        Raises:
            ConditionError: Nothing is proved about them.
        """
        sizes = self.sizes if survivors is None else Counter(survivors)
        rounds = sizes.total()
        if not rounds:
            return None
        if self.participation.scheme == "once":
            # Rounds of other clients cost a client nothing, so the smallest one says it all.
            found = self._proved(self.delta, Counter([min(sizes)]))
            conditions = replace(found.run.conditions, sizes=tuple(sorted(sizes.items())))
            return replace(found, run=replace(found.run, conditions=conditions))
        left = self.delta - rounds * self._overflow
        if left <= 0.0:
            raise ConditionError(f"{rounds:,} rounds spend δ={self.delta:g} on draws of too many clients alone.")
        rounded: Counter[int] = Counter()
        for size, count in sorted(sizes.items()):
            rounded[self.rounded_down(size)] += count
        found = self._proved(left, rounded)
        return replace(found, claim=replace(found.claim, delta=self.delta), tail=found.tail + self.delta - left)

    def check(self, rounds: int, survivors: int) -> None:
        """Refuses a run before its first round where the budget does not reach to `rounds`, those spent included.

        Raises:
            InfeasibleError: The budget is too small; the message says how many rounds it buys.
            ConditionError: Nothing is proved about such rounds.
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
        """Whether a round with so few messages may be released, and `rounds_left` more as planned after it.

        A round that nothing is proved about never may.
        """
        if survivors <= self.colluding:
            return False
        if 0 < self._floor <= survivors:
            return True
        return self._holds(self.sizes + Counter([survivors]) + Counter({self._floor: rounds_left}))

    def charge(self, survivors: int) -> None:
        """Counts a round that is about to be released."""
        self.sizes[survivors] += 1

    def _proved(self, delta: float, sizes: Counter[int]) -> Guarantee:
        if self._found is None or self._found[0] != (delta, sizes):
            found = guarantee_over_rounds(
                self.protocol,
                delta,
                participation=self.participation,
                adjacency=self.adjacency,
                surviving=sizes,
                colluding=self.colluding,
            )
            if self.examples is not None:
                # The paper's theorem would be about sums whose norm is one example's.
                kept = tuple(pair for pair in found.alternatives if not pair[0].startswith("paper-theorem"))
                found = replace(found, alternatives=kept)
            self._found = (delta, sizes), found
        return self._found[1]

    def rounded_down(self, survivors: int) -> int:
        """With sampling, one of few sizes: accounting takes seconds for each, and fewer messages never cost less."""
        step = max(1, self._messages // SAMPLED_SIZES) if self.participation.sampled else 1
        missing = self._messages - survivors
        return max(1, self._messages - -(-missing // step) * step)

    def _with(self, rounds: int, survivors: int) -> Counter[int]:
        return self.sizes + Counter({survivors: rounds - self.sizes.total()})

    def _holds(self, sizes: Counter[int]) -> bool:
        """Whether something is proved about rounds with so many messages, and the budget buys them."""
        try:
            found = self.guarantee(sizes)
        except ConditionError:
            return False
        return found is None or self.epsilon is None or found.epsilon <= self.epsilon


class RunCharges:
    """What a run charges to a population's budget.

    Attributes:
        run: The run's name on the ledger; a new run draws one, and a run that goes on keeps it.
    """

    def __init__(
        self, ledger: Ledger, population: str, protocol: Protocol, spending: Spending, *, repeatable: bool
    ) -> None:
        """Checks that the budget is about what the run protects.

        Rounds are `repeatable` if they have the same result when they are run again.
        """
        self.run = secrets.token_hex(8)
        self._ledger = ledger
        self._population = population
        self._protocol = protocol
        self._spending = spending
        self._repeatable = repeatable
        self._entry: Entry | None = None
        budget = ledger.budget(population)
        if budget.adjacency != spending.adjacency:
            raise ParameterError(
                f"The budget of {population!r} is for {budget.adjacency} neighbours and the run for "
                f"{spending.adjacency} ones; choose another participation or adjacency, or another budget."
            )
        if budget.unit != ("client" if spending.examples is None else "example"):
            raise ParameterError(f"The budget of {population!r} protects one {budget.unit}, and the run does not.")

    def check(self, cohorts: Cohorts, *, charged: Collection[int], rounds: range, survivors: int) -> None:
        """Refuses a run where the budget does not reach to the end of `rounds`, those still to be run.

        Raises:
            BudgetExceededError: The budget is too small.
            CheckpointError: The run has spent more than the ledger knows of: it is not the run's ledger. Or the folder
                is an older copy, and correlated noise cannot be drawn again.
        """
        known = self._ledger.rounds(self._population, self.run)
        if missing := sorted(set(charged) - known):
            raise CheckpointError(
                f"Round {missing[0]} of the run is not on the ledger {self._ledger.path}: resume with the ledger that "
                "the run was started with."
            )
        if self._correlated:
            for number in sorted(known.intersection(rounds)):
                self._find(number)
        planned = [self._event(cohorts, number, survivors) for number in rounds if number not in known]
        self._ledger.quote(self._population, planned)

    def reserve(self, cohorts: Cohorts, number: int, survivors: int) -> None:
        """Charges a round, unless that was done before the run was interrupted.

        Raises:
            BudgetExceededError: Too little is left. Nothing was charged, and nothing may be computed.
            CheckpointError: The folder is an older copy, and correlated noise cannot be drawn again.
        """
        event = self._event(cohorts, number, survivors)
        entry = self._find(number)
        if entry is None:
            entry = self._ledger.reserve(self._population, event)
        elif entry.released and not self._repeatable:
            # The clients of this round are in it a second time, so it belongs to no partition.
            again = replace(event, run="", partition="", label=f"run {self.run} again, from an older copy")
            entry = self._ledger.reserve(self._population, again)
        self._entry = entry

    def release(self, survivors: int) -> None:
        """Records the release of the round that was reserved last; its mean may be computed when this has returned."""
        assert self._entry is not None
        if not self._entry.released:
            self._ledger.release(self._entry, survivors)
        elif self._entry.survivors != survivors:
            number, before = self._entry.event.round, self._entry.survivors
            raise CheckpointError(f"Round {number} was released with {before} messages and has {survivors} now.")

    @property
    def _correlated(self) -> bool:
        return self._protocol.mechanism.correlation is not None

    def _find(self, number: int) -> Entry | None:
        """The round's entry, unless it was released with noise that may not be used again."""
        entry = self._ledger.find(self._population, run=self.run, round=number)
        if entry is not None and entry.released and self._correlated and not self._repeatable:
            raise CheckpointError(
                f"Round {number} of the run was released, as entry {entry.number} of the ledger {self._ledger.path}, "
                "and the folder does not know of it: it is an older copy. Noise that is correlated over rounds must "
                "not be used again with other models: resume the newest copy, or start a new run."
            )
        return entry

    def _event(self, cohorts: Cohorts, number: int, survivors: int) -> RoundEvent:
        return RoundEvent(
            self._protocol,
            survivors=self._spending.rounded_down(survivors),
            participation=Participation.once() if self._correlated else cohorts.participation,
            colluding=self._spending.colluding,
            round=number,
            run=self.run,
            # The cohorts of a run are disjoint by construction, those of two runs are not. And with correlated noise
            # each round costs what all of them do.
            partition=self.run if cohorts.scheme == "once" or self._correlated else "",
            examples=self._spending.examples,
            overflow=cohorts.overflow,
            label="cpsgd train, a simulation: its noise follows from a seed" if self._repeatable else "cpsgd train",
        )


def open_accounts(
    mechanism: Mechanism,
    cohorts: Cohorts,
    account: AccountOptions,
    *,
    examples: int | None,
    repeatable: bool,
    on_gpu: bool,
) -> tuple[Spending | None, RunCharges | None]:
    """A run's own account, where it is private, and its charges to a ledger, where there is one.

    Raises:
        ParameterError: A ledger is to pay for what protects nobody, or for something else than its budget is about.
    """
    protocol = protocol_of(mechanism)
    spending = None
    if protocol is not None and is_private(mechanism):
        spending = Spending(protocol, cohorts, account, examples=examples)
    if account.ledger is None or account.population is None:
        return spending, None
    if protocol is None or spending is None:
        raise ParameterError("Only a run that is private at all is charged to a ledger: leave the ledger out.")
    if on_gpu:
        raise ParameterError(
            "A ledger pays for noise that protects people; on a GPU it comes from a counter and protects nobody. "
            "Use device cpu, or no ledger."
        )
    given = account.ledger
    ledger = given if isinstance(given, Ledger) else Ledger(given, witness=account.witness)
    return spending, RunCharges(ledger, account.population, protocol, spending, repeatable=repeatable)
