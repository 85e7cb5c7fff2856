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

from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.codec import pipeline, wire
from cpsgd.errors import VectorError

MAX_THREADS = 1024
# Coordinates of the vectors that a thread gets at a time, at least one vector: enough to hide the cost of handing over.
_COORDINATES = 1 << 17
# Such parts per thread that are read ahead.
_AHEAD = 2
# Of shorter vectors one thread makes more messages than two: they wait for the interpreter between the kernels' calls.
_SHORT = 1 << 16


_Encoded = tuple[list[bytes], Exception | None]
"""Messages, and the error that ended them."""


@dataclass
class _Part:
    """Some vectors, the number of the first, and their messages."""

    first: int
    vectors: list[ArrayLike]
    encoded: Future[_Encoded]


def encode_many(
    protocol: pipeline.Parameters, vectors: Iterable[ArrayLike], round: int, threads: int | None = None
) -> Generator[bytes, None, None]:
    """Yields one message per vector, in order; see `Protocol.encode_many`."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    usual = processors() if protocol.dim >= _SHORT else 1
    count = usual if threads is None else _validate.integer("threads", threads, low=1, high=MAX_THREADS)
    try:
        found = iter(vectors)
    except TypeError:
        raise VectorError(f"Expected vectors, one per client, got {type(vectors).__name__}.") from None
    return _messages(protocol, found, round, count)


def processors() -> int:
    """Returns the number of processors that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (len(allowed(0)) if allowed else os.cpu_count()) or 1


def _messages(
    protocol: pipeline.Parameters, vectors: Iterator[ArrayLike], round: int, threads: int
) -> Generator[bytes, None, None]:
    """Yields the messages in order, encoded by `threads` threads, a few vectors ahead."""
    at_a_time = max(1, _COORDINATES // protocol.dim)
    failed: list[Exception] = []  # raised by the iterator of vectors

    def read() -> list[ArrayLike]:
        part: list[ArrayLike] = []
        try:
            # Not by list(), which would lose those before an error.
            part.extend(islice(vectors, at_a_time))
        except Exception as error:
            failed.append(error)
        return part

    def encode(first: int, part: list[ArrayLike]) -> _Encoded:
        messages: list[bytes] = []
        try:
            for vector in part:
                messages.append(pipeline.encode(protocol, vector, round))  # kept where one is refused
        except Exception as error:
            error.add_note(f"It is vector {first + len(messages)}, counted from 0.")
            return messages, error
        return messages, None

    waiting: deque[_Part] = deque()
    with ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="cpsgd-encode") as executor:
        try:
            first, more = 0, True
            while True:
                while more and len(waiting) < _AHEAD * threads:
                    part = read()
                    more = bool(part) and not failed
                    if part:
                        encoded: Future[_Encoded] = executor.submit(encode, first, part) if threads > 1 else Future()
                        waiting.append(_Part(first, part, encoded))
                        first += len(part)
                if not waiting:
                    break
                while not waiting[0].encoded.done() and _helped(waiting, encode):
                    pass
                messages, error = waiting.popleft().encoded.result()
                yield from messages
                if error is not None:
                    raise error
            if failed:
                raise failed[0]
        finally:
            # Where the caller stops early, or a vector is refused: what was not begun need not be.
            for left in waiting:
                left.encoded.cancel()


def _helped(waiting: Iterable[_Part], encode: Callable[[int, list[ArrayLike]], _Encoded]) -> bool:
    """Encodes in this thread the first part that no thread has begun; returns False if there is none."""
    for part in waiting:
        if part.encoded.cancel():
            part.encoded = Future()
            part.encoded.set_result(encode(part.first, part.vectors))
            return True
    return False
