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
