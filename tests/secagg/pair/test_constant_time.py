"""No branch and no address in the kernels of two servers depends on a secret, as far as valgrind sees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cpsgd.codec import pack

KERNELS = Path(pack.__file__).parent / "_kernels"
PRIMES = (2, 3, 337, 3779, 78041, 2**31 - 1)
COUNT = 1031


@pytest.mark.slow
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
def test_only_draws_by_rejection_look_at_what_they_draw(tmp_path: Path, level: str) -> None:
    """And these show which words they left out, of which nothing is kept: the control that valgrind notices."""
    if shutil.which("valgrind") is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and valgrind, as Debian's packages bring them")
    program = tmp_path / "constant_time"
    flags = ["-std=c++17", "-g", "-O3", "-ffp-contract=off", f"-march={level}", "-DCPSGD_LEVEL=level", f"-I{KERNELS}"]
    source = str(Path(__file__).with_name("constant_time.cpp"))
    subprocess.run(["g++", *flags, source, "-o", str(program)], check=True)
    words = [str(number) for p in PRIMES for number in pack.grouping(p).arguments(COUNT)]
    run = ["valgrind", "-q", "--error-limit=no", str(program), *words]
    found = subprocess.run(run, check=True, capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["uniform_elements"] * len(PRIMES), found.stderr[:4000]
