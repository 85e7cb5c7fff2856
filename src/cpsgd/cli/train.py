"""`cpsgd train`: private training from many simulated clients, beside its baselines."""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.markup import escape

from cpsgd._durable import create_file, write_file
from cpsgd._numbers import bits_of, rounded_up, size
from cpsgd.cli import options, output
from cpsgd.cli.plan import options_table
from cpsgd.errors import CheckpointError, CpsgdError, ParameterError
from cpsgd.learning.settings import CHANGEABLE_ON_RESUME, NO_SEED, PRESETS, Settings, read_file
from cpsgd.registry import MechanismOptions

if TYPE_CHECKING:
    from cpsgd.learning.experiment import Experiment, Result

_RUNS = Path("runs")
_CONFIG = "config.json"
_SUMMARY = "summary.json"
_SECRET_NOISE = "Use --device cpu --seed none for secret noise."

_SETUP, _PRIVACY = Group("What is trained", sort_key=1), Group("Privacy and bits", sort_key=2)
_LEARNING, _RUN = Group("Learning", sort_key=3), Group("Run", sort_key=4)
# The panels of the help; a setting that is named nowhere here is about learning.
_PANELS = {
    _SETUP: (
        *("preset", "dataset", "data", "clients", "model", "cohort", "rounds", "participation", "dropout"),
        *("passes", "uplink", "downlink"),
    ),
    _PRIVACY: (
        *("epsilon", "delta", "bits", "clip_norm", "correlated", "examples", "adjacency", "colluding", "canaries"),
        *(entry.name for entry in fields(MechanismOptions)),
    ),
    _RUN: ("seed", "device", "memory_limit", "evaluate_every"),
    options.BUDGET: ("ledger", "population", "witness"),
}

_GIVEN = options.from_class(
    Settings,
    unset=True,
    text=("seed",),
    groups={entry.name: _LEARNING for entry in fields(Settings)}
    | {name: group for group, names in _PANELS.items() for name in names},
)
_NOTHING: Any = _GIVEN()
if TYPE_CHECKING:
    Given = Any  # made when the program runs
else:
    Given = Annotated[_GIVEN, options.FLAT]


