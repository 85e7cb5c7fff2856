"""Would the tests notice? Every entry spoils one formula; a check that passes on the real code must then complain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri

from cpsgd.mechanisms.binomial import Binomial, BinomialLaw, BinomialNoise
from cpsgd.mechanisms.law import Array, Law, Window
from cpsgd.neighbours import Adjacency
from cpsgd.paper import theorem
from cpsgd.privacy import fixed_size, loss_sums, moments
from cpsgd.privacy.proofs import certified_gaussian as certificate
from cpsgd.privacy.proofs import certified_renyi as renyi

from . import checks

Check = Callable[[], list[str]]


def halved_sensitivity(patch: pytest.MonkeyPatch) -> None:
    """D instead of 2D between neighbours."""
    real = Binomial.sensitivity

    def spoiled(mechanism: Binomial, **vectors: Any) -> float:
        return real(mechanism, **{**vectors, "adjacency": Adjacency.ZERO_OUT})

    patch.setattr(Binomial, "sensitivity", spoiled)


def one_client_too_many(patch: pytest.MonkeyPatch) -> None:
    """Noise of a client that did not answer is counted."""
    real = BinomialNoise.law

    def spoiled(noise: BinomialNoise, honest: int) -> BinomialLaw:
        return real(noise, honest + 1)

    patch.setattr(BinomialNoise, "law", spoiled)


def free_tails(patch: pytest.MonkeyPatch) -> None:
    """What is clamped away costs nothing."""
    real = certificate.central_range
    patch.setattr(certificate, "central_range", lambda law, mass: (*real(law, mass)[:2], 0.0))


def one_sided_tail(patch: pytest.MonkeyPatch) -> None:
    """Only the upper tail is charged."""
    real = certificate.central_range

    def spoiled(law: Window, mass: float) -> tuple[int, int, float]:
        low, high, _ = real(law, mass)
        return low, high, float(law.above[high - law.first])

    patch.setattr(certificate, "central_range", spoiled)


def tails_of_one_coordinate(patch: pytest.MonkeyPatch) -> None:
    """The tail of one coordinate is charged, not of all d."""
    real = certificate.central_range

    def spoiled(law: Window, mass: float) -> tuple[int, int, float]:
        low, high, outside = real(law, mass)
        return low, high, outside / 3.0

    patch.setattr(certificate, "central_range", spoiled)


def range_not_extended(patch: pytest.MonkeyPatch) -> None:
    """The range is not widened by the steps between neighbours."""
    real = certificate.check_parameters
    patch.setattr(certificate, "check_parameters", lambda *args: 0 * real(*args))


def one_end_of_the_interval(patch: pytest.MonkeyPatch) -> None:
    """φ(q(F)) is taken at the inner end of the interval only, where it is larger."""

    def spoiled(law: Window) -> Array:
        quantile = ndtri(np.minimum(np.minimum(law.below, law.above)[:-1], 0.5))
        inverse = math.sqrt(2 * math.pi) * np.exp(0.5 * quantile**2)
        return np.append(law.mass[1:-1] * np.minimum(inverse[:-1], inverse[1:]), np.inf)

    patch.setattr(certificate, "_quotients", spoiled)


def one_direction(patch: pytest.MonkeyPatch) -> None:
    """Only D_α(P_t, Z_0) or only D_α(Z_0, P_t) is bounded: here the smaller of the two."""
    real = moments._Side.growth
    patch.setattr(
        moments._Side,
        "growth",
        lambda side, exponent, reach: min(real(side, exponent, reach), real(side, 1.0 - exponent, reach)),
    )


def one_sign(patch: pytest.MonkeyPatch) -> None:
    """Only positive t are looked at, for skewed coins too."""
    real = moments.Moments.__init__

    def spoiled(self: moments.Moments, law: Law, **kwargs: Any) -> None:
        real(self, law, **kwargs)
        self._sides = [min(self._sides, key=lambda side: side.growth(8.0, self._reach))]

    patch.setattr(moments.Moments, "__init__", spoiled)


def grid_without_curvature(patch: pytest.MonkeyPatch) -> None:
    """The supremum over t is replaced by the value at the largest t."""
    patch.setattr(
        moments._Side,
        "growth",
        lambda side, exponent, reach: moments._Node(side, exponent, math.ceil(reach) - 1, 1.0).value,
    )


def conversion_without_log_order(patch: pytest.MonkeyPatch) -> None:
    """The conversion subtracts log α twice."""
    real = renyi.rdp_epsilon
    patch.setattr(
        renyi,
        "rdp_epsilon",
        lambda divergence, order, delta: real(divergence, order, delta) - math.log(order) / (order - 1.0) - 0.02,
    )


def divergence_of_one_round(patch: pytest.MonkeyPatch) -> None:
    """The rounds' divergences are not added up."""
    real = renyi._Orders.__init__

    def spoiled(orders: renyi._Orders, rounds: Any, sensitivity: float, delta: float) -> None:
        real(orders, rounds, sensitivity, delta)
        orders._rounds = [(bounds, 1) for bounds, _ in rounds]

    patch.setattr(renyi._Orders, "__init__", spoiled)


