"""`reproduction/error_vs_epsilon.py`: the numbers behind the paper's Figure 1, and the files."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.paper.theorem import Sensitivities, binomial_mechanism_epsilon
from cpsgd.privacy import gdp_epsilon
from cpsgd.privacy.proofs.certified_gaussian import certified_epsilon
from reproduction import error_vs_epsilon
from reproduction.error_vs_epsilon import SCALES, ErrorFigure, certified_trials, compute

DIM, DELTA, EPSILONS = 64, 1e-6, (0.3, 1.0, 3.0)


@pytest.fixture(scope="module")
def figure() -> ErrorFigure:
    return compute(dim=DIM, delta=DELTA, epsilons=EPSILONS)


def errors(figure: ErrorFigure, method: str, scale: float | None = None) -> list[float]:
    series = next(s for s in figure.series if s.method == method and s.scale == scale)
    return [float("inf") if value is None else value for value in series.squared_error]


def test_the_gaussian_line_is_exact(figure: ErrorFigure) -> None:
    for epsilon, error in zip(EPSILONS, errors(figure, "gaussian-analytic"), strict=True):
        assert gdp_epsilon((DIM / error) ** 0.5, DELTA) == pytest.approx(epsilon, rel=1e-9)


def test_the_classical_lemma_ends_at_one(figure: ErrorFigure) -> None:
    classical = next(s for s in figure.series if s.method == "gaussian-classical")
    assert [value is None for value in classical.squared_error] == [False, False, True]


def test_certificates_lie_between_the_gaussian_and_the_theorem(figure: ErrorFigure) -> None:
    gaussian = errors(figure, "gaussian-analytic")
    for scale in SCALES:
        ours, paper = errors(figure, "certificate", scale), errors(figure, "paper-theorem", scale)
        for low, middle, high in zip(gaussian, ours, paper, strict=True):
            assert low <= middle <= high


def test_smaller_scales_approach_the_gaussian(figure: ErrorFigure) -> None:
    for method in ("certificate", "paper-theorem"):
        for index in range(len(EPSILONS)):
            by_scale = [errors(figure, method, scale)[index] for scale in SCALES]
            # The search stops within one per cent.
            assert all(b <= 1.01 * a for a, b in itertools.pairwise(by_scale))
    assert errors(figure, "certificate", SCALES[-1])[0] < 1.02 * errors(figure, "gaussian-analytic")[0]


def test_the_trials_really_suffice() -> None:
    trials = certified_trials(1.0, DELTA, DIM, 1 / 16)
    found, _ = certified_epsilon(BinomialLaw(trials, 0.5), dim=DIM, sensitivity=16.0, levels=17, delta=DELTA)
    assert found <= 1.0
    norms = Sensitivities(l1=8.0, l2=1.0, linf=1.0)
    paper = binomial_mechanism_epsilon(
        noise_trials=trials, p=0.5, dim=DIM, delta=DELTA, sensitivities=norms, scale=1 / 16
    )
    assert paper > 1.0


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the command in an empty folder, for two values of ε."""
    monkeypatch.setattr(error_vs_epsilon, "EPSILONS", (0.5, 2.0))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(error_vs_epsilon.app, *arguments)


def test_files(command: Any) -> None:
    pytest.importorskip("matplotlib")
    result = command("--out", "figures", "--dim", 64, "--delta", 1e-6, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert [Path(file).name for file in data["files"]] == ["error-vs-epsilon.png", "error-vs-epsilon.json"]
    assert Path("figures/error-vs-epsilon.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("figures/error-vs-epsilon.json").read_text()) == data


def test_missing_matplotlib_names_the_remedy(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command("--out", "figures")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert not Path("figures").exists()
