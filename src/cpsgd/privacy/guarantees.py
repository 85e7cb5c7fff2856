"""One question, one answer: the smallest ε that is proved for a round, and the theorem behind it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd._numbers import rounded_down, rounded_up
from cpsgd.adjacency import Adjacency
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import MECHANISMS
from cpsgd.mechanisms.law import Law, Normal, RoundedNormal, Steps
from cpsgd.participation import Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.certificate import certified_epsilon
from cpsgd.privacy.gaussian import analytic_epsilon, classical_epsilon, gdp_epsilon
from cpsgd.privacy.products import smoothed_epsilon
from cpsgd.privacy.renyi import renyi_certificate, renyi_floor

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

CITATIONS = {
    "gaussian-certificate": (
        "Gaussian certificate (docs/accounting.md, section 4), on Dong, Roth and Su, "
        '"Gaussian Differential Privacy", JRSS B 2022, and Balle and Wang, ICML 2018, Theorem 8'
    ),
    "smoothed-certificate": (
        "smoothed Gaussian certificate of all coordinates together (docs/accounting.md, section 6), on Dong, Roth and "
        'Su, "Gaussian Differential Privacy", JRSS B 2022, and Balle and Wang, ICML 2018, Theorem 8'
    ),
    "renyi-certificate": (
        "Rényi certificate (docs/accounting.md, section 5), converted by Canonne, Kamath and Steinke, "
        '"The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12'
    ),
    "gaussian-analytic": (
        'exact Gaussian mechanism: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", '
        "ICML 2018, Theorem 8"
    ),
    "rounded-gaussian": (
        "rounding of the exact Gaussian mechanism (docs/accounting.md, section 13), by Balle and Wang, "
        "ICML 2018, Theorem 8"
    ),
    "correlated-gaussian": (
        "Gaussian noise correlated over the rounds of a run, rounded (docs/accounting.md, section 14), on Denisov, "
        'McMahan, Rush, Smith and Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear '
        'Operators on Adaptive Streams", NeurIPS 2022, and Balle and Wang, ICML 2018, Theorem 8'
    ),
    "gaussian-classical": (
        'classical Gaussian mechanism: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, '
        "Theorem A.1"
    ),
    **dict(mechanism.published for mechanism in MECHANISMS.values() if mechanism.published is not None),
}
"""The theorem behind every method."""

COMPARISONS = frozenset(mechanism.published[0] for mechanism in MECHANISMS.values() if mechanism.published is not None)
"""Methods whose ε is shown but never returned as the guarantee: what a mechanism's authors published.

