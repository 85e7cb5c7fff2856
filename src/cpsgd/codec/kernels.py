"""The kernels for those outside of the codec: the accounting has some, too."""

from __future__ import annotations

from cpsgd.codec._kernels import kernels as kernels
