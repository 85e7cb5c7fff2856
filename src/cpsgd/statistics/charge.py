"""Charges of statistics to a population's budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent
    from cpsgd.ledger.entries import TableUnit
    from cpsgd.protocol import Protocol


def events_of(
    protocols: Sequence[Protocol],
    label: str = "",
    *,
    survivors: int | None = None,
    round: int = 0,
    overflow: float = 0.0,
    table_unit: TableUnit = "",
) -> list[RoundEvent]:
    """Returns one event for the accountant per protocol: a round that everybody takes part in."""
    from cpsgd.ledger import RoundEvent

    common: dict[str, Any] = {"label": label, "overflow": overflow, "table_unit": table_unit}
    return [
        RoundEvent(protocol, survivors=survivors or protocol.clients, round=number, **common)
        for number, protocol in enumerate(protocols, start=round)
    ]


def unit_of(user: str | None) -> Literal["user", "row"]:
    """Returns what a statistic with this column of users protects."""
    return "row" if user is None else "user"


@dataclass(frozen=True)
class Charge:
    """Rounds that a population's budget is to pay for, if there is a ledger. Nothing is spent before `pay`."""

    ledger: Ledger | None
    population: str
    events: Sequence[RoundEvent]

    @staticmethod
    def check(ledger: Ledger | str | Path | None, population: str | None) -> None:
        """Refuses a ledger without a population, and a population without a ledger."""
        if (ledger is None) != (population is None):
            raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")

    @staticmethod
    def counts_shifts(ledger: Ledger | str | Path | None, population: str | None) -> bool:
        """Returns whether the budget is adaptive: such budgets count Gaussian shifts, which makes a pure ε dearer."""
        if ledger is None or population is None:
            return False
        from cpsgd.ledger import Ledger

        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        return book.budget(population).filter is not None

    @classmethod
    def of(
        cls,
        ledger: Ledger | str | Path | None,
        population: str | None,
        events: Sequence[RoundEvent],
    ) -> Charge:
        """Returns the charge for these rounds.

        Raises:
            BudgetExceededError: Too little of the budget is left.
        """
        cls.check(ledger, population)
        if ledger is None or population is None:
            return cls(None, "", ())
        from cpsgd.ledger import Ledger

        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        book.quote(population, events)
        return cls(book, population, events)

    def pay(self) -> None:
        """Charges the rounds. Their results may be computed afterwards."""
        if self.ledger is not None:
            for entry in [self.ledger.reserve(self.population, event) for event in self.events]:
                self.ledger.release(entry, entry.event.survivors)