The paper's Theorem 1 is false where neighbours differ by several standard deviations of the noise: like the classical
Gaussian lemma, whose limit ε <= 1 it lacks, it has no term for the mean μ²/2 of the privacy loss. Bin(200,000, ½) noise
and a distance of 1,000 is an example, with ε = 26.4 at δ = 1e-5 by the theorem and an exact δ of 6e-5 at that ε.
"""


@dataclass(frozen=True)
class Guarantee:
    """A proved statement: the round is (epsilon, delta)-differentially private.

    Attributes:
        epsilon: ε, rounded up.
        delta: δ in total, everything included.
        adjacency: Which data sets are neighbours.
        method: Name of the method that proved it, a key of `CITATIONS`.
        citation: The theorem behind it.
        tail: The part of δ that pays for outputs far out in the noise's tails and for the noise sampler's finite
            resolution.
        alternatives: The other methods with the ε they prove, or the reason why they prove none.
        noise_clients: Number of honest clients whose noise was counted.
        assumption: What is taken on trust about the vectors (`Protocol.assumption`); None where all is enforced.

    Example:
        >>> from cpsgd.protocol import Protocol
        >>> given = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=12)
        >>> proved = guarantee(given, 1e-6)
        >>> proved.method, proved.noise_clients, proved.to_dict()["delta"]
        ('gaussian-certificate', 1000, 1e-06)
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    method: str
    citation: str
    tail: float
    alternatives: tuple[tuple[str, float | str], ...]
    noise_clients: int
    assumption: str | None = field(default=None, kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the alternatives as a list of objects with `method` and `epsilon` or `reason`."""
        alternatives = [
            {"method": method, "reason" if isinstance(found, str) else "epsilon": found}
            for method, found in self.alternatives
        ]
        return {**vars(self), "alternatives": alternatives}

    def _rows(self) -> list[tuple[str, str]]:
        """All that is said of it beside ε."""
        rows = [("proved by", self.citation), ("noise of", f"{self.noise_clients:,} clients")]
        if self.assumption is not None:
            rows.append(("assuming", self.assumption))
        if self.tail:
            rows.append(("tails", f"{self.tail:.2g} of δ"))
        for method, found in self.alternatives:
            rows.append(("otherwise", f"{method}: {found if isinstance(found, str) else rounded_up(found)}"))
        return rows

    @property
    def _headline(self) -> str:
        return f"ε = {rounded_up(self.epsilon)} at δ = {self.delta:g}, {self.adjacency} adjacency"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._headline}, {self.method})"

    def _repr_html_(self) -> str:
        return html_table(self._headline, self._rows())

    def __str__(self) -> str:
        lines = [self._headline]
        for label, text in self._rows():
            lines += textwrap.wrap(text, 100, initial_indent=f"  {label:<9}  ", subsequent_indent=" " * 13)
        return "\n".join(lines)


def guarantee(
    protocol: Protocol,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    surviving: int | None = None,
    colluding: int = 0,
) -> Guarantee:
    """The smallest ε proved for one round of this protocol; for its whole run, where noise is correlated over rounds.

    Only noise that really is in the sum, and that nobody can subtract, protects: that of surviving - colluding clients.

    Args:
        protocol: The round's parameters.
        delta: δ in (0, 1), in total.
        adjacency: "replace-one" (the paper's) or "zero-out".
        surviving: How many clients' messages are in the sum; all of the protocol's if None.
        colluding: How many of those may tell their noise to whoever sees the result.

    Raises:
        ConditionError: No noise, or no method applies; the message says what would help.

    Example:
        >>> from cpsgd.protocol import Protocol
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16)
        >>> found = guarantee(protocol, delta=1e-9)
        >>> found.method, f"{found.epsilon:.3f}"
        ('smoothed-certificate', '0.531')
        >>> dict(found.alternatives)["paper-theorem"] > 3.36
        True
    """
    return _guarantee(protocol, delta, adjacency, surviving, colluding, thorough=True)


def quick_guarantee(
    protocol: Protocol, delta: float, *, adjacency: Adjacency | str, surviving: int, colluding: int
) -> Guarantee:
    """What `guarantee` proves by its quickest method alone, where that applies."""
    try:
        return _guarantee(protocol, delta, adjacency, surviving, colluding, thorough=False)
    except ConditionError:
        return _guarantee(protocol, delta, adjacency, surviving, colluding, thorough=True)


def _guarantee(
    protocol: Protocol,
    delta: float,
    adjacency: Adjacency | str,
    surviving: int | None,
    colluding: int,
    *,
    thorough: bool,
) -> Guarantee:
    _validate.probability("delta", delta)
    neighbours = Adjacency.parse(adjacency)
    arrived = protocol.clients if surviving is None else _validate.integer("surviving", surviving, low=0)
    honest = arrived - _validate.integer("colluding", colluding, low=0, high=arrived)
    if honest == 0:
        raise ConditionError(
            f"No honest client's noise is in the sum (surviving={arrived}, colluding={colluding}): there is no privacy."
        )
    protocol.mechanism.check_messages(arrived, protocol.clients)
    protocol.mechanism.check_honest(honest, colluding, protocol.clients)
    found = _methods(protocol, delta, neighbours, honest, thorough)
    proved = {m: result for m, result in found.items() if not isinstance(result, str) and m not in COMPARISONS}
    if not proved:
        reasons = "\n".join(f"  {m}: {reason}" for m, reason in found.items() if m not in COMPARISONS)
        raise ConditionError(f"No method proves anything about this round.\n{reasons}")
    best = min(proved, key=lambda method: proved[method][0])
    epsilon, tail = proved[best]
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        adjacency=neighbours,
        method=best,
        citation=CITATIONS[best],
        tail=tail,
        alternatives=tuple((m, r if isinstance(r, str) else r[0]) for m, r in found.items() if m != best),
        noise_clients=honest,
        assumption=protocol.assumption(neighbours),
    )


_Prove = Callable[[float], tuple[float, float]]
Result = tuple[float, float] | str
"""ε and the part of δ spent on tails, or the reason why there is none."""

# The smoothed certificate is worth its time where it may be better by more than this.
_GAIN = 1.002
# Shares of δ that may pay for the noise sampler's resolution.
_SHARES = (1e-6, 0.1)


def _methods(protocol: Protocol, delta: float, adjacency: Adjacency, honest: int, thorough: bool) -> dict[str, Result]:
    """What each method proves for a round with so many honest clients, or why it does not; slow ones if `thorough`."""
    mechanism, dim = protocol.mechanism, protocol.dim
    law = mechanism.noise.law(honest)
    sensitivity = protocol.sensitivity(adjacency)
    # The sampled noise is this close, in total variation, to the law the proofs are about.
    moved = _Moved(honest * dim * mechanism.noise.variation, mechanism.sampler_remedy)
    if isinstance(law, Normal):
        gaussian = {"sigma": law.deviation, "sensitivity": sensitivity}
        slack = dim * mechanism.noise.slack(honest)

        def classical(delta: float) -> tuple[float, float]:
            if slack > 1.0:  # and e^-λ δ may be zero
                raise ConditionError(f"rounding may add more than 1 to ε; {mechanism.sampler_remedy}")
            return classical_epsilon(**gaussian, delta=delta * math.exp(-slack)) + 2.0 * slack, 0.0

        found = {
            "gaussian-analytic": _attempt(lambda delta: (analytic_epsilon(**gaussian, delta=delta), 0.0), delta, moved)
        }
        if isinstance(law, RoundedNormal):
            method = "rounded-gaussian" if mechanism.correlation is None else "correlated-gaussian"
            found = {method: _rounded(protocol, law, adjacency, honest, delta)}
        found["gaussian-classical"] = _attempt(classical, delta, moved)
    else:

        def smoothed(delta: float) -> tuple[float, float]:
            reach = protocol.reach(adjacency)
            epsilon, proof = smoothed_epsilon(law, dim=dim, sensitivity=sensitivity, reach=reach, delta=delta)
            return epsilon, proof.tail_mass

        if isinstance(law, Steps):
            found = {"smoothed-certificate": _attempt(smoothed, delta, moved)}
        else:
            slower = smoothed if thorough else None
            found = _lattice_methods(law, dim, sensitivity, mechanism.levels, delta, moved, slower)
    if mechanism.published is not None:
        name, _ = mechanism.published
        found[name] = _attempt(
            lambda delta: (mechanism.published_epsilon(protocol, delta, adjacency, honest), 0.0), delta, moved
        )
    return found


def _lattice_methods(
    law: Law, dim: int, sensitivity: float, levels: int, delta: float, moved: _Moved, smoothed: _Prove | None
) -> dict[str, Result]:
    """What the certificates prove for integer noise, or why they do not; without `smoothed` the quickest alone."""

    def certificate(delta: float) -> tuple[float, float]:
        epsilon, proof = certified_epsilon(law, dim=dim, sensitivity=sensitivity, levels=levels, delta=delta)
        return epsilon, proof.tail_mass

    def renyi(delta: float) -> tuple[float, float]:
        proof = renyi_certificate(law, dim=dim, sensitivity=sensitivity, levels=levels, delta=delta)
        return proof.epsilon, proof.tail_mass

    found: dict[str, Result] = {"gaussian-certificate": _attempt(certificate, delta, moved)}
    if smoothed is None:
        return found
    # Each of the others is slower than the last, and has a floor that is known at once: that of a Gaussian with the
    # noise's variance (near enough), and the Rényi certificate's own.
    floors = {
        "smoothed-certificate": (gdp_epsilon(sensitivity / math.sqrt(law.variance), delta) * _GAIN, smoothed),
        "renyi-certificate": (renyi_floor(sensitivity**2 / (2.0 * law.variance), delta), renyi),
    }
    for method, (floor, prove) in floors.items():
        known = min((result[0] for result in found.values() if not isinstance(result, str)), default=math.inf)
        if floor >= known:
            found[method] = f"could not come below {rounded_down(floor)}, so not computed"
        else:
            found[method] = _attempt(prove, delta, moved)
    return found


def _rounded(protocol: Protocol, law: RoundedNormal, adjacency: Adjacency, honest: int, delta: float) -> Result:
    """What is proved for a Gaussian that is rounded; the price of that is weighed against ε as it is."""
    cost = normal_cost(protocol, law, adjacency, honest)
    try:
        epsilon = composed_epsilon([cost], delta=delta, participation=Participation.every())
    except ConditionError:
        epsilon = math.inf
    if math.isinf(epsilon):
        return f"rounding may cost all of δ={delta:g}; {protocol.mechanism.sampler_remedy}"
    return epsilon, cost.variation * (1.0 + math.exp(epsilon)) * (1.0 + 1e-12)


def normal_cost(protocol: Protocol, law: Normal, adjacency: Adjacency, honest: int, count: int = 1) -> Rounds:
    """What `count` rounds of Gaussian noise cost, as exact as the mechanism draws it."""
    mechanism, dim = protocol.mechanism, protocol.dim
    return Rounds(
        protocol.sensitivity(adjacency) / law.deviation * (1.0 + 1e-14),
        count,
        variation=honest * dim * mechanism.noise.variation,
        slack=dim * mechanism.noise.slack(honest) * (1.0 + 1e-14),
    )


@dataclass(frozen=True)
class _Moved:
    """How far the sampled noise of a round is from its law, in total variation, and what to do if that is too far."""

    mass: float
    remedy: str


def _attempt(prove: _Prove, delta: float, moved: _Moved) -> Result:
    """ε and what was spent on tails, or the reason (`prove` raised it) why the method does not apply.

    If both neighbours' output laws are within `moved` of the ones the proof is about, (1 + e^ε) times that must be left
    over from δ. A share is put aside first, and ε is accepted if the share turns out to be enough. A larger share only
    makes ε larger: where the largest would not pay for the ε known so far (0 at first), the proof is not asked again.
    """
    epsilon, spent = 0.0, 2.0 * moved.mass
    try:
        for share in _SHARES if moved.mass else (0.0,):
            if spent > _SHARES[-1] * delta:
                break
            epsilon, tail = prove(delta * (1.0 - share))
            spent = moved.mass * (1.0 + math.exp(min(epsilon, 700.0))) * (1.0 + 1e-12)
            if spent <= share * delta * (1.0 - 1e-9):
                return epsilon, tail + spent
    except ConditionError as reason:
        return str(reason)
    cost = f"{spent:.2g} of δ={delta:g} at ε={rounded_up(epsilon)}"
    return f"the noise sampler's resolution would cost {cost}; {moved.remedy}"
