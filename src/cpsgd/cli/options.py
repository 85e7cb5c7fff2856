"""Options that several commands share, made from the library's own dataclasses where it has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, validators

from cpsgd.cli.frame import WHOLE, whole
from cpsgd.errors import ParameterError
from cpsgd.planner.requirements import BEST, Requirements
from cpsgd.registry import MechanismOptions, field_texts, parameters_of, spelled_out

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

PROTOCOL, PRIVACY, BUDGET = Group("Protocol", sort_key=1), Group("Privacy", sort_key=2), Group("Budget", sort_key=9)
FLAT = Parameter(name="*")
"""For a parameter that is a dataclass: its fields are options by their own names."""

COUNT = Parameter(converter=whole, validator=validators.Number(gte=0))
"""For options that are whole numbers from 0 on."""


def file_option(help: str, *, name: str | None = None, metavar: str = "FILE") -> Parameter:
    """Returns the description of an option that takes a file."""
    return Parameter(name=name, metavar=metavar, help=help)


Json = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]
Key = Annotated[str | None, Parameter(help="Name of the array in an .npz file that holds several.")]
Table = Annotated[Path, Parameter(name="FILE", help="An .npy, .npz or .csv table, one row per client.")]
ProtocolFile = Annotated[
    Path, file_option("The protocol's JSON, as written by `cpsgd round protocol`.", name="--protocol")
]
AcceptEpsilon = Annotated[
    float | None,
    Parameter(
        group=PRIVACY,
        help="Release also what does not keep the protocol's promise, if the ε that is true is at most this.",
    ),
]
Round = Annotated[int, COUNT, Parameter(help="Number of the round.")]


def from_class(
    source: type[Any],
    *names: str,
    unset: bool = False,
    optional: Collection[str] = (),
    text: Collection[str] = (),
    groups: Mapping[str, Group] | None = None,
) -> type[Any]:
    """Returns a dataclass of command-line options with the names, types, defaults and help of a library's dataclass.

    Args:
        source: A dataclass whose docstring, or those of its bases, describe its fields under `Attributes:`.
        names: The fields to take; all if none are named.
        unset: Every option may be left out and is then None, so that `given` can tell what was said.
        optional: Fields without a default that may be left out and are then None.
        text: Fields that the command reads itself.
        groups: The panel of the help that each field belongs to; all to the default one if None.

    What the library takes as text, too, is text here. A switch that is on by default gets a `--no-` form.
    """
    hints = get_type_hints(source, include_extras=True)
    helps = _helps(source)
    made: list[tuple[str, Any, Field[Any]]] = []
    for original in fields(source):
        if names and original.name not in names:
            continue
        kinds = set(_kinds(hints[original.name]))
        absent = unset or original.name in optional
        may_be_none = absent or type(None) in kinds
        kinds -= {type(None)}
        kinds |= {str} if original.name in text else set()
        said: dict[str, Any] = {"help": helps[original.name]}
        if groups is not None:
            said["group"] = groups[original.name]
        if kinds == {int}:
            said["converter"] = whole
        if original.default is True:
            said["negative"] = f"--no-{original.name}".replace("_", "-")
        hint = str if str in kinds else hints[original.name]
        # The defaults of these library classes are plain values.
        default: Any = field(default=None if absent else original.default)
        made.append((original.name, Annotated[hint | None if may_be_none else hint, Parameter(**said)], default))
    named = {"__module__": source.__module__}
    return make_dataclass(f"{source.__name__}Options", made, namespace=named, frozen=True, kw_only=True)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _helps(source: type[Any]) -> dict[str, str]:
    """Returns each field's help from the docstrings of a class and its bases, with fields written as options."""
    known = {original.name for original in fields(source)}

    def option(match: re.Match[str]) -> str:
        return f"`--{match[1].replace('_', '-')}`" if match[1] in known else match[0]

    return {
        name: re.sub(r"`(\w+)`", option, text).replace("if None", "if not given")
        for name, text in field_texts(source).items()
    }


def given(chosen: Any) -> dict[str, Any]:
    """Returns the options that were given, by the library's names."""
    return {entry.name: value for entry in fields(chosen) if (value := getattr(chosen, entry.name)) is not None}


_SIZE = from_class(Requirements, "clients", "dim", unset=True)
_REQUIRED = from_class(Requirements, "epsilon", "delta", "bits", unset=True)
_PROMISED = ("rounds", "participation", "adjacency", "dropout", "colluding", "secure")
_PLANNED = from_class(Requirements, "epsilon", "delta", "bits", *_PROMISED, unset=True)
_MECHANISM = from_class(MechanismOptions, unset=True)
NO_SIZE: Any = _SIZE()
NO_REQUIREMENTS: Any = _REQUIRED()
NO_PLAN: Any = _PLANNED()
_NO_MECHANISM: Any = _MECHANISM()

if TYPE_CHECKING:
    # Made when the program runs, which a type checker cannot follow.
    Size = Any
    Required = Any
    Planned = Any
    Cost = Any
    Mechanism = Any
else:
    Mechanism = Annotated[_MECHANISM, FLAT]
    Size = Annotated[_SIZE, FLAT]
    Required = Annotated[_REQUIRED, Parameter(name="*", group=PRIVACY)]
    Planned = Annotated[_PLANNED, Parameter(name="*", group=PRIVACY)]
    Cost = Annotated[from_class(Requirements, "epsilon", "delta", "bits"), FLAT]


