"""A round between a server and its clients, whatever engine moves the bytes.

| module | content |
|---|---|
| `choreography` | the exchanges that each kind of round is made of |
| `sessions` | `RoundSession`: runs a round's exchanges, and records who answered or dropped out |
| `course` | `Course`: a server's rounds one after the other |
| `terms` | `Terms`: plan, sums and ledger of a run; `Settlement`: a round's charge and release |
| `carrying` | `carry`: moves a session's messages over any transport |
| `answering` | `ClientSession`: answers a request if it keeps the client's own `limits.Limits` |
| `messages` | `Request`; answers have the frames of `cpsgd.secagg` or `cpsgd.codec` |
| `client_files` | files of the client's operator: `Memory` of rounds answered, and `Signing` |
| `checkpoint` | the server's file to resume a run |
| `extras`, `plausibility` | private metrics that ride on an update; bounds that an honest mean keeps |

An engine moves bytes, waits, and calls the train function. See `cpsgd.engines.flower` and
`cpsgd.engines.nvflare`.
"""

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand

if TYPE_CHECKING:
    from cpsgd.federation.answering import ClientSession as ClientSession
    from cpsgd.federation.carrying import Transport as Transport
    from cpsgd.federation.carrying import carry as carry
    from cpsgd.federation.choreography import begin_round as begin_round
    from cpsgd.federation.course import Course as Course
    from cpsgd.federation.extras import AdaptiveClip as AdaptiveClip
    from cpsgd.federation.limits import Limits as Limits
    from cpsgd.federation.sessions import RoundReport as RoundReport
    from cpsgd.federation.sessions import RoundSession as RoundSession
    from cpsgd.federation.terms import Terms as Terms

_HOMES = {
    "AdaptiveClip": "extras",
    "ClientSession": "answering",
    "Course": "course",
    "Limits": "limits",
    "Terms": "terms",
    "begin_round": "choreography",
    **dict.fromkeys(("RoundReport", "RoundSession"), "sessions"),
    **dict.fromkeys(("Transport", "carry"), "carrying"),
}
# A client needs none of the names of the server.
__getattr__ = on_demand(__name__, _HOMES)
