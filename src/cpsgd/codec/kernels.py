"""The kernels for those outside of the codec, who may have some of their own; the accounting has, too."""

from __future__ import annotations

from cpsgd.codec._kernels import kernels as kernels
from cpsgd.codec._kernels.by_values import ByValues


class PythonKernel(ByValues):
    """A kernel that is written in Python, and says what the integers are."""

    pack = staticmethod(kernels.pack)
