"""`python -m cpsgd.audit`, a process of `levels`: answers each protocol on standard input with a line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from cpsgd.audit.cases import Case
from cpsgd.audit.surveys import law_checked
from cpsgd.protocol import Protocol

# JSON has no infinity, which fails a check.
_HUGE = sys.float_info.max


def main() -> None:
    """Checks the law of the protocols on standard input."""
    asked = json.load(sys.stdin)
    for sampler, protocol in asked["cases"]:
        case = Case(sampler, Protocol.from_json(protocol))
        found = law_checked(case, rounds=asked["rounds"], surviving=asked["surviving"], share=asked["share"])
        finite = [replace(check, statistic=min(check.statistic, _HUGE)) for check in found.checks]
        answer = {"checks": [vars(check) for check in finite], "rounds": found.rounds, "digest": found.digest}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
