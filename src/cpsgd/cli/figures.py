"""`cpsgd figures`: pictures that are computed and not measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from cpsgd.cli import options, output
from cpsgd.cli.frame import new_app

app = new_app("figures")


@app.command
def frontier(
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="Where the files go.")] = Path("figures"),
    json: options.Json = False,
) -> None:
    """Draw the error over bits per coordinate, for every mechanism and for published ones: SVG, PNG and CSV.

    At three settings, with and without secure aggregation. Takes a quarter of an hour or so.
    """
    from cpsgd.reports import rivals

    rivals.check()  # before minutes are spent
    console = Console(stderr=True, highlight=False)

    def show(done: int, of: int, what: str) -> None:
        console.print(f"{done:>3}/{of}  {what}", markup=False, soft_wrap=True)

    points = rivals.compute(progress=show)
    files = rivals.write(out, points)
    written = output.facts([("written", escape(str(file))) for file in files])
    output.answer(json, {"files": files, "points": [asdict(point) for point in points]}, written)
