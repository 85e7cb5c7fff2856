"""One message to two servers, one of them honest: shares modulo a small prime, and a proof that each is in range.

`RoundShape` fixes a round, `make_report` turns a client's integers into a report, `Leader` and `Helper` check and add
reports. docs/proofs/pair.md has the construction, its proofs and what each party learns.
"""
