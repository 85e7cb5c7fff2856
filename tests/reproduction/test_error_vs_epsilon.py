"""The numbers behind the paper's Figure 1."""

from __future__ import annotations

import itertools

import pytest

from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.paper.theorem import Sensitivities, binomial_mechanism_epsilon
from cpsgd.privacy import gdp_epsilon
from cpsgd.privacy.proofs.certified_gaussian import certified_epsilon
from reproduction.error_vs_epsilon import SCALES, ErrorFigure, certified_trials, compute

DIM, DELTA, EPSILONS = 64, 1e-6, (0.3, 1.0, 3.0)


@pytest.fixture(scope="module")
def figure() -> ErrorFigure:
    return compute(dim=DIM, delta=DELTA, epsilons=EPSILONS)


def errors(figure: ErrorFigure, method: str, scale: float | None = None) -> list[float]:
    series = next(s for s in figure.series if s.method == method and s.scale == scale)
    return [float("inf") if value is None else value for value in series.squared_error]


@pytest.mark.slow
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
