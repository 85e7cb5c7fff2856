"""A durable ledger of privacy budgets: every expense is on disk before its result is released.

    ledger = Ledger("budgets.ledger")
    ledger.create(Budget(population="patients-2026", epsilon=4.0, delta=1e-6))
    entry = ledger.reserve("patients-2026", RoundEvent(protocol, survivors=950, round=7))   # or refused, before it runs
    ...                                                                                     # the round
    ledger.release(entry, survivors=970)                                                    # then hand out the result

| module | content |
|---|---|
| `book` | `Ledger`, which puts the others together |
| `entries`, `kinds` | budgets, rounds and entries; rounds counted by kind |
| `charging` | the cost of rounds together |
| `chain`, `state` | records linked by hashes; everything that follows from them |
| `replica` | a process's view of a log that others write to |
| `index`, `lookup` | places of records, as a cache beside the log; single entries |
| `sqlite_files` | ledgers of 0.1.0 and 0.2.0, which are taken over |
| `verification` | reads a whole ledger again |
| `witness`, `signed_reports` | evidence for other people |

See docs/ledger.md.
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
