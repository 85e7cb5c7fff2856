"""What an installed wheel must do, in an environment that holds it and what it asks for, and nothing else.

    python packaging/smoke.py [--numpy]

With `--numpy` the kernels must be the NumPy twin, as where no compiler was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def main() -> None:
    import cpsgd
    from cpsgd.codec._kernels import kernels

    expected = "numpy" if "--numpy" in sys.argv[1:] else "native"
    found = "numpy" if kernels.simd_level() == "numpy" else "native"
    assert found == expected, f"expected {expected} kernels, found {kernels.simd_level()}"
    checkout = Path(__file__).resolve().parents[1]
    assert checkout not in Path(cpsgd.__file__).resolve().parents, "this is the checkout, not an installed wheel"

    plan = cpsgd.plan(clients=1_000, dim=100, epsilon=2.0, delta=1e-6, clip_norm=1.0, bits=4)
    protocol = plan.protocol
    aggregator = cpsgd.Aggregator(protocol, 0)
    vector = np.full(100, 0.05)
    for _ in range(protocol.clients):
        aggregator.add(protocol.encode(vector, 0))
    error = float(np.linalg.norm(aggregator.mean() - vector))
    assert error < 1.0, f"the mean is {error:g} away"

    command = [sys.executable, "-m", "cpsgd", "plan", "--clients", "1000", "--dim", "100", "--epsilon", "2"]
    more = ["--delta", "1e-6", "--bits", "4", "--json"]
    with tempfile.TemporaryDirectory() as elsewhere:
        printed = subprocess.run([*command, *more], cwd=elsewhere, check=True, capture_output=True, text=True)
    assert json.loads(printed.stdout), "the command printed no plan"
    print(f"cpsgd {cpsgd.__version__}, Python {sys.version.split()[0]}, kernels {kernels.simd_level()}: works")


if __name__ == "__main__":
    main()
