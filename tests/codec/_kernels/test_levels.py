"""Every SIMD level this processor has gives the reference's values, and all give the same message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpsgd.codec._kernels import _native

LEVELS = _native.supported_levels()
DIGEST = """
import hashlib, numpy as np
from cpsgd import Protocol
from cpsgd.codec import pipeline
from cpsgd.randomness import Keystream
digest = hashlib.sha256()
for dim in (1, 1000, 4097, 51_370):
    for levels, trials, p, modulus in ((2, 14, 0.5, None), (5, 100, 0.5, 1001), (9, 20, 0.3, None)):
        protocol = Protocol.rotated_binomial(
            clients=10, dim=dim, clip_norm=1.0, levels=levels, trials=trials, p=p, modulus=modulus)
        vector = np.random.default_rng(dim).standard_normal(dim)
        message = pipeline.encode(protocol, vector, 3, Keystream(bytes(16)))
        digest.update(message[64:])
print(digest.hexdigest())
"""


def run(level: str, *arguments: str) -> str:
    environment = {**os.environ, "CPSGD_SIMD": level}
    result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_baseline_is_always_there() -> None:
    assert LEVELS[0] == "baseline"
    assert _native.simd_level() in LEVELS


@pytest.mark.parametrize("level", [level for level in LEVELS if level != _native.simd_level()])
def test_level_agrees_with_the_reference(level: str) -> None:
    tests = Path(__file__).with_name("test_reference.py")
    assert "passed" in run(level, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests))


def test_all_levels_send_the_same_message() -> None:
    assert len({run(level, "-c", DIGEST) for level in LEVELS}) == 1


def test_an_unknown_level_is_an_error_at_import() -> None:
    environment = {**os.environ, "CPSGD_SIMD": "mmx"}
    result = subprocess.run([sys.executable, "-c", "import cpsgd"], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "CPSGD_SIMD=mmx" in result.stderr
