"""Every SIMD level this processor has gives the NumPy twin's values, and all of them give the same message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpsgd.codec._kernels import _native

LEVELS = _native.supported_levels()
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
DIGEST = """
import hashlib, numpy as np
from cpsgd import Protocol
from cpsgd.codec import pipeline
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.mechanisms import Coins, RoundedGaussian, SampledCoins
from cpsgd.randomness import Keystream
digest = hashlib.sha256()
for dim in (1, 1000, 4097, 51_370):
    for levels, trials, p, modulus in ((2, 14, 0.5, None), (5, 100, 0.5, 1001), (9, 20, 0.3, None)):
        protocol = Protocol.rotated_binomial(
            clients=10, dim=dim, clip_norm=1.0, levels=levels, trials=trials, p=p, modulus=modulus)
        vector = np.random.default_rng(dim).standard_normal(dim)
        message = pipeline.encode(protocol, vector, 3, Keystream(bytes(16)))
        digest.update(message[64:])
    for mechanism in (
        Coins(coins=1, theta=0.12, coordinate_range=0.02),
        Coins(coins=5, theta=0.05, coordinate_range=0.02),
        SampledCoins(rate=0.05, theta=0.5, coordinate_range=0.02),
        RoundedGaussian(noise_deviation=1.9, step=0.01, window=33, coordinate_range=0.02),
        RoundedCorrelated(noise_deviation=1.9, step=0.01, window=33, coordinate_range=0.02, inherited_range=3.0,
                          bands=2, run_length=9),
    ):
        protocol = Protocol(clients=10, dim=dim, clip_norm=1.0, mechanism=mechanism)
        digest.update(pipeline.integers(protocol, vector, 3, Keystream(bytes(16))).tobytes())
        if isinstance(mechanism, SampledCoins):
            digest.update(protocol.format.chosen(bytes(16), dim).tobytes())
print(digest.hexdigest())
"""


# Without the compiled module, as where no compiler was found; prints the warnings of an import, and whether it works.
WITHOUT_THE_MODULE = """
import sys, warnings
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "cpsgd.codec._kernels._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import cpsgd
    import cpsgd.secagg, cpsgd.simulation.cpu
from cpsgd.codec._kernels import kernels
for warning in caught:
    if "NumPy" in str(warning.message):
        print(warning.category.__name__, str(warning.message))
protocol = cpsgd.Protocol.rotated_binomial(clients=1, dim=100, clip_norm=1.0, levels=4096, trials=16)
aggregator = cpsgd.Aggregator(protocol, 0)
aggregator.add(protocol.encode([0.05] * 100, 0))
print(kernels.simd_level(), bool(abs(aggregator.mean() - 0.05).max() < 0.05))
"""


def run(level: str, *arguments: str) -> str:
    # No plugins, which take longer to import than some of the tests.
    environment = {**os.environ, "CPSGD_SIMD": level, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_baseline_is_always_there() -> None:
    assert LEVELS[0] == "baseline"
    assert _native.simd_level() in LEVELS


@pytest.mark.parametrize("level", [level for level in LEVELS if level != _native.simd_level()])
def test_level_agrees_with_the_twin(level: str) -> None:
    tests = [
        str(Path(__file__).with_name(name))
        for name in ("test_numpy_twin.py", "test_accounting_twin.py", "test_modular_twin.py")
    ]
    assert "passed" in run(level, *PYTEST, *tests)


def test_the_codec_works_on_its_twin() -> None:
    tests = [str(Path(__file__).parents[1] / name) for name in ("test_clip.py", "test_formats.py", "test_wire.py")]
    assert "passed" in run("numpy", *PYTEST, *tests)


def test_all_levels_send_the_same_message() -> None:
    assert len({run(level, "-c", DIGEST) for level in [*LEVELS, "numpy"]}) == 1


def test_an_unknown_level_is_an_error_at_import() -> None:
    environment = {**os.environ, "CPSGD_SIMD": "mmx"}
    result = subprocess.run(
        [sys.executable, "-c", "import cpsgd.codec.pipeline"], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "CPSGD_SIMD=mmx" in result.stderr


@pytest.mark.parametrize("level", ["", "avx2"])
def test_without_the_compiled_module_numpy_stands_in_with_one_warning(level: str) -> None:
    warning, works = run(level, "-c", WITHOUT_THE_MODULE).splitlines()
    assert warning.startswith("RuntimeWarning cpsgd was built without a C++ compiler")
    assert "CPSGD_SIMD=numpy" in warning
    assert works == "numpy True"


def test_numpy_that_was_asked_for_is_no_reason_to_warn() -> None:
    assert run("numpy", "-W", "error", "-c", WITHOUT_THE_MODULE).splitlines() == ["numpy True"]


def test_a_compiled_module_that_does_not_load_is_an_error() -> None:
    broken = WITHOUT_THE_MODULE.replace("raise ModuleNotFoundError", "raise ImportError")
    result = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
