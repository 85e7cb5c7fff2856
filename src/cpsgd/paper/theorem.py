"""The paper's own privacy bound: Theorem 1 on the Binomial mechanism, and its use for the paper's protocols.

Agarwal, Suresh, Yu, Kumar, McMahan: "cpSGD: Communication-efficient and differentially-private distributed SGD",
NeurIPS 2018. This is the baseline; the certificates of this package are several times smaller. Numbers are rounded
up. If a condition of the theorem fails, `ConditionError` names a remedy.

For comparison only: the theorem is false for neighbours several standard deviations of the noise apart
(docs/proofs/paper-theorem.md), so no guarantee of this package rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpsgd import _validate
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Adjacency
from cpsgd.paper import bounds

if TYPE_CHECKING:
    from cpsgd.codec.pipeline import Parameters

CITATION = (
    "Theorem 1 with the sensitivities of stochastic rounding: Agarwal, Suresh, Yu, Kumar and McMahan, "
    '"cpSGD", NeurIPS 2018'
)

# A dozen roundings of about 1e-16 each.
_SAFE = 1.0 + 1e-14
# The most trials that an error names, and the most that a float holds.
_MOST_NAMED, _MOST_TRIALS = 2**53, 2**1000


@dataclass(frozen=True)
class Sensitivities:
    """Δ₁, Δ₂ and Δ∞: the largest distances between neighbours, in three norms."""

    l1: float
    l2: float
    linf: float


@dataclass(frozen=True)
class Constants:
    """b_p, c_p and d_p of Theorem 1 (equations for b_p, c_p, d_p in the paper's appendix)."""

    b: float
    c: float
    d: float

    @classmethod
    def of(cls, p: float) -> Constants:
        """Returns the constants at min(p, 1 - p).

        The paper's proof takes p <= 1/2 "by symmetry", but b_p as printed is not symmetric. Flipping all coins maps
        one case to the other. At p = 1/2, c_p is 7√2/4 = 2.4749; the theorem rounds it to 5/2.
        """
        p = min(p, 1.0 - p)
        squares = p**2 + (1.0 - p) ** 2
        cubes = p**3 + (1.0 - p) ** 3
        return cls(
            b=2.0 * squares / 3.0 + (1.0 - 2.0 * p),
            c=math.sqrt(2.0) * (3.0 * cubes + 2.0 * squares),
            d=4.0 * squares / 3.0,
        )


def binomial_mechanism_epsilon(
    *, noise_trials: int, p: float, dim: int, delta: float, sensitivities: Sensitivities, scale: float = 1.0
) -> float:
    """Returns ε of Theorem 1: f(D) + s (Z - Np) with Z ~ Binomial(N, p) in every coordinate is (ε, δ)-private.

    Args:
        noise_trials: N.
        p: Success probability.
        dim: d.
        delta: δ in (0, 1).
        sensitivities: Δ₁, Δ₂, Δ∞ of f, whose values are multiples of s.
        scale: s.

    Returns:
        ε, rounded up.

    Raises:
        ConditionError: N p (1 - p) < max(23 log(10 d/δ), 2 Δ∞/s); the message names the smallest N that suffices.

    Example:
        >>> one = Sensitivities(l1=1.0, l2=1.0, linf=1.0)
        >>> epsilon = binomial_mechanism_epsilon(noise_trials=2000, p=0.5, dim=1, delta=1e-6, sensitivities=one)
        >>> f"{epsilon:.7f}"
        '0.6375134'
    """
    _validate.integer("noise_trials", noise_trials, low=0)
    _check(p, dim, delta, sensitivities, scale)
    needed = _needed_variance(dim, delta, sensitivities, scale)
    if not _condition_holds(noise_trials, p, needed):
        smallest = _smallest(lambda trials: _condition_holds(trials, p, needed))
        raise ConditionError(
            f"Theorem 1 needs N p (1 - p) >= max(23 log(10 d/δ), 2 Δ∞/s) = {needed:.6g}, "
            f"got {noise_trials * p * (1.0 - p):.6g} with N={noise_trials}, p={p:g}. "
            + ("Choose a p nearer to ½." if smallest is None or smallest > _MOST_NAMED else f"N={smallest} would do.")
        )
    return _epsilon(noise_trials, p, dim, delta, sensitivities, scale)


def binomial_mechanism_trials(
    *, epsilon: float, p: float, dim: int, delta: float, sensitivities: Sensitivities, scale: float = 1.0
) -> int:
    """Returns the smallest N for which Theorem 1 applies and gives at most `epsilon`.

    Raises:
        ConditionError: No N that a float can hold suffices.

    Example:
        >>> one = Sensitivities(l1=1.0, l2=1.0, linf=1.0)
        >>> binomial_mechanism_trials(epsilon=1.0, p=0.5, dim=1, delta=1e-6, sensitivities=one)
        1483
    """
    _validate.positive("epsilon", epsilon)
    _check(p, dim, delta, sensitivities, scale)
    needed = _needed_variance(dim, delta, sensitivities, scale)

    def enough(trials: int) -> bool:
        return _condition_holds(trials, p, needed) and _epsilon(trials, p, dim, delta, sensitivities, scale) <= epsilon

    smallest = _smallest(enough)
    if smallest is None:
        raise ConditionError(
            f"No number of trials is enough for ε={epsilon!r} with p={p:g}: choose a larger ε, or a p nearer to ½."
        )
    return smallest


def quantization_sensitivities(
    *,
    dim: int,
    clip_norm: float,
    coordinate_range: float,
    levels: int,
    delta: float,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
) -> Sensitivities:
    """Returns Δ₁, Δ₂, Δ∞ of stochastic k-level rounding in units of s = 2X/(k - 1), with probability 1 - δ.

    The lemma behind the paper's theorem for π_sk(Bin): with a = √d Δ/s for neighbours at Euclidean distance Δ (2D for
    replace-one, so a = √d D/q and Δ/s = D/q with the paper's q = X/(k - 1)) and L = log(2/δ),

        Δ₁ = a + √(2 a L) + 4L/3,   Δ₂ = Δ/s + √(Δ₁ + √(2 a L)),   Δ∞ = k + 1.

    For zero-out a coordinate changes by at most half the range: Δ∞ = (k - 1)/2 + 2.

    Example:
        >>> found = quantization_sensitivities(dim=100, clip_norm=1.0, coordinate_range=1.0, levels=4, delta=1e-6)
        >>> f"{found.l1:.1f} {found.l2:.2f} {found.linf:.0f}"
        '78.8 13.41 5'
    """
    _validate.integer("dim", dim, low=1)
    _validate.integer("levels", levels, low=2)
    _validate.probability("delta", delta)
    neighbours = Adjacency.parse(adjacency)
    scale = 2.0 * _validate.positive("coordinate_range", coordinate_range) / (levels - 1)
    l2 = neighbours.distance(_validate.positive("clip_norm", clip_norm)) / scale
    l1 = math.sqrt(dim) * l2
    log = math.log(2.0 / delta)
    deviation = math.sqrt(2.0 * l1 * log)
    rounded_l1 = l1 + deviation + 4.0 / 3.0 * log
    return Sensitivities(
        l1=rounded_l1 * _SAFE,
        l2=(l2 + math.sqrt(rounded_l1 + deviation)) * _SAFE,
        linf=neighbours.distance(0.5 * (levels - 1)) + 2.0,
    )


def theorem_epsilon(
    protocol: Parameters,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    noise_clients: int | None = None,
) -> float:
    """Returns ε of the paper's theorems for π_sk(Bin(m, p)) and Rot(π_sk(Bin(m, p))); see `rounded_epsilon`.

    Args:
        protocol: A Binomial protocol.
        delta: δ in (0, 1), in total.
        adjacency: The paper's is "replace-one".
        noise_clients: Number of honest clients whose noise is in the sum; by default all of the protocol's.

    Raises:
        ConditionError: There is no noise, too little of it for Theorem 1, or for Rot the range X is too small.
        ParameterError: The paper has no such theorem for the protocol's mechanism.

    Example:
        >>> from cpsgd import Protocol
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=1000, clip_norm=1.0, levels=4, trials=200)
        >>> f"{theorem_epsilon(protocol, 1e-6):.3f}"
        '0.227'
    """
    mechanism: Any = protocol.mechanism
    if mechanism.name != "binomial":
        raise ParameterError(
            f"The paper's Theorem 1 is about Binomial noise, not about {mechanism.name}; use cpsgd.guarantee."
        )
    return rounded_epsilon(
        clients=protocol.clients,
        dim=protocol.dim,
        clip_norm=protocol.clip_norm,
        coordinate_range=mechanism.coordinate_range,
        levels=mechanism.levels,
        trials=mechanism.trials,
        p=mechanism.p,
        rotate=protocol.rotate,
        delta=delta,
        adjacency=adjacency,
        noise_clients=noise_clients,
    )


def rounded_epsilon(
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    coordinate_range: float,
    levels: int,
    trials: int,
    p: float,
    rotate: bool,
    delta: float,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    noise_clients: int | None = None,
) -> float:
    """Returns ε by Theorem 1 of rounding to k levels plus Binomial(m, p) noise, rounded up. `delta` is the total δ.

    π_sk(Bin) is (ε, 2δ')-private and Rot(π_sk(Bin)) (ε, 3δ')-private, with ε by Theorem 1 at δ' and the lemma's
    sensitivities. One share of δ' is for the theorem, one for the lemma, and one for rotations that leave a coordinate
    beyond X. So δ' = δ/2 or δ/3. For Rot the paper sets X = 2D√(log(2nd/δ)/d); a larger X is as good, a smaller one is
    refused. Coordinates are clipped here, so that the third share is not needed; it is kept as in the paper.

    Raises:
        ConditionError: There is no noise, too little of it for Theorem 1, or for Rot the range X is too small.

    Example:
        >>> epsilon = rounded_epsilon(clients=10_000, dim=1000, clip_norm=1.0, coordinate_range=0.5, levels=4,
        ...                           trials=200, p=0.5, rotate=True, delta=1e-6)
        >>> f"{epsilon:.3f}"
        '0.199'
    """
    _validate.probability("delta", delta)
    honest = clients if noise_clients is None else _validate.integer("noise_clients", noise_clients, low=0)
    if rotate:
        needed = bounds.coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)
        # Privacy does not depend on this condition, so a range that was rounded in a file is accepted.
        if coordinate_range < needed * (1.0 - 1e-6):
            raise ConditionError(
                f"The paper's theorem for Rot takes X = 2D√(log(2nd/δ)/d) = {needed:.6g} (larger is fine), "
                f"got coordinate_range={coordinate_range:.6g}. The certificates have no such condition."
            )
    share = delta / (3.0 if rotate else 2.0)
    sensitivities = quantization_sensitivities(
        dim=dim,
        clip_norm=clip_norm,
        coordinate_range=coordinate_range,
        levels=levels,
        delta=share,
        adjacency=adjacency,
    )
    return binomial_mechanism_epsilon(
        noise_trials=trials * honest, p=p, dim=dim, delta=share, sensitivities=sensitivities
    )


