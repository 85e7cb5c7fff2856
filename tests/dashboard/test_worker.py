"""The process that computes: jobs step by step, given up in the middle, too slow, or failing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from cpsgd.dashboard import budgets
from cpsgd.dashboard.worker import Worker
from cpsgd.errors import CpsgdError, WorkerError

# Jobs must be importable where they are computed: these are Python's own.
SLEEP: Any = (map, time.sleep)


def with_worker(test: Callable[[Worker], Awaitable[None]]) -> None:
    async def run() -> None:
        worker = Worker()
        try:
            await test(worker)
        finally:
            worker.close()

    asyncio.run(run())


async def collected(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


def test_jobs_come_back_step_by_step_one_after_the_other() -> None:
    async def test(worker: Worker) -> None:
        assert await collected(worker.run(range, 3, limit=30)) == [0, 1, 2]
        both = await asyncio.gather(*(collected(worker.run(range, n, limit=30)) for n in (2, 4)))
        assert both == [[0, 1], [0, 1, 2, 3]]

    with_worker(test)


def test_a_job_without_end_stops_when_nobody_listens() -> None:
    async def test(worker: Worker) -> None:
        await worker.start()
        first = worker._process
        async with aclosing(worker.run(itertools.count, 5, limit=30)) as numbers:
            assert [await anext(numbers) for _ in range(3)] == [5, 6, 7]
        assert await collected(worker.run(range, 2, limit=30)) == [0, 1]
        assert worker._process is first  # what it had computed before is kept

    with_worker(test)


def test_a_step_without_end_is_ended_by_force() -> None:
    async def test(worker: Worker) -> None:
        async with aclosing(worker.run(*SLEEP, [0, 3600], limit=30)) as steps:
            assert await anext(steps) is None
        assert await asyncio.wait_for(collected(worker.run(range, 2, limit=30)), 20) == [0, 1]
        with pytest.raises(WorkerError, match=r"more than 0\.2 seconds"):
            await collected(worker.run(*SLEEP, [3600], limit=0.2))
        assert await asyncio.wait_for(collected(worker.run(range, 1, limit=30)), 20) == [0]

    with_worker(test)


def test_many_who_go_away_at_any_moment_leave_it_working() -> None:
    async def test(worker: Worker) -> None:
        for moment in range(40):
            asked = asyncio.create_task(collected(worker.run(itertools.count, limit=30)))
            await asyncio.sleep(0.004 * (moment % 10))
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert await asyncio.wait_for(collected(worker.run(range, 3, limit=30)), 20) == [0, 1, 2]

    with_worker(test)


def test_failures_are_errors_of_ours_and_say_nothing_private() -> None:
    async def test(worker: Worker) -> None:
        with pytest.raises(CpsgdError, match="There is no ledger at nowhere"):
            await collected(worker.run(budgets.read, "nowhere", limit=30))
        with pytest.raises(WorkerError, match=r"could not be computed \(TypeError\)") as failure:
            await collected(worker.run(map, len, [3], limit=30))
        assert "int" not in str(failure.value).replace("computed", "")
        assert await collected(worker.run(range, 1, limit=30)) == [0]

    with_worker(test)


def test_a_process_that_dies_is_replaced() -> None:
    async def test(worker: Worker) -> None:
        await worker.start()
        assert worker._process is not None
        os.kill(worker._process.pid or 0, signal.SIGKILL)
        worker._process.join()
        assert await collected(worker.run(range, 1, limit=30)) == [0]
        with pytest.raises(WorkerError, match="ended unexpectedly"):
            await collected(worker.run(map, os._exit, [1], limit=30))
        assert await collected(worker.run(range, 1, limit=30)) == [0]

    with_worker(test)
