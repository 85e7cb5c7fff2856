"""The errors of other protocols by their authors' designs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpsgd.errors import ParameterError
from cpsgd.planner.problem import Problem
from cpsgd.planner.requirements import Requirements
from reproduction.published_designs import PublishedProblem, published_error

MANY = PublishedProblem(clients=10_000, dim=65_536, epsilon=2.0, delta=1e-9, bits=18.0, secure=True)
FEW = PublishedProblem(clients=100, dim=10_000, epsilon=2.0, delta=1e-6, bits=14.0, secure=True)


def ratio(name: str, problem: PublishedProblem, **changes: float) -> float:
    problem = replace(problem, **changes)  # type: ignore[arg-type]
    found = published_error(name, problem)
    assert found is not None
    required = Requirements(clients=problem.clients, dim=problem.dim, epsilon=problem.epsilon, delta=problem.delta)
    return found / Problem.of(required).gaussian_squared_error


@pytest.mark.parametrize("name", ["discrete-gaussian", "skellam"])
def test_lattices_and_moduli(name: str) -> None:
    assert ratio(name, MANY) == pytest.approx(1.13, abs=0.005)
    assert ratio(name, FEW) == pytest.approx(1.16, abs=0.005)
    # What their accounting costs even with real numbers for messages.
    assert ratio(name, MANY, bits=30.0) == pytest.approx(1.101, abs=0.002)
    # They send sums modulo M, whoever adds them up.
    assert ratio(name, MANY, secure=False) == ratio(name, MANY)
    # Sums of so many clients' roundings do not fit.
    assert published_error(name, replace(MANY, bits=9.0)) is None


def test_poisson_binomial_pays_for_every_coordinate() -> None:
    assert ratio("coins", MANY, bits=1.0, secure=False) == pytest.approx(7.0, abs=0.1)
    assert ratio("coins", MANY, bits=14.0) == ratio("coins", MANY, bits=1.0, secure=False)
    assert published_error("coins", replace(MANY, bits=13.0)) is None
    assert published_error("coins", replace(MANY, bits=0.9, secure=False)) is None


def test_the_paper() -> None:
    errors = [ratio("binomial", MANY, bits=bits, secure=False) for bits in (3.0, 8.0, 16.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] == pytest.approx(11.3, abs=0.2)
    assert published_error("binomial", replace(MANY, bits=1.0, secure=False)) is None
    assert published_error("binomial", replace(FEW, bits=2.0, secure=False)) is None


@pytest.mark.parametrize("name", ["binomial", "discrete-gaussian", "skellam", "coins"])
def test_more_privacy_costs_more(name: str) -> None:
    strict = published_error(name, replace(MANY, epsilon=0.5, bits=24.0))
    loose = published_error(name, replace(MANY, bits=24.0))
    assert strict is not None
    assert loose is not None
    assert strict > 4.0 * loose


def test_nothing_is_published_about_others() -> None:
    with pytest.raises(ParameterError, match="gaussian"):
        published_error("gaussian", MANY)
    with pytest.raises(ParameterError, match="one of"):
        published_error("unknown", MANY)
