"""`cpsgd audit --model`: a trained model, from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpsgd.learning.canaries import FILE, audit_folder
from tests.learning.test_canaries import quieter, trained


@pytest.mark.slow
def test_the_model_is_audited_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpsgd: Any) -> None:
    private = trained(4000)
    paths = private.export(tmp_path / "good")
    assert [path.name for path in paths] == ["model.safetensors", "model-card.json", FILE]
    card = json.loads(paths[1].read_text())
    assert card["privacy"]["epsilon"] == private.epsilon
    assert card["audit"] == private.audit().to_dict()
    assert audit_folder(tmp_path / "good").right == card["audit"]["right"]
    assert "included" not in paths[1].read_text()
    quieter(monkeypatch, 0.02)
    trained(4000).export(tmp_path / "bad")
    result = cpsgd("audit", "--model", tmp_path / "bad")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    printed = json.loads(cpsgd("audit", "--model", tmp_path / "bad", "--json").stdout)
    assert printed["passed"] is False
    assert printed["canaries"] == 4000
