"""Settings from files that anybody may have written."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cpsgd.errors import ParameterError
from cpsgd.learning.option_groups import FolderOptions
from cpsgd.learning.settings import Settings, read_file, without_privacy


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("huge.toml", "epsilon = " + "9" * 400, "epsilon"),
        ("list.toml", "preset = []", "preset"),
        ("deep.json", "[" * 100_000, "cannot be read"),
        ("deep.toml", "a = " + "[" * 100_000, "cannot be read"),
        ("array.json", "[]", "does not hold settings"),
        ("bytes.toml", "\udcff", "cannot be read"),
        ("memory.toml", "memory_limit = 0", r"memory_limit \(in MiB\) in \[1, "),
        ("bytes.json", '{"memory_limit": 1073741824}', r"memory_limit \(in MiB\) in \[1, "),
        ("size.toml", 'memory_limit = "1 GiB"', "memory_limit to be of type int"),
        ("flag.json", '{"rounds": true}', "rounds"),
        ("nested.json", '{"lr": ' + "[" * 500 + "]" * 500 + "}", "lr"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ParameterError, match=message) as raised:
        Settings.of(read_file(path))
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("name", "message"), [("cohrt", "'cohrt'. Did you mean 'cohort'? Known"), ("x" * 40, "x'. Known")]
)
def test_a_misspelt_setting(name: str, message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        Settings.of({name: 10})


# As the first release wrote it to a run's folder.
WRITTEN = {
    "preset": "digits",
    "dataset": "infinite-digits",
    "clients": 20000,
    "model": "linear",
    "cohort": 300,
    "rounds": 3,
    "epsilon": 2.0,
    "delta": 1e-06,
    "bits": 6.0,
    "clip_norm": 1.0,
    "optimizer": "adam",
    "lr": 0.05,
    "weight_decay": 0.0001,
    "schedule": "late",
    "participation": "fixed-size",
    "dropout": 0.1,
    "examples": 3,
    "adjacency": "replace-one",
    "colluding": 10,
    "local_steps": 1,
    "local_lr": 0.1,
    "seed": "none",
    "baselines": False,
    "device": "cpu",
    "memory_limit": 3,
    "evaluate_every": 2,
    "ledger": "b.ledger",
    "population": "people",
}


def test_settings_of_earlier_runs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WRITTEN))
    settings = Settings.of(read_file(path))
    assert settings.to_dict() == WRITTEN
    assert settings.seed is None
    explicit = {**WRITTEN, "levels": 16, "trials": 200, "range": 0.5}
    del explicit["bits"]
    assert Settings.of(explicit).to_dict() == explicit


def test_a_preset_and_what_is_given_on_top() -> None:
    paper = Settings.of({"preset": "paper"})
    assert (paper.clients, paper.cohort, paper.rounds, paper.delta, paper.lr) == (25_000_000, 10_000, 2_500, 1e-9, 6.0)
    assert (paper.weight_decay, paper.schedule, paper.optimizer, paper.seed) == (1e-4, "late", "sgd", 0)
    assert Settings.of({"preset": "paper", "dataset": "digits"}).clients is None
    charged = Settings.of({"ledger": "b.ledger", "population": "people", "baselines": False, "lr": 3})
    assert (charged.seed, charged.lr, type(charged.lr)) == (None, 3.0, float)
    assert Settings.of({"levels": 3, "trials": 9}).bits is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"participation": "twice"}, "Known are once, every, apart, poisson, fixed-size"),
        ({"adjacency": "remove"}, "Known are replace-one, zero-out"),
        ({"optimizer": ["sgd"]}, "Known are sgd, momentum, adagrad, adam"),
        ({"dropout": 1}, r"dropout in \[0, 1\)"),
        ({"local_steps": 2}, "local_lr"),
        ({"baselines": 1}, "baselines to be of type bool"),
        ({"clients": None}, "clients to be of type int"),
        ({"ledger": "b.ledger", "population": "people"}, "--no-baselines"),
        ({"population": "people"}, "both ledger and population"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Settings.of(values)


def test_every_option_has_one_help_text_and_every_help_text_its_option() -> None:
    described: list[str] = []
    for group in (*Settings.__mro__, FolderOptions):
        if dataclasses.is_dataclass(group):
            _, _, attributes = (group.__doc__ or "").partition("Attributes:\n")
            found = re.findall(r"^ {8}(\w+): \S", attributes, re.MULTILINE)
            own = inspect.get_annotations(group)
            assert set(found) <= set(own), group
            described += found
    options = [field.name for kind in (Settings, FolderOptions) for field in dataclasses.fields(kind)]
    assert sorted(described) == sorted(options)


def test_a_preset_s_run_without_privacy_has_settings_of_its_own() -> None:
    """With the private run's clipping and rate it would flatter that run."""
    paper = Settings.of({"preset": "paper", "epsilon": 0.5, "seed": 3})
    plain = without_privacy(paper)
    assert plain is not None
    assert (plain.optimizer, plain.lr, plain.averaging, plain.seed) == ("adam", 0.00463, 0.9, 3)
    assert (plain.cohort, plain.rounds, plain.dataset) == (paper.cohort, paper.rounds, paper.dataset)


@pytest.mark.parametrize("change", [{"rounds": 10}, {"cohort": 100}, {"model": "linear"}])
def test_for_another_task_nothing_was_selected(change: dict[str, Any]) -> None:
    assert without_privacy(Settings.of({"preset": "digits", **change})) is None
