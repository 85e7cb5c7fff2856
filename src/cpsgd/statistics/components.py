"""Principal components of clients' points: their covariance, one private mean.

Every client holds one point x in a public ball and sends, once, the products of its coordinates: the upper triangle of
x xᵀ. Entries off the diagonal are multiplied by √2, so that the vector's Euclidean norm is the matrix's Frobenius norm.
Behind it is the point itself times a weight a, for the covariance M - m mᵀ needs the mean m, too. The eigenvectors of
the covariance are post-processing and cost nothing. docs/other-uses.md derives the best a, and says why this is more
accurate than power iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError
from cpsgd.planner import Plan
from cpsgd.privacy import Guarantee
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import noise_norm
from cpsgd.statistics.planned import Planned
from cpsgd.statistics.points import (
    Ball,
    Columns,
    PointOptions,
    PointStatistic,
    ball_of,
    columns_of,
    of_rows,
    paid,
    private_mean,
)
from cpsgd.statistics.questions import Geometry, Matrix, Question, Vectors
from cpsgd.statistics.results import Reading, told
from cpsgd.statistics.rows import Missing, interval_width

# ‖m‖ in units of the radius that the weight of the mean is made for.
_TYPICAL_MEAN = 0.5
_REASON = "each vector is made here from a point x of the unit ball, the products x xᵀ and a x"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PCAResult(PointStatistic):
    """The components: groups are directions, names are columns.

    Directions are orthonormal, that of the largest variance first, and such that the largest coordinate of each is
    positive. Where columns have bounds, coordinates are in units of half their widths. Intervals are estimates, by
    perturbation to first order, and [-1, 1] where noise may have mixed a direction with others.

    Attributes:
        variances: The points' variances along the components (divided by the number of clients), noise included.
        total_variance: The trace of the covariance, noise included.
        mean: The points' mean, noise included; the given one where it is public.
        expected_angle: An estimate of the largest angle, in radians, between the components' span and that of the
            exact ones; see `estimated_angle`.
    """

    variances: Matrix
    total_variance: float
    mean: Matrix
    expected_angle: float

    @property
    def components(self) -> Matrix:
        """One row per direction: `values`."""
        return self.values

    @property
    def details(self) -> dict[str, Any]:
        """Variances, the mean by column, and the expected angle."""
        return {
            "variances": self.variances.tolist(),
            "total_variance": self.total_variance,
            "mean": dict(zip(self.names, self.mean.tolist(), strict=True)),
            "expected_angle": self.expected_angle,
        }


@dataclass(frozen=True)
class MomentVector:
    """Layout of a client's vector: a point's products, and behind them the point's d coordinates times the weight a.

    a is 0 where the mean is public and points are not sent.
    """

    dim: int
    weight: float

    @classmethod
    def of(cls, dim: int, *, with_mean: bool) -> MomentVector:
        """Returns the layout with the best weight."""
        return cls(dim, math.sqrt(2.0 * _TYPICAL_MEAN / math.sqrt(dim + 1.0)) if with_mean else 0.0)

    @property
    def length(self) -> int:
        """Number of coordinates of a vector."""
        return self.dim * (self.dim + 1) // 2 + (self.dim if self.weight else 0)

    @property
    def clip_norm(self) -> float:
        """D = √(1 + a²), which no client in the ball exceeds."""
        return math.hypot(1.0, self.weight)

    @property
    def distance(self) -> float:
        """The largest distance between two clients' vectors: (2 + a²)/√2 where a² <= 2 and d > 1.

        The proof, with the cases a² > 2 and d = 1, is in docs/proofs/nearer-vectors.md. In float32 points are off by
        2^-24 of themselves, and vectors by three roundings: together 2^-21, at most.
        """
        a = self.weight
        if self.dim == 1:
            v = 0.5 - 0.5 * math.sqrt(max(0.0, 1.0 - 2.0 * a * a))
            exact = max(2.0 * a, (1.0 + v) * math.hypot(1.0 - v, a))
        else:
            exact = (2.0 + a * a) / math.sqrt(2.0) if a * a <= 2.0 else 2.0 * a
        return min(exact * (1.0 + 2.0**-21), 2.0 * self.clip_norm)

    def write(self, points: Vectors) -> Vectors:
        """Returns the clients' vectors: the triangle of products, and behind it the point."""
        rows, columns = np.triu_indices(self.dim)
        products = points[:, rows] * points[:, columns]
        products *= _isometry(rows, columns).astype(np.float32)
        return np.hstack([products, np.float32(self.weight) * points]) if self.weight else products

    def read(self, mean: Matrix) -> tuple[Matrix, Matrix]:
        """Returns the matrix of second moments and the points' mean (zero where it was not sent)."""
        rows, columns = np.triu_indices(self.dim)
        moments = np.empty((self.dim, self.dim))
        moments[rows, columns] = moments[columns, rows] = mean[: len(rows)] / _isometry(rows, columns)
        return moments, mean[len(rows) :] / self.weight if self.weight else np.zeros(self.dim)