def _check(p: float, dim: int, delta: float, sensitivities: Sensitivities, scale: float) -> None:
    _validate.probability("p", p)
    _validate.integer("dim", dim, low=1)
    _validate.probability("delta", delta)
    _validate.positive("scale", scale)
    for name in ("l1", "l2", "linf"):
        _validate.positive(name, getattr(sensitivities, name))


def _needed_variance(dim: int, delta: float, sensitivities: Sensitivities, scale: float) -> float:
    """Returns max(23 log(10 d/δ), 2 Δ∞/s), rounded up."""
    return max(23.0 * math.log(10.0 * dim / delta), 2.0 * sensitivities.linf / scale) * _SAFE


def _smallest(enough: Callable[[int], bool]) -> int | None:
    """Returns the smallest N with enough(N), monotone in N; None if N exceeds what a float can hold."""
    short, smallest = 0, 1
    while not enough(smallest):
        short, smallest = smallest, 2 * smallest
        if smallest > _MOST_TRIALS:
            return None
    while smallest - short > 1:
        middle = (short + smallest) // 2
        short, smallest = (short, middle) if enough(middle) else (middle, smallest)
    return smallest


def _condition_holds(trials: int, p: float, needed: float) -> bool:
    return trials * p * (1.0 - p) >= needed


def _epsilon(trials: int, p: float, dim: int, delta: float, sensitivities: Sensitivities, scale: float) -> float:
    """Returns ε by the equation of Theorem 1, rounded up, without its condition."""
    constants = Constants.of(p)
    variance = trials * p * (1.0 - p)
    log, log10 = math.log(1.25 / delta), math.log(10.0 / delta)
    gaussian = sensitivities.l2 * math.sqrt(2.0 * log / variance)
    middle = (sensitivities.l2 * constants.c * math.sqrt(log10) + sensitivities.l1 * constants.b) / (1.0 - delta / 10.0)
    last = sensitivities.linf * (2.0 / 3.0 * log + constants.d * math.log(20.0 * dim / delta) * log10)
    return (gaussian + (middle + last) / variance) / scale * _SAFE
