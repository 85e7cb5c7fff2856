"""`cpsgd`: the commands under one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cyclopts import App

from cpsgd.cli import audit, budget, data, exchange, identity, mean, plan, privacy, statistics, train
from cpsgd.cli.frame import launch, new_app


def _version() -> str:
    from cpsgd import __version__

    return f"cpsgd {__version__}"


app = new_app("cpsgd", "Private means of many people's vectors, over thin links.", _version)
_COMMANDS: dict[str, App | Callable[..., None]] = {
    "train": train.run,
    "plan": plan.run,
    "privacy": privacy.app,
    "mean": mean.run,
    "kmeans": statistics.kmeans,
    "pca": statistics.pca,
    "protocol": exchange.protocol,
    "encode": exchange.encode,
    "aggregate": exchange.aggregate,
    "audit": audit.run,
    "budget": budget.app,
    "identity": identity.app,
    "data": data.app,
}
for _index, (_name, _command) in enumerate(_COMMANDS.items()):
    # In this order in the help, too.
    if isinstance(_command, App):
        _command.sort_key = _index
        app.command(_command)
    else:
        app.command(_command, name=_name, sort_key=_index)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    launch(app, arguments)
