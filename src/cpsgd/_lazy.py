"""Names of a package, and modules, that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__` that imports each name's module, by `homes`, on first use.

    Example:
        >>> on_demand("cpsgd", {"Protocol": "protocol"})("Protocol").__name__
        'Protocol'
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(package)
        setattr(module, name, getattr(import_module(f"{package}.{homes[name]}"), name))
        return getattr(module, name)

    return find


class Late:
    """A module that is imported when one of its names is first used: SciPy alone takes a quarter of a second.

    Example:
        >>> Late("math").floor(2.5)
        2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # found at once the next time
        return value
