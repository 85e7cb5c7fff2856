"""The job that a recipe makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.np.np_model_persistor import NPModelPersistor

from cpsgd.engines.nvflare import CpsgdRecipe
from cpsgd.errors import ParameterError

SETTINGS: dict[str, Any] = {"num_clients": 10, "num_rounds": 3, "epsilon": 4.0, "delta": 1e-6}


def exported(folder: Path, **changes: Any) -> Path:
    """The job's folder."""
    script = folder / "script.py"
    script.write_text("pass\n")
    recipe = CpsgdRecipe(
        name="job", model=NPModelPersistor(model=[[0.0] * 4]), train_script=str(script), **{**SETTINGS, **changes}
    )
    recipe.export(str(folder / "jobs"))
    return folder / "jobs" / "job"


def test_a_job_of_a_recipe(tmp_path: Path) -> None:
    job = exported(tmp_path, plan={"dropout": 0.15, "bits": 12}, examples=50)
    config = job / "app" / "config"
    client = json.loads((config / "config_fed_client.json").read_text())
    server = json.loads((config / "config_fed_server.json").read_text())
    (executor,) = client["executors"]
    assert executor["tasks"] == ["*"]
    assert executor["executor"]["path"] == "cpsgd.engines.nvflare.executor.CpsgdExecutor"
    assert executor["executor"]["args"]["limits"] == {"epsilon": 4.0, "delta": 1e-6, "examples": 50}
    assert executor["executor"]["args"]["executor"]["args"]["execution_mode"] == "in_process"
    (workflow,) = server["workflows"]
    assert workflow["path"] == "cpsgd.engines.nvflare.controller.CpsgdController"
    assert workflow["args"] == {**SETTINGS, "plan": {"dropout": 0.15, "bits": 12}, "examples": 50}
    # Nothing by which metrics, events or logs would travel, and nothing of the package: it is installed.
    assert client["components"] == []
    assert [component["id"] for component in server["components"]] == ["persistor"]
    assert [path.name for path in (job / "app" / "custom").iterdir()] == ["script.py"]
    # 8 of 10 must survive.
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 8


def test_a_recipe_without_secure_aggregation_says_so_on_both_sides(tmp_path: Path) -> None:
    config = exported(tmp_path, secure=False) / "app" / "config"
    client = json.loads((config / "config_fed_client.json").read_text())
    server = json.loads((config / "config_fed_server.json").read_text())
    assert client["executors"][0]["executor"]["args"]["secure"] is False
    assert server["workflows"][0]["args"]["secure"] is False


def test_wrong_options_are_refused_when_the_job_is_made(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="epsilon and delta together"):
        exported(tmp_path, limits={"epsilon": 1.0})
    with pytest.raises(ParameterError, match="grace"):
        exported(tmp_path, pace={"grace": -1.0})


@pytest.mark.parametrize("bands", [8, "auto"])
def test_correlated_noise_is_refused_when_the_job_is_made(bands: object, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="use Flower"):
        exported(tmp_path, plan={"correlated": bands})
