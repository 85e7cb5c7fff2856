"""`cpsgd`: the commands under one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpsgd.cli import audit, dashboard, exchange, mean, plan, statistics, tables, train
from cpsgd.cli.frame import launch, new_app


def _version() -> str:
    from cpsgd import __version__

    return f"cpsgd {__version__}"


app = new_app("cpsgd", "Private means of many people's vectors, over thin links.", _version)
_COMMANDS: dict[str, Callable[..., None] | str] = {
    "train": train.run,
    "plan": plan.run,
    "privacy": "What given parameters protect, and by which theorem.",
    "mean": mean.run,
    "sum": tables.sum,
    "count": tables.count,
    "histogram": tables.histogram,
    "quantiles": tables.quantiles,
    "kmeans": statistics.kmeans,
    "pca": statistics.pca,
    "protocol": exchange.protocol,
    "encode": exchange.encode,
    "aggregate": exchange.aggregate,
    "audit": audit.run,
    "budget": "Privacy budgets on a durable ledger.",
    "dashboard": dashboard.run,
    "identity": "Keys by which clients of secure aggregation know each other, whatever the server says.",
    "data": "Bring data sets to this machine.",
    "figures": "Pictures that are computed, not measured.",
}
for _index, (_name, _command) in enumerate(_COMMANDS.items()):
    # In this order in the help, too. A group of commands is a module of that name, imported when one of them is called.
    if isinstance(_command, str):
        app.command(f"cpsgd.cli.{_name}:app", name=_name, sort_key=_index, help=_command)
    else:
        app.command(_command, name=_name, sort_key=_index)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    launch(app, arguments)
