"""A plugin for `make slow`: measures every test's processor time and writes tests/slow.txt.

The file names the tests whose cases take longer than `LIMIT` on average; tests/conftest.py marks these as slow.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 0.1
"""Seconds of processor time, with those of processes that a test has waited for."""
LIST = Path(__file__).with_name("slow.txt")

_taken: defaultdict[str, list[float]] = defaultdict(list)


def name_of(item: pytest.Item) -> str:
    """A test's file and name, without its parameters."""
    return item.nodeid.partition("[")[0]


def _seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _seconds()
    result = yield
    if not any(mark.name == "slow" for mark in item.own_markers if "recorded" not in mark.kwargs):
        _taken[name_of(item)].append(_seconds() - before)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker sends what it measured to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["taken"] = dict(_taken)
    else:
        names = sorted(name for name, seconds in _taken.items() if sum(seconds) > LIMIT * len(seconds))
        LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, seconds in node.workeroutput["taken"].items():
        _taken[name] += seconds
