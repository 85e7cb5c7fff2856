"""`Figures`: a server's counters, and its progress as JSON (for `cpsgd dashboard`) and as Prometheus reads it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cpsgd.engines.pair.books import Books
from cpsgd.engines.pair.store import Verdict
from cpsgd.secagg.pair.upload import upload_bytes

# Seconds over which the rate is taken, and rounds that are shown.
_WINDOW, _SHOWN = 60.0, 100


@dataclass
class Figures:
    """Counters of this process."""

    verdicts: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    busy: float = 0.0
    started: float = field(default_factory=time.monotonic)
    _lately: deque[tuple[float, int]] = field(default_factory=deque)

    def count(self, verdicts: Iterable[int], start: float) -> None:
        """Counts the verdicts on a batch that was begun at a reading of `time.monotonic`."""
        names = [Verdict(code).name.lower() for code in verdicts]
        now = time.monotonic()
        self.verdicts.update(names)
        self.busy += now - start
        self._lately.append((now, len(names)))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - _WINDOW:
            self._lately.popleft()

    def per_second(self) -> float:
        """Returns the reports per second of the last minute."""
        now = time.monotonic()
        self._forget(now)
        return sum(count for _, count in self._lately) / max(1.0, min(_WINDOW, now - self.started))

    def progress(self, books: Books) -> dict[str, Any]:
        """Returns the task, its rounds and these counters as plain values. None of them is secret."""
        task = books.task
        rounds = books.store.rounds(_SHOWN)
        return {
            "role": books.role,
            "task": task.id.hex(),
            "promise": str(task.protocol.promise),
            "admission": task.admission,
            "dim": task.protocol.dim,
            "upload_bytes": upload_bytes(task.shape(0), tokens=books.tokens),
            "round": books.current if books.current < task.rounds else None,
            "rounds": task.rounds,
            "needed": task.surviving,
            "most": task.clients,
            "states": [vars(each) for each in rounds],
            "verdicts": dict(self.verdicts),
            "waiting": self.waiting,
            "per_second": self.per_second(),
            "busy_seconds": self.busy,
            "seconds": time.monotonic() - self.started,
        }

    def prometheus(self, books: Books) -> str:
        """Returns the figures as Prometheus reads them."""
        state = books.store.round(min(books.current, books.task.rounds - 1))
        gauges = {
            "round": books.current,
            "accepted": state.accepted,
            "refused": state.refused,
            "needed": books.task.surviving,
            "waiting": self.waiting,
        }
        lines = [line for name, value in gauges.items() for line in _lines(name, "gauge", {"": value})]
        lines += _lines("busy_seconds", "counter", {"": f"{self.busy:.6f}"})
        counts = {f'{{verdict="{name}"}}': count for name, count in sorted(self.verdicts.items())}
        return "\n".join(lines + _lines("reports", "counter", counts)) + "\n"


def _lines(name: str, kind: str, values: dict[str, Any]) -> list[str]:
    return [f"# TYPE cpsgd_pair_{name} {kind}", *(f"cpsgd_pair_{name}{key} {value}" for key, value in values.items())]
