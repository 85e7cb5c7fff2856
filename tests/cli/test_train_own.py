"""`cpsgd train --data module:function`: data, model and loss of one's own."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

MODULE = """
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

from cpsgd.learning import datasets


def cancer():
    x, y = load_breast_cancer(return_X_y=True)
    return datasets.from_arrays((x - x.mean(0)) / x.std(0), y, clients=np.arange(len(y)) % 200, name="cancer")


def images():
    digits = load_digits()
    data = datasets.from_arrays(digits.images[:500, None] / 16, digits.target[:500], name="images")
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, stride=2), torch.nn.Flatten(), torch.nn.Linear(36, 10))
    return data, model


def progress():
    x, y = load_diabetes(return_X_y=True)
    return datasets.from_arrays(x / x.std(), (y - y.mean()) / y.std(), name="diabetes")


def one_output():
    return cancer(), torch.nn.Linear(30, 1)


def fails():
    raise KeyError("a patient's name")


def nothing():
    return None


def four():
    return cancer(), torch.nn.Linear(30, 2), torch.nn.functional.cross_entropy, 4


def no_model():
    return cancer(), "linear"


number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "mydata.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    yield
    for name in ("mydata", "broken"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def options(function: str, cohort: int, *more: object) -> list[object]:
    privacy = ["--epsilon", 50, "--mechanism", "gaussian", "--sigma", 1.0, "--participation", "every"]
    size = ["--cohort", cohort, "--rounds", 3, "--no-baselines"]
    return ["train", "--data", f"mydata:{function}", *size, *privacy, *more]


def test_a_table_of_ones_own_with_a_named_model(cpsgd: Any, tmp_path: Path) -> None:
    result = cpsgd.succeeds(*options("cancer", 160, "--model", "linear", "--json"))
    printed = json.loads(result.stdout)
    run = tmp_path / "runs" / "mydata-1"
    assert (printed["run"], printed["dataset"], printed["parameters"]) == ("mydata-1", "cancer", 62)
    assert printed["settings"]["data"] == "mydata:cancer"
    assert load_file(run / "model.safetensors").keys() == {"0.weight", "0.bias"}
    card = json.loads((run / "model-card.json").read_text())
    assert card["privacy"]["epsilon"] == printed["guarantee"]["epsilon"]
    assert card["model"]["sha256"] == hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    written = {Path(path).name for path in printed["files"]}
    assert written == {"curves.png", "report.html", "model.safetensors", "model-card.json"}
    assert "private training on cancer" in (run / "report.html").read_text()
    again = cpsgd("train", "--resume", "--run", "mydata-1", "--json")
    assert json.loads(again.stdout)["results"] == printed["results"]


def test_images_with_a_model_of_ones_own_whose_weights_follow_from_the_seed(cpsgd: Any) -> None:
    found = [
        json.loads(cpsgd(*options("images", 400, "--seed", seed, "--json")).stdout)["results"][0] for seed in (1, 1, 2)
    ]
    losses = [result["loss"] for result in found]
    assert losses[0] == losses[1] != losses[2]
    assert "returns a model of its own" in cpsgd(*options("images", 400, "--model", "mlp-5")).stderr


def test_noise_on_data_of_ones_own_is_secret_unless_a_seed_is_asked_for(cpsgd: Any, tmp_path: Path) -> None:
    losses = []
    for name, more, protected in (("a", (), True), ("b", (), True), ("c", ("--seed", 0), False)):
        result = cpsgd.succeeds(*options("images", 400, "--run", name, *more))
        run = tmp_path / "runs" / name
        summary = json.loads((run / "summary.json").read_text())
        card = json.loads((run / "model-card.json").read_text())["privacy"]
        losses.append(summary["results"][0]["loss"])
        assert summary["seeded"] is not protected
        assert ("protects nobody" not in result.stdout) is protected
        assert ("protects nobody" not in (run / "report.html").read_text()) is protected
        assert card["protects"] == ("one client" if protected else "nobody")
    assert losses[0] != losses[1]


def test_files_name_the_model_that_was_trained(cpsgd: Any, tmp_path: Path) -> None:
    cpsgd.succeeds(*options("images", 400, "--run", "a"))
    run, name = tmp_path / "runs" / "a", "Sequential(Conv2d, Flatten, Linear)"
    assert json.loads((run / "config.json").read_text())["model"] == name
    assert json.loads((run / "summary.json").read_text())["settings"]["model"] == name
    assert name in (run / "report.html").read_text()
    cpsgd.succeeds("train", "--resume", "--run", "a")


def test_bits_are_chosen_for_accuracy_where_nothing_is_sent(cpsgd: Any, tmp_path: Path) -> None:
    own = ["train", "--data", "mydata:images", "--no-baselines", "--epsilon", 8, "--rounds", 2, "--json"]
    for cohort, more, chosen, kind in (
        (400, ("--participation", "every"), "for accuracy", "rounded-gaussian"),
        (200, (), "for accuracy", "correlated-gaussian"),
        (200, ("--optimizer", "adam"), "for accuracy", "rounded-gaussian"),
        (200, ("--bits", 1), "at most 1 bit", "coins"),
    ):
        result = cpsgd.succeeds(*own, "--cohort", cohort, *more)
        assert chosen in result.stderr
        assert json.loads(result.stdout)["protocol"]["mechanism"] == kind


def test_rounds_are_printed_where_they_are_evaluated_and_written_for_tensorboard(cpsgd: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ("--evaluate-every", 5, "--tensorboard", "--run", "a")
    result = cpsgd.succeeds(*[12 if part == 3 else part for part in options("images", 400, *more)])
    lines = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("private ")]
    assert lines == ["5/12", "10/12", "12/12"]
    events = EventAccumulator(str(tmp_path / "runs" / "a" / "tensorboard" / "private"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 12]
    assert [event.step for event in events.Scalars("survivors")] == list(range(1, 13))


def test_the_clip_norm_may_adapt(cpsgd: Any, tmp_path: Path) -> None:
    result = cpsgd.succeeds(*options("cancer", 160, "--model", "linear", "--clip-quantile", 0.6, "--json"))
    printed = json.loads(result.stdout)
    assert (printed["parameters"], printed["protocol"]["dim"]) == (62, 63)
    lines = (tmp_path / "runs" / "mydata-1" / "metrics.jsonl").read_text().splitlines()
    assert len({json.loads(line)["clip_norm"] for line in lines}) == 3


def test_regression_from_a_file(cpsgd: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'data = "mydata:progress"\ncohort = 354\nrounds = 3\nparticipation = "every"\nmodel = "mlp-4"\n'
        'mechanism = "gaussian"\nsigma = 1.0\nepsilon = 50.0\n'
    )
    result = cpsgd.succeeds("train", "--config", "run.toml")
    assert "test R²" in result.stdout
    assert "Test R² and loss" in (tmp_path / "runs" / "mydata-1" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--data", "mydata"), "Expected data to be module:function"),
        (("--data", "no_such_module:load"), "There is no module 'no_such_module'"),
        (("--data", "broken:load"), "The module broken failed with ModuleNotFoundError"),
        (("--data", "mydata:load"), "no function 'load' in the module mydata"),
        (("--data", "mydata:number"), "no function 'number'"),
        (("--data", "mydata:fails"), "mydata:fails() failed with KeyError (in mydata.py, line"),
        (("--data", "mydata:nothing"), "got NoneType"),
        (("--data", "mydata:four"), "got ArrayDataset, Linear, function, int"),
        (("--data", "mydata:no_model"), "Expected mydata:no_model to return a model of torch.nn, got str"),
        (("--data", "mydata:one_output"), "Expected outputs of shape ['n', 2]"),
        (("--dataset", "digits"), "or a dataset with its number of clients, not both"),
        (("--clients", 3), "or a dataset with its number of clients, not both"),
        (("--preset", "paper"), "the preset is 'own' with data"),
        (("--cohort", 161), "larger than the population of 160"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(
    cpsgd: Any, tmp_path: Path, changes: tuple[object, ...], message: str
) -> None:
    given = options("cancer", 160)
    if changes[0] in given:
        place = given.index(changes[0])
        given[place : place + 2] = []
    result = cpsgd(*given, *changes)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "patient" not in result.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_cohort_must_be_given(cpsgd: Any) -> None:
    cpsgd.refuses("Missing cohort", "train", "--data", "mydata:cancer")
    assert "never without" in " ".join(cpsgd("train", "--preset", "own").stderr.split())
