"""Many clients' messages at once, on as many threads as there are processors.

The kernels and the cipher run without the interpreter lock, so that threads share nothing but the parameters. Each
message is what `pipeline.encode` makes of its vector alone, with noise of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from cpsgd import _validate
from cpsgd.codec import pipeline, wire
from cpsgd.errors import VectorError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

MAX_THREADS = 1024
# A thread gets vectors of so many coordinates at a time, and at least one: enough to hide the cost of handing over.
_COORDINATES = 1 << 17
# Such parts per thread that are read ahead of the one that is waited for.
_AHEAD = 2


def encode_many(
    protocol: Protocol, vectors: Iterable[ArrayLike], round: int, threads: int | None = None
) -> Generator[bytes, None, None]:
    """See `Protocol.encode_many`."""
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    count = processors() if threads is None else _validate.integer("threads", threads, low=1, high=MAX_THREADS)
    try:
        found = iter(vectors)
    except TypeError:
        raise VectorError(f"Expected vectors, one per client, got {type(vectors).__name__}.") from None
    return _messages(protocol, found, round, count)


def processors() -> int:
    """Processors that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)
    return (len(allowed(0)) if allowed else os.cpu_count()) or 1


def _messages(
    protocol: Protocol, vectors: Iterator[ArrayLike], round: int, threads: int
) -> Generator[bytes, None, None]:
    at_a_time = max(1, _COORDINATES // protocol.dim)
    failed: list[Exception] = []  # of whoever makes the vectors

    def read() -> list[ArrayLike]:
        part: list[ArrayLike] = []
        try:
            # Not by list(), which would lose those before an error.
            part.extend(islice(vectors, at_a_time))
        except Exception as error:
            failed.append(error)
        return part

    def encode(first: int, part: list[ArrayLike]) -> tuple[list[bytes], Exception | None]:
        messages: list[bytes] = []
        try:
            for vector in part:
                messages.append(pipeline.encode(protocol, vector, round))  # kept where one is refused
        except Exception as error:
            error.add_note(f"It is vector {first + len(messages)}, counted from 0.")
            return messages, error
        return messages, None

    def taken(part: Future[tuple[list[bytes], Exception | None]]) -> Iterator[bytes]:
        messages, error = part.result()
        yield from messages
        if error is not None:
            raise error

    waiting: deque[Future[tuple[list[bytes], Exception | None]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="cpsgd-encode") as executor:
        try:
            first = 0
            while not failed and (part := read()):
                waiting.append(executor.submit(encode, first, part))
                first += len(part)
                if len(waiting) > _AHEAD * threads:
                    yield from taken(waiting.popleft())
            while waiting:
                yield from taken(waiting.popleft())
            if failed:
                raise failed[0]
        finally:
            # Where the caller stops early, or a vector is refused: what was not begun need not be.
            for future in waiting:
                future.cancel()
