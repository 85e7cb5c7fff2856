"""`cpsgd`: the commands under one name, each imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from cpsgd.cli.frame import launch, new_app

COMMANDS = {
    "train": ("train:run", "Train a model from many simulated clients through a private mean, beside its baselines."),
    "plan": (
        "plan:run",
        "Find the best protocol for your requirements: its mechanism, parameters, proved ε and expected error.",
    ),
    "privacy": ("privacy:app", "Compute the ε of given parameters, and name its theorem."),
    "mean": ("mean:run", "Estimate the mean of a table's rows by a whole round on this machine."),
    "sum": ("columns:sum", "Sum a table's columns, so that (ε, δ) protects each user."),
    "count": (
        "columns:count",
        "Count a table's rows, or the ones in columns of 0 and 1, so that (ε, δ) protects each user.",
    ),
    "histogram": (
        "columns:histogram",
        "Count the rows with a column's value in each bin or of each category, so that (ε, δ) protects each user.",
    ),
    "quantiles": ("columns:quantiles", "Find quantiles of a table's columns, so that (ε, δ) protects each user."),
    "kmeans": (
        "unsupervised:kmeans",
        "Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.",
    ),
    "pca": (
        "unsupervised:pca",
        "Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.",
    ),
    "protocol": (
        "exchange:protocol",
        "Write a protocol file, and say what a round with it sends and how wrong it can be.",
    ),
    "encode": ("exchange:encode", "Turn a vector into a private message, as a client does."),
    "aggregate": ("exchange:aggregate", "Add up messages and write their mean, as the server does."),
    "audit": ("audit:run", "Attack real rounds, and compare what can be learned with the ε that is claimed."),
    "budget": ("budget:app", "Keep privacy budgets on a durable ledger."),
    "dashboard": ("dashboard:run", "Plan, watch runs, and read budgets and audits in the browser."),
    "identity": (
        "identities:app",
        "Make keys by which clients of secure aggregation know each other, whatever the server says.",
    ),
    "pair": (
        "pair:app",
        "Sum vectors of clients that send one message each, by two servers that do not collude.",
    ),
    "data": ("data:app", "Bring data sets to this machine."),
    "figures": ("figures:app", "Draw pictures that are computed, not measured."),
}
"""In the help's order: each command's place in this package, and its line in the overview.

The line is the first of the command's docstring (a test compares them), so that the overview imports no command.
"""


def _version() -> str:
    from cpsgd import __version__

    return f"cpsgd {__version__}"


def command_line(named: Sequence[str] = tuple(COMMANDS)) -> App:
    """Returns the app. Commands that are `named` show their own help, all others their line in the overview."""
    app = new_app("cpsgd", "Private means of many people's vectors, over low-bandwidth connections.", _version)
    for index, (name, (place, line)) in enumerate(COMMANDS.items()):
        own = name in named and not place.endswith(":app")
        app.command(f"cpsgd.cli.{place}", name=name, sort_key=index, help=None if own else line)
    return app


app = command_line()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the console script."""
    arguments = sys.argv[1:] if arguments is None else arguments
    launch(command_line(arguments), arguments)
