"""Generated mutants: draws some, runs the tests that reach each, and lists those that no test notices.

    PYTHONPATH=tests python -m mutants.generated --share 0.01 --seed 1 [--rooms privacy ledger] [--marks 'not thorough']

The tests are collected once. Child processes run them all and note which mutants' lines each one runs. Then every
mutant gets a child of its own: the function's code is exchanged there, and the tests that run its line are run, those
of the module's own test file and quick ones first, until one fails. Processes that tests start do not see a mutant.

`equivalent.txt` lists mutants that change nothing a test could notice, each with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from scipy.stats import binomtest

from .operators import Mutant, mutants
from .runner import ROOT, SOURCE

ROOMS = ("privacy", "mechanisms", "correlated", "ledger", "audit", "federation", "secagg")
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
_PACKAGE = str(SOURCE / "cpsgd") + os.sep
_FOUND, _SURVIVED, _BROKEN = 1, 0, 3
_CONTROLS, _UNCHANGED = 5, "nothing is changed"
_PATIENCE = 2
"""A child that waits, for a lock say, takes no processor time: it has so many times its limit by the clock of an idle
machine."""


def equivalent() -> dict[str, str]:
    """Returns the listed mutants with their reasons: a name and, indented below it, a sentence."""
    reasons, name = {}, ""
    for line in EQUIVALENT.read_text().splitlines():
        if line.startswith((" ", "\t")):
            reasons[name] = line.strip()
        elif line and not line.startswith("#"):
            name = line
    return reasons


def drawn(rooms: tuple[str, ...], wanted: Callable[[Mutant], bool]) -> list[Mutant]:
    """Returns the wanted mutants of these rooms."""
    paths = [path for room in rooms for path in sorted((SOURCE / "cpsgd" / room).rglob("*.py"))]
    return [m for path in paths for m in mutants(path, str(path.relative_to(SOURCE / "cpsgd")), wanted)]


def sample(rooms: tuple[str, ...], share: float, seed: int) -> list[Mutant]:
    """Returns a share of the mutants, without the listed equivalents."""
    listed = equivalent()
    return drawn(rooms, lambda mutant: mutant.drawn(share, seed) and mutant.name not in listed)


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


def _functions(files: Iterable[str]) -> dict[tuple[str, str], list[types.FunctionType]]:
    """Imports the files below src/cpsgd and returns their functions by file and qualified name."""
    for file in files:
        importlib.import_module("cpsgd." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    found = defaultdict(list)
    gc.unfreeze()  # what is frozen, as the tests' own set-up does, is not among the objects
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:  # `isinstance` wakes other packages' proxies
            code = thing.__code__
            if code.co_filename.startswith(_PACKAGE):
                found[code.co_filename.removeprefix(_PACKAGE), code.co_qualname].append(thing)
    return found


def _apply(mutant: Mutant, functions: dict[tuple[str, str], list[types.FunctionType]]) -> bool:
    """Puts the mutant into this process; False if it cannot be put there."""
    path = _PACKAGE + mutant.file
    compiled = compile(mutant.source, path, "exec")
    wrong = _codes(compiled).get(mutant.function)
    if wrong is None:
        return _apply_constant(mutant, compiled, path)
    found = functions.get((mutant.file, mutant.function), [])
    for function in found:
        if len(function.__code__.co_freevars) != len(wrong.co_freevars):
            return False
        function.__code__ = wrong
    return bool(found)


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

    def __init__(self, chosen: list[Mutant], workers: int, minutes: float, seconds: float) -> None:
        self.chosen, self.workers, self.seconds = chosen, workers, seconds
        self.deadline = time.monotonic() + 60 * minutes
        self.survivors: list[Mutant] = []
        self.untested: list[Mutant] = []
        self.ended: list[Mutant] = []
        self.left_out: list[Mutant] = []
        self.failed = False
        self._functions: dict[tuple[str, str], list[types.FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Maps tests to mutants, then tries each mutant in a child."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        self._functions = _functions({mutant.file for mutant in self.chosen})
        for thing in gc.get_objects():  # what collecting the tests has left in them was found without a fault
            if type(thing) is _lru_cache_wrapper:
                thing.cache_clear()
        gc.collect()
        gc.freeze()  # so that children do not copy what they only look at
        reached = self._map(session)
        items = {item.nodeid: item for item in session.items}
        running: dict[int, tuple[Mutant, float]] = {}
        waiting = list(self.chosen)
        while waiting or running:
            if waiting and time.monotonic() > self.deadline:
                self.left_out, waiting = self.left_out + waiting, []
            if waiting and len(running) < self.workers:
                mutant = waiting.pop(0)
                tests = reached[_place(mutant)]
                if not tests:
                    if mutant.change != _UNCHANGED:
                        self.untested.append(mutant)
                    continue
                chosen, seconds = _affordable(mutant, tests, self.seconds)
                child = self._start([items[name] for name in chosen], mutant, seconds)
                running[child] = mutant, time.monotonic() + _PATIENCE * _busy() * (10 + 5 * seconds)
                continue
            if running:
                child, code = self._ended(running)
                mutant = running.pop(child)[0]
                if mutant.change == _UNCHANGED:
                    if code != _SURVIVED:
                        print(f"{mutant.name} could not be tried (exit code {code})", flush=True)
                        raise session.Failed("tests that notice a control notice everything")
                elif code == _BROKEN:
                    print(f"{mutant.name} cannot be put into a running process", flush=True)
                    self.left_out.append(mutant)
                elif code == _SURVIVED:
                    self.survivors.append(mutant)
                elif code != _FOUND:
                    self.ended.append(mutant)
        return True

    def _ended(self, running: dict[int, tuple[Mutant, float]]) -> tuple[int, int]:
        """Waits for one of the children and returns it with its exit code; ends those that wait for ever."""
        while True:
            for child, (_, latest) in running.items():
                over = time.monotonic() > latest
                if over:
                    _end(child)
                found, status = os.waitpid(child, 0 if over else os.WNOHANG)
                if found:
                    _end(child)  # what its tests have started
                    return child, os.waitstatus_to_exitcode(status)
            time.sleep(0.02)

    def _start(self, items: list[pytest.Item], mutant: Mutant, seconds: float) -> int:
        child = os.fork()
        if child:
            return child
        os.setpgid(0, 0)
        # A mutant that runs for ever is ended by a signal, and counts as found.
        limit = round(10 + 5 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        _silence()
        code = _BROKEN
        try:
            if _apply(mutant, self._functions):
                code = _FOUND if any(not _passes(item) for item in items) else _SURVIVED
        finally:
            os._exit(code)

    def _map(self, session: pytest.Session) -> dict[tuple[str, object], list[tuple[float, str]]]:
        """Returns, for each place of a mutant, the tests that come there, with their seconds."""
        started = time.monotonic()
        files = sorted({item.path for item in session.items})
        children = []
        with tempfile.TemporaryDirectory() as folder:
            for number in range(self.workers):
                own = dict.fromkeys(files[number :: self.workers])
                child = os.fork()
                if not child:
                    try:
                        errors = os.dup(2)
                        _silence()
                        tracer = Tracer(self.chosen)
                        traced = [tracer.run(item) for item in session.items if item.path in own]
                        Path(folder, str(number)).write_bytes(pickle.dumps(traced))
                    except BaseException:
                        os.write(errors, traceback.format_exc().encode())
                    finally:
                        os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            traced = [
                test for number in range(self.workers) for test in pickle.loads(Path(folder, str(number)).read_bytes())
            ]
        reached: dict[tuple[str, object], list[tuple[float, str]]] = defaultdict(list)
        failed = []
        for name, seconds, passed, places in traced:
            if not passed:
                failed.append(name)
                continue
            for place in places:
                reached[place].append((seconds, name))
        if failed:
            print("These tests fail without any fault, and are left out:", *failed, sep="\n  ")
            self.failed = True
        print(
            f"{len(traced)} tests come to {len(reached)} of {len({_place(m) for m in self.chosen})} places "
            f"({time.monotonic() - started:.0f} s).",
            flush=True,
        )
        return reached


def _place(mutant: Mutant) -> tuple[str, object]:
    """Returns a mutant's file and lines, or the constant's name where it is one of a module."""
    return mutant.file, mutant.function if mutant.constant else mutant.lines


class Tracer:
    """Runs tests and notes which of the mutants' places they come to."""

    def __init__(self, chosen: list[Mutant]) -> None:
        self._places: defaultdict[str, dict[int, set[tuple[str, object]]]] = defaultdict(lambda: defaultdict(set))
        self._constants: defaultdict[str, set[tuple[str, object]]] = defaultdict(set)
        for mutant in chosen:
            if mutant.constant:
                self._constants[mutant.function].add(_place(mutant))
            else:
                for line in range(mutant.lines[0], mutant.lines[1] + 1):
                    self._places[_PACKAGE + mutant.file][line].add(_place(mutant))
        self._found: set[tuple[str, object]] = set()
        self._of: dict[types.CodeType, dict[int, set[tuple[str, object]]]] = {}

    def run(self, item: pytest.Item) -> tuple[str, float, bool, set[tuple[str, object]]]:
        """Runs a test and returns its name, seconds, whether it passed, and the places it came to."""
        self._found = set()
        self._of.clear()
        started = time.process_time()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            passed = _passes(item)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]  # as the documentation has it
        return item.nodeid, time.process_time() - started, passed, self._found

    def _called(self, frame: types.FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        places = self._of.get(code)
        if places is None:
            places = self._of[code] = {}
            for name in code.co_names:  # a test may read a constant itself
                self._found |= self._constants.get(name, set())
            if code.co_filename.startswith(_PACKAGE):
                wanted = self._places.get(code.co_filename, {})
                places |= {line: wanted[line] for _, _, line in code.co_lines() if line in wanted}
        if not places:
            return None

        def passed(frame: types.FrameType, event: str, _: object) -> Any:
            self._found |= places.pop(frame.f_lineno, set())
            if places:
                return passed
            frame.f_trace = None
            return None

        return passed


def _affordable(mutant: Mutant, tests: list[tuple[float, str]], most: float) -> tuple[list[str], float]:
    """Returns the tests to try, with their seconds.

    First come those of the module's file of tests, then of files that name the module, then of its room.
    """
    own = f"tests/{mutant.file.partition('/')[0]}/"
    module = Path(mutant.file).stem
    if module == "__init__":
        module = Path(mutant.file).parent.name

    def rank(test: tuple[float, str]) -> tuple[bool, bool, bool, tuple[float, str]]:
        file = test[1].partition("::")[0]
        return f"/test_{module}.py" not in file, module not in _words(file), not test[1].startswith(own), test

    chosen, spent = [], 0.0
    for seconds, name in sorted(tests, key=rank):
        chosen.append(name)
        spent += seconds
        if spent > most:
            break
    return chosen, spent


@cache
def _words(file: str) -> frozenset[str]:
    """Returns the words of a file of tests: names of modules, among others."""
    return frozenset(re.findall(r"\w+", (ROOT / file).read_text()))


def _busy() -> float:
    """Returns how many processes share each processor, at least 1."""
    return max(1.0, max(os.getloadavg()) / (os.cpu_count() or 1))


def _end(child: int) -> None:
    """Ends a child and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _passes(item: pytest.Item) -> bool:
    from _pytest.runner import runtestprotocol

    return all(not report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def main() -> int:
    """Prints survivors; 0 if their share is no higher than `--most`, and at least half of the mutants were tried."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    options.add_argument("--share", type=float, default=1.0, help="of all mutants")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", type=Path, help="a file with names of mutants: try these, with listed ones")
    options.add_argument("--tests", nargs="+", help="files of tests in place of all")
    options.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so long")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seconds", type=float, default=15.0, help="processor time of tests per mutant")
    options.add_argument("--marks", default="not slow and not thorough", help="tests to try, as pytest -m has it")
    options.add_argument("--most", type=float, default=0.0, help="share of survivors that is no failure")
    options.add_argument("--table", type=Path, help="write survivors by module to this page")
    given = options.parse_args()
    if given.only:
        names = {line.removeprefix("SURVIVED ").partition(" (line")[0] for line in given.only.read_text().splitlines()}
        chosen = drawn(tuple(given.rooms), lambda mutant: mutant.name in names)
    else:
        chosen = sample(tuple(given.rooms), given.share, given.seed)
    print(f"{len(chosen)} mutants", flush=True)
    session = Session([*controls(chosen), *chosen], given.workers, given.minutes, given.seconds)
    tests = given.tests or [
        *(str(ROOT / "tests" / room) for room in (*ROOMS, "planner", "compatibility")),
        *(str(SOURCE / "cpsgd" / room) for room in ROOMS),
        *(str(path) for path in (ROOT / "tests").glob("test_*.py")),
    ]
    os.environ["PYTHONHASHSEED"] = "0"
    # Whoever finds a fault need not say how small it can be.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    with contextlib.chdir(ROOT):
        code = pytest.main(
            ["-q", "-s", "-n", "0", "--tb=no", "-p", "no:cacheprovider", "--assert=plain", "-m", given.marks, *tests],
            plugins=[session],
        )
    if code not in (0, 5):
        return int(code)
    survivors = session.untested + session.survivors
    tried = [mutant for mutant in chosen if mutant not in session.left_out]
    for mutant in sorted(survivors, key=lambda m: (m.file, m.lines)):
        unreached = " [no test comes there]" if mutant in session.untested else ""
        print(f"SURVIVED {mutant.name} (line {mutant.lines[0]}){unreached}")
    share = len(survivors) / max(len(tried), 1)
    said = (
        f"{len(survivors)} of {len(tried)} mutants survive ({100 * share:.1f} %); {len(session.ended)} ran for too "
        f"long or crashed, which is noticed; {len(session.left_out)} could not be tried."
    )
    print(said)
    if given.table:
        given.table.write_text(page(" ".join(sys.argv[1:]), said, tried, survivors), encoding="utf-8")
    return int(share > given.most or session.failed or 2 * len(tried) < len(chosen))


def page(options: str, said: str, tried: list[Mutant], survivors: list[Mutant]) -> str:
    """Returns the page that publishes survivors by room and by module."""
    made = f"Made by `python -m mutants.generated {options}` on {datetime.now(UTC):%Y-%m-%d}."
    if "--share" in options:
        low, high = binomtest(len(survivors), len(tried)).proportion_ci()
        said += f" It is a sample: of all mutants {100 * low:.0f} to {100 * high:.0f} % survive, with 95 % confidence."
    lines = ["# Mutants that no test notices", "", made, "", said, ""]
    of: dict[str, Callable[[Mutant], str]] = {"room": lambda m: m.file.partition("/")[0], "module": lambda m: m.file}
    for title, name in of.items():
        left = Counter(map(name, survivors))
        lines += [f"| {title} | mutants | survivors |", "|---|---|---|"]
        lines += [f"| {each} | {count} | {left[each]} |" for each, count in sorted(Counter(map(name, tried)).items())]
        lines += [""]
    return "\n".join([*lines, *(f"* `{m.name}`" for m in sorted(survivors, key=lambda m: m.name)), ""])


if __name__ == "__main__":
    sys.exit(main())
