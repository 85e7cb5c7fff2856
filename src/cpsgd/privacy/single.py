"""Proofs about one round: every method tries, and the smallest ε wins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cpsgd import _validate
from cpsgd._numbers import rounded_down, rounded_up
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law, Normal, RoundedNormal, Steps
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.certificate import certified_epsilon
from cpsgd.privacy.examples import example_protocol
from cpsgd.privacy.gaussian import analytic_epsilon, classical_epsilon, gdp_epsilon
from cpsgd.privacy.products import smoothed_epsilon
from cpsgd.privacy.renyi import renyi_certificate, renyi_floor
from cpsgd.protocol import Protocol
from cpsgd.registry import MECHANISMS
from cpsgd.run import Run

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
class Best:
    """The best proof about one round, and what the other methods prove."""

    method: str
    epsilon: float
    tail: float
    others: tuple[tuple[str, float | str], ...]

    @property
    def citation(self) -> str:
        """The theorem behind it."""
        return CITATIONS[self.method]


def best_proof(run: Run, delta: float) -> Best:
    """Returns the smallest ε proved for one round of a run, the one with the fewest messages."""
    return _best(run, delta, thorough=True)


def quick_proof(run: Run, delta: float) -> Best:
    """Returns what `best_proof` proves by its quickest method alone, where that applies."""
    try:
        return _best(run, delta, thorough=False)
    except ConditionError:
        return _best(run, delta, thorough=True)


def accounted(run: Run) -> Protocol:
    """Returns the protocol that proofs are about: the run's own, or that of one example."""
    return run.protocol if run.examples is None else example_protocol(run.protocol, run.examples)


def _best(run: Run, delta: float, *, thorough: bool) -> Best:
    _validate.probability("delta", delta)
    protocol, arrived, colluding, honest = accounted(run), run.surviving, run.colluding, run.honest
    if honest < 1:
        raise ConditionError(
            f"No honest client's noise is in the sum (surviving={arrived}, colluding={colluding}): there is no privacy."
        )
    protocol.mechanism.memory.check_messages(arrived, protocol.clients)
    protocol.mechanism.memory.check_honest(honest, colluding, protocol.clients)
    found = _methods(protocol, delta, run.adjacency, honest, thorough)
    proved = {m: result for m, result in found.items() if not isinstance(result, str) and m not in COMPARISONS}
    if not proved:
        reasons = "\n".join(f"  {m}: {reason}" for m, reason in found.items() if m not in COMPARISONS)
        raise ConditionError(f"No method proves anything about this round.\n{reasons}")
    best = min(proved, key=lambda method: proved[method][0])
    others = tuple((m, r if isinstance(r, str) else r[0]) for m, r in found.items() if m != best)
    return Best(best, *proved[best], others)


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
            found = {law.method: _rounded(protocol, law, adjacency, honest, delta)}
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
