"""Builds the sdist and the wheels of a release, and tries them: `make dist`.

For every Python found (3.11 to 3.13), or given, the wheel is built twice, from the sdist, in folders of other names:
the bytes must be equal. `auditwheel` repairs and names it. Then it is installed into an empty environment in which no
compiler is found, and `packaging/smoke.py` runs there. Last, the sdist is installed without a compiler, and must
work on NumPy.

What is built with is locked, by hashes: `packaging/build.txt`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
# Dates within archives: the beginning of 2026, which is before any release of this.
EPOCH = "1767225600"


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command that must succeed."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, **environment})


def make_environment(folder: Path, python: str) -> Path:
    """An empty environment of that Python; returns its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(interpreter: Path, *what: str | Path, **environment: str) -> None:
    """Installs into an environment."""
    run(interpreter, "-m", "pip", "install", "--quiet", *what, **environment)


def builder(folder: Path, python: str) -> Path:
    """An environment with what the package is built with, and nothing else."""
    interpreter = make_environment(folder, python)
    install(
        interpreter,
        "--require-hashes",
        "--requirement",
        ROOT / "packaging/build.txt",
    )
    return interpreter


def built(interpreter: Path, source: Path, out: Path) -> Path:
    """The wheel of an unpacked sdist."""
    tools = {"PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}", "SOURCE_DATE_EPOCH": EPOCH}
    run(interpreter, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, **tools)
    (wheel,) = out.glob("*.whl")
    return wheel


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_compilers(folder: Path) -> dict[str, str]:
    """An environment whose path has neither compilers nor what builds with them."""
    empty = folder / "no-tools"
    empty.mkdir()
    return {"PATH": str(empty), "CC": "", "CXX": ""}


def pythons() -> list[str]:
    """The interpreters given, or those of the versions above that the path has and that run."""
    found = [shutil.which(f"python{version}") for version in PYTHONS]
    return sys.argv[1:] or [
        p for p in found if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0
    ]


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        first = builder(work / "build", sys.executable)
        tools = {"PATH": f"{first.parent}{os.pathsep}{os.environ['PATH']}", "SOURCE_DATE_EPOCH": EPOCH}
        run(first, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT, **tools)
        (sdist,) = DIST.glob("*.tar.gz")
        for python in pythons():
            if list(DIST.glob("*-abi3-*.whl")):
                break  # that of the first Python from 3.12 on is for all later ones
            label = python.strip("/").replace("/", "-")
            interpreter = builder(work / f"build-{label}", python)
            wheels = []
            for copy in ("one", "another-folder"):
                place = work / label / copy
                with tarfile.open(sdist) as archive:
                    archive.extractall(place, filter="data")
                (source,) = place.iterdir()
                wheels.append(built(interpreter, source, place / "out"))
            if digest(wheels[0]) != digest(wheels[1]):
                raise SystemExit(f"Two builds for {label} differ: {wheels[0]}, {wheels[1]}.")
            run(interpreter, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheels[0], **tools)
        bare = without_compilers(work)
        for python in pythons():
            interpreter = make_environment(work / f"try-{python.strip('/').replace('/', '-')}", python)
            install(
                interpreter,
                "--only-binary",
                ":all:",
                "--find-links",
                DIST,
                "cpsgd",
                **bare,
            )
            run(interpreter, ROOT / "packaging/smoke.py", **bare)
        interpreter = make_environment(work / "try-sdist", sys.executable)
        install(interpreter, sdist, **bare)
        run(interpreter, ROOT / "packaging/smoke.py", "--numpy", **bare)
    for path in sorted(DIST.iterdir()):
        print(digest(path), path.name)


if __name__ == "__main__":
    main()
