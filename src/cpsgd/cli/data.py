"""`cpsgd data`: data sets to learn from, brought to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsgd.cli import _options, _output

if TYPE_CHECKING:
    from cpsgd.learning.datasets.mnist import Part

app = typer.Typer(name="data", no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Bring data sets to this machine."""


@app.command("mnist")
def mnist(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            help="The data folder; the files go to its folder mnist.",
            show_default="CPSGD_DATA_DIR, or else cpsgd in the user's cache",
        ),
    ] = None,
    json: _options.Json = False,
) -> None:
    """Download MNIST (12 MB) and verify it.

    Files that are there and intact are kept. An interrupted download goes on where it stopped.
    """
    files = _download(folder)
    if json:
        _output.show_json(
            {
                "dataset": "mnist",
                "files": [{"path": str(path), "downloaded": downloaded} for path, downloaded in files.items()],
            }
        )
        return
    facts = [("downloaded" if downloaded else "was there", str(path)) for path, downloaded in files.items()]
    _output.show([*facts, ("verified", "every file has MNIST's checksum")])


def _download(folder: Path | None) -> dict[Path, bool]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from cpsgd.learning.datasets.mnist import PARTS, download

    console = Console(stderr=True)
    if not console.is_terminal:
        return download(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {part.name: progress.add_task(part.name, total=part.packed_size) for part in PARTS}

        def show(part: Part, done: int) -> None:
            progress.update(tasks[part.name], completed=done)

        return download(folder, show)
