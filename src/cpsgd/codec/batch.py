"""Many clients' messages at once, on as many threads as there are processors.

The kernels and the cipher run without the interpreter lock, so that threads share nothing but the parameters. Each
message is what `pipeline.encode` makes of its vector alone, with noise of its own. The caller's thread is one of them:
where it would have to wait for a message it encodes another one, so that no thread need be woken for each.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.codec import pipeline, wire

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

MAX_THREADS = 1024
# A thread gets vectors of so many coordinates at a time, and at least one: enough to hide the cost of handing over.
_COORDINATES = 1 << 17
# Such parts per thread that are read ahead.
_AHEAD = 2


@dataclass
class _Part:
    """Some vectors, and the messages that a thread makes of them."""

    vectors: list[ArrayLike]
    messages: Future[list[bytes]]


Encode = Callable[[list[ArrayLike]], list[bytes]]


def encode_many(
    protocol: Protocol, vectors: Iterable[ArrayLike], round: int, threads: int | None = None
) -> Generator[bytes, None, None]:
    """See `Protocol.encode_many`."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    count = processors() if threads is None else _validate.integer("threads", threads, low=1, high=MAX_THREADS)
    return _messages(protocol, iter(vectors), round, count)


def processors() -> int:
    """Processors that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (len(allowed(0)) if allowed else os.cpu_count()) or 1


def _messages(
    protocol: Protocol, vectors: Iterator[ArrayLike], round: int, threads: int
) -> Generator[bytes, None, None]:
    if threads == 1:
        for vector in vectors:
            yield pipeline.encode(protocol, vector, round)
        return
    at_a_time = max(1, _COORDINATES // protocol.dim)

    def encode(part: list[ArrayLike]) -> list[bytes]:
        return [pipeline.encode(protocol, vector, round) for vector in part]

    waiting: deque[_Part] = deque()
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="cpsgd-encode") as executor:
        try:
            while True:
                while len(waiting) < _AHEAD * threads and (part := list(islice(vectors, at_a_time))):
                    waiting.append(_Part(part, executor.submit(encode, part)))
                if not waiting:
                    return
                while not waiting[0].messages.done() and _helped(waiting, encode):
                    pass
                yield from waiting.popleft().messages.result()
        finally:
            # Where the caller stops early, or a vector is refused: what was not begun need not be.
            for left in waiting:
                left.messages.cancel()


def _helped(waiting: Iterable[_Part], encode: Encode) -> bool:
    """Encodes the first part that no thread has begun, in this thread; False where all are begun."""
    for part in waiting:
        if part.messages.cancel():
            part.messages = Future()
            try:
                part.messages.set_result(encode(part.vectors))
            except Exception as refused:  # to be raised when its turn comes
                part.messages.set_exception(refused)
            return True
    return False
