"""`cpsgd plan`: from clients, dimension, ε, δ and bits to the best protocol."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.markup import escape

from cpsgd._durable import write_file
from cpsgd._numbers import bits_of, size
from cpsgd.cli import _files, options, output
from cpsgd.cli.privacy import guarantee_rows
from cpsgd.errors import ParameterError
from cpsgd.planner.requirements import Requirements

if TYPE_CHECKING:
    from cpsgd.planner import Plan
    from cpsgd.planner.passes import PassesPlan

    Required = Any  # made when the program runs
else:
    Required = options.from_class(Requirements, optional=("clients",))

_PASSES = Group("Several passes over a population, instead of --clients and --participation", sort_key=3)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Options of a population whose clients may take part several times.

    Attributes:
        population: Number of all clients: passes, cohort, bands and bits are chosen, and all options shown.
        passes: Only so many passes over the population.
        uplink: The most bytes that a client may send over the whole training.
        downlink: The most bytes that a client may receive over the whole training.
    """

    population: Annotated[int | None, options.COUNT] = None
    passes: Annotated[int | None, options.COUNT] = None
    uplink: float | None = None
    downlink: float | None = None


_SERVERS = Group(
    "Two servers, with --pair and --out: the task's public file goes there, all secrets beside it", sort_key=4
)


@dataclass(frozen=True, kw_only=True)
class PairTaskOptions:
    """Options of a task of two servers.

    Attributes:
        leader: Address of the server that clients send to.
        helper: Address of the other server, run by somebody else.
        admission: Who may send: those on a roster of public keys, those with a token for each server, or anybody;
            "roster" if not given.
        tokens: With --admission tokens: number of tokens to make.
        leader_keys: The leader's public keys, as `cpsgd pair keys` wrote them. Without, its private keys are made here.
        helper_keys: The helper's public keys, as `cpsgd pair keys` wrote them. Without, its private keys are made here.
        insecure: Let plain http addresses of other machines through, where another program encrypts.
    """

    leader: Annotated[str | None, Parameter(metavar="URL")] = None
    helper: Annotated[str | None, Parameter(metavar="URL")] = None
    admission: Literal["open", "roster", "tokens"] | None = None
    tokens: Annotated[int, options.COUNT] = 0
    leader_keys: Annotated[Path | None, Parameter(metavar="FILE")] = None
    helper_keys: Annotated[Path | None, Parameter(metavar="FILE")] = None
    insecure: bool = False


_NO_PASSES, _NO_TASK = PassOptions(), PairTaskOptions()


def run(
    *,
    required: Annotated[Required, options.FLAT],
    many: Annotated[PassOptions, Parameter(name="*", group=_PASSES)] = _NO_PASSES,
    task: Annotated[PairTaskOptions, Parameter(name="*", group=_SERVERS)] = _NO_TASK,
    out: Annotated[
        Path | None,
        options.file_option("Where the protocol's JSON goes, with its promise; with --pair, the task of both servers."),
    ] = None,
    plot: Annotated[Path | None, options.file_option("Draw the frontier into this file.")] = None,
    json: options.Json = False,
) -> None:
    """Find the best protocol for your requirements: its mechanism, parameters, proved ε and expected error."""
    from cpsgd.planner import Requirements
    from cpsgd.planner.planning import plan_for

    _files.check_picture(plot)
    if out is not None:
        _files.check_output(out)
    passes = None if many.population is None else _planned_passes(required, many)
    if passes is None:
        _check_clients(required, many)
    _check_task(required, task, out)
    found = plan_for(Requirements(**vars(required))) if passes is None else passes.plan
    written: list[Path] = []
    if out is not None and required.pair:
        written = _write_task(found, required, task, out)
    elif out is not None:
        write_file(out, (found.protocol.to_json() + "\n").encode())
    if plot is not None:
        from cpsgd.reports.pictures import draw_frontier

        draw_frontier(found, plot)
    notes = [] if plot is None else [f"Frontier drawn into {plot}"]
    notes += [] if out is None else [f"{'Task' if written else 'Protocol'} written to {out}"]
    if written:
        notes.append(f"Secrets, each for one party: {', '.join(map(str, written[1:]))}")
    upload = _upload(found) if required.pair else {}
    if upload:
        notes.append(f"Upload to two servers: {upload['upload_bytes']:,} bytes with its proof")
    shown = _frontier(found) if passes is None else options_table(passes)
    values = (found if passes is None else passes).to_dict()
    output.answer(json, {**values, **upload, "out": out, "secrets": written[1:]}, _summary(found), shown, *notes)


def _planned_passes(required: Any, many: PassOptions) -> PassesPlan:
    """Returns the plan for a population."""
    from cpsgd.planner.passes import plan_passes

    usual = {entry.name: entry.default for entry in fields(Requirements)}
    given = {name: value for name, value in vars(required).items() if value != usual[name] and value is not None}
    return plan_passes(**{"rounds": 1, **given, **vars(many)})


def _check_clients(required: Any, many: PassOptions) -> None:
    if given := [f"--{name}" for name in ("passes", "uplink", "downlink") if getattr(many, name) is not None]:
        raise ParameterError(f"{', '.join(given)} is about several passes over a population: give --population, too.")
    if required.clients is None:
        raise ParameterError("Missing --clients, the messages per round; or --population, for several passes over it.")


