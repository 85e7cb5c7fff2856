"""How a run looks while it happens: live on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from cpsgd.learning import RoundMetrics

# Lines of a run where there is no terminal, and the longest silence between them.
_LINES = 10
_SILENCE = 30.0


class Display:
    """Shows the rounds of several runs, one after the other."""

    def __init__(self, console: Console) -> None:
        """Shows on this console."""
        self._console = console
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description:<11}"),
                BarColumn(bar_width=18),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
        self._task = TaskID(0)
        self._rounds = 0
        self._name = ""
        self._spoken = 0.0

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, name: str, rounds: int, done: int) -> None:
        """A run begins, or goes on after some rounds."""
        self._name, self._rounds, self._spoken = name, rounds, time.monotonic()
        if self._progress is not None:
            self._task = self._progress.add_task(name, total=rounds, completed=done, figures="")

    def show(self, metrics: RoundMetrics) -> None:
        """A round is over."""
        done = metrics.round + 1
        if self._progress is not None:
            self._progress.update(self._task, completed=done, figures=_figures(metrics))
            return
        now = time.monotonic()
        if done % max(1, self._rounds // _LINES) == 0 or done == self._rounds or now - self._spoken > _SILENCE:
            self._spoken = now
            self._console.print(
                f"{self._name:<10}  round {done:,}/{self._rounds:,}  {_figures(metrics)}", markup=False, soft_wrap=True
            )


def _figures(metrics: RoundMetrics) -> str:
    parts = []
    if metrics.loss is not None and metrics.accuracy is not None:
        parts.append(f"loss {metrics.loss:.3f}  accuracy {metrics.accuracy:.2%}")
    if metrics.epsilon is not None:
        parts.append(f"ε {metrics.epsilon:.3f}")
    parts.append(f"sent {size(metrics.bytes_total)}")
    if not metrics.released:
        parts.append("abandoned: too few messages")
    return "  ".join(parts)


def size(count: float) -> str:
    """Bytes as people say them.

    >>> size(25_712), size(3_200_000_000)
    ('25.7 kB', '3.2 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000.0 or unit == "TB":
            break
        count /= 1000.0
    return f"{count:.3g} {unit}"


def device_text(name: str) -> str:
    """Where a run is computed, and what that means for it.

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
    """Within, Ctrl-C asks for an end after the current round (the yielded function tells); a second one ends at once.

    An exception thrown wherever the interpreter happens to be can be swallowed there, by a destructor for one.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, b"\nFinishing this round. Press Ctrl-C again to stop at once.\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread hears signals
        return
    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
