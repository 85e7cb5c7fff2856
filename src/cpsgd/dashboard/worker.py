"""A process that runs one job after the other, step by step, and can be stopped in the middle of a step.

A job is a generator function of a module, with arguments that can be pickled; what it yields comes back as it is made.
A caller that no longer wants a job closes the iterator: the process is asked to stop after its step, and ended where it
does not within a moment. It keeps what it has computed from job to job (planners remember certificates), and a new one
is quick to start: on POSIX it is forked from a server that has imported everything already.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from cpsgd.errors import CpsgdError, WorkerError

# Seconds: between two looks at the pipe, and until a job that nobody wants is ended by force.
_LOOK, _GRACE = 0.02, 0.2
_PRELOADED = ["cpsgd.dashboard.plan_page", "cpsgd.dashboard.budgets"]
_STEP, _DONE, _FAILED = "step", "done", "failed"

Job = Callable[..., Iterator[Any]]


class Worker:
    """One worker process, started when it is first needed. Jobs wait for each other."""

    def __init__(self) -> None:
        self._context: SpawnContext | ForkServerContext
        if sys.platform == "win32":
            self._context = multiprocessing.get_context("spawn")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(_PRELOADED)
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._turn = asyncio.Lock()
        self._unwanted = False
        self._stopping = False

    async def start(self) -> None:
        """Starts the process before it is needed."""
        async with self._prepared():
            pass

    async def run(self, job: Job, *arguments: object, limit: float) -> AsyncGenerator[Any, None]:
        """Yields what the job yields.

        Args:
            job: A generator function at the top of a module.
            arguments: Its arguments.
            limit: Seconds after which it is ended.

        Raises:
            CpsgdError: What the job raised.
            WorkerError: It took too long, or its process ended.
        """
        async with self._prepared() as pipe:
            deadline = time.monotonic() + limit
            self._unwanted = True  # until it is known how it ended
            pipe.send((job, arguments))
            while True:
                try:
                    while not pipe.poll():
                        if self._stopping:
                            raise WorkerError("The dashboard was stopped.")
                        if time.monotonic() > deadline:
                            raise WorkerError(f"This takes more than {limit:g} seconds and was stopped.")
                        await asyncio.sleep(_LOOK)
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    raise WorkerError("The process that computes ended unexpectedly; ask again.") from None
                if kind == _STEP:
                    yield value
                    continue
                self._unwanted = False
                if kind == _FAILED:
                    raise value
                return

    @asynccontextmanager
    async def _prepared(self) -> AsyncIterator[Connection]:
        """Yields the pipe of an idle process, to one caller at a time."""
        await self._turn.acquire()
        preparing = asyncio.ensure_future(asyncio.to_thread(self._ready))
        try:
            pipe = await asyncio.shield(preparing)
        except BaseException:
            # The caller may have gone, but the thread still runs: until it ends, only it may use the pipe.
            preparing.add_done_callback(lambda _: self._turn.release())
            raise
        try:
            yield pipe
        finally:
            self._turn.release()

    def stop(self) -> None:
        """Asks jobs to end, also from another thread or a signal handler; call `close` afterwards."""
        self._stopping = True

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
        self._process = self._pipe = None
        self._unwanted = False

    def _ready(self) -> Connection:
        """Returns the pipe of an idle process."""
        if self._unwanted and not self._stopped():
            self.close()
        if self._process is not None and not self._process.is_alive():
            self.close()
        if self._pipe is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        return self._pipe

    def _stopped(self) -> bool:
        """Asks a running job to stop; returns whether it stopped in time."""
        if self._pipe is None:
            return False
        deadline = time.monotonic() + _GRACE
        try:
            self._pipe.send(None)
            while time.monotonic() < deadline:
                if self._pipe.poll(_LOOK) and self._pipe.recv()[0] != _STEP:
                    self._unwanted = False
                    return True
        except (EOFError, OSError):
            pass
        return False


def _serve(pipe: Connection) -> None:
    """Runs jobs until the other end of the pipe is closed."""
    try:
        while True:
            if (asked := pipe.recv()) is None:
                continue  # came too late to stop anything
            job, arguments = asked
            pipe.send(_computed(pipe, job, arguments))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _computed(pipe: Connection, job: Job, arguments: tuple[object, ...]) -> tuple[str, CpsgdError | None]:
    """Runs a job, sends each of its values, and returns how it ended."""
    try:
        for value in job(*arguments):
            if pipe.poll():
                break  # nobody wants the rest
            pipe.send((_STEP, value))
    except CpsgdError as error:
        return _FAILED, CpsgdError(str(error))
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        return _FAILED, WorkerError(f"This could not be computed ({type(error).__name__}).")
    return _DONE, None
