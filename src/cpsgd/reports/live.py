"""Shows the progress of a run: a live bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpsgd._numbers import rounded_up, size

if TYPE_CHECKING:
    from cpsgd.learning import RoundMetrics

# Lines of a run where there is no terminal, and the longest time between them in seconds.
_LINES = 10
_SILENCE = 30.0


class Display:
    """Shows the rounds of several runs, one after the other."""

    def __init__(self, console: Console, *, remark: str = "") -> None:
        """Shows figures on a console, with a remark beside every ε."""
        self._console, self._remark = console, remark
        self._progress = Progress(
            TextColumn("[bold]{task.description:<11}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, name: str, rounds: int, done: int, evaluate_every: int = 1) -> None:
        """Starts the display of a run of which `done` rounds are over.

        Lines of text come about ten times in a run, or at every evaluation if there are rounds without one.
        """
        self._name, self._rounds, self._spoken = name, rounds, time.monotonic()
        self._every = evaluate_every if evaluate_every > 1 else max(1, rounds // _LINES)
        self._task = self._progress.add_task(name, total=rounds, completed=done, figures="")

    def show(self, metrics: RoundMetrics) -> None:
        """Shows the metrics of the round that just ended."""
        done, now = metrics.round + 1, time.monotonic()
        if self._console.is_terminal:
            self._progress.update(self._task, completed=done, figures=self._figures(metrics))
        elif done % self._every == 0 or done == self._rounds or now - self._spoken > _SILENCE:
            self._spoken = now
            self.say(f"{self._name:<10}  round {done:,}/{self._rounds:,}  {self._figures(metrics)}")

    def _figures(self, metrics: RoundMetrics) -> str:
        parts = [
            "" if metrics.loss is None else f"loss {metrics.loss:.3f}",
            "" if metrics.accuracy is None else f"accuracy {metrics.accuracy:.2%}",
            "" if metrics.r_squared is None else f"R² {metrics.r_squared:.3f}",
            "" if metrics.epsilon is None else f"ε {rounded_up(metrics.epsilon)}{self._remark}",
            f"sent {size(metrics.bytes_total)}",
            "" if metrics.released else "abandoned: too few messages",
        ]
        return "  ".join(filter(None, parts))


def device_text(name: str) -> str:
    """Returns the name of the device of a run, and what that means for its randomness.

    Raises:
        ParameterError: There is no such device here.
    """
    from cpsgd.learning import devices

    device = devices.resolve(name)
    if device.type == "cuda":
        return f"device: {device}; random numbers from a counter, the noise of a round's sum drawn at once"
    return "device: cpu" + (", since there is no CUDA device" if name == "auto" else "")


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within the context, Ctrl-C only sets a flag; yields a function that returns it. A second Ctrl-C stops at once.

    An exception raised at an arbitrary place could be swallowed there, for example in a destructor.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, b"\nFinishing this round. Press Ctrl-C again to stop at once.\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread receives signals
        return
    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
