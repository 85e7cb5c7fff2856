"""Options that several commands share, and the protocol they add up to."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# The norm vectors are clipped to is public. It must not be read off the data: the largest norm belongs to one person
# and would give them away. So the default is a constant.
DEFAULT_CLIP_NORM = 1.0
DEFAULT_LEVELS = 2
DEFAULT_TRIALS = 14
DEFAULT_P = 0.5

_PANEL = "Protocol"
# Where an option is not called like the parameter.
_OPTION_NAMES = {"file": "--protocol", "coordinate_range": "--range"}

ProtocolFile = Annotated[
    Path | None,
    typer.Option(
        "--protocol", metavar="FILE", help="A protocol's JSON, instead of parameters here.", rich_help_panel=_PANEL
    ),
]
RequiredProtocolFile = Annotated[
    Path, typer.Option("--protocol", metavar="FILE", help="The protocol's JSON, as written by `cpsgd protocol`.")
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        help="D: longer vectors are scaled down to this Euclidean norm. Choose it without looking at the data.",
        show_default=f"{DEFAULT_CLIP_NORM:g}",
        rich_help_panel=_PANEL,
    ),
]
Levels = Annotated[
    int | None,
    typer.Option(
        help="k: levels a coordinate is rounded to.", show_default=str(DEFAULT_LEVELS), rich_help_panel=_PANEL
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        help="m: a client's noise is Binomial(m, p); 0 adds none.",
        show_default=str(DEFAULT_TRIALS),
        rich_help_panel=_PANEL,
    ),
]
SuccessProbability = Annotated[
    float | None,
    typer.Option("--p", help="p of the Binomial noise.", show_default=str(DEFAULT_P), rich_help_panel=_PANEL),
]
CoordinateRange = Annotated[
    float | None,
    typer.Option(
        "--range",
        help="X: coordinates are clipped to ±X, after the rotation.",
        show_default="the paper's choice",
        rich_help_panel=_PANEL,
    ),
]
Rotate = Annotated[
    bool | None,
    typer.Option(
        "--rotate/--no-rotate", help="Rotate vectors before rounding.", show_default="rotate", rich_help_panel=_PANEL
    ),
]
Sigma = Annotated[
    float | None,
    typer.Option(
        help="The Gaussian protocol: standard deviation each client adds, instead of rounding and Binomial noise.",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Public seed of the rotation; the noise has none and cannot be repeated.",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
_WISH_PANEL = "Privacy"
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="ε the round may cost: the planner then chooses k, m and X. Needs --delta.", rich_help_panel=_WISH_PANEL
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        help="δ of the guarantee: shows the ε proved for the round (replace-one neighbours).",
        rich_help_panel=_WISH_PANEL,
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        help="With --epsilon: bits a coordinate may take.",
        show_default="the fewest within 10 % of the Gaussian's error",
        rich_help_panel=_WISH_PANEL,
    ),
]
PointsFile = Annotated[Path, typer.Argument(metavar="FILE", help="An .npy, .npz or .csv table, one row a client.")]
RequiredEpsilon = Annotated[float, typer.Option(help="ε that everything together may cost (replace-one neighbours).")]
RequiredDelta = Annotated[float, typer.Option(help="δ of the guarantee.")]
Radius = Annotated[
    float,
    typer.Option(
        help="Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without looking "
        "at the data."
    ),
]
CoordinateBits = Annotated[
    float | None,
    typer.Option(
        "--bits", help="Bits a coordinate may take.", show_default="the fewest within 10 % of the Gaussian's error"
    ),
]
_LEDGER_PANEL = "Budget"
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        metavar="FILE",
        help="Charge the budget on this ledger, or refuse; see `cpsgd budget`.",
        rich_help_panel=_LEDGER_PANEL,
    ),
]
Population = Annotated[
    str | None, typer.Option(help="With --ledger: whose budget pays.", rich_help_panel=_LEDGER_PANEL)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Key = Annotated[str | None, typer.Option(help="Name of the array in an .npz file that holds several.")]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What was said about the protocol on the command line; None where nothing was."""

    file: Path | None = None
    clip_norm: float | None = None
    levels: int | None = None
    trials: int | None = None
    p: float | None = None
    coordinate_range: float | None = None
    rotate: bool | None = None
    sigma: float | None = None
    seed: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    bits: float | None = None

    def protocol(self, *, clients: int, dim: int) -> Protocol:
        """The protocol for this many clients and coordinates; one from a file stays as it is.

        Raises:
            ParameterError: Options are missing, contradict each other or are out of range.
        """
        if self.file is not None:
            from cpsgd.cli import _files

            if others := self._besides("file", "delta"):
                raise ParameterError(
                    f"The protocol file already fixes every parameter; leave out {others}, or write a new file with "
                    "`cpsgd protocol`."
                )
            return _files.read_protocol(self.file)
        from cpsgd.protocol import Protocol

        clip_norm = DEFAULT_CLIP_NORM if self.clip_norm is None else self.clip_norm
        if self.epsilon is not None:
            return self._planned(clients, dim, clip_norm)
        if self.bits is not None:
            raise ParameterError("--bits is a wish to the planner; give --epsilon and --delta with it.")
        if self.sigma is not None:
            if others := self._besides("sigma", "clip_norm", "delta"):
                raise ParameterError(f"The Gaussian protocol (--sigma) neither rounds nor rotates; leave out {others}.")
            return Protocol.gaussian(clients=clients, dim=dim, clip_norm=clip_norm, sigma=self.sigma)
        levels = DEFAULT_LEVELS if self.levels is None else self.levels
        trials = DEFAULT_TRIALS if self.trials is None else self.trials
        p = DEFAULT_P if self.p is None else self.p
        if self.rotate is False:
            if self.seed is not None:
                raise ParameterError("--seed is the seed of the rotation; leave it out or drop --no-rotate.")
            return Protocol.binomial(
                clients=clients,
                dim=dim,
                clip_norm=clip_norm,
                levels=levels,
                trials=trials,
                p=p,
                coordinate_range=self.coordinate_range,
            )
        return Protocol.rotated_binomial(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            levels=levels,
            trials=trials,
            p=p,
            coordinate_range=self.coordinate_range,
            rotation_seed=0 if self.seed is None else self.seed,
        )

    def _planned(self, clients: int, dim: int, clip_norm: float) -> Protocol:
        from cpsgd.planner import plan

        if self.delta is None:
            raise ParameterError("Missing --delta: ε says nothing without it. It should be far below 1 / clients.")
        if others := self._besides("clip_norm", "rotate", "seed", "epsilon", "delta", "bits"):
            raise ParameterError(f"With --epsilon the planner chooses {others}; leave it out, or leave out --epsilon.")
        rotate = self.rotate is not False
        chosen = plan(clients, dim, float(self.epsilon or 0.0), self.delta, clip_norm, bits=self.bits, rotate=rotate)
        return chosen.protocol if self.seed is None else replace(chosen.protocol, rotation_seed=self.seed)

    def _besides(self, *expected: str) -> str:
        """The options that were given and are not among `expected`, as they are written on the command line."""
        return ", ".join(
            _OPTION_NAMES.get(field.name, "--" + field.name.replace("_", "-"))
            for field in fields(self)
            if field.name not in expected and getattr(self, field.name) is not None
        )


DEVICE_HELP = "Where it is computed: cpu, cuda (an NVIDIA GPU) or auto."
