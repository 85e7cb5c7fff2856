"""A durable ledger of privacy budgets: what was spent of whose, on disk before a result is released.

    ledger = Ledger("budgets.ledger")
    ledger.create(Budget(population="patients-2026", epsilon=4.0, delta=1e-6))
    entry = ledger.reserve("patients-2026", RoundEvent(protocol, survivors=950, round=7))   # or refused, before it runs
    ...                                                                                     # the round
    ledger.release(entry, survivors=970)                                                    # then hand out the result

`events` says what a budget and a round are, `kinds` sorts rounds, `totals` knows what they cost together, `chain` how
records are linked, `storage` how they get on the disk and `snapshots` how a long ledger is opened. `replica` keeps up
with a file that others write to, `verification` reads all of it again, and `book` puts these together. `witness` and
`reports` are for other people's eyes. docs/ledger.md has the whole story.
"""

from __future__ import annotations

from cpsgd.ledger.book import Ledger as Ledger
from cpsgd.ledger.chain import Head as Head
from cpsgd.ledger.charging import Total as Total
from cpsgd.ledger.entries import Budget as Budget
from cpsgd.ledger.entries import Entry as Entry
from cpsgd.ledger.entries import RoundEvent as RoundEvent
from cpsgd.ledger.entries import Unit as Unit
from cpsgd.ledger.signed_reports import Report as Report
from cpsgd.ledger.signed_reports import check_report as check_report
from cpsgd.ledger.verification import Verification as Verification
from cpsgd.ledger.witness import Line as Line
from cpsgd.ledger.witness import Witness as Witness
