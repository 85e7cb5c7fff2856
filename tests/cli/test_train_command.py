"""`cpsgd train`: a run from end to end, its folder, resuming, and what is refused before anything is charged."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.cli.app import app
from cpsgd.learning.gradients import ClientUpdates

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
# Where any plan will do, one that is soon made.
PLANNED = ("--bits", 6, "--mechanism", "binomial")
SMALL = ("--cohort", 400, "--rounds", 4, "--model", "linear", *PLANNED)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, invoke: Any) -> Path:
    """The folder of a whole run with its baselines."""
    folder = tmp_path_factory.mktemp("finished")
    with chdir(folder):
        result = invoke(app, "train", *SMALL, "--run", "whole", "--json")
    assert result.exit_code == 0, result.stderr
    (folder / "printed.json").write_text(result.stdout)
    return folder


@contextmanager
def started(folder: Path, invoke: Any, *options: object) -> Iterator[Any]:
    """Trains in a process of its own, and waits for its end; what it writes to stderr comes to a file."""

    def train() -> None:
        os.chdir(folder)
        result = invoke(app, "train", *options)
        Path("stderr").write_text(result.stderr)
        sys.exit(result.exit_code)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    yield process
    process.join(60)


def until_a_round(run: Path) -> None:
    """Waits for the first."""
    deadline = time.monotonic() + 60
    while not ((run / "metrics.jsonl").exists() and rows(run)) and time.monotonic() < deadline:
        time.sleep(0.005)


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def test_a_run_leaves_everything_a_reader_needs(finished: Path) -> None:
    run = finished / "runs" / "whole"
    printed = json.loads((finished / "printed.json").read_text())
    assert [result["name"] for result in printed["results"]] == ["private", "no privacy", "gaussian", "quantized"]
    private, floats, gaussian, quantized = printed["results"]
    assert 1.0 < private["epsilon"] <= 2.0
    assert 1.9 < gaussian["epsilon"] <= 2.0
    assert floats["epsilon"] is None
    assert quantized["epsilon"] is None
    assert private["bits_per_coordinate"] <= 6.0
    assert private["bytes_per_client"] < printed["float32_bytes"] == floats["bytes_per_client"]
    # Noise of ε = 2 from 400 clients costs accuracy; without it four rounds learn something.
    assert floats["accuracy"] > 0.3
    assert printed["guarantee"]["rounds"] == 4
    assert printed["paper_bound"]["epsilon_at_paper_range"] > 2.0
    assert json.loads((run / "config.json").read_text())["cohort"] == 400
    assert [row["round"] for row in rows(run)] == [0, 1, 2, 3]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoint.bin").exists()
    assert len(rows(run / "baselines" / "no-privacy")) == 4


def test_the_report_needs_nothing_from_outside(finished: Path) -> None:
    page = (finished / "runs" / "whole" / "report.html").read_text()
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in page
    assert "<svg" in page
    for word in ("no privacy", "gaussian", "quantized", "proved by", "per client and round"):
        assert word in page


def test_killed_and_resumed_equals_the_uninterrupted_run(
    finished: Path, tmp_path: Path, cpsgd: Any, invoke: Any
) -> None:
    run = tmp_path / "runs" / "whole"
    with started(tmp_path, invoke, *SMALL, "--run", "whole") as victim:
        until_a_round(run)
        victim.kill()
    assert victim.exitcode == -signal.SIGKILL
    assert not (run / "report.html").exists()
    cpsgd.succeeds("train", "--resume")
    assert rows(run) == rows(finished / "runs" / "whole")
    for baseline in ("no-privacy", "gaussian", "quantized"):
        assert rows(run / "baselines" / baseline) == rows(finished / "runs" / "whole" / "baselines" / baseline)
    assert (run / "report.html").exists()


def test_a_second_process_is_refused_and_ctrl_c_says_how_to_go_on(tmp_path: Path, cpsgd: Any, invoke: Any) -> None:
    options = ("--cohort", 400, "--rounds", 20_000, "--model", "linear", "--no-baselines", "--run", "long", *PLANNED)
    with started(tmp_path, invoke, *options) as victim:
        until_a_round(tmp_path / "runs" / "long")
        second = cpsgd("train", "--resume", "--run", "long")
        os.kill(victim.pid, signal.SIGINT)
    assert second.exit_code == 2
    assert "Another process is at work on the run in runs/long" in " ".join(second.stderr.split())
    assert victim.exitcode == 130
    complaint = (tmp_path / "stderr").read_text()
    assert "cpsgd train --resume --run long" in complaint
    assert "Traceback" not in complaint


def test_canaries_audit_the_model_and_go_on_with_the_run(cpsgd: Any, tmp_path: Path) -> None:
    options = ("--cohort", 400, "--rounds", 2, "--model", "linear", "--no-baselines", "--sigma", 0.3, "--epsilon", 60)
    printed = cpsgd.json("train", *options, "--canaries", 600, "--run", "a")
    folder = tmp_path / "runs" / "a"
    found = cpsgd.json("audit", "--model", folder)
    assert found == printed["audit"] == json.loads((folder / "model-card.json").read_text())["audit"]
    assert (found["unit"], found["canaries"], found["passed"]) == ("client", 600, True)
    assert found["claimed"] == printed["guarantee"]["epsilon"]
    assert f"audit {found['finding']}" in " ".join(cpsgd.succeeds("train", "--resume", "--run", "a").stdout.split())
    assert cpsgd.json("audit", "--model", folder) == found


def test_settings_from_a_file_and_flags_on_top(cpsgd: Any) -> None:
    Path("run.toml").write_text(
        'model = "linear"\ncohort = 300\nrounds = 9\nbits = 6\nmechanism = "binomial"\nbaselines = false\n'
    )
    printed = cpsgd.json("train", "--config", "run.toml", "--rounds", 2)
    assert (printed["settings"]["cohort"], printed["settings"]["rounds"]) == (300, 2)
    assert [result["name"] for result in printed["results"]] == ["private"]
    assert printed["run"] == "digits-1"


def test_an_explicit_protocol_and_its_table(cpsgd: Any) -> None:
    explicit = ("--levels", 16, "--trials", 200, "--epsilon", 60)
    result = cpsgd.succeeds("train", "--cohort", 400, "--rounds", 1, "--model", "linear", "--no-baselines", *explicit)
    assert "k = 16 levels in ±0.4" in result.stdout
    assert "m = 200 trials" in result.stdout
    for word in ("test accuracy", "proved by", "published", "float32", "report.html"):
        assert word in result.stdout
    printed = " ".join(result.stdout.split())
    assert "protects nobody, since the noise can be repeated; with secret noise all that one client holds" in printed
    assert "This run protects nobody: its noise can be repeated." in printed
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("private ")]
    assert "; protects nobody  sent" in line
    assert "protects nobody, since its noise follows from seed 0" in " ".join(result.stdout.split())


def test_any_mechanism_can_be_spelled_out(cpsgd: Any) -> None:
    explicit = ("--sigma", 0.3, "--epsilon", 60)
    printed = cpsgd.json("train", "--cohort", 400, "--rounds", 1, "--model", "linear", *explicit)
    assert (printed["protocol"]["sigma"], printed["protocol"]["rotate"]) == (0.3, False)
    private, _, gaussian = printed["results"]
    assert gaussian["name"] == "gaussian"
    assert gaussian["epsilon"] == pytest.approx(private["epsilon"], rel=1e-6)


def test_an_explicit_protocol_is_not_planned_and_its_own_privacy_sets_the_gaussian(cpsgd: Any) -> None:
    # The planner takes no ε so large. Here it is but a budget.
    explicit = ("--levels", 16, "--trials", 200, "--epsilon", 600, "--dropout", 0.05)
    result = cpsgd.succeeds("train", "--cohort", 400, "--rounds", 2, "--model", "linear", *explicit, "--json")
    private, _, gaussian, quantized = json.loads(result.stdout)["results"]
    assert 1.0 < private["epsilon"] < 1.2
    # The trainer's smallest round may be a little larger than the one the Gaussian's noise was chosen for.
    assert gaussian["epsilon"] == pytest.approx(private["epsilon"], rel=0.05)
    assert quantized["bits_per_coordinate"] == 4.0


@pytest.mark.parametrize("protocol", [PLANNED, ("--levels", 40, "--trials", 200, "--epsilon", 60)])
def test_examples_neighbours_and_colluding_clients_can_be_chosen(cpsgd: Any, protocol: tuple[object, ...]) -> None:
    options = ("--examples", 3, "--adjacency", "zero-out", "--colluding", 20)
    printed = cpsgd.json("train", "--cohort", 300, "--rounds", 1, "--model", "linear", *protocol, *options)
    assert (printed["unit"], printed["seeded"]) == ("example", True)
    assert (printed["guarantee"]["adjacency"], printed["guarantee"]["noise_clients"]) == ("zero-out", 280)
    private, _, gaussian, _ = printed["results"]
    if "--bits" in protocol:
        assert 1.95 < private["epsilon"] <= 2.0
        assert 1.999 < gaussian["epsilon"] <= 2.0
    else:
        assert gaussian["epsilon"] == pytest.approx(private["epsilon"], rel=1e-3)
    assert printed["paper_bound"]["reason"] == "The paper has no bound for single examples."
    page = Path("runs/digits-1/report.html").read_text()
    assert "one example of a client, who sends at most 3" in page
    assert "zero-out" in page


def test_without_a_seed_no_two_runs_are_alike(cpsgd: Any) -> None:
    Path("run.toml").write_text('seed = "none"\n')
    printed = []
    for options in (("--seed", "none"), ("--config", "run.toml")):
        result = cpsgd.succeeds("train", *SMALL, "--no-baselines", *options, "--json")
        printed.append(json.loads(result.stdout))
    for run in printed:
        assert (run["seeded"], run["settings"]["seed"]) == (False, "none")
    assert printed[0]["results"][0]["loss"] != printed[1]["results"][0]["loss"]
    assert "the noise came from the operating system" in Path("runs/digits-1/report.html").read_text()
    assert "protects nobody" not in Path("runs/digits-1/report.html").read_text()
    # Such a run is continued as what it is, and a finished one has nothing more to do.
    result = cpsgd.succeeds("train", "--resume", "--run", "digits-1", "--json")
    assert json.loads(result.stdout)["results"] == printed[0]["results"]
    result = cpsgd("train", "--resume", "--run", "digits-1", "--seed", 0)
    assert "another seed" in result.stderr


@pytest.mark.parametrize("participation", ["fixed-size", pytest.param("poisson", marks=pytest.mark.slow)])
def test_sampled_rounds_with_dropouts_keep_their_budget(cpsgd: Any, participation: str) -> None:
    sampled = ("--participation", participation, "--dropout", 0.1, "--clients", 20_000)
    printed = cpsgd.json("train", *SMALL, *sampled, "--no-baselines")
    assert 0.5 < printed["results"][0]["epsilon"] <= 2.0
    assert printed["guarantee"]["participation"] == f"{participation}:0.02"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--preset", "papers"), "Known are digits, paper"),
        (("--optimizer", "sdg"), 'Choose from: "sgd", "momentum", "adagrad", "adam"'),
        (("--dataset", "letters"), "Known are digits, infinite-digits"),
        (("--model", "cnn"), "Known are 'linear'"),
        (("--participation", "twice"), 'Choose from: "once", "every"'),
        (("--clients", 100), "larger than the population"),
        (("--levels", 4), "both levels and trials"),
        (("--levels", 4, "--trials", 9, "--bits", 4), "not both"),
        (("--levels", 4, "--sigma", 1), "No mechanism has levels, sigma together"),
        (("--mechanism", "gaussian"), "Choose its sigma yourself"),
        (("--levels", 64, "--trials", 200), "the budget ε=2 buys 0"),
        (("--seed", "-1"), "a number from 0 on, or none"),
        (("--seed", "null"), "a number from 0 on, or none"),
        (("--adjacency", "remove"), "replace-one"),
        (("--adjacency", "replace-one", "--participation", "poisson"), "zero-out"),
        (("--examples", 0), "examples"),
        (("--examples", 2, "--participation", "fixed-size"), "Example-level privacy is proved here for"),
        (("--examples", 2, "--local-steps", 2, "--local-lr", 0.1), "examples or local_steps"),
        (("--memory-limit", 0), "Expected memory_limit (in MiB) in [1, 16777216]"),
        (("--memory-limit", 1 << 30), "Expected memory_limit (in MiB) in [1, 16777216]"),
        (("--colluding", 400), "nobody is left whose noise protects"),
        (("--resume",), "no run under runs/"),
        (("--resume", "--run", "none"), "There is no run in runs/none"),
        (("--run", "../x"), "name of a folder under runs/"),
    ],
)
def test_what_is_refused_before_anything_is_charged(cpsgd: Any, options: tuple[object, ...], text: str) -> None:
    small = () if "--resume" in options else ("--cohort", 400, "--rounds", 2, "--model", "linear", "--no-baselines")
    result = cpsgd("train", *small, *options)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.replace("│", "").split())
    assert not list(Path().glob("runs/*/checkpoint.bin"))


@pytest.mark.parametrize(
    ("text", "answer"), [("round = 3", "Known are preset"), ('rounds = "3"', "type int"), ("=", "TOML")]
)
def test_bad_files(cpsgd: Any, text: str, answer: str) -> None:
    Path("run.toml").write_text(text)
    cpsgd.refuses(answer, "train", "--config", "run.toml")


def test_a_run_is_not_overwritten_nor_resumed_with_other_settings(
    finished: Path, cpsgd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    cpsgd.refuses("--resume --run whole", "train", *SMALL, "--run", "whole")
    cpsgd.refuses("another lr", "train", "--resume", "--run", "whole", "--lr", 3.0)


def test_the_memory_limit_changes_no_result_and_may_change_on_resuming(cpsgd: Any) -> None:
    limits: list[int] = []
    real = ClientUpdates.tensors

    def record(self: ClientUpdates, *arguments: Any) -> Any:
        limits.append(self.memory_limit)
        return real(self, *arguments)

    small = ("--cohort", 300, "--model", "linear", *PLANNED, "--no-baselines")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ClientUpdates, "tensors", record)
        cpsgd.succeeds("train", *small, "--rounds", 4, "--run", "free")
        assert set(limits) == {1 << 30}
        limits.clear()
        Path("run.toml").write_text("memory_limit = 2\n")
        with pytest.MonkeyPatch.context() as stopped:
            stopped.setattr("cpsgd.reports.live.interrupts", lambda: nullcontext(lambda: True))
            result = cpsgd("train", *small, "--rounds", 4, "--run", "tight", "--config", "run.toml")
        assert result.exit_code == 130, result.stderr
        assert set(limits) == {2 << 20}
        limits.clear()
        result = cpsgd.succeeds("train", "--resume", "--run", "tight", "--memory-limit", 1)
        assert set(limits) == {1 << 20}
    assert rows(Path("runs/tight")) == rows(Path("runs/free"))
    # What the run was started with stays on record.
    assert json.loads(Path("runs/tight/config.json").read_text())["memory_limit"] == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train", "--device", "tpu"), "Unknown device 'tpu'. Known are cpu, cuda or auto."),
        pytest.param(("train", "--device", "cuda"), "There is no CUDA device", marks=WITHOUT_GPU),
        pytest.param(("train", "--device", "cuda"), "Use device cpu or auto", marks=WITHOUT_GPU),
    ],
)
def test_what_a_training_cannot_be_computed_with(cpsgd: Any, command: tuple[str, ...], words: str) -> None:
    cpsgd.refuses(words, *command, "--dataset", "digits", "--cohort", 300, "--rounds", 2)
    assert not list(Path().rglob("charges.jsonl"))


@WITHOUT_GPU
def test_auto_says_that_it_falls_back(cpsgd: Any) -> None:
    Path("run.toml").write_text('dataset = "digits"\nmodel = "linear"\n')
    small = ("--config", "run.toml", "--rounds", 1, "--cohort", 300, "--device", "auto", *PLANNED)
    said = "device: cpu, since there is no CUDA device"
    result = cpsgd.succeeds("train", *small, "--no-baselines")
    assert said in result.stdout


def test_an_interrupt_keeps_rounds_before_their_checkpoint_is_due(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.reports.live.interrupts", lambda: nullcontext(lambda: True))
    small = ("--cohort", 300, "--rounds", 3, "--model", "linear", *PLANNED, "--no-baselines", "--seed", "none")
    stopped = cpsgd("train", *small, "--evaluate-every", 3, "--run", "stopped")
    assert stopped.exit_code == 130
    (row,) = rows(Path("runs/stopped"))
    assert row["released"]


def test_a_run_on_a_ledger_has_no_seed_unless_one_is_given(cpsgd: Any) -> None:
    create = ("budget", "create", "b.ledger", "--population", "people", "--epsilon", 3.2, "--delta", 1e-6)
    cpsgd.succeeds(*create)
    small = ("train", *SMALL, "--dataset", "digits", "--cohort", 300, "--rounds", 2, "--no-baselines", "--json")
    for population, words in (("nobody", "no budget for 'nobody'"), (None, "both ledger and population")):
        whose = () if population is None else ("--population", population)
        cpsgd.refuses(words, *small, "--run", "refused", "--ledger", "b.ledger", *whose)
    charged = (*small, "--ledger", "b.ledger", "--population", "people")
    for run, seed in (("private", ()), ("simulated", ("--seed", 5))):
        result = cpsgd.succeeds(*charged, "--run", run, *seed)
        summary = json.loads(result.stdout)
        assert summary["seeded"] == bool(seed)
        assert summary["budget"]["epsilon"] <= 3.2
    assert summary["budget"]["rounds"] == 4
    exported = json.loads(cpsgd("budget", "export", "b.ledger").stdout)
    (people,) = exported["populations"]
    simulated = ["follows from a seed" in entry["event"]["label"] for entry in people["entries"]]
    assert simulated == [False, False, True, True]
    cpsgd.refuses("is left; this would bring it to", *charged, "--run", "third")
    cpsgd.succeeds("budget", "verify", "b.ledger")


def test_a_run_that_began_meanwhile_keeps_its_settings(
    finished: Path, cpsgd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both chose the folder while it was not there yet.
    folder = Path("runs/whole")
    shutil.copytree(finished / "runs" / "whole", folder)
    before = (folder / "config.json").read_bytes()
    monkeypatch.setattr("cpsgd.cli.train._new_folder", lambda name, preset: folder)
    cpsgd.refuses("Another run has just begun in runs/whole", "train", *SMALL, "--lr", 3.0, "--no-baselines")
    assert (folder / "config.json").read_bytes() == before


def test_a_refused_run_leaves_its_name_free(cpsgd: Any) -> None:
    command = ("train", "--dataset", "digits", "--model", "linear", "--cohort", 50, "--rounds", 3, "--sigma", 0.3)
    refused = cpsgd(*command, "--no-baselines", "--run", "again")
    assert refused.exit_code != 0
    assert not Path("runs/again").exists()
    second = cpsgd(*command, "--no-baselines", "--run", "again")
    assert second.stderr == refused.stderr


def test_runs_are_named_after_what_they_train_on() -> None:
    from cpsgd.cli.train import _kind
    from cpsgd.learning.settings import Settings

    assert _kind(Settings.of({})) == "digits"
    assert _kind(Settings.of({"preset": "paper"})) == "paper"
    assert _kind(Settings.of({"dataset": "mnist", "cohort": 100})) == "mnist"
    assert _kind(Settings.of({"dataset": "../a b:c"})) == "..-a-b-c"