def run(
    *,
    given: Given = _NOTHING,
    config: Annotated[Path | None, Parameter(metavar="FILE", group=_SETUP, help="Settings from a TOML file.")] = None,
    name: Annotated[
        str | None,
        Parameter(name="--run", metavar="NAME", group=_RUN, help="Folder under runs/; numbered if not given."),
    ] = None,
    resume: Annotated[
        bool, Parameter(group=_RUN, help="Continue --run NAME, or the latest, where it stopped.")
    ] = False,
    tensorboard: Annotated[
        bool,
        Parameter(group=_RUN, negative=(), help="Write the rounds' figures for TensorBoard to runs/NAME/tensorboard."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Train a model from many simulated clients through a private mean, beside its baselines.

    All clients live on this machine. With a seed noise follows from it, so that runs can be repeated: a simulation of
    what privacy costs, which protects nobody. Everything goes to runs/NAME/: settings, metrics, checkpoint, report.
    What is not given comes from the TOML file, and then from the preset.
    """
    changes = options.given(given)
    if "seed" in changes:
        changes["seed"] = _seed(changes["seed"])
    if config is not None:
        changes = {**read_file(config), **changes}
    # Of several processes that torchrun started the first one shows and keeps everything.
    leads = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0"
    if resume:
        folder = _RUNS / _run_name(name) if name is not None else _latest()
        settings = _settings_of(folder, changes)
        if not leads:
            _assist(settings, folder)
            return
    else:
        settings = Settings.of(changes)
        if not leads:
            _assist(settings, None)
            return
        folder = _new_folder(name, _kind(settings))
    _train(settings, folder, resume=resume, boards=tensorboard, json=json)


def _assist(settings: Settings, begun: Path | None) -> None:
    """Computes this process's share of the clients, for the leading process, without output."""
    from cpsgd.learning.experiment import Experiment

    experiment = Experiment(settings, begun=begun)
    for trainer in [experiment.trainer(name, None, resume=False) for name in experiment.mechanisms]:
        for _ in trainer.run():
            pass


def _seed(text: str) -> int | str:
    """Returns the seed as settings have it: a number, or the word for none."""
    if text != NO_SEED and not text.isdecimal():
        raise ParameterError(f"Expected --seed to be a number from 0 on, or {NO_SEED}, got {text!r}.")
    return text if text == NO_SEED else int(text)


def _train(settings: Settings, folder: Path, *, resume: bool, boards: bool, json: bool) -> None:
    """Trains the private run and its baselines in a folder, and writes their reports there.

    With `boards`, also writes each one's figures for TensorBoard.
    """
    try:
        from cpsgd.dashboard import run_view
        from cpsgd.learning import checkpoints, devices, export
        from cpsgd.learning.experiment import PRIVATE, Experiment, folder_of
        from cpsgd.learning.metrics import tensorboard
        from cpsgd.planner import Plan
    except ImportError as error:
        raise CpsgdError(f"{error}. To train, pip install 'cpsgd[torch,learn,plot]'.") from None
    from cpsgd.reports import live, plotting, run_report

    plotting.check()
    export.check()
    experiment = Experiment(settings, begun=folder if resume else None)
    console = Console(stderr=json, highlight=False)
    protocol = experiment.protocol
    console.print(
        f"{experiment.dataset.name}: {experiment.dataset.size:,} clients, {experiment.settings.cohort:,} per round, "
        f"{settings.rounds:,} rounds; {experiment.settings.model}, {experiment.dim:,} parameters",
        soft_wrap=True,
    )
    console.print(
        f"protocol: {protocol.mechanism.describe()}, D = {protocol.clip_norm:g}: "
        f"{bits_of(protocol.bits_per_coordinate)} per coordinate, "
        f"{size(protocol.message_bytes)} per message",
        soft_wrap=True,
    )
    console.print(f"chosen {_choice(settings)}", soft_wrap=True)
    planned = experiment.mechanisms[PRIVATE]
    if isinstance(planned, Plan) and planned.prefix is not None:
        console.print(f"over the run: {planned.prefix}", markup=False, soft_wrap=True)
    if experiment.passes is not None:
        console.print(options_table(experiment.passes))
    console.print(live.device_text(settings.device), soft_wrap=True)
    simulated = run_report.is_simulation(settings.to_dict(), devices.resolve(settings.device).type)
    remark = f"; {run_report.NOBODY}" if simulated else ""
    if simulated:
        console.print(
            f"This run {run_report.NOBODY}: its noise can be repeated. " + _SECRET_NOISE,
            style="bold yellow",
            soft_wrap=True,
        )
    results: list[Result] = []
    # Before anything can be charged, so that whatever was charged can be continued.
    if resume:
        os.utime(folder / _CONFIG)  # the latest run is now this one
    else:
        _begin(folder, experiment.settings)
    try:
        # All runs are checked before the first round of any is charged.
        trainers = {
            name: experiment.trainer(
                name,
                folder_of(folder, name),
                resume=resume,
                callbacks=[tensorboard(folder / "tensorboard" / name.replace(" ", "-"))] if boards else [],
            )
            for name in experiment.mechanisms
        }
        console.print(f"folder: {folder}\n", markup=False, soft_wrap=True)
        with live.interrupts() as asked, live.Display(console, remark=remark) as display:
            for name, trainer in trainers.items():
                display.start(name, trainer.rounds, trainer.round, settings.evaluate_every)
                for metrics in trainer.run():
                    display.show(metrics)
                    if asked():
                        trainer.save()
                        raise KeyboardInterrupt
                results.append(experiment.result(name, trainer))
    except CpsgdError:
        charged = (folder / checkpoints.CHARGES).exists() and (folder / checkpoints.CHARGES).stat().st_size > 0
        if not resume and not charged and not (folder / checkpoints.CHECKPOINT).exists():
            # Nothing was begun, in a folder that was empty: the name is free again.
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        output.complain(f"Interrupted. Continue with: cpsgd train --resume --run {folder.name}", style="bold yellow")
        raise SystemExit(130) from None
    summary = _summary(experiment, folder, results)
    audited = experiment.settings.canaries and summary["guarantee"]
    summary["audit"] = trainers[PRIVATE].audit().to_dict() if audited else None
    write_file(folder / _SUMMARY, (json_module.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
    written = (run_report.draw(folder / run_report.CURVES, results), run_view.write(folder))
    summary["files"] = [str(path) for path in written]
    summary["files"] += [str(path) for path in trainers[PRIVATE].export(folder)]
    if json:
        output.show_json(summary)
        return
    console.print()
    console.print(_table(results, remark))
    console.print(output.facts(_facts(summary, results)))


def _choice(settings: Settings) -> str:
    """Returns a sentence about the goal for which the protocol was chosen."""
    if settings.explicit:
        return "by its parameters, as given"
    if settings.for_accuracy:
        return "for accuracy: all data are on this machine and nothing is sent (--bits plans a deployment's messages)"
    limit = "the fewest bits near the best" if settings.bits is None else f"at most {bits_of(settings.bits)}"
    return f"for messages that a deployment's clients would send: {limit} per coordinate"


# ------------------------------------------------------------------ run directories


def _run_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise ParameterError(f"Expected --run to be the name of a folder under {_RUNS}/, got {name!r}.")
    return name


def _kind(settings: Settings) -> str:
    """Returns the first part of a run's name: the preset, another data set, or the user's module."""
    if settings.data is not None:
        return settings.data.partition(":")[0].rpartition(".")[2]
    usual = PRESETS[settings.preset]["dataset"]
    return settings.preset if settings.dataset == usual else re.sub(r"[^\w.-]+", "-", settings.dataset)


def _new_folder(name: str | None, kind: str) -> Path:
    if name is not None:
        folder = _RUNS / _run_name(name)
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} is not empty. Continue that run with --resume --run {name}, or choose another name."
            )
        return folder
    number = 1
    while (folder := _RUNS / f"{kind}-{number}").exists():
        number += 1
    return folder


def _begin(folder: Path, settings: Settings) -> None:
    """Writes the settings of a run. Of two processes that chose the same folder the second is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        create_file(folder / _CONFIG, (json_module.dumps(settings.to_dict(), indent=2) + "\n").encode())
    except FileExistsError:
        raise CheckpointError(
            f"Another run has just begun in {folder}. Give this one a name of its own with --run."
        ) from None


def _latest() -> Path:
    """Returns the folder of the run that changed last."""
    configs = sorted(_RUNS.glob(f"*/{_CONFIG}"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise CheckpointError(f"There is no run under {_RUNS}/ to resume.")
    return configs[-1].parent


def _settings_of(folder: Path, given: dict[str, Any]) -> Settings:
    """Returns the settings that a run was started with. Options given now must agree, if they affect results."""
    if not (folder / _CONFIG).exists():
        raise CheckpointError(f"There is no run in {folder} to resume.")
    kept = Settings.of(read_file(folder / _CONFIG)).to_dict()
    if different := sorted(
        key for key, value in given.items() if key not in CHANGEABLE_ON_RESUME and kept.get(key) != value
    ):
        raise CheckpointError(
            f"The run in {folder} was started with another {', '.join(different)}; leave that out to resume it, or "
            "start a new run."
        )
    return Settings.of({**kept, **{key: value for key, value in given.items() if key in CHANGEABLE_ON_RESUME}})


# ------------------------------------------------------------------ the end of a run


def _summary(experiment: Experiment, folder: Path, results: list[Result]) -> dict[str, Any]:
    from cpsgd.learning import devices

    guarantee = results[0].guarantee
    return {
        "run": folder.name,
        "simulation": True,
        "seeded": experiment.settings.seed is not None,
        "device": devices.resolve(experiment.settings.device).type,
        "unit": "client" if experiment.settings.examples is None else "example",
        "settings": experiment.settings.to_dict(),
        "dataset": experiment.dataset.name,
        "source": experiment.dataset.source,
        "parameters": experiment.dim,
        "protocol": experiment.protocol.to_dict(),
        "guarantee": None if guarantee is None else guarantee.to_dict(),
        "paper_bound": None if guarantee is None else experiment.paper_bound(guarantee.noise_clients),
        "budget": _budget(experiment.settings),
        "float32_bytes": 4 * experiment.dim,
        "results": [result.to_dict() for result in results],
    }


def _budget(settings: Settings) -> dict[str, Any] | None:
    """Returns the population's spent budget as JSON values; None without a ledger."""
    if settings.ledger is None or settings.population is None:
        return None
    from cpsgd.ledger import Ledger

    return {"ledger": settings.ledger, **Ledger(settings.ledger).total(settings.population).to_dict()}


def _table(results: list[Result], remark: str) -> object:
    """Returns the table of results; the private run comes first, is marked, and has the remark beside its ε."""
    from cpsgd.reports import run_report

    rows = [
        (
            f"▸ {result.name}" if index == 0 else result.name,
            run_report.score_text(result.to_dict()),
            "∞" if result.guarantee is None else rounded_up(result.guarantee.epsilon) + remark,
            f"{result.bits_per_coordinate:.4g}",
            size(result.bytes_per_client),
            f"{sum(metrics.seconds for metrics in result.history):.0f}",
        )
        for index, result in enumerate(results)
    ]
    return output.grid(
        (
            "run",
            f"test {run_report.score_name(results[0].to_dict())}",
            "ε",
            "bits",
            "sent per client",
            "seconds",
        ),
        rows,
    )


def _facts(summary: dict[str, Any], results: list[Result]) -> list[tuple[str, str]]:
    from cpsgd.reports import run_report

    floats = summary["float32_bytes"]
    private, facts = results[0], []
    if (found := private.guarantee) is not None:
        privacy = f"({rounded_up(found.epsilon)}, {found.delta:g}), {found.adjacency} neighbours"
        facts += [
            ("privacy", f"{privacy}, participation {found.participation}"),
            *output.secrecy(found.participation),
            ("protects", run_report.unit_text(summary)),
            ("proved by", escape(found.citation)),
            ("published", escape(run_report.published_text(summary["paper_bound"]))),
        ]
    return [
        *facts,
        (
            "sent",
            f"{size(private.bytes_per_client)} per client and round, {bits_of(private.bits_per_coordinate)} per "
            f"coordinate; float32 {size(floats)} ({floats / private.bytes_per_client:.1f}×)",
        ),
        *_budget_facts(summary["budget"]),
        *([] if summary["audit"] is None else [("audit", f"{summary['audit']['finding']}, by canaries")]),
        ("note", run_report.seed_text(summary)),
        *[("written", escape(path)) for path in summary["files"]],
    ]


def _budget_facts(budget: dict[str, Any] | None) -> list[tuple[str, str]]:
    if budget is None:
        return []
    spent, limit = rounded_up(budget["epsilon"]), rounded_up(budget["limit"])
    return [("budget", escape(f"{budget['population']}: ε = {spent} of {limit} at δ = {budget['delta']:g} spent"))]
