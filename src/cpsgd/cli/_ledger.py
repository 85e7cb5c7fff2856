"""Commands that charge what they release to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd.cli import _render
from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.ledger import Ledger, RoundEvent
    from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class Charge:
    """A round that a population's budget is to pay for. Nothing is spent before `pay`."""

    ledger: Ledger
    population: str
    event: RoundEvent

    def pay(self) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Charges the round; its result may be computed when this has returned.

        Returns:
            What is spent, as JSON and for people.

        Raises:
            LedgerError: The budget does not allow the round, or the ledger cannot be used.
        """
        entry = self.ledger.reserve(self.population, self.event)
        self.ledger.release(entry, self.event.survivors)
        total = self.ledger.total(self.population)
        text = (
            f"{total.population}: ε = {_render.rounded_up(total.epsilon)} of {total.limit:g} at δ = {total.delta:g} "
            f"spent, {total.left:.4g} left ({total.rounds:,} round{'' if total.rounds == 1 else 's'})"
        )
        return {"budget": {"ledger": str(self.ledger.path), **total.to_dict()}}, [("budget", text)]


def quote(
    path: Path | None, population: str | None, protocol: Protocol, *, survivors: int, round: int, label: str
) -> Charge | None:
    """A round that everybody in the table takes part in, if the budget allows it; None where no ledger is given.

    Raises:
        ParameterError: Only one of the ledger and the population is given.
        LedgerError: The budget does not allow the round, or the ledger cannot be used.
    """
    if path is None and population is None:
        return None
    if path is None or population is None:
        raise ParameterError("Give both --ledger and --population: a ledger may hold several budgets.")
    from cpsgd.ledger import Ledger, RoundEvent

    ledger = Ledger(path)
    event = RoundEvent(protocol, survivors=survivors, participation="every", round=round, label=label)
    ledger.quote(population, [event])
    return Charge(ledger, population, event)
