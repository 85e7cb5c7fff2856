"""`cpsgd train`: private training from many simulated clients, beside its baselines."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpsgd.cli import _files, _options, _output, _render, _training
from cpsgd.errors import CheckpointError, CpsgdError, ParameterError

if TYPE_CHECKING:
    from cpsgd.learning.experiment import Experiment, Result
    from cpsgd.learning.settings import Settings

_RUNS = Path("runs")
_CONFIG = "config.json"
_SUMMARY = "summary.json"
_SETUP, _PRIVACY, _LEARNING, _RUN = "What is trained", "Privacy and bits", "Learning", "Run"


def run(
    preset: Annotated[
        str | None,
        typer.Option(help="Where settings start from: digits or paper.", show_default="digits", rich_help_panel=_SETUP),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings from a TOML file.", rich_help_panel=_SETUP)
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="digits, infinite-digits, mnist or infinite-mnist.", rich_help_panel=_SETUP),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="linear, or mlp-60-60 and the like.", rich_help_panel=_SETUP)
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients there are.", rich_help_panel=_SETUP)] = None,
    cohort: Annotated[int | None, typer.Option(help="n: clients in a round.", rich_help_panel=_SETUP)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.", rich_help_panel=_SETUP)] = None,
    participation: Annotated[
        str | None,
        typer.Option(help="once, every, poisson or fixed-size.", rich_help_panel=_SETUP),
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Probability that a message does not arrive.", rich_help_panel=_SETUP)
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="Protect single examples, at most so many a client; each one's gradient is clipped.",
            show_default="protect clients",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
    adjacency: Annotated[
        str | None,
        typer.Option(
            help="Which data sets are neighbours: replace-one or zero-out.",
            show_default="replace-one, with poisson zero-out",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
    colluding: Annotated[
        int | None,
        typer.Option(help="Clients of a round who may tell their noise.", show_default="0", rich_help_panel=_PRIVACY),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε that all rounds together may cost.", rich_help_panel=_PRIVACY)
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ of the guarantee.", rich_help_panel=_PRIVACY)] = None,
    bits: Annotated[
        float | None,
        typer.Option(help="Bits a coordinate may take; k, m and X are planned.", rich_help_panel=_PRIVACY),
    ] = None,
    levels: Annotated[
        int | None, typer.Option(help="Instead of --bits: k, with --trials.", rich_help_panel=_PRIVACY)
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Instead of --bits: m, with --levels.", rich_help_panel=_PRIVACY)
    ] = None,
    range: Annotated[
        float | None, typer.Option(help="With --levels: X; the paper's if not given.", rich_help_panel=_PRIVACY)
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="D: longer updates are scaled down to this norm.", rich_help_panel=_PRIVACY)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="The server's: sgd, momentum, adagrad or adam.", rich_help_panel=_LEARNING)
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The server's learning rate.", rich_help_panel=_LEARNING)] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="So much of each parameter is added to its gradient.", rich_help_panel=_LEARNING),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of the learning rate: constant, linear or late.", rich_help_panel=_LEARNING)
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Local SGD steps a client; 1 sends a gradient.", rich_help_panel=_LEARNING)
    ] = None,
    local_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the local steps.", rich_help_panel=_LEARNING)
    ] = None,
    baselines: Annotated[
        bool | None,
        typer.Option("--baselines/--no-baselines", help="Run the baselines, too.", rich_help_panel=_LEARNING),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|none",
            help="First weights, cohorts and noise follow from it. With none, on a CPU, noise is the system's.",
            show_default="0; none with --ledger",
            rich_help_panel=_RUN,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=_options.DEVICE_HELP, show_default="cpu", rich_help_panel=_RUN)
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            help="MiB that the clients computed together may take; a run may be resumed with another limit.",
            show_default="1024, on a GPU 4096",
            rich_help_panel=_RUN,
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Rounds between looks at the test set and checkpoints.", show_default="1", rich_help_panel=_RUN
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="Folder under runs/.", show_default="numbered", rich_help_panel=_RUN
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue --run NAME, or the latest, where it stopped.", rich_help_panel=_RUN),
    ] = False,
    ledger: _options.LedgerFile = None,
    population: _options.Population = None,
    json: _options.Json = False,
) -> None:
    """Train a model from many simulated clients through a private mean, beside its baselines.

    All clients live on this machine. With a seed noise follows from it, so that runs can be repeated: a simulation of
    what privacy costs, which protects nobody. Everything goes to runs/NAME/: settings, metrics, checkpoint, report.
    """
    given: dict[str, Any] = {
        "preset": preset,
        "dataset": dataset,
        "model": model,
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "participation": participation,
        "dropout": dropout,
        "examples": examples,
        "adjacency": adjacency,
        "colluding": colluding,
        "epsilon": epsilon,
        "delta": delta,
        "bits": bits,
        "levels": levels,
        "trials": trials,
        "range": range,
        "clip_norm": clip_norm,
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "local_steps": local_steps,
        "local_lr": local_lr,
        "baselines": baselines,
        "device": device,
        "memory_limit": memory_limit,
        "evaluate_every": evaluate_every,
        "seed": _seed(seed),
        "ledger": None if ledger is None else str(ledger),
        "population": population,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if config is not None:
        from cpsgd.learning.settings import read_file

        given = {**read_file(config), **given}
    if resume:
        folder = _RUNS / _run_name(name) if name is not None else _latest()
        settings = _settings_of(folder, given)
    else:
        from cpsgd.learning.settings import Settings

        settings = Settings.of(given)
        folder = _new_folder(name, settings.preset)
    _train(settings, folder, resume=resume, json=json)


def _seed(text: str | None) -> int | str | None:
    """A seed as settings have it: a number, or the word for none; None where it was not given."""
    from cpsgd.learning.settings import NO_SEED

    if text is None or text == NO_SEED:
        return text
    if not text.isdecimal():
        raise ParameterError(f"Expected --seed to be a number from 0 on, or {NO_SEED}, got {text!r}.")
    return int(text)


def _train(settings: Settings, folder: Path, *, resume: bool, json: bool) -> None:
    try:
        from cpsgd.learning import checkpoints
        from cpsgd.learning.experiment import Experiment, folder_of
    except ImportError as error:
        raise CpsgdError(str(error)) from None
    from rich.console import Console

    from cpsgd.reports import run_report

    run_report.check()
    experiment = Experiment(settings)
    console = Console(stderr=json, highlight=False)
    protocol = experiment.protocol
    console.print(
        f"{experiment.dataset.name}: {experiment.dataset.size:,} clients, {settings.cohort:,} a round, "
        f"{settings.rounds:,} rounds; {settings.model}, {experiment.dim:,} parameters",
        soft_wrap=True,
    )
    console.print(
        f"protocol: k = {protocol.levels}, m = {protocol.trials}, X = {protocol.coordinate_range:.4g}, "
        f"D = {protocol.clip_norm:g}: {protocol.bits_per_coordinate:.4g} bits a coordinate, "
        f"{_training.size(protocol.message_bytes)} a message",
        soft_wrap=True,
    )
    console.print(_training.device_text(settings.device), soft_wrap=True)
    results: list[Result] = []
    # Before anything can be charged, so that whatever was charged can be continued.
    if resume:
        os.utime(folder / _CONFIG)  # the latest run is now this one
    else:
        _begin(folder, settings)
    try:
        # All runs are checked before the first round of any is charged.
        trainers = {
            name: experiment.trainer(name, folder_of(folder, name), resume=resume) for name in experiment.mechanisms
        }
        console.print(f"folder: {folder}\n", markup=False, soft_wrap=True)
        with _training.interrupts() as asked, _training.Display(console) as display:
            for name, trainer in trainers.items():
                display.start(name, trainer.rounds, trainer.round)
                for metrics in trainer.run():
                    display.show(metrics)
                    if asked():
                        trainer.save()
                        raise KeyboardInterrupt
                results.append(experiment.result(name, trainer))
    except CpsgdError:
        charged = (folder / checkpoints.CHARGES).exists() and (folder / checkpoints.CHARGES).stat().st_size > 0
        if not resume and not charged and not (folder / checkpoints.CHECKPOINT).exists():
            # Nothing was begun: the name is free again.
            (folder / _CONFIG).unlink()
        raise
    except KeyboardInterrupt:
        _output.complain(f"Interrupted. Continue with: cpsgd train --resume --run {folder.name}", style="bold yellow")
        raise typer.Exit(130) from None
    summary = _summary(experiment, folder, results)
    _files.write_bytes(folder / _SUMMARY, (json_module.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
    summary["files"] = [str(path) for path in run_report.write(folder, summary, results)]
    if json:
        _output.show_json(summary)
        return
    console.print()
    console.print(_table(results))
    console.print(_render.facts(_facts(summary, results)))


# ------------------------------------------------------------------ run directories


def _run_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise ParameterError(f"Expected --run to be the name of a folder under {_RUNS}/, got {name!r}.")
    return name


def _new_folder(name: str | None, preset: str) -> Path:
    if name is not None:
        folder = _RUNS / _run_name(name)
        if folder.exists() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} is not empty. Continue that run with --resume --run {name}, or choose another name."
            )
        return folder
    number = 1
    while (folder := _RUNS / f"{preset}-{number}").exists():
        number += 1
    return folder


def _begin(folder: Path, settings: Settings) -> None:
    """Writes down what the run is. Of two processes that chose the same folder one comes too late."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / _CONFIG).open("xb") as file:
            file.write((json_module.dumps(settings.to_dict(), indent=2) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise CheckpointError(
            f"Another run has just begun in {folder}. Give this one a name of its own with --run."
        ) from None


def _latest() -> Path:
    configs = sorted(_RUNS.glob(f"*/{_CONFIG}"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise CheckpointError(f"There is no run under {_RUNS}/ to resume.")
    return configs[-1].parent


def _settings_of(folder: Path, given: dict[str, Any]) -> Settings:
    """The settings a run was started with; what is given on top must agree, but for what makes no difference to it."""
    from cpsgd.learning.settings import CHANGEABLE_ON_RESUME, Settings, read_file

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
    """What is spent of the population's budget, all runs together."""
    if settings.ledger is None or settings.population is None:
        return None
    from cpsgd.ledger import Ledger

    return {"ledger": settings.ledger, **Ledger(settings.ledger).total(settings.population).to_dict()}


def _table(results: list[Result]) -> object:
    rows = [
        (
            f"▸ {result.name}" if index == 0 else result.name,
            f"{result.accuracy:.2%}",
            "∞" if result.guarantee is None else _render.rounded_up(result.guarantee.epsilon),
            f"{result.bits_per_coordinate:.4g}",
            f"{result.bytes_per_client / 1e6:.4f}",
            f"{sum(metrics.seconds for metrics in result.history):.0f}",
        )
        for index, result in enumerate(results)
    ]
    return _render.grid(("run", "test accuracy", "ε", "bits", "MB a client and round", "seconds"), rows)


def _facts(summary: dict[str, Any], results: list[Result]) -> list[tuple[str, str]]:
    from rich.markup import escape

    from cpsgd.reports import run_report

    floats = summary["float32_bytes"]
    private = results[0]
    facts = []
    if private.guarantee is not None:
        facts += [
            (
                "privacy",
                f"({_render.rounded_up(private.guarantee.epsilon)}, {private.guarantee.delta:g}), "
                f"{private.guarantee.adjacency} neighbours, participation {private.guarantee.participation}",
            ),
            ("protects", run_report.unit_text(summary)),
            ("proved by", escape(private.guarantee.citation)),
            ("paper's bound", escape(run_report.paper_text(summary["paper_bound"]))),
        ]
    facts += [
        (
            "sent",
            f"{private.bytes_per_client / 1e6:.4f} MB a client and round, {private.bits_per_coordinate:.4g} bits a "
            f"coordinate; float32 {floats / 1e6:.4f} MB ({floats / private.bytes_per_client:.1f}×)",
        ),
        *_budget_facts(summary["budget"]),
        ("note", run_report.seed_text(summary)),
        *[("written", escape(path)) for path in summary["files"]],
    ]
    return facts


def _budget_facts(budget: dict[str, Any] | None) -> list[tuple[str, str]]:
    from rich.markup import escape

    if budget is None:
        return []
    spent, limit = _render.rounded_up(budget["epsilon"]), budget["limit"]
    return [("budget", escape(f"{budget['population']}: ε = {spent} of {limit:g} at δ = {budget['delta']:g} spent"))]
