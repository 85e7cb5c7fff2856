"""`cpsgd data`: data sets to learn from, brought to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cpsgd.cli import options, output
from cpsgd.cli.commands import COMMANDS
from cpsgd.cli.frame import command, new_app

if TYPE_CHECKING:
    from cpsgd.learning.datasets.mnist import Part

app = new_app("data", example=COMMANDS["data"].example)


@command(app, "cpsgd data mnist")
def mnist(
    *,
    folder: Annotated[
        Path | None,
        Parameter(
            name="--dir",
            metavar="FOLDER",
            help="The data folder; the files go to its folder mnist. If not given: CPSGD_DATA_DIR, or else cpsgd "
            "in the user's cache.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Download MNIST (12 MB) and verify it.

    Files that are there and intact are kept. An interrupted download goes on where it stopped.
    """
    files = _download(folder)
    if json:
        found = [{"path": path, "downloaded": downloaded} for path, downloaded in files.items()]
        output.show_json({"dataset": "mnist", "files": found})
        return
    facts = [("downloaded" if downloaded else "was there", str(path)) for path, downloaded in files.items()]
    output.show([*facts, ("verified", "every file has MNIST's checksum")])


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
