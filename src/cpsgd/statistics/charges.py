"""What a statistic costs, charged to a ledger before it is released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpsgd.errors import ParameterError
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent


def events_of(protocols: Sequence[Protocol], label: str = "") -> list[RoundEvent]:
    """Rounds that everybody takes part in, for the accountant."""
    from cpsgd.ledger import RoundEvent

    return [
        RoundEvent(protocol, survivors=protocol.clients, round=number, label=label)
        for number, protocol in enumerate(protocols)
    ]


@dataclass(frozen=True)
class Charge:
    """Rounds that a population's budget is to pay for, if there is a ledger. Nothing is spent before `pay`."""

    ledger: Ledger | None
    population: str
    events: Sequence[RoundEvent]

    @staticmethod
    def check(ledger: Ledger | str | Path | None, population: str | None) -> None:
        """Refuses one without the other."""
        if (ledger is None) != (population is None):
            raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")

    @classmethod
    def of(
        cls, ledger: Ledger | str | Path | None, population: str | None, protocols: Sequence[Protocol], label: str
    ) -> Charge:
        """What these rounds cost; refuses what the budget does not allow.

        Raises:
            BudgetExceededError: Too little is left.
        """
        cls.check(ledger, population)
        if ledger is None or population is None:
            return cls(None, "", ())
        from cpsgd.ledger import Ledger

        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        events = events_of(protocols, f"statistics: {label}")
        book.quote(population, events)
        return cls(book, population, events)

    def pay(self) -> None:
        """Charges the rounds, whose results may then be computed."""
        if self.ledger is None:
            return
        for entry in [self.ledger.reserve(self.population, event) for event in self.events]:
            self.ledger.release(entry, entry.event.survivors)
