"""`cpsgd figures`: pictures of the repository's folder `reproduction`, for a package installed from a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cpsgd.cli import options
from cpsgd.cli.frame import new_app
from cpsgd.errors import CpsgdError

app = new_app("figures")


@app.command
def frontier(
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="Folder for the files.")] = Path("figures"),
    json: options.Json = False,
) -> None:
    """Draws the error of every mechanism against bits, ours and as published: SVG, PNG and CSV.

    At three settings, with and without secure aggregation. Takes a quarter of an hour or so. Needs a checkout of the
    repository, where `python -m reproduction.frontier` does the same.
    """
    checkout = Path(__file__).parents[3]
    if not (checkout / "reproduction" / "frontier.py").is_file():
        raise CpsgdError(
            "This picture compares with other people's papers and is drawn from a checkout of cpsgd's repository: "
            "run `python -m reproduction.frontier` there."
        )
    sys.path.append(str(checkout))
    importlib.import_module("reproduction.frontier").main(out=out, json=json)
