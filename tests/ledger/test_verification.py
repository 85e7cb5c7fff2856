"""A whole ledger is read again; `test_chain`, `test_snapshots` and `test_witness` damage what it reads."""

from __future__ import annotations

import pytest

from cpsgd.errors import LedgerChainError
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.protocol import Protocol

EVENT = RoundEvent(Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=1), survivors=900)


def test_verify_and_heads(ledger: Ledger) -> None:
    first = ledger.head
    entry = ledger.reserve("people", EVENT)
    ledger.release(entry, 900)
    found = ledger.verify()
    assert (found.records, found.head, found.overspent) == (4, ledger.head, ())
    assert found.totals == (ledger.total("people"),)
    for head in (first, str(first), first.hash, f" {first.hash.upper()}\n", ledger.head):
        assert ledger.verify(head).records == 4
    with pytest.raises(LedgerChainError, match="does not contain the head"):
        ledger.verify("0" * 64)
