"""Who takes part: parsing and what is refused."""

from __future__ import annotations

import pytest

from cpsgd.errors import ParameterError
from cpsgd.neighbours import Participation


@pytest.mark.parametrize("text", ["once", "every", "poisson:0.25", "fixed-size:0.5"])
def test_text_round_trip(text: str) -> None:
    assert str(Participation.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "poisson", "once:1", "poisson:x", "poisson:0", "poisson:1.5", "poisson:nan", "sometimes"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        Participation.parse(text)


def test_each_sampling_scheme_names_the_adjacency_it_covers() -> None:
    Participation.poisson(0.1).check("zero-out")
    Participation.fixed_size(cohort=1, population=10).check("replace-one")
    for scheme in (Participation.once(), Participation.every()):
        scheme.check("zero-out")
        scheme.check("replace-one")
    with pytest.raises(ParameterError, match="zero-out"):
        Participation.poisson(0.1).check("replace-one")
    with pytest.raises(ParameterError, match="replace-one"):
        Participation.fixed_size(cohort=1, population=10).check("zero-out")


def test_only_one_round_counts_when_everybody_takes_part_once() -> None:
    assert Participation.once().counted_rounds(50) == 1
    assert Participation.every().counted_rounds(50) == 50
    assert Participation.poisson(0.1).counted_rounds(50) == 50


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(ParameterError, match="population"):
        Participation.fixed_size(cohort=11, population=10)
