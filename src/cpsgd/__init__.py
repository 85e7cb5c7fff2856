"""cpsgd: learning from many people's data without seeing any of it, over low-bandwidth connections.

A `Protocol` fixes the parameters of a round; `Protocol.encode` turns a client's vector into a private few-bit message;
an `Aggregator` adds messages up and yields the unbiased mean. `plan` finds the best protocol for an (ε, δ) and a number
of bits, `guarantee` says which ε is proved for a protocol, and by which theorem. In a training loop of one's own
`RoundSimulator` takes the place of many clients, and `PrivateMean` that of an all-reduce among workers. `make_private`
makes an ordinary PyTorch loop on one machine private.
"""

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand

if TYPE_CHECKING:
    from cpsgd.aggregator import Aggregator as Aggregator
    from cpsgd.engines.allreduce import PrivateMean as PrivateMean
    from cpsgd.learning.private_loop import make_private as make_private
    from cpsgd.mechanisms import ErrorBound as ErrorBound
    from cpsgd.mechanisms import ExpectedError as ExpectedError
    from cpsgd.neighbours import Adjacency as Adjacency
    from cpsgd.planner import Plan as Plan
    from cpsgd.planner import plan as plan
    from cpsgd.privacy import Guarantee as Guarantee
    from cpsgd.privacy import guarantee as guarantee
    from cpsgd.protocol import Protocol as Protocol
    from cpsgd.run import Run as Run
    from cpsgd.simulation.cpu import RoundSimulator as RoundSimulator

__version__ = "0.2.0"

__all__ = [
    "Adjacency",
    "Aggregator",
    "ErrorBound",
    "ExpectedError",
    "Guarantee",
    "Plan",
    "PrivateMean",
    "Protocol",
    "RoundSimulator",
    "Run",
    "guarantee",
    "make_private",
    "plan",
]

_HOMES = {
    "Adjacency": "neighbours",
    "Aggregator": "aggregator",
    "ErrorBound": "mechanisms",
    "ExpectedError": "mechanisms",
    "PrivateMean": "engines.allreduce",
    "make_private": "learning.private_loop",
    "RoundSimulator": "simulation.cpu",
    "Plan": "planner",
    "plan": "planner",
    "Guarantee": "privacy",
    "guarantee": "privacy",
    "Protocol": "protocol",
    "Run": "run",
}


# A client of Flower is a process per message, and needs neither planner nor accountant.
__getattr__ = on_demand(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__version__"])
