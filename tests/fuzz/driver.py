"""Fuzzes every parser: `PYTHONPATH=tests python -m fuzz.driver [--inputs N] [--seed S] [TARGET...]`.

With `atheris` installed the search is guided by coverage (libFuzzer), each target in a process of its own; without,
valid inputs are changed at random. Either way a finding is an error that is not a `CpsgdError`, or memory beyond
`MEMORY`.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

from cpsgd.errors import CpsgdError

from .mutations import mutate
from .targets import TARGETS, Target

MEMORY = 192 << 20
"""Bytes that a parser may take beyond what the process has before, for inputs of at most `LONGEST` bytes."""


class FindingError(AssertionError):
    """A parser did not return, or not in one of the ways it may."""


def check(target: Target, data: bytes) -> bool:
    """Whether the parser accepted an input.

    Raises:
        FindingError: It neither did nor refused it properly.
    """
    try:
        target.parse(data)
    except CpsgdError:
        return False
    except Exception as error:
        raise FindingError(f"{target.name}: {type(error).__name__}: {error}\n  input {data[:2000]!r}") from error
    return True


def fuzz(target: Target, inputs: int, seed: int) -> int:
    """Runs a parser on so many changed inputs; returns how many it accepted.

    Raises:
        FindingError: Something was found.
    """
    rng = random.Random(f"{target.name} {seed}")
    seeds = target.seeds()
    for data in seeds:
        check(target, data)
    with limited_memory():
        accepted = 0
        for _ in range(inputs):
            data = mutate(rng.choice(seeds), seeds, target.tokens, rng)
            accepted += check(target, target.seal(data) if rng.random() < 0.5 else data)
    return accepted


class limited_memory:  # noqa: N801  # reads as a statement
    """Address space is limited to `MEMORY` beyond what is in use: a parser that wants more gets a `MemoryError`."""

    def __enter__(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def main() -> None:
    """Shares the inputs out among the targets and reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(t.name for t in TARGETS))
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [target for target in TARGETS if not options.targets or target.name in options.targets]
    with_coverage = importlib.util.find_spec("atheris") is not None
    print("guided by coverage" if with_coverage else "not guided by coverage: pip install atheris", flush=True)
    everything = sum(target.share for target in chosen)
    total = failed = 0
    began = time.monotonic()
    for target in chosen:
        inputs = max(1, round(options.inputs * target.share / everything))
        start = time.monotonic()
        if with_coverage:
            command = [sys.executable, "-m", "fuzz.guided", target.name, str(inputs), str(options.seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if not line.startswith("INFO: Instrumenting")]
            really = next((int(line.split()[-1]) for line in said if "number_of_executed_units" in line), 0)
            trouble = "" if done.returncode == 0 and really >= inputs else "\n".join(said)[-6000:]
        else:
            try:
                fuzz(target, inputs, options.seed)
                trouble = ""
            except FindingError as finding:
                trouble = str(finding)
        seconds = time.monotonic() - start
        total += inputs
        print(f"{target.name:<14}{inputs:>10,} inputs  {seconds:7.1f} s  {'FOUND' if trouble else 'ok'}", flush=True)
        if trouble:
            failed += 1
            print(trouble, flush=True)
    print(f"{total:,} inputs in {time.monotonic() - began:.0f} s, {failed} targets with findings")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
