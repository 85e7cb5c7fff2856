"""The cost of entries, charged one by one to an account of their own."""

from __future__ import annotations

from collections.abc import Sequence

from cpsgd.ledger.charging import Total, spent
from cpsgd.ledger.entries import Budget, Entry
from cpsgd.ledger.kinds import Account


def total_of(budget: Budget, entries: Sequence[Entry]) -> Total:
    """The total that follows from entries alone, in the order in which they were reserved and released."""
    account = Account()
    steps = [(entry.number, False, entry) for entry in entries]
    steps += [(entry.released_as or entry.number, True, entry) for entry in entries if entry.released]
    for _, released, entry in sorted(steps, key=lambda step: step[:2]):
        if released:
            account.release(entry.event, entry.survivors, entry.octave)
        else:
            account.reserve(entry.event, octave=entry.octave)
    return spent(budget, [account])
