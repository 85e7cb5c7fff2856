"""All mechanisms by name, and their parameters as files and command lines spell them.

A new mechanism is named in `MECHANISMS`. Its parameters are then options everywhere: `MechanismOptions` has a field for
every parameter of any mechanism, with the help text of its docstring.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from cpsgd import _validate
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    Gaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
)
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.interface import RANGES
from cpsgd.mechanisms.whole_laplace import WholeLaplace

MECHANISMS: dict[str, type[Mechanism]] = {
    mechanism.name: mechanism
    for mechanism in (
        Binomial,
        Gaussian,
        Skellam,
        DiscreteGaussian,
        Coins,
        SampledCoins,
        LazyCoins,
        RoundedGaussian,
        CorrelatedGaussian,
        RoundedCorrelated,
        ShapedGaussian,
        DiscreteLaplace,
        WholeLaplace,
    )
}
"""All mechanisms, by name."""


# How people call X, which is a field's long name.
_SHORT = {"coordinate_range": "range"}
_LONG = {short: long for long, short in _SHORT.items()}


def by_name(name: str) -> type[Mechanism]:
    """Returns the class of mechanisms with this name.

    Raises:
        ParameterError: There is none; the message lists the known names.
    """
    try:
        return MECHANISMS[name]
    except (KeyError, TypeError):
        raise ParameterError(f"Expected mechanism to be one of {list(MECHANISMS)}, got {reprlib.repr(name)}.") from None


def of_file(data: Mapping[str, object]) -> type[Mechanism]:
    """Returns the mechanism's class for a protocol file; files of 0.1.0 do not name it."""
    if "mechanism" in data:
        return by_name(str(data["mechanism"]))
    return Binomial if data.get("sigma") is None else Gaussian


# ---------------------------------------------------------------------- parameters as options


def _parameters(kind: type[Mechanism]) -> dict[str, Any]:
    """Returns a mechanism's parameters by their names as options, with their types."""
    hints = get_type_hints(kind)

    def plain(hint: Any) -> Any:
        return next(part for part in (*get_args(hint), hint) if part is not NoneType)

    return {_SHORT.get(name, name): plain(hints[name]) for name in _names(kind)}


def _names(kind: type[Mechanism]) -> list[str]:
    return [entry.name for entry in fields(kind)]  # type: ignore[arg-type]  # every mechanism is a dataclass


def _required(kind: type[Mechanism]) -> list[str]:
    """Returns the parameters that a mechanism has no default for."""
    return [_SHORT.get(e.name, e.name) for e in fields(kind) if e.default is MISSING]  # type: ignore[arg-type]


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Returns the text for each field from the `Attributes:` in the docstrings of a dataclass and its bases."""
    texts: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        said = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")[2]
        found = re.findall(r"^    (\w+): (.*(?:\n      .*)*)", said, flags=re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in found}
    return texts


def _make() -> type[Any]:
    """Makes the dataclass `MechanismOptions`, with a field for every parameter of any mechanism."""
    options: dict[str, tuple[Any, str, list[str]]] = {}
    for name, kind in MECHANISMS.items():
        texts = field_texts(kind)
        for option, hint in _parameters(kind).items():
            _, _, owners = options.setdefault(option, (hint, texts[_LONG.get(option, option)], []))
            owners.append(name)
    lines = [
        "        mechanism: Name of the mechanism, such as binomial, coins or rounded-gaussian (docs/mechanisms.md). "
        "By default the first that has all parameters given."
    ]
    for option, (_, text, owners) in options.items():
        owned = "" if len(owners) == len(MECHANISMS) else f" ({', '.join(owners)})"
        lines.append(f"        {option}: {text.rstrip('.')}{owned}.")
    doc = "A mechanism by its parameters; None where nothing was said.\n\n    Attributes:\n" + "\n".join(lines)
    kinds = {"mechanism": str, **{option: hint for option, (hint, _, _) in options.items()}}
    made = [(name, hint | None, field(default=None)) for name, hint in kinds.items()]
    named = {"__module__": __name__, "__doc__": doc + "\n    "}
    return make_dataclass("MechanismOptions", made, namespace=named, frozen=True, kw_only=True)


MechanismOptions = _make()


def parameters_of(options: Any) -> dict[str, Any]:
    """Returns the parameters that are set in an object with the fields of `MechanismOptions`, without the name."""
    names = [entry.name for entry in fields(MechanismOptions) if entry.name != "mechanism"]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def named_kind(name: str | None, parameters: Mapping[str, Any]) -> type[Mechanism]:
    """Returns the mechanism of this name; without one, the first that has all the parameters.

    Raises:
        ParameterError: There is no such mechanism, or it lacks one of the parameters.
    """
    known = {kind: _parameters(kind) for kind in (MECHANISMS.values() if name is None else [by_name(name)])}
    for kind, own in known.items():
        if parameters.keys() <= own.keys():
            return kind
    if name is not None:
        unknown = ", ".join(option for option in parameters if option not in own)
        raise ParameterError(f"The {name} mechanism has no {unknown}; leave that out. It has {', '.join(own)}.")
    owned = "; ".join(f"{kind.name} has {', '.join(own)}" for kind, own in known.items())
    raise ParameterError(f"No mechanism has {', '.join(parameters)} together; leave out some of them: {owned}.")


def required(name: str | None, parameters: Mapping[str, Any]) -> list[str]:
    """Returns the mechanism's mandatory parameters."""
    return _required(named_kind(name, parameters))


def spelled_out(
    name: str | None,
    parameters: Mapping[str, Any],
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    rotate: bool = True,
    delta: float = 1e-9,
) -> Mechanism:
    """Returns the mechanism with these parameters; those not given are its usual ones for such a protocol.

    Raises:
        ParameterError: The mechanism has no such parameter, or one is out of range.

    Example:
        >>> spelled_out(None, {"levels": 3, "trials": 13, "range": 0.5}, clients=10, dim=4, clip_norm=1.0)
        Binomial(levels=3, coordinate_range=0.5, trials=13, p=0.5)
    """
    kind = named_kind(name, parameters)
    # By the names that were given: the range may follow from the norm, and has a longer name in a protocol.
    for given, value in {"clip_norm": clip_norm, **parameters}.items():
        if given in ("clip_norm", "range"):
            _validate.positive(given, value, low=RANGES[0], high=RANGES[1])
    usual = kind.usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
    return kind(**{**usual, **{_LONG.get(option, option): value for option, value in parameters.items()}})
