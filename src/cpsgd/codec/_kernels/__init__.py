"""The kernels: C++ (`_native`, compiled for several SIMD levels) or their NumPy twin, value for value the same.

The NumPy twin is what runs where no kernel could be built, and what the tests compare the C++ code with. The level is
chosen when the module is imported; the environment variable CPSGD_SIMD (baseline, avx2, avx512 or numpy) forces one.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpsgd.codec._kernels import _native as kernels
elif os.environ.get("CPSGD_SIMD") == "numpy":
    from cpsgd.codec._kernels import numpy_twin as kernels
else:
    try:
        kernels = import_module("cpsgd.codec._kernels._native")
    except ModuleNotFoundError:
        from cpsgd.codec._kernels import numpy_twin as kernels

        warnings.warn(
            "cpsgd was built without a C++ compiler and runs on NumPy: some 50 times slower, and its time may depend "
            "on the noise. Install a compiler and reinstall cpsgd, or set CPSGD_SIMD=numpy to accept this.",
            RuntimeWarning,
            stacklevel=2,
        )

__all__ = ["kernels"]
