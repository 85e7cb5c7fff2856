"""Generated mutants: draws some, runs the tests that reach each, and lists those that no test notices.

    PYTHONPATH=tests python -m mutants.generated --share 0.01 --seed 1 [--rooms privacy ledger] [--slow]

The tests are collected once. A first child process runs them all and notes which functions each one calls. Then every
mutant gets a child of its own: the function's code is exchanged there, and the tests that call it are run, quick ones
first, until one fails. Processes that tests start do not see such a mutant. With `--slow`, one that survives is tried
again by all tests of its room, on a copy of the source (`runner.tested`).

`equivalent.txt` lists mutants that change nothing a test could notice, each with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pickle
import resource
import sys
import tempfile
import time
import types
from collections import Counter
from dataclasses import replace
from functools import _lru_cache_wrapper
from pathlib import Path

import pytest

from .operators import Mutant, mutants
from .runner import ROOT, SOURCE, copied, tested

ROOMS = ("privacy", "mechanisms", "correlated", "ledger", "audit", "federation", "secagg")
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
_PACKAGE = str(SOURCE / "cpsgd") + os.sep
_MOST_SECONDS = 15.0
"""Processor time of the tests that a mutant is tried with, as measured without it."""
_FOUND, _SURVIVED, _BROKEN = 1, 0, 3
_CONTROLS, _UNCHANGED = 5, "nothing is changed"


def equivalent() -> dict[str, str]:
    """Returns the listed mutants with their reasons: a name and, indented below it, a sentence."""
    reasons, name = {}, ""
    for line in EQUIVALENT.read_text().splitlines():
        if line.startswith((" ", "\t")):
            reasons[name] = line.strip()
        elif line and not line.startswith("#"):
            name = line
    return reasons


def drawn(rooms: tuple[str, ...], share: float, seed: int) -> list[Mutant]:
    """Returns the sample, without the listed equivalents."""
    listed = equivalent()
    paths = [path for room in rooms for path in sorted((SOURCE / "cpsgd" / room).rglob("*.py"))]
    made = [m for path in paths for m in mutants(path, str(path.relative_to(SOURCE / "cpsgd")), share, seed)]
    return [mutant for mutant in made if mutant.name not in listed]


def controls(chosen: list[Mutant]) -> list[Mutant]:
    """Returns a few of the mutants without their fault: tests that notice them notice everything."""
    return [
        replace(mutant, change=_UNCHANGED, source=(SOURCE / "cpsgd" / mutant.file).read_text())
        for mutant in chosen[:: max(1, len(chosen) // _CONTROLS)]
    ]


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Returns the functions of a compiled module by qualified name, not those inside functions."""
    found = {}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            if "<locals>" not in const.co_qualname:
                found[const.co_qualname] = const
            found |= _codes(const)
    return found


def _apply(mutant: Mutant) -> bool:
    """Puts the mutant into this process; False if it cannot be put there."""
    path = _PACKAGE + mutant.file
    compiled = compile(mutant.source, path, "exec")
    wrong = _codes(compiled).get(mutant.function)
    if wrong is None:
        return _apply_constant(mutant, compiled, path)
    hits = 0
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:  # `isinstance` wakes other packages' proxies
            code = thing.__code__
            if code.co_filename == path and code.co_qualname == mutant.function:
                if len(code.co_freevars) != len(wrong.co_freevars):
                    return False
                thing.__code__ = wrong
                hits += 1
    return hits > 0


def _apply_constant(mutant: Mutant, compiled: types.CodeType, path: str) -> bool:
    """Changes a module's constant, in every module that has imported it."""
    homes = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path]
    if not homes:
        return False
    old = getattr(homes[0], mutant.function)
    names = dict(vars(homes[0]))
    exec(compiled, names)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("cpsgd") and vars(module).get(mutant.function) is old:
            setattr(module, mutant.function, names[mutant.function])
    return True