class Components(Question[PCAResult]):
    """The directions of largest variance of the clients' points.

    One round, for clients that each hold a point x of a public ball; a client with several rows has their mean.
    `MomentVector` says what is sent.

    Args:
        columns: The points' coordinates: names of columns with their bounds, in units of which variances are. Or names,
            or their number, with a radius.
        components: Number of directions, at most the points' coordinates.
        radius: Public bound on a point's distance from `mean`, or from zero; points beyond are moved to the ball's
            surface. Choose it without looking at the data.
        mean: The points' mean where it is public. None to find it from the points, privately, in the same round.
        missing: What a missing value counts as: "bounds" for the middle of its bounds, or a value.

    Example:
        >>> asked = Components(2, 1, radius=1.0).plan(clients=400, epsilon=8.0, delta=1e-6, bits=8)
        >>> points = 0.1 + np.random.default_rng(0).normal(size=(400, 2)) * [0.4, 0.1]
        >>> found = asked.aggregate([asked.encode(point) for point in points])
        >>> abs(found.components).round()
        array([[1., 0.]])
    """

    def __init__(
        self,
        columns: Columns,
        components: int,
        *,
        radius: float | None = None,
        mean: ArrayLike | None = None,
        missing: Missing = None,
    ) -> None:
        self.ball = Ball.of(columns, radius, mean, missing)
        self.components = _validate.integer("components", components, low=1, high=self.ball.dim)
        self.layout = MomentVector.of(self.ball.dim, with_mean=mean is None)

    @property
    def geometry(self) -> Geometry:
        """Dimension, largest norm and largest distance of the vectors; derived in `MomentVector`."""
        return Geometry.round(self.layout.length, self.layout.clip_norm, self.layout.distance, _REASON, rounding=1.0)

    def vector(self, value: object) -> Vectors:
        """Returns one client's vector; see `Ball.point` for what a value may be."""
        return self.layout.write(self.ball.point(value)).reshape(-1)

    def plan(self, clients: int, epsilon: float, delta: float = 0.0, **requirements: Any) -> Planned[PCAResult]:
        """Plans the round, unless the budget is so small that noise would hide every variance; see `Question.plan`."""
        planned = super().plan(clients, epsilon, delta, **requirements)
        _check_budget(planned.plan, self.ball.dim)
        return planned

    def answer(
        self, planned: Planned[PCAResult], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> PCAResult:
        """Returns the directions of largest variance, with intervals, from the decoded mean of the clients' vectors."""
        moments, centre = self.layout.read(mean)
        covariance = moments - np.outer(centre, centre)
        variances, directions = _eigen(covariance)
        deviation = _deviation(planned.protocol, count)
        angle = estimated_angle(variances, directions, self.components, deviation, centre, self.layout.weight)
        spread = _spread(variances, directions, self.components, deviation, centre, self.layout.weight)
        reach = interval_width(confidence, planned.rate) * spread
        names, found = tuple(f"component {i + 1}" for i in range(self.components)), directions[: self.components]
        low, high = np.maximum(found - reach, -1.0), np.minimum(found + reach, 1.0)
        reading, radius = Reading(self.ball.columns, names, found, low, high), self.ball.radius
        return PCAResult(
            **told("pca", reading, planned.plan, guarantee, count, confidence, self.ball.bounds),
            plan=planned.plan,
            guarantee=guarantee,
            group_by=("component",),
            variances=radius**2 * variances[: self.components],
            total_variance=radius**2 * float(np.trace(covariance)),
            mean=self.ball.outside(centre),
            expected_angle=angle,
        )


def pca(
    points: object,
    components: int,
    epsilon: float,
    delta: float = 0.0,
    *,
    mean: ArrayLike | None = None,
    **options: Unpack[PointOptions],
) -> PCAResult:
    """Finds the directions of largest variance so that (epsilon, delta) protects each client's point.

    Args:
        points: Any table that `mean` takes, or an array with one point per row. Every client's message is simulated.
        components: Number of directions, at most the points' coordinates.
        epsilon: ε, for replacing one client's point (replace-one neighbours).
        delta: δ of the guarantee.
        mean: The points' mean where it is public. None to find it from the points, privately, in the same round.
        options: See `PointOptions`: bounds or radius, columns, user, missing and others.

    Raises:
        TableError: The table cannot be used. Nothing was charged.
        BudgetExceededError: The ledger does not allow it.
        ParameterError: More components than coordinates, or a parameter out of range.
        VectorError: A point is not finite; its row is named.
        InfeasibleError: The budget is so small that noise would hide every variance. Nothing was sent.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> points = 0.1 + generator.normal(size=(2000, 3)) * [0.3, 0.1, 0.05]
        >>> found = pca(points, 1, epsilon=8.0, delta=1e-6, radius=1.0)
        >>> abs(found.components).round()
        array([[1., 0., 0.]])
    """
    chosen = columns_of(points, options)
    question = Components(chosen, components, mean=mean, **ball_of(options))
    people, asked = paid("pca", points, question.ball, question.plan, Claim(epsilon, delta), options, 1)
    found = private_mean(asked.protocol, 0, people, question.layout.write, options.get("advance"))
    return of_rows(asked.result(found, len(people), confidence=options.get("confidence", 0.95)), options)


def subspace_angle(first: ArrayLike, second: ArrayLike) -> float:
    """Returns the largest principal angle, in radians, between the spans of two sets of orthonormal rows.

    Example:
        >>> round(subspace_angle([[1.0, 0.0]], [[0.6, 0.8]]), 4)
        0.9273
    """
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    # The sine of the largest angle is the norm of the part of `right` outside of the span of `left`.
    sine = np.linalg.norm(right - right @ left.T @ left, ord=2)
    return math.asin(min(1.0, float(sine)))


def estimated_angle(
    variances: Matrix, directions: Matrix, components: int, deviation: float, mean: Matrix, weight: float
) -> float:
    """Estimates the angle between the found subspace and the exact one, by perturbation to first order.

    Noise E turns the span of the first q eigenvectors u by sines uᵢᵀE uⱼ/(λᵢ - λⱼ), i <= q < j. The mean square of
    uᵢᵀE uⱼ is σ²/2 from the second moments, and ((uᵢᵀm)² + (uⱼᵀm)²)σ²/a² from m mᵀ. The root of the sum over all pairs
    bounds the largest angle's sine. Eigenvalues and m are the noisy ones, so that this is an estimate, no bound. Noise
    drives equal eigenvalues apart, by its norm at most, about σ√(2d): this is taken off every gap, and where nothing
    remains the answer is a right angle.

    Args:
        variances: All eigenvalues λ, the largest first.
        directions: The eigenvectors u, one per row.
        components: q.
        deviation: σ, of one coordinate of the mean of the messages.
        mean: m.
        weight: a, 0 where the mean was public.
    """
    spread = (directions @ mean / weight) ** 2 if weight else np.zeros(len(variances))
    squares = deviation**2 * (0.5 + spread[:components, None] + spread[components:])
    opened = deviation * math.sqrt(2.0 * len(variances))
    gaps = variances[:components, None] - variances[components:] - opened
    if (gaps <= 0.0).any():
        return 0.5 * math.pi
    return math.asin(min(1.0, math.sqrt(float(np.sum(squares / gaps**2)))))


def _spread(
    variances: Matrix, directions: Matrix, components: int, deviation: float, mean: Matrix, weight: float
) -> Matrix:
    """Estimates the standard deviation of each coordinate of the found directions; see `estimated_angle`.

    To first order, noise adds to uᵢ the sum over j of uⱼ times uᵢᵀE uⱼ/(λᵢ - λⱼ). It is infinite where a gap is noise.
    """
    spread = (directions @ mean / weight) ** 2 if weight else np.zeros(len(variances))
    squares = deviation**2 * (0.5 + spread[:components, None] + spread)
    gaps = np.abs(variances[:components, None] - variances) - deviation * math.sqrt(2.0 * len(variances))
    np.fill_diagonal(gaps, np.inf)
    with np.errstate(divide="ignore"):
        mixed = np.where(gaps > 0.0, squares / gaps**2, np.inf)
    found = np.sqrt(np.where(np.isinf(mixed), 0.0, mixed) @ directions**2)
    return np.where(np.isinf(mixed).any(axis=1, keepdims=True), np.inf, found)


def exact_components(points: ArrayLike, components: int) -> Matrix:
    """Returns the components without privacy, for those who hold all points and want to compare."""
    table = np.asarray(points, dtype=np.float64)
    centred = table - table.mean(axis=0)
    return _eigen(centred.T @ centred / len(table))[1][:components]


def _eigen(covariance: Matrix) -> tuple[Matrix, Matrix]:
    """Returns eigenvalues, the largest first, and eigenvectors as rows with fixed signs."""
    values, vectors = np.linalg.eigh(covariance)
    rows = vectors.T[::-1]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    return values[::-1], rows * np.sign(largest)


def _isometry(rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Matrix:
    """Returns 1 on the diagonal and √2 off it, so that triangle and symmetric matrix have the same norm."""
    return np.where(rows == columns, 1.0, math.sqrt(2.0))


def _deviation(protocol: Protocol, count: int) -> float:
    """Returns σ, the standard deviation of a coordinate of the mean of `count` messages, rounding at its largest."""
    return noise_norm(protocol, count) / math.sqrt(protocol.dim)


def _check_budget(planned: Plan, dim: int) -> None:
    """Refuses a budget whose noise matrix, of norm about σ√(2d), hides the largest possible variance of points."""
    clients = planned.protocol.clients
    norm = _deviation(planned.protocol, clients) * math.sqrt(2.0 * dim)
    if norm < 1.0:
        return
    raise InfeasibleError(
        f"ε={rounded_up(planned.target_epsilon)} is too little for {clients:,} clients with points of {dim} "
        f"coordinates: the noise would be {norm:.3g} times the largest variance possible. At least "
        f"{math.ceil(clients * norm):,} clients are needed, and many more to see small variances; or a larger epsilon."
    )