@dataclass(frozen=True, kw_only=True)
class ProtocolChoice:
    """Options about a protocol; None where an option was not given.

    Attributes:
        file: A protocol's JSON, instead of parameters here.
        clip_norm: D: longer vectors are scaled down to this Euclidean norm. Choose it without looking at the data. 1 if
            not given; an ε asked for by itself needs it.
        mechanism: What a coordinate becomes.
        replace_one_distance: The largest Euclidean distance of any two clients' vectors, where it is known to be less
            than 2D; needs --distance-reason. Nothing enforces it: the ε shown rests on it.
        distance_reason: Why no two vectors are further apart, in a sentence that goes into the protocol.
        rotate: Rotate vectors before rounding; the default.
        seed: Public seed of the rotation; the noise has none and cannot be repeated. 0 if not given.
    """

    file: Annotated[Path | None, Parameter(name="--protocol", metavar="FILE")] = None
    # The norm is public. It must not be read off the data: the largest norm belongs to one person and would give them
    # away. So its default is a constant.
    clip_norm: float | None = None
    replace_one_distance: float | None = None
    distance_reason: str | None = None
    mechanism: Mechanism = _NO_MECHANISM
    rotate: Annotated[bool | None, Parameter(negative="--no-rotate")] = None
    seed: Annotated[int | None, WHOLE] = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, by their names on the command line."""
        said = {"protocol": self.file, "clip_norm": self.clip_norm, **self._stated, **given(self.mechanism)}
        said |= {"rotate": self.rotate, "seed": self.seed}
        return {"--" + name.replace("_", "-"): value for name, value in said.items() if value is not None}

    @property
    def _stated(self) -> dict[str, Any]:
        return {"replace_one_distance": self.replace_one_distance, "distance_reason": self.distance_reason}

    def protocol(self, required: Any = None, *, clients: int | None = None, dim: int | None = None) -> Protocol:
        """Returns the protocol in the file, or one for this many clients and coordinates.

        Raises:
            ParameterError: Options are missing, contradict each other or are out of range.
        """
        asked = {} if required is None else given(required)
        said = self.given | {f"--{name}": value for name, value in asked.items() if name != "delta"}

        def beside(*expected: str) -> str:
            return ", ".join(name for name in said if name not in expected)

        if self.file is not None:
            if others := beside("--protocol", "--adjacency"):
                raise ParameterError(
                    f"The protocol file already fixes every parameter; leave out {others}, or write a new file with "
                    "`cpsgd round protocol`."
                )
            from cpsgd.cli import _files

            return _files.read_protocol(self.file)
        if clients is None or dim is None:
            raise ParameterError("Missing --clients and --dim: the range and the promises depend on both.")
        clip_norm = 1.0 if self.clip_norm is None else self.clip_norm
        rotate = self.rotate is not False
        if "epsilon" in asked:
            if "delta" not in asked:
                raise ParameterError("Missing --delta: ε says nothing without it. It should be far below 1 / clients.")
            theirs = ("clip_norm", "rotate", "seed", "epsilon", "bits", "mechanism", *self._stated, *_PROMISED)
            if others := beside(*(f"--{name.replace('_', '-')}" for name in theirs)):
                raise ParameterError(
                    f"With --epsilon the planner chooses {others}; leave it out, or leave out --epsilon."
                )
            from cpsgd.planner import plan

            asked |= {"clients": clients, "dim": dim, "clip_norm": clip_norm, "rotate": rotate, **self._stated}
            planned = plan(**asked, mechanism=self.mechanism.mechanism or BEST)
            return planned.protocol if self.seed is None else replace(planned.protocol, rotation_seed=self.seed)
        if others := ", ".join(f"--{name}" for name in ("bits", "secure") if name in asked):
            raise ParameterError(f"{others} is for the planner; give --epsilon and --delta with it.")
        from cpsgd.protocol import Protocol

        size: dict[str, Any] = {"clients": clients, "dim": dim, "clip_norm": clip_norm}
        said_of = parameters_of(self.mechanism)
        mechanism = spelled_out(self.mechanism.mechanism, said_of, **size, rotate=rotate)
        if mechanism.grid is None and (others := ", ".join(name for name in ("--rotate", "--seed") if name in said)):
            raise ParameterError(f"The {mechanism.name} protocol neither rounds nor rotates; leave out {others}.")
        if not rotate and self.seed is not None:
            raise ParameterError("--seed is the seed of the rotation; leave it out or drop --no-rotate.")
        rotate = rotate and mechanism.grid is not None
        return Protocol(**size, mechanism=mechanism, rotate=rotate, rotation_seed=self.seed or 0, **self._stated)

    def sized(self, size: Any, required: Any = None) -> Protocol:
        """Returns `protocol` for a `Size` from the command line; a protocol file allows no `Size`."""
        if self.file is not None and given(size):
            raise ParameterError("The protocol file already fixes --clients and --dim; leave them out.")
        return self.protocol(required, clients=size.clients, dim=size.dim)


Parameters = Annotated[ProtocolChoice, Parameter(name="*", group=PROTOCOL)]
NO_PARAMETERS = ProtocolChoice()