class Session:
    """A pytest plugin that runs tests on mutants in place of its own loop."""

    def __init__(self, chosen: list[Mutant], workers: int, seconds: float) -> None:
        self.chosen, self.workers, self.deadline = chosen, workers, time.monotonic() + seconds
        self.survivors: list[Mutant] = []
        self.untested: list[Mutant] = []
        self.ended: list[Mutant] = []
        self.left_out = 0
        self.failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Maps tests to functions, then tries each mutant in a child."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        reached = self._map(session)
        items = {item.nodeid: item for item in session.items}
        running: dict[int, Mutant] = {}
        waiting = list(self.chosen)
        while waiting or running:
            if waiting and time.monotonic() > self.deadline:
                self.left_out, waiting = len(waiting), []
            if waiting and len(running) < self.workers:
                mutant = waiting.pop(0)
                tests = reached.get((mutant.file, mutant.function)) or reached.get((mutant.file, "<module>"), [])
                if not tests:
                    if mutant.change != _UNCHANGED:
                        self.untested.append(mutant)
                    continue
                chosen, seconds = _affordable(mutant, tests)
                running[self._start([items[name] for name in chosen], mutant, seconds)] = mutant
                continue
            if running:
                child, status = os.wait()
                mutant = running.pop(child)
                code = os.waitstatus_to_exitcode(status)
                if code == _BROKEN or (mutant.change == _UNCHANGED and code != _SURVIVED):
                    raise session.Failed(f"{mutant.name} could not be tried (exit code {code})")
                if mutant.change == _UNCHANGED:
                    continue
                if code == _SURVIVED:
                    self.survivors.append(mutant)
                elif code != _FOUND:
                    self.ended.append(mutant)
        return True

    def _start(self, items: list[pytest.Item], mutant: Mutant, seconds: float) -> int:
        child = os.fork()
        if child:
            return child
        # A mutant that runs for ever is ended by a signal, and counts as found.
        limit = round(10 + 5 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        _silence()
        code = _BROKEN
        try:
            if _apply(mutant):
                for thing in gc.get_objects():
                    if type(thing) is _lru_cache_wrapper:
                        thing.cache_clear()
                code = _FOUND if any(not _passes(item) for item in items) else _SURVIVED
            else:
                code = _SURVIVED
        finally:
            os._exit(code)

    def _map(self, session: pytest.Session) -> dict[tuple[str, str], list[tuple[float, str]]]:
        """Returns, for each function, the tests that call it, with their seconds."""
        with tempfile.NamedTemporaryFile() as file:
            child = os.fork()
            if not child:
                try:
                    _silence()
                    Path(file.name).write_bytes(pickle.dumps([_traced(item) for item in session.items]))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            traced = pickle.loads(Path(file.name).read_bytes())
        reached: dict[tuple[str, str], list[tuple[float, str]]] = {}
        failed = []
        for name, seconds, passed, functions in traced:
            if not passed:
                failed.append(name)
                continue
            for function in functions:
                reached.setdefault(function, []).append((seconds, name))
        if failed:
            print("These tests fail without any fault, and are left out:", *failed, sep="\n  ")
            self.failed = True
        print(f"{len(traced)} tests reach {len(reached)} functions.", flush=True)
        return reached


def _affordable(mutant: Mutant, tests: list[tuple[float, str]]) -> tuple[list[str], float]:
    """Returns the tests to try, those of the mutant's own room and then quick ones first, and their seconds."""
    own = f"tests/{mutant.file.partition('/')[0]}/"
    chosen, spent = [], 0.0
    for seconds, name in sorted(tests, key=lambda test: (not test[1].startswith(own), test)):
        chosen.append(name)
        spent += seconds
        if spent > _MOST_SECONDS:
            break
    return chosen, spent


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _passes(item: pytest.Item) -> bool:
    from _pytest.runner import runtestprotocol

    return all(not report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _traced(item: pytest.Item) -> tuple[str, float, bool, set[tuple[str, str]]]:
    """Runs a test and returns its name, seconds, whether it passed, and the functions of the package it called."""
    functions: set[tuple[str, str]] = set()
    known: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            known.add(code)
            if code.co_filename.startswith(_PACKAGE):
                name = code.co_qualname.partition(".<locals>")[0]
                functions.add((code.co_filename.removeprefix(_PACKAGE), name))
                functions.add((code.co_filename.removeprefix(_PACKAGE), "<module>"))

    started = time.process_time()
    sys.setprofile(note)
    try:
        passed = _passes(item)
    finally:
        sys.setprofile(None)
    return item.nodeid, time.process_time() - started, passed, functions


def survives_slow_tests(mutant: Mutant, copy: Path) -> bool:
    """Tries a mutant on a copy of the source with all tests of its room, the slow ones among them."""
    path = copy / "cpsgd" / mutant.file
    right = path.read_text()
    path.write_text(mutant.source)
    code, _ = tested(copy, (f"tests/{mutant.file.partition('/')[0]}",))
    path.write_text(right)
    return code == 0


def main() -> int:
    """Prints survivors by module; 0 if there are none."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    options.add_argument("--share", type=float, default=1.0, help="of all mutants")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so long")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options.add_argument("--slow", action="store_true", help="try survivors with slow tests, on a copy")
    given = options.parse_args()
    chosen = drawn(tuple(given.rooms), given.share, given.seed)
    print(f"{len(chosen)} mutants", flush=True)
    session = Session([*controls(chosen), *chosen], given.workers, 60 * given.minutes)
    tests = [str(ROOT / "tests" / room) for room in (*ROOMS, "planner")]
    tests += [str(path) for path in (ROOT / "tests").glob("test_*.py")]
    os.environ["PYTHONHASHSEED"] = "0"
    with contextlib.chdir(ROOT):
        code = pytest.main(
            ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not thorough", *tests],
            plugins=[session],
        )
    if code not in (0, 5):
        return int(code)
    survivors = session.untested + session.survivors
    if given.slow and survivors:
        with tempfile.TemporaryDirectory() as folder:
            copy = copied(Path(folder))
            survivors = [mutant for mutant in survivors if survives_slow_tests(mutant, copy)]
    tried = len(chosen) - session.left_out
    by_file = Counter(mutant.file for mutant in chosen)
    for mutant in sorted(survivors, key=lambda m: (m.file, m.line)):
        print(
            f"SURVIVED {mutant.name} (line {mutant.line})" + (" [no quick test]" if mutant in session.untested else "")
        )
    for file, count in Counter(mutant.file for mutant in survivors).most_common():
        print(f"{file:<45} {count:>4} of {by_file[file]:>4} survive")
    print(
        f"{len(survivors)} of {tried} mutants survive ({100 * len(survivors) / max(tried, 1):.1f} %); "
        f"{len(session.ended)} ran for too long or crashed; {session.left_out} not tried for want of time."
    )
    return int(bool(survivors) or session.failed)


if __name__ == "__main__":
    sys.exit(main())
