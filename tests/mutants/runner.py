"""`make mutants`: seeds one fault at a time in a copy of the source, and fails where the tests do not notice.

    PYTHONPATH=tests python -m mutants.runner [WORDS]

With words, only the faults are seeded whose area or name has one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
_PASSED, _FAILED = 0, 1
_SECONDS = 1800
# An editable install has a finder that comes before the path; without it the copy is what is imported, also by
# processes that tests start.
_CUSTOMIZED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(type(f), "__module__", "").lower()]
"""
_GUARD = """
from pathlib import Path
import cpsgd
from cpsgd.codec.rounding import kernels
here = Path(__file__).resolve().parent
assert Path(cpsgd.__file__).resolve().is_relative_to(here), cpsgd.__file__
assert Path(kernels.__file__).resolve().is_relative_to(here), kernels.__file__
"""


def seeded(fault: Fault, source: Path) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        ValueError: The right text does not stand there exactly once.
    """
    text = (source / "cpsgd" / fault.file).read_text()
    if (found := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: expected the text of “{fault.name}” once, found it {found} times.")
    return text.replace(fault.old, fault.new)


def copied(folder: Path) -> Path:
    """A copy of the source with the compiled kernels in it, which nothing else is imported in place of."""
    from cpsgd.codec._kernels import kernels

    copy = folder / "src"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = Path(str(kernels.__file__))
    if compiled.suffix != ".py":
        shutil.copy(compiled, copy / "cpsgd" / "codec" / "_kernels")
    (copy / "sitecustomize.py").write_text(_CUSTOMIZED)
    (copy / "mutant_guard.py").write_text(_GUARD)
    return copy


def tested(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and last lines of pytest on the copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "mutant_guard",
        "-p",
        "no:cacheprovider",
    ]
    # A fault may make something run for ever, which is noticed as well.
    try:
        done = subprocess.run(
            [*command, "-n", "0", "-m", "not thorough", *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"stopped after {_SECONDS} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def main(words: list[str]) -> int:
    """Seeds all faults; 0 if the tests notice every one."""
    chosen = [f for f in FAULTS if not words or any(word in f"{f.area} {f.name}" for word in words)]
    if not chosen:
        print(f"No fault has any of {words} in its name.")
        return 2
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        # Tests that fail anyway would notice everything.
        code, said = tested(copy, tuple(sorted({test for fault in chosen for test in fault.tests})))
        if code != _PASSED:
            print(f"The tests do not pass without any fault:\n{said}")
            return 2
        for fault in chosen:
            path = copy / "cpsgd" / fault.file
            right = path.read_text()
            started = time.monotonic()
            path.write_text(seeded(fault, copy))
            code, said = tested(copy, fault.tests)
            path.write_text(right)
            verdict = {_PASSED: "SURVIVED", _FAILED: "found"}.get(code, f"BROKEN (pytest's exit code {code})")
            print(f"{verdict:<9} {fault.area}: {fault.name} ({time.monotonic() - started:.0f} s)", flush=True)
            if code != _FAILED:
                bad += 1
                print(said, flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults are found.")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
