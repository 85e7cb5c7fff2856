"""Executes notebooks: `python docs/_site/execute.py` writes their outputs again, and a test compares them.

A cell with the tag `noisy` may print other digits each time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def execute(path: Path) -> Any:
    """The notebook with fresh outputs, and without what differs from one execution to the next."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def outputs(cell: Any) -> list[str]:
    """What a cell shows, as far as it is the same each time: text, and that there is a picture."""
    noisy = "noisy" in cell.metadata.get("tags", [])
    shown = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = "picture" if "image/png" in data else output.get("text") or data.get("text/plain", "")
        shown.append(re.sub(r"\d[\d.,e+-]*", "#", text) if noisy else text)
    return shown


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(path.name, path.stat().st_size, "bytes")