def _check_task(required: Any, task: PairTaskOptions, out: Path | None) -> None:
    """Refuses options that make no task, or an unsafe one."""
    if task == _NO_TASK and not (required.pair and out is not None):
        return
    if not required.pair or out is None or task.leader is None or task.helper is None:
        raise ParameterError("A task needs --pair, --out, and the addresses of both servers, --leader and --helper.")
    if (task.admission == "tokens") != (task.tokens > 0):
        raise ParameterError("Give --tokens with --admission tokens, and only with that: a number of clients.")
    from cpsgd.engines.pair.task import check_address

    for url in (task.leader, task.helper):
        check_address(url, insecure=task.insecure)


def _write_task(found: Plan, required: Any, task: PairTaskOptions, out: Path) -> list[Path]:
    """Makes the task of a plan, and returns the files that were written: the task's, and all secrets."""
    from cpsgd.engines.pair.running import read_public_keys, write_task
    from cpsgd.engines.pair.task import create_task

    assert task.leader is not None
    assert task.helper is not None
    made, secrets = create_task(
        found.protocol,
        leader=task.leader,
        helper=task.helper,
        rounds=required.rounds,
        admission=task.admission or "roster",
        server_messages=required.server_messages,
        leader_keys=None if task.leader_keys is None else read_public_keys(task.leader_keys),
        helper_keys=None if task.helper_keys is None else read_public_keys(task.helper_keys),
    )
    return write_task(out.parent, made, secrets, name=out.name, tokens=task.tokens)


def options_table(found: PassesPlan) -> object:
    """Returns the table of all options for a population, the chosen one marked."""
    rows = [
        (
            f"{'▸ ' if option == found.chosen else ''}{option.passes}",
            f"{option.cohort:,}",
            f"{option.bands}",
            f"{option.bits:g}",
            size(option.bytes_up),
            size(option.bytes_down),
            f"{option.squared_error:.4g}",
        )
        for option in found.options
    ]
    columns = ("passes", "clients per round", "bands", "bits", "bytes up", "bytes down", "noise in the model")
    return output.grid(columns, rows, title="\nOptions: what a client sends and receives over all its rounds")


def _upload(found: Plan) -> dict[str, int]:
    from cpsgd.planner.two_servers import upload_bytes

    return {"upload_bytes": upload_bytes(found.protocol)}


def _summary(found: Plan) -> object:
    from cpsgd.planner.utility import utility_warning

    protocol, error = found.protocol, found.error
    mechanism = protocol.mechanism
    share = {name: f"{100.0 * part / error.total:.1f} %" for name, part in asdict(error).items()}
    rows = [
        ("protocol", f"[bold]{mechanism.name}[/bold]: {escape(mechanism.describe())}; s = {protocol.scale:.4g}"),
        (
            "message",
            f"{bits_of(protocol.bits_per_coordinate)} per coordinate, {protocol.message_bytes:,} bytes "
            f"(floats: {4 * protocol.dim:,})",
        ),
        *output.caution(protocol),
        (
            "error",
            f"[bold]{error.total:.4g}[/bold] expected squared error: noise {share['noise']}, "
            f"rounding {share['rounding']}, clipping {share['clipping']}",
        ),
        ("", f"{found.ratio:.3f} × the exact {found.reference} mechanism's {found.gaussian_squared_error:.4g}"),
        *([] if found.prefix is None else [("over the run", escape(str(found.prefix)))]),
        *([("", f"[yellow]{escape(warning)}[/yellow]")] if (warning := utility_warning(found)) else []),
        *_considered(found),
        *guarantee_rows(found.guarantee),
    ]
    if found.rounds > 1:
        rows.append(("rounds", f"{found.rounds:,}, participation {found.participation}"))
        if found.participation.scheme == "once":
            rows.append(("", "[yellow]no client may take part in more than one of them[/yellow]"))
        if found.participation.scheme == "apart":
            apart = f"two rounds of one client must be at least {found.participation.separation} apart"
            rows.append(("", f"[yellow]{apart}[/yellow]"))
    rows += [(name, f"[yellow]{text}[/yellow]") for name, text in output.secrecy(found.participation)]
    if found.surviving < protocol.clients:
        rows.append(("dropouts", f"a round that ends with fewer than {found.surviving:,} messages must be refused"))
    if protocol.modulus is not None:
        rows.append(
            ("modulus", f"{protocol.modulus:,}; a round overflows with probability ≤ {found.overflow_probability:.2g}")
        )
    return output.facts(rows, title=f"Plan for {protocol.clients:,} clients, {protocol.dim:,} coordinates")


def _considered(found: Plan) -> list[tuple[str, str]]:
    """Returns a row for each mechanism that was not chosen, with its error or why it has no design."""
    texts = []
    for each in found.considered:
        if each.squared_error is None:
            text = each.reason or ""
        else:
            ratio = f"{each.squared_error / found.gaussian_squared_error:.3f} × the {found.reference}'s"
            text = ratio if each.proved else f"at best {ratio}"
        texts.append(f"{each.mechanism}: {text}")
    # The first is the one chosen; its figures stand above.
    return [("instead of" if index == 0 else "", f"[dim]{escape(text)}[/dim]") for index, text in enumerate(texts[1:])]


def _frontier(found: Plan) -> object:
    rows = []
    for point in found.frontier:
        error, ratio = point.expected_squared_error, f"{point.ratio:.3f}"
        if point.prefix is not None:
            error, ratio = point.prefix.squared_error, f"{1.0 / point.prefix.gain:.3g}"
        bits = f"{'▸ ' if point.bits == found.bits else ''}{point.bits:.4g}"
        rows.append((bits, point.mechanism.describe(), f"{error:.4g}", ratio))
    columns = ("bits", "protocol", "squared error", "× Gaussian")
    if found.prefix is not None:
        columns = ("bits", "protocol", "error of the model", "× independent")
    return output.grid(columns, rows, title="\nFrontier: the best for each number of bits")
