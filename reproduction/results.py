"""Selects settings and trains for the accuracies of docs/results, on one GPU, until the time is up.

    python -m reproduction.results --budget 600

What the files in `--out` have already is not done again, so that the command can be given several times. The stages are
in the order of what they are worth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from reproduction import correlated, select_settings
from reproduction.accuracy_vs_bytes import RESULTS

Main = Callable[[Sequence[str]], None]

_SELECT, _TRAIN = select_settings.main, correlated.main
_PASSES = "--bits 14 --independent-bits 0.1 --memory-limit 60000"

STAGES: tuple[tuple[Main, str, str], ...] = (
    (_SELECT, "correlated", "--epsilon 2 1 0.5 --bands 1 8 32"),
    (_TRAIN, "correlated", "--bands 1 8 32"),
    (_SELECT, "correlated", "--epsilon 2 --bands --few-bits 4 5"),
    (_TRAIN, "correlated", "--bands 129 --memory-limit 32000"),
    (_SELECT, "passes", "--epsilon 2 0.5 --bands 32 --passes 10"),
    (_SELECT, "passes", "--epsilon 0.5 --bands 32 --passes 25"),
    (_SELECT, "passes", "--epsilon 2 0.5 --bands 1 --passes 50"),
    (_TRAIN, "passes", f"--bands 32 {_PASSES}"),
    (_TRAIN, "passes", f"--bands 1 --passes 50 --seeds 1 {_PASSES}"),
    (_SELECT, "correlated", "--epsilon 1 0.5 --bands --few-bits 5"),
    (_TRAIN, "correlated", "--bands 129 --memory-limit 32000"),
    (_TRAIN, "passes", f"--bands 1 --passes 50 {_PASSES}"),
)
"""What does it, the folder, and its options."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=RESULTS)
    arguments.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing more is begun")
    arguments.add_argument("--options", default="", help="further options of every stage, such as '--device cpu'")
    options = arguments.parse_args()
    until = time.monotonic() + options.budget
    for does, name, wanted in STAGES:
        folder = options.out / name
        print(f"{name} {wanted}", flush=True)
        given = f"--out {folder} --budget {until - time.monotonic()} {wanted} {options.options}"
        given += "" if does is _SELECT else f" --chosen {folder / 'chosen.json'} --no-draw"
        try:
            does(given.split())
        except TimeoutError as error:
            print(error)


if __name__ == "__main__":
    main()
