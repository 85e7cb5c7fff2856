"""The command line: what programs read from `--json`, and exit codes, as in release 0.1.0."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.cli.app import app

from .recorded import DATA, read

CASES: list[dict[str, Any]] = read("cli.json")["cases"]
SLOW = {"train", "budget", "round"}
GROUPS = [
    pytest.param(group, marks=[pytest.mark.slow] if group in SLOW else [])
    for group in dict.fromkeys(case["group"] for case in CASES)
]


# Plans are now made with the best mechanism: these fields are of the one that release 0.1.0 had, which can be named.
OF_BINOMIAL = {"levels", "trials", "p", "sigma"}
# Only a method that proves nothing has a reason, and all do now. Some noise has one proof, and no alternatives.
OF_FAILURES = {"guarantee.alternatives.[].reason", "guarantee.alternatives.[].method"}
# Measured on the points themselves, which no guarantee covered: they are printed no more.
EXACT = {"inertia", "angle_degrees.measured"}


def keys_of(value: object, path: str = "") -> set[str]:
    """Names of all fields, as paths; [] stands for any element of a list."""
    if isinstance(value, dict):
        return {path + key for key in value}.union(*(keys_of(part, f"{path}{key}.") for key, part in value.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(part, f"{path}[].") for part in value))
    return set()


@pytest.mark.parametrize("group", GROUPS)
def test_commands_print_the_same_keys_and_end_the_same(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    shutil.copytree(DATA / "cli", tmp_path, dirs_exist_ok=True)
    (tmp_path / "client-0.key").chmod(0o600)  # in a checkout it is open to all
    monkeypatch.setenv("CPSGD_SIMD", "this")  # an audit of other levels starts processes: tests/audit/test_surveys.py
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        if case["group"] != group:
            continue
        named = ["--mechanism", "binomial"] if case["args"][0] in ("plan", "train") else []
        done = invoke(app, *case["args"], *named)
        assert done.exit_code == case["exit_code"], (case["args"], done.stderr)
        if case["keys"] is not None:
            missing = set(case["keys"]) - keys_of(json.loads(done.stdout)) - OF_FAILURES - EXACT
            if not named:
                missing = {key for key in missing if key.split(".")[-1] not in OF_BINOMIAL}
            assert not missing, (case["args"], missing)
