"""Would the checks of the smoothed certificate notice? Every entry spoils one step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Array, Steps
from cpsgd.privacy import curves, smoothed
from cpsgd.privacy.proofs import certified_smooth as products
from cpsgd.privacy.proofs.certified_gaussian import GaussianCertificate

from . import product_checks as checks

Check = Callable[[], list[str]]


def no_overshoot(patch: pytest.MonkeyPatch) -> None:
    """Steps over a value of w are taken to stop there."""
    patch.setattr(smoothed.Growth, "_overshoots", property(lambda self: np.zeros((len(self.starts),) * 2)))


def steps_over_one_value_only(patch: pytest.MonkeyPatch) -> None:
    """A step over several values of w is charged as if it came from just below each."""

    def spoiled(self: smoothed.Growth) -> Array:
        lost = self.reach**2 * (self.rates[:-1] / self.rates[1:] - 1.0)
        return np.triu(np.broadcast_to(np.append(0.0, lost), (len(self.starts),) * 2), 1)

    patch.setattr(smoothed.Growth, "_overshoots", property(spoiled))


def rate_of_the_next_value(patch: pytest.MonkeyPatch) -> None:
    """κ at a node is used below it."""
    real = smoothed.growth

    def spoiled(*args: Any, **kwargs: Any) -> smoothed.Growth:
        found = real(*args, **kwargs)
        return smoothed.Growth(found.starts, np.append(found.rates[1:], found.rates[-1]), found.reach)

    patch.setattr(smoothed, "growth", spoiled)


def rates_too_small(patch: pytest.MonkeyPatch) -> None:
    """κ is a tenth too small everywhere."""
    real = smoothed.growth

    def spoiled(*args: Any, **kwargs: Any) -> smoothed.Growth:
        found = real(*args, **kwargs)
        return smoothed.Growth(found.starts, 0.9 * found.rates, found.reach)

    patch.setattr(smoothed, "growth", spoiled)


def no_bend(patch: pytest.MonkeyPatch) -> None:
    """A line in s is taken for a line in log s."""
    patch.setattr(smoothed, "_BENT", 0.0)


def one_order(patch: pytest.MonkeyPatch) -> None:
    """Only the more private of the two orders of a pair is looked at."""
    real = smoothed._moments

    def spoiled(*args: Any) -> Array:
        found = real(*args)
        return np.minimum(found, found[:, ::-1])

    patch.setattr(smoothed, "_moments", spoiled)


def mass_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """The mass of a cell is not spread to its ends but left in the middle, where the exponential is smaller."""

    def spoiled(x: Array, e: Array, w: float) -> Array:
        middle = 0.5 * (x[:, 1:] + x[:, :-1])
        x[:, :-1] = middle
        mass = np.zeros_like(x)
        cell = 0.5 * (e[:, 1:] + e[:, :-1]) * np.append(np.diff(middle), 0.0 * middle[:, :1], axis=1)
        mass[:, :-1] = cell * np.exp(-middle * (0.5 * middle / w + 0.5))
        return mass

    patch.setattr(smoothed, "_masses", spoiled)


def mean_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    """The mean of J's density is taken for the density in the middle at a slope that is too large."""
    real = smoothed._averages

    def spoiled(w: float, widths: Array, c0: Array, c1: Array) -> tuple[Array, Array]:
        value, bend = real(w, widths, c0, c1)
        return value + 0.05 * widths[:, None] / w, bend

    patch.setattr(smoothed, "_averages", spoiled)


