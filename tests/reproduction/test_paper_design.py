"""Designs by the paper's theorem, against a search through all of them."""

from __future__ import annotations

import pytest

from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.paper import bounds
from cpsgd.paper.theorem import theorem_epsilon
from cpsgd.privacy.guarantees import guarantee
from cpsgd.protocol import Protocol
from reproduction.paper_design import PaperDesign, paper_design

CLIENTS, DIM, DELTA = 1000, 650, 1e-6


def bound(levels: int, trials: int, clip_norm: float = 1.0) -> float:
    """ε by the theorem, with the paper's range; infinite where it does not apply."""
    size = {"clients": CLIENTS, "dim": DIM, "clip_norm": clip_norm}
    try:
        return theorem_epsilon(Protocol.rotated_binomial(**size, levels=levels, trials=trials, delta=DELTA), DELTA)
    except ConditionError:
        return float("inf")


def protocol_of(design: PaperDesign, clients: int = CLIENTS, dim: int = DIM, clip_norm: float = 1.0) -> Protocol:
    """The rotated Binomial protocol with fair coins that the design is meant for."""
    return Protocol.rotated_binomial(clients=clients, dim=dim, clip_norm=clip_norm, **vars(design))


@pytest.mark.parametrize(("epsilon", "bits"), [(2.0, 6), (8.0, 6), (8.0, 8), (40.0, 5)])
def test_the_largest_number_of_levels_that_keeps_the_wish(epsilon: float, bits: int) -> None:
    size = 2**bits
    kept = [levels for levels in range(2, size) if bound(levels, size - levels) <= epsilon]
    found = paper_design(CLIENTS, DIM, epsilon, DELTA, bits=bits)
    assert (found.levels, found.trials) == (max(kept), size - max(kept))
    assert protocol_of(found).bits_per_coordinate == bits


def test_the_protocol_is_the_papers() -> None:
    found = paper_design(CLIENTS, DIM, 8.0, DELTA, 3.0, bits=8)
    assert found.coordinate_range == bounds.coordinate_range(clients=CLIENTS, dim=DIM, clip_norm=3.0, delta=DELTA)
    # For these clients, coordinates and norm, fair coins and rotation; one level more would be too many.
    assert theorem_epsilon(protocol_of(found, clip_norm=3.0), DELTA) <= 8.0
    assert bound(found.levels + 1, found.trials - 1, clip_norm=3.0) > 8.0
    # The units of vectors do not matter.
    assert found.levels == paper_design(CLIENTS, DIM, 8.0, DELTA, bits=8).levels


@pytest.mark.parametrize(("epsilon", "bits"), [(4.0, 6), (4.0, 8), (2.0, 10)])
def test_certificates_prove_less_than_half_of_it_at_the_papers_size(epsilon: float, bits: int) -> None:
    found = protocol_of(paper_design(10_000, 51_370, epsilon, 1e-9, bits=bits), 10_000, 51_370)
    assert guarantee(found, 1e-9).epsilon < 0.5 * theorem_epsilon(found, 1e-9)


@pytest.mark.parametrize(
    "wish",
    [
        (CLIENTS, DIM, 0.01, DELTA, 8),  # too little noise for so small an ε
        (10, DIM, 100.0, DELTA, 4),  # too little for the theorem's condition, whatever ε
    ],
)
def test_what_the_theorem_does_not_allow(wish: tuple[int, int, float, float, int]) -> None:
    *parameters, bits = wish
    with pytest.raises(InfeasibleError, match=rf"no k and m with {bits} bits per coordinate keep ε={wish[2]:g}"):
        paper_design(*parameters, bits=bits)


@pytest.mark.parametrize("bits", [1, 25, 6.5])
def test_bits_are_whole_and_few(bits: float) -> None:
    with pytest.raises(ParameterError, match="bits"):
        paper_design(CLIENTS, DIM, 8.0, DELTA, bits=bits)  # type: ignore[arg-type]
