"""A training run's rounds on a privacy ledger, each charged once however often the run is interrupted.

The order of things in a round is: reserve on the ledger, write the run's own log of charges, release on the ledger, and
only then compute the mean. So a round that is on the ledger and not in the run's log has not been computed, and is
taken up with the entry it has. One that is *released* on the ledger and not in the log was computed once, in a folder
that has since been replaced by an older copy. With a seed it has the same result again and costs nothing more; without,
it would be a second release of the same clients, and is charged as one.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace

from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.spending import Spending
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.protocol import Protocol


class RunCharges:
    """What a run charges to a population's budget.

    Attributes:
        run: The run's name on the ledger; a new run draws one, and a run that goes on keeps it.
    """

    def __init__(
        self,
        ledger: Ledger,
        population: str,
        protocol: Protocol,
        spending: Spending,
        *,
        examples: int | None,
        repeatable: bool,
    ) -> None:
        """Checks that the budget is about what the run protects.

        Args:
            ledger: The ledger.
            population: Whose budget pays.
            protocol: What the rounds run with.
            spending: How the run accounts for them.
            examples: None for the privacy of whole clients; the most examples of a client for that of one of them.
            repeatable: Whether a round that is run again has the same result.
        """
        self.run = secrets.token_hex(8)
        self._ledger = ledger
        self._population = population
        self._protocol = protocol
        self._spending = spending
        self._examples = examples
        self._repeatable = repeatable
        self._entry: Entry | None = None
        budget = ledger.budget(population)
        if budget.adjacency != spending.adjacency:
            raise ParameterError(
                f"The budget of {population!r} is for {budget.adjacency} neighbours and the run for "
                f"{spending.adjacency} ones; choose another participation or adjacency, or another budget."
            )
        if budget.unit != ("client" if examples is None else "example"):
            raise ParameterError(f"The budget of {population!r} protects one {budget.unit}, and the run does not.")

    def check(self, cohorts: Cohorts, *, charged: Collection[int], rounds: range, survivors: int) -> None:
        """Refuses a run before its first round where the budget does not reach to the end.

        Args:
            cohorts: Who takes part.
            charged: Rounds in the run's own log of charges.
            rounds: Rounds still to be run.
            survivors: Messages that are expected to arrive in each.

        Raises:
            BudgetExceededError: The budget is too small.
            CheckpointError: The run has spent more than the ledger knows of: it is not the run's ledger.
        """
        known = {entry.event.round for entry in self._ledger.events(self._population) if entry.event.run == self.run}
        if missing := sorted(set(charged) - known):
            raise CheckpointError(
                f"Round {missing[0]} of the run is not on the ledger {self._ledger.path}: resume with the ledger that "
                "the run was started with."
            )
        planned = [self._event(cohorts, number, survivors) for number in rounds if number not in known]
        self._ledger.quote(self._population, planned)

    def reserve(self, cohorts: Cohorts, number: int, survivors: int) -> None:
        """Charges a round, unless that was done before the run was interrupted.

        Raises:
            BudgetExceededError: Too little is left. Nothing was charged, and nothing may be computed.
        """
        event = self._event(cohorts, number, survivors)
        entry = self._ledger.find(self._population, run=self.run, round=number)
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
            raise CheckpointError(
                f"Round {self._entry.event.round} was released with {self._entry.survivors} messages and has "
                f"{survivors} now."
            )

    def _event(self, cohorts: Cohorts, number: int, survivors: int) -> RoundEvent:
        return RoundEvent(
            self._protocol,
            survivors=self._spending.rounded_down(survivors),
            participation=cohorts.participation,
            colluding=self._spending.colluding,
            round=number,
            run=self.run,
            # The cohorts of a run are disjoint by construction, those of two runs are not.
            partition=self.run if cohorts.scheme == "once" else "",
            examples=self._examples,
            overflow=cohorts.overflow,
            label="cpsgd train, a simulation: its noise follows from a seed" if self._repeatable else "cpsgd train",
        )