def half_of_the_backgrounds(patch: pytest.MonkeyPatch) -> None:
    """Of each group of K only the first half is looked at."""
    real = curves._envelope
    patch.setattr(curves, "_envelope", lambda mixtures, *args: real(mixtures[: (len(mixtures) + 1) // 2], *args))


def all_others_on_one_side(patch: pytest.MonkeyPatch) -> None:
    """Clients at -1 are taken for clients at 1."""
    patch.setattr(curves._Power, "mirrored", lambda power: power)


def one_client_too_many(patch: pytest.MonkeyPatch) -> None:
    """The client itself is counted among the others."""
    real = curves.of_steps
    patch.setattr(
        curves,
        "of_steps",
        lambda steps, **kwargs: real(dataclasses.replace(steps, clients=steps.clients + 1), **kwargs),
    )


def mean_of_free_steps(patch: pytest.MonkeyPatch) -> None:
    """A bin of F counts as its mean, not as its smallest."""
    real = curves._common

    def spoiled(low: Array, high: Array, free: int, cut: float) -> tuple[list[tuple[float, curves._Power]], float]:
        shared = np.minimum(low, high)
        mean = round(free * float(shared.sum())) + 1
        return [(1.0, curves._power(shared / shared.sum(), min(free, mean), cut))], real(low, high, free, cut)[1]

    patch.setattr(curves, "_common", spoiled)


def nobody_between_the_blocks(patch: pytest.MonkeyPatch) -> None:
    """The blocks leave out the largest K."""
    real = curves._edges
    patch.setattr(curves, "_edges", lambda *given: real(*given)[:-1])


def one_sign(patch: pytest.MonkeyPatch) -> None:
    """Only positive t are looked at, for skewed coins too."""
    patch.setattr(BinomialLaw, "mirror", 0)


def forgotten_copy(patch: pytest.MonkeyPatch) -> None:
    """Of several coins only one is accounted for."""
    real = products.smoothed_certificate

    def spoiled(law: Steps, **kwargs: Any) -> GaussianCertificate:
        return real(dataclasses.replace(law, copies=1), **kwargs)

    patch.setattr(products, "smoothed_certificate", spoiled)


def tails_of_one_coordinate(patch: pytest.MonkeyPatch) -> None:
    """The slack is charged once, not for every coordinate."""
    real = products.smoothed_certificate

    def spoiled(law: Steps, *, dim: int, **kwargs: Any) -> GaussianCertificate:
        found = real(law, dim=dim, **kwargs)
        return dataclasses.replace(found, tail_mass=found.tail_mass / dim)

    patch.setattr(products, "smoothed_certificate", spoiled)


def free_thresholds(patch: pytest.MonkeyPatch) -> None:
    """Thresholds far out cost nothing."""
    real = products.smoothed_certificate

    def spoiled(law: Steps, **kwargs: Any) -> GaussianCertificate:
        found = real(law, **kwargs)
        return dataclasses.replace(found, tail_mass=0.5 * found.tail_mass)

    patch.setattr(products, "smoothed_certificate", spoiled)


def wrong_rates_of_few_clients() -> list[str]:
    """The quickest of the cases, which is enough to notice."""
    return checks.wrong_rates(checks.SINGLES[-1:])


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], Check]] = [
    (no_overshoot, checks.wrong_growth),
    (steps_over_one_value_only, checks.wrong_growth),
    (rate_of_the_next_value, wrong_rates_of_few_clients),
    (rates_too_small, wrong_rates_of_few_clients),
    (no_bend, checks.wrong_moments),
    (one_order, checks.wrong_moments),
    (mass_in_the_middle, checks.wrong_moments),
    (mean_the_wrong_way, checks.wrong_averages),
    (half_of_the_backgrounds, checks.wrong_curves),
    (all_others_on_one_side, checks.wrong_curves),
    (one_client_too_many, checks.wrong_curves),
    (mean_of_free_steps, checks.wrong_blocks),
    (nobody_between_the_blocks, checks.wrong_covers),
    (one_sign, checks.wrong_curves),
    (forgotten_copy, checks.wrong_repetitions),
    (tails_of_one_coordinate, checks.wrong_tails),
    (free_thresholds, checks.wrong_tails),
]


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        pytest.param(spoil, check, id=spoil.__name__, marks=pytest.mark.thorough if index else ())
        for index, (spoil, check) in enumerate(MUTATIONS)
    ],
)
def test_a_wrong_step_is_caught(
    spoil: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real ones pass: test_curves.py, test_smoothed.py and test_products.py.
    products._families.cache_clear()
    products._growth.cache_clear()
    spoil(monkeypatch)
    try:
        assert check() != []
    finally:
        products._families.cache_clear()
        products._growth.cache_clear()