def tails_of_one_round(patch: pytest.MonkeyPatch) -> None:
    """The rounds' tails are counted once."""
    real = renyi._Orders.__init__

    def spoiled(orders: renyi._Orders, rounds: Any, sensitivity: float, delta: float) -> None:
        real(orders, rounds, sensitivity, delta)
        orders._tail = sum(bounds.tail_mass for bounds, _ in rounds)

    patch.setattr(renyi._Orders, "__init__", spoiled)


def tails_for_free_in_the_conversion(patch: pytest.MonkeyPatch) -> None:
    """What the tails spend is reported, but not taken out of δ."""
    real = renyi._Orders.at

    def spoiled(orders: renyi._Orders, order: float) -> renyi.RenyiCertificate:
        tail, orders._tail = orders._tail, 0.0
        found = dataclasses.replace(real(orders, order), tail_mass=tail)
        orders._tail = tail
        return found

    patch.setattr(renyi._Orders, "at", spoiled)


def hoelder_without_its_second_factor(patch: pytest.MonkeyPatch) -> None:
    """Between the orders 2 and 3 the curvature of the order 2 is taken."""

    def spoiled(node: moments._Node, exponent: float, second: moments._Node, third: moments._Node) -> None:
        node.curvature, node.curvature_error = second.curvature, 0.0

    patch.setattr(moments._Node, "bound_curvature", spoiled)


def kinds(**factors: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Fixed-size rounds with a smaller μ or rate."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        real = fixed_size._pair
        patch.setattr(
            fixed_size,
            "_pair",
            lambda kind, loss: real(
                dataclasses.replace(kind, **{name: factor * getattr(kind, name) for name, factor in factors.items()}),
                loss,
            ),
        )

    return spoil


def one_round_too_few(patch: pytest.MonkeyPatch) -> None:
    """Of several fixed-size rounds one is not composed."""
    real = fixed_size.sampled_profile
    patch.setattr(
        fixed_size,
        "sampled_profile",
        lambda rounds, points: real([dataclasses.replace(k, count=max(1, k.count - 1)) for k in rounds], points),
    )


def negative_losses_left_out(patch: pytest.MonkeyPatch) -> None:
    """The pair of fixed-size rounds has no losses below zero."""
    real = fixed_size._pair

    def spoiled(kind: fixed_size.SampledRounds, loss: Array) -> loss_sums.Losses:
        found = real(kind, loss)
        return dataclasses.replace(found, mass=np.where(np.signbit(found.loss), 0.0, found.mass))

    patch.setattr(fixed_size, "_pair", spoiled)


def constants(**changes: float) -> Callable[[pytest.MonkeyPatch], None]:
    """One of Theorem 1's constants is off by a factor."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        real = theorem.Constants.of
        patch.setattr(
            theorem.Constants,
            "of",
            lambda p: dataclasses.replace(
                real(p), **{name: factor * getattr(real(p), name) for name, factor in changes.items()}
            ),
        )

    return spoil


def standard_deviation_of_one_client(patch: pytest.MonkeyPatch) -> None:
    """μ is not multiplied by the distance."""
    real = certificate.gaussian_certificate
    patch.setattr(
        certificate,
        "gaussian_certificate",
        lambda law, **kwargs: dataclasses.replace(real(law, **kwargs), mu=real(law, **kwargs).unit_mu),
    )


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], Check]] = [
    (halved_sensitivity, checks.wrong_guarantees),
    (one_client_too_many, checks.wrong_guarantees),
    (free_tails, checks.wrong_certificates),
    (one_sided_tail, checks.wrong_certificates),
    (tails_of_one_coordinate, checks.wrong_certificates),
    (range_not_extended, checks.wrong_certificates),
    (one_end_of_the_interval, checks.wrong_certificates),
    (standard_deviation_of_one_client, checks.wrong_certificates),
    (one_direction, checks.wrong_moments),
    (one_sign, checks.wrong_moments),
    (grid_without_curvature, checks.wrong_moments),
    (conversion_without_log_order, checks.wrong_conversions),
    (divergence_of_one_round, checks.wrong_sums),
    (tails_of_one_round, checks.wrong_sums),
    (tails_for_free_in_the_conversion, checks.wrong_sums),
    (hoelder_without_its_second_factor, checks.wrong_moments),
    (kinds(mu=0.99), checks.wrong_sampling),
    (kinds(rate=0.99), checks.wrong_sampling),
    (one_round_too_few, checks.wrong_sampling),
    (negative_losses_left_out, checks.wrong_sampling),
    (constants(b=0.5), checks.wrong_theorem),
    (constants(c=0.5**0.5), checks.wrong_theorem),
    (constants(d=0.5), checks.wrong_theorem),
]


@pytest.mark.parametrize("check", list(dict.fromkeys(check for _, check in MUTATIONS)))
def test_the_real_formulas_pass(check: Check) -> None:
    assert check() == []


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        pytest.param(spoil, check, id=spoil.__name__, marks=pytest.mark.thorough if index else ())
        for index, (spoil, check) in enumerate(MUTATIONS)
    ],
)
def test_a_wrong_formula_is_caught(
    spoil: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    assert check() != []
