"""Reading a whole ledger again: every hash, every snapshot, the index, and heads that were kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpsgd.errors import LedgerChainError, LedgerFormatError
from cpsgd.ledger import charging
from cpsgd.ledger.chain import Head
from cpsgd.ledger.charging import Total
from cpsgd.ledger.index import Index
from cpsgd.ledger.lookup import Lookup, written
from cpsgd.ledger.replica import Replica, ahead, not_contained
from cpsgd.ledger.state import State
from cpsgd.ledger.witness import Witness


@dataclass(frozen=True)
class Verification:
    """The result of `Ledger.verify` for a chain that is whole.

    Attributes:
        head: The last record. Keep it elsewhere, and a later `verify` can tell that nothing before it was changed.
        records: Number of records.
        totals: What is spent, by population, computed anew.
        ahead: Time of the last record, if that is in the future; otherwise empty. `Ledger.forget_future` is the remedy.
    """

    head: Head
    records: int
    totals: tuple[Total, ...]
    ahead: str = ""

    @property
    def overspent(self) -> tuple[str, ...]:
        """Populations whose rounds cost more than their budget; none, unless a release of cpsgd miscounted."""
        return tuple(total.population for total in self.totals if total.epsilon > total.limit)


def verify(
    replica: Replica, head: str | Head | None, witness: Witness | None, signers: Iterable[bytes] | None
) -> Verification:
    """Reads all records of a ledger, and computes all totals anew; `Ledger.verify` says what is raised."""
    lines = [] if witness is None else witness.lines()
    for line in lines if signers is not None else []:
        line.check(signers or ())
    unseen = {line.head for line in lines}
    kept = None if head is None else str(head).strip().lower().rpartition(":")[2]
    contained = kept is None
    state, index = State(), Index(replica.path)
    with replica.looking() as (log, _):
        entries, beside = Lookup(log, index), Index(replica.path)
        sound = beside.load(log)
        for text, end in written(log):
            index.add(state.apply(text, end.hash, entries), end)
            contained |= end.hash == kept
            unseen.discard(state.head)
        if not sound or not beside.agrees(index):
            raise LedgerFormatError(
                f"Every record of {replica.path} is as it was written, but the index beside it, {beside.path}, is not. "
                "Make it anew with `cpsgd budget repair`."
            )
    if not contained:
        raise LedgerChainError(
            f"The chain of {replica.path} is whole, but does not contain the head {str(kept)[:16]}…: its end was cut "
            "off, it was replaced by another copy, or it was written anew."
        )
    if witness is not None and unseen:
        raise not_contained(replica.path, min(unseen, key=lambda each: each.number), witness)
    totals = tuple(charging.spent(*purse) for purse in state.purses_over_time())
    return Verification(state.head, state.head.number + 1, totals, ahead(state))
