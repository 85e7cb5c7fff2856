"""Which data sets are neighbours, and how far apart their vectors are."""

from __future__ import annotations

import json

import numpy as np
import pytest

import cpsgd
from cpsgd import Protocol
from cpsgd.errors import ParameterError
from cpsgd.neighbours import Adjacency, Participation


def test_names() -> None:
    assert [str(adjacency) for adjacency in Adjacency] == ["replace-one", "zero-out"]
    assert Adjacency.parse("replace-one") is Adjacency.REPLACE_ONE
    assert Adjacency.parse("zero-out") is Adjacency.ZERO_OUT
    assert Adjacency.parse(Adjacency.ZERO_OUT) is Adjacency.ZERO_OUT
    assert cpsgd.Adjacency is Adjacency
    # As text wherever files and tables hold it.
    assert json.dumps({"adjacency": Adjacency.ZERO_OUT}) == '{"adjacency": "zero-out"}'


@pytest.mark.parametrize("name", ["add-remove", "", "REPLACE_ONE", "Zero-Out", None, 1])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ParameterError, match=r"\['replace-one', 'zero-out'\], got") as caught:
        Adjacency.parse(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("clip_norm", [1e-20, 0.3, 1.0, 7.0])
def test_distances(clip_norm: float) -> None:
    assert Adjacency.REPLACE_ONE.distance(clip_norm) == 2.0 * clip_norm
    assert Adjacency.ZERO_OUT.distance(clip_norm) == clip_norm
    assert (Adjacency.REPLACE_ONE.reach, Adjacency.ZERO_OUT.reach) == (2.0, 1.0)


@pytest.mark.parametrize("stated", [0.5, 1.0, 1.7, 2.0, 9.0])
def test_a_stated_distance_is_one_of_two_clients_and_not_from_zero(stated: float) -> None:
    """Vectors may be near each other and all far from zero."""
    assert Adjacency.REPLACE_ONE.distance(1.0, stated) == min(2.0, stated)
    assert Adjacency.ZERO_OUT.distance(1.0, stated) == 1.0


@pytest.mark.parametrize("adjacency", Adjacency)
def test_no_neighbours_are_further_apart(adjacency: Adjacency) -> None:
    generator = np.random.default_rng(1)
    vectors = generator.normal(size=(1_000, 5))
    vectors *= 3.0 / np.linalg.norm(vectors, axis=1, keepdims=True)
    others = -vectors if adjacency is Adjacency.REPLACE_ONE else np.zeros_like(vectors)
    distances = np.linalg.norm(vectors - others, axis=1)
    assert distances.max() == pytest.approx(adjacency.distance(3.0), rel=1e-12)
    inside = vectors * generator.random((1_000, 1))
    others = np.roll(inside, 1, axis=0) if adjacency is Adjacency.REPLACE_ONE else np.zeros_like(inside)
    assert np.linalg.norm(inside - others, axis=1).max() <= adjacency.distance(3.0)


def test_zeroing_out_is_half_as_far_for_every_mechanism() -> None:
    common = {"clients": 3, "dim": 9, "clip_norm": 2.0}
    for protocol in (
        Protocol.gaussian(**common, sigma=1.0),
        Protocol.binomial(**common, levels=5, trials=9),
        Protocol.rotated_binomial(**common, levels=5, trials=9, coordinate_range=0.1),
    ):
        far, near = (
            protocol.mechanism.sensitivity(dim=9, clip_norm=2.0, adjacency=adjacency)
            for adjacency in (Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT)
        )
        assert near == 0.5 * far > 0.0


# ------------------------------------------------------------------ participation


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
