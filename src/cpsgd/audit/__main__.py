"""`python -m cpsgd.audit`: a process of `levels`. Protocols come on standard input, a line of JSON answers each."""

from __future__ import annotations

import json
import math
import sys

from cpsgd.audit.cases import Case
from cpsgd.audit.checks import Check
from cpsgd.audit.surveys import law_checked
from cpsgd.protocol import Protocol

# JSON has neither infinity nor NaN; both fail a check.
_HUGE = sys.float_info.max


def main() -> None:
    """Checks the law of what standard input names."""
    asked = json.load(sys.stdin)
    for sampler, protocol in asked["cases"]:
        case = Case(sampler, Protocol.from_json(protocol))
        found = law_checked(case, rounds=asked["rounds"], surviving=asked["surviving"], share=asked["share"])
        answer = {"checks": [_plain(check) for check in found.checks], "rounds": found.rounds, "digest": found.digest}
        print(json.dumps(answer), flush=True)


def _plain(check: Check) -> dict[str, object]:
    return {**vars(check), "statistic": check.statistic if math.isfinite(check.statistic) else _HUGE}


if __name__ == "__main__":
    main()
