"""The guarantee of many rounds of one protocol, also where rounds end with different numbers of clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd import _validate
from cpsgd.adjacency import Adjacency
from cpsgd.correlation import Correlation
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Law, Normal, RoundedNormal, Steps
from cpsgd.participation import Participation
from cpsgd.privacy import composition
from cpsgd.privacy.accountant import LARGEST_EPSILON, Rounds, composed_epsilon
from cpsgd.privacy.certificate import gaussian_certificate
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.guarantees import CITATIONS, Guarantee, guarantee, normal_cost, quick_guarantee
from cpsgd.privacy.products import smoothed_certificate, smoothed_epsilon
from cpsgd.privacy.renyi import renyi_floor, summed_renyi_certificate

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

_PER_ROUND = "per-round guarantee + optimal composition"
# Optimal composition sums over rounds; with more of them the Gaussian certificate is far ahead anyway.
# No certificate is below a Gaussian of equal variance by more than this.
_NEARLY = 0.999
_MOST_COMPOSED = 20_000

SAMPLED_TAIL_SHARE = 0.01
"""Share of δ that pays for the certificate's tails under sampling, where trying several would take too long."""

TAIL_SHARES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)
"""Shares of δ for the certificates' tails that are tried without sampling."""
# Shares of δ that a published route spends on the rounds themselves; composition gets the rest.
_PUBLISHED_SHARES = (0.9, 0.5, 0.1, 0.01, 1e-3)
# Rényi certificates of rounds with more different numbers of clients are not computed.
_MOST_RENYI_SIZES = 4
# The smoothed certificate is worth its time where it may be better by more than this.
_GAIN = 1.002
# Shares of δ that may pay for the noise sampler's resolution over all rounds.
_SAMPLER_SHARES = (1e-6, 0.1)
# Rounds are sorted into at most this many sizes, each rounded down: fewer certificates, never less privacy.
_MOST_SIZES = 32

_COMPOSED = {
    "once": "each client is in one round only, so the costliest round counts",
    "every": "Gaussians compose as √Σμ² (Dong, Roth and Su 2022, Corollary 3.3)",
    "poisson": "Poisson-sampled Gaussian by dp_accounting: privacy loss distributions (Doroshenko, Ghazi, Kamath, "
    "Kumar, Manurangsi 2022) or Rényi (Mironov, Talwar, Zhang 2019)",
    "fixed-size": "sampling without replacement (docs/accounting.md, section 12), on Balle, Barthe and Gaboardi 2018, "
    "Theorem 2, and Zhu, Dong and Wang 2022, Theorem 10",
}
_PRODUCT = "rounds are more coordinates of one product"
_SUMMED = "Rényi divergences of rounds add up (Mironov 2017, Proposition 1)"


@dataclass(frozen=True, repr=False)
class RoundsGuarantee(Guarantee):
    """A proved statement about all rounds together.

    Attributes:
        rounds: How many rounds.
        participation: Who takes part in which of them.
    """

    rounds: int
    participation: Participation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**super().to_dict(), "participation": str(self.participation)}

    def _rows(self) -> list[tuple[str, str]]:
        many = f"{self.rounds:,} rounds" if self.rounds > 1 else "1 round"
        secrecy = self.participation.secrecy
        told = [] if secrecy is None else [("secret", secrecy)]
        return [*super()._rows(), ("covers", f"{many}, participation {self.participation}"), *told]


def guarantee_over_rounds(
    protocol: Protocol,
    delta: float,
    *,
    rounds: int | None = None,
    participation: str | Participation = "every",
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    surviving: int | Sequence[int] | Mapping[int, int] | None = None,
    colluding: int = 0,
) -> RoundsGuarantee:
    """The smallest ε proved for all the rounds together; the published accounting, composed, is an alternative.

    Args:
        protocol: The parameters of each round.
        delta: δ in (0, 1), in total over all rounds.
        rounds: How many rounds; 1 if not given, or as many as `surviving` has entries.
        participation: "once", "every", "poisson:RATE", "fixed-size:RATE" or a `Participation`, which says what
            each assumes.
        adjacency: "replace-one" or "zero-out"; Poisson needs the latter and fixed-size sampling the former.
        surviving: How many clients' messages were in each round's sum: one number for all rounds, one per round, or
            as a mapping how many rounds had each number.
        colluding: How many of those, in each round, may tell their noise.

    Raises:
        ConditionError: No method applies; the message says what would help.

    Example:
        >>> from cpsgd.protocol import Protocol
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16)
        >>> f"{guarantee_over_rounds(protocol, 1e-9, rounds=10).epsilon:.2f}"
        '1.77'
        >>> f"{guarantee_over_rounds(protocol, 1e-9, surviving=[10_000] * 5 + [8_000] * 5).epsilon:.2f}"
        '1.93'
    """
    _validate.probability("delta", delta)
    neighbours = Adjacency.parse(adjacency)
    scheme = Participation.parse(participation)
    scheme.check(neighbours)
    sizes = _sizes(protocol, rounds, surviving)
    count = sum(sizes.values())
    fewest = min(sizes)
    correlation = protocol.mechanism.correlation
    if correlation is not None:
        _check_run(correlation, count, scheme)
    if (count == 1 and not scheme.sampled) or scheme.scheme == "once" or correlation is not None:
        single = guarantee(protocol, delta, adjacency=neighbours, surviving=fewest, colluding=colluding)
        return RoundsGuarantee(**vars(single), rounds=count, participation=scheme)
    _validate.integer("colluding", colluding, low=0)
    if fewest - colluding < 1:
        raise ConditionError(
            f"A round ended with {fewest} clients of whom {colluding} may collude: it protects nobody; refuse it."
        )
    law = protocol.mechanism.law(fewest - colluding)
    exact, steps = isinstance(law, Normal), isinstance(law, Steps)
    method = "gaussian-analytic" if exact else "smoothed-certificate" if steps else "gaussian-certificate"
    if isinstance(law, RoundedNormal):
        method = "rounded-gaussian"
    found: dict[str, Result] = {}
    if not (steps and scheme.scheme == "every"):
        citation = f"{CITATIONS[method]}; {_COMPOSED[scheme.scheme]}"
        shares = [0.0] if exact else [SAMPLED_TAIL_SHARE] if scheme.rate < 1.0 else TAIL_SHARES
        found[method] = _attempt(
            lambda: (*_composed(protocol, delta, sizes, scheme, neighbours, colluding, shares), citation)
        )
    # For sampled rounds, too: given who was drawn, a client is in some of the rounds only.
    methods: dict[str, Callable[..., tuple[float, float, str]]] = {
        "smoothed-certificate": _smoothed,
        "renyi-certificate": _renyi,
        _PER_ROUND: partial(_per_round, scheme),
    }
    left_out = {"smoothed-certificate", "renyi-certificate"} if exact else {"renyi-certificate", _PER_ROUND}
    for name, prove in methods.items():
        if (exact or steps) and name in left_out:
            continue
        below = min((result[0] for result in found.values() if not isinstance(result, str)), default=math.inf)
        result = _attempt(partial(prove, protocol, delta, sizes, neighbours, colluding, below))
        # Sampled coins have this certificate already, of each round; of all rounds at once it knows of no sampling.
        if isinstance(result, str) or result[0] >= below:
            found.setdefault(name, result)
        else:
            found[name] = result
    proved = {name: result for name, result in found.items() if not isinstance(result, str)}
    if not proved:
        raise ConditionError(str(next(iter(found.values()))))
    best = min(proved, key=lambda name: proved[name][0])
    epsilon, tail, citation = proved[best]
    if protocol.mechanism.published is not None:
        name = f"{protocol.mechanism.published[0]} + optimal composition"
        found[name] = _attempt(lambda: _published(protocol, delta, count, scheme, neighbours, fewest - colluding))
    return RoundsGuarantee(
        epsilon=epsilon,
        delta=delta,
        adjacency=neighbours,
        method=best,
        citation=citation,
        tail=tail,
        alternatives=tuple((name, r if isinstance(r, str) else r[0]) for name, r in found.items() if name != best),
        noise_clients=fewest - colluding,
        assumption=protocol.assumption(neighbours),
        rounds=count,
        participation=scheme,
    )


def _check_run(correlation: Correlation, rounds: int, scheme: Participation) -> None:
    """Refuses rounds and participation that the correlation of a run's noise does not cover.

    Raises:
        ConditionError: It does not.
    """
    if rounds > correlation.rounds:
        raise ConditionError(
            f"The noise is correlated over a run of {correlation.rounds:,} rounds, and {rounds:,} are asked about; "
            "plan a longer run, or begin a new one with a protocol of its own."
        )
    if scheme.sampled:
        raise ConditionError(
            "Amplification by sampling is not proved for noise that is correlated over rounds; use participation "
            "'once', or independent noise."
        )
    if scheme.scheme == "every" and rounds > 1 and correlation.separation != 1:
        apart = "in one of them at most" if correlation.separation is None else f"{correlation.separation} apart"
        raise ConditionError(
            f"The run's noise is for clients that take part {apart}, not in every round; use participation 'once', "
            "separation=1 (which does not pay), or independent noise."
        )


def composition_citation(schemes: Iterable[str]) -> str:
    """The theorems behind composing equivalent Gaussians of rounds with these schemes of participation."""
    certificates = [CITATIONS["gaussian-certificate"], CITATIONS["smoothed-certificate"]]
    return "; ".join([*certificates, *(_COMPOSED[scheme] for scheme in sorted(schemes))])


Result = tuple[float, float, str] | str
"""ε, the part of δ spent on tails and the citation, or the reason why there is none."""


def _attempt(prove: Callable[[], tuple[float, float, str]]) -> Result:
    try:
        return prove()
    except ConditionError as reason:
        return str(reason)


def _sizes(
    protocol: Protocol, rounds: int | None, surviving: int | Sequence[int] | Mapping[int, int] | None
) -> Counter[int]:
    """How many rounds ended with how many clients; sizes rounded down where there are very many of them."""
    if surviving is None or isinstance(surviving, int | np.integer):
        arrived = protocol.clients if surviving is None else _validate.integer("surviving", surviving, low=1)
        return Counter({arrived: _validate.integer("rounds", 1 if rounds is None else rounds, low=1)})
    if isinstance(surviving, Mapping):
        counts = surviving.items()
        sizes = Counter(
            {_validate.integer("surviving", n, low=1): _validate.integer("rounds", c, low=1) for n, c in counts}
        )
    else:
        sizes = Counter(_validate.integer("surviving", size, low=1) for size in surviving)
    if not sizes or rounds not in (None, sizes.total()):
        raise ParameterError(
            f"Expected one entry of surviving per round, got {sizes.total()} entries for rounds={rounds}; "
            "leave rounds out."
        )
    if len(sizes) <= _MOST_SIZES:
        return sizes
    low, high = min(sizes), max(sizes)
    step = (high / low) ** (1.0 / (_MOST_SIZES - 1)) * (1.0 + 1e-9)
    floors = sorted({math.floor(low * step**i) for i in range(_MOST_SIZES)})
    rounded: Counter[int] = Counter()
    for size, count in sizes.items():
        rounded[max(floor for floor in floors if floor <= size)] += count
    return rounded


def _composed(
    protocol: Protocol,
    delta: float,
    sizes: Counter[int],
    scheme: Participation,
    adjacency: Adjacency,
    colluding: int,
    shares: Sequence[float],
) -> tuple[float, float]:
    """The smallest ε over a few shares of δ for the tails, and what the tails then spend."""
    found: list[tuple[float, float]] = []
    failures: list[ConditionError] = []
    for share in shares:
        try:
            spent = [
                round_cost(protocol, adjacency, size, colluding, count, share * delta / sizes.total(), scheme)
                for size, count in sizes.items()
            ]
            epsilon = composed_epsilon(spent, delta=delta, participation=scheme)
            tail = sum(r.count * (r.tail_mass + r.variation * (1.0 + math.exp(epsilon))) for r in spent)
            found.append((epsilon, tail))
        except ConditionError as error:
            failures.append(error)
    if not found:
        raise failures[-1]
    best = min(found, key=lambda pair: pair[0])
    if math.isinf(best[0]):
        reason = "ε would be over 500"
        if protocol.mechanism.variation > 0.0:
            reason += ", or so large that the noise sampler's resolution spends δ"
        raise ConditionError(f"Nothing is proved about {sizes.total()} such rounds ({reason}); run fewer or add noise.")
    return best


def _smoothed(
    protocol: Protocol, delta: float, sizes: Counter[int], adjacency: Adjacency, colluding: int, below: float
) -> tuple[float, float, str]:
    """ε by the smoothed certificate of all rounds' coordinates together, each as if it had the fewest clients."""
    mechanism, dim, rounds, honest = protocol.mechanism, protocol.dim, sizes.total(), min(sizes) - colluding
    law, sensitivity = mechanism.law(honest), protocol.sensitivity(adjacency)
    assert not isinstance(law, Normal)
    if isinstance(law, Law):
        floor = gdp_epsilon(sensitivity * math.sqrt(rounds / law.variance), delta) * _GAIN
        if floor >= below:
            raise ConditionError(f"could not come below {math.floor(1e4 * floor) / 1e4:g}, so not computed")
    moved = dim * mechanism.variation * rounds * max(sizes)
    spent = 2.0 * moved
    for share in _SAMPLER_SHARES if moved else (0.0,):
        if spent > _SAMPLER_SHARES[-1] * delta:
            break
        epsilon, certificate = smoothed_epsilon(
            law,
            dim=dim,
            sensitivity=sensitivity,
            reach=protocol.reach(adjacency),
            delta=delta * (1.0 - share),
            rounds=rounds,
        )
        if epsilon > LARGEST_EPSILON:
            raise ConditionError(f"ε would be over {LARGEST_EPSILON:g}; run fewer rounds or add noise")
        spent = moved * (1.0 + math.exp(epsilon)) * (1.0 + 1e-12)
        if spent <= share * delta * (1.0 - 1e-9) or not moved:
            citation = f"{CITATIONS['smoothed-certificate']}; {_PRODUCT}"
            return epsilon, certificate.tail_mass + spent, citation
    raise ConditionError(f"the noise sampler's resolution would cost {spent:.2g} of δ; {mechanism.sampler_remedy}")


def _renyi(
    protocol: Protocol, delta: float, sizes: Counter[int], adjacency: Adjacency, colluding: int, below: float
) -> tuple[float, float, str]:
    """ε by the Rényi certificates of all rounds, added up; not computed where it could not come below this."""
    if len(sizes) > _MOST_RENYI_SIZES:
        raise ConditionError(f"is computed for rounds of up to {_MOST_RENYI_SIZES} different numbers of clients")
    mechanism, dim = protocol.mechanism, protocol.dim
    sensitivity = protocol.sensitivity(adjacency)
    laws = [(mechanism.law(size - colluding), count) for size, count in sizes.items()]
    rounds = [(law, count) for law, count in laws if isinstance(law, Law)]
    slope = sum(count * sensitivity**2 / (2.0 * law.variance) for law, count in rounds)
    if (floor := renyi_floor(slope, delta)) >= below:
        raise ConditionError(f"could not come below {math.floor(1e4 * floor) / 1e4:g}, so not computed")
    # Both neighbours' laws are, over all rounds, this close in total variation to the ones the certificates are about.
    moved = dim * mechanism.variation * sum(count * (size - colluding) for size, count in sizes.items())
    spent = 2.0 * moved
    for share in _SAMPLER_SHARES if moved else (0.0,):
        if spent > _SAMPLER_SHARES[-1] * delta:
            break
        certificate = summed_renyi_certificate(
            rounds, dim=dim, sensitivity=sensitivity, levels=mechanism.levels, delta=delta * (1.0 - share)
        )
        if certificate.epsilon > LARGEST_EPSILON:
            raise ConditionError(f"ε would be over {LARGEST_EPSILON:g}; run fewer rounds or add noise")
        spent = moved * (1.0 + math.exp(certificate.epsilon)) * (1.0 + 1e-12)
        if spent <= share * delta * (1.0 - 1e-9):
            citation = f"{CITATIONS['renyi-certificate']}; {_SUMMED}"
            return certificate.epsilon, certificate.tail_mass + spent, citation
    raise ConditionError(f"the noise sampler's resolution would cost {spent:.2g} of δ; {mechanism.sampler_remedy}")


def round_cost(
    protocol: Protocol,
    adjacency: Adjacency,
    surviving: int,
    colluding: int,
    count: int,
    tail: float,
    scheme: Participation,
) -> Rounds:
    """What `count` rounds with this many clients cost, each with a tail of this mass."""
    honest, mechanism = surviving - colluding, protocol.mechanism
    mechanism.check_messages(surviving, protocol.clients)
    mechanism.check_honest(honest, colluding, protocol.clients)
    if mechanism.correlation is not None:
        _check_run(mechanism.correlation, 1, scheme)
    law = mechanism.law(honest)
    sensitivity = protocol.sensitivity(adjacency)
    if isinstance(law, Normal):
        return normal_cost(protocol, law, adjacency, honest, count)
    counted = counted_tail(scheme)
    if isinstance(law, Steps):
        # What is proved are hockey-stick divergences of pairs, up to the tail: all that sampling needs.
        found = smoothed_certificate(
            law,
            dim=protocol.dim,
            sensitivity=sensitivity,
            reach=protocol.reach(adjacency),
            tail=min(0.5, tail / counted),
        )
        return Rounds(found.mu, count, counted * found.tail_mass * (1.0 + 1e-15))
    certificate = gaussian_certificate(
        law,
        dim=protocol.dim,
        sensitivity=sensitivity,
        levels=mechanism.levels,
        tail=min(0.5, tail / counted),
    )
    variation = honest * protocol.dim * mechanism.variation
    return Rounds(certificate.mu, count, counted * certificate.tail_mass * (1.0 + 1e-15), variation)


def joint_cost(protocol: Protocol, adjacency: Adjacency, honest: int, count: int, tail: float) -> Rounds:
    """What `count` rounds cost if all their coordinates are smoothed together, with a tail of this mass per round.

    Rounds that are √w-GDP together compose with others as if each of them were √(w/count)-GDP.

    Raises:
        ConditionError: There is no smoothed certificate.
    """
    law = protocol.mechanism.law(honest)
    if isinstance(law, Normal):
        raise ConditionError("Gaussian noise needs no smoothing.")
    # Up to the next power of two the certificate is made for, so that the same serves every count.
    most = 1 << (count - 1).bit_length()
    found = smoothed_certificate(
        law,
        dim=protocol.dim,
        sensitivity=protocol.sensitivity(adjacency),
        reach=protocol.reach(adjacency),
        tail=min(0.5, tail * most),
        rounds=count,
    )
    return Rounds(
        mu=found.mu / math.sqrt(count) * (1.0 + 1e-15),
        count=count,
        tail_mass=found.tail_mass / count * (1.0 + 1e-15),
        variation=honest * protocol.dim * protocol.mechanism.variation,
    )


def counted_tail(scheme: Participation) -> float:
    """The share of a certificate's tail that counts: with fixed-size sampling only that of rounds the client is in."""
    return math.nextafter(scheme.rate, 1.0) if scheme.scheme == "fixed-size" else 1.0


def published_epsilon(
    protocol: Protocol,
    delta: float,
    *,
    rounds: int,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    noise_clients: int | None = None,
) -> float:
    """ε by the published accounting of the protocol's mechanism, rounds composed optimally.

    For the paper's mechanism that is its Theorem 1. For comparison only:
    `cpsgd.privacy.guarantees.COMPARISONS` says where that fails.

    Raises:
        ConditionError: The published theorem does not apply to the protocol.
    """
    neighbours = Adjacency.parse(adjacency)
    honest = protocol.clients if noise_clients is None else noise_clients
    found = math.inf
    for share in _PUBLISHED_SHARES if rounds > 1 else (1.0 - 1e-9,):
        each = share * delta / rounds
        epsilon = protocol.mechanism.published_epsilon(protocol, each, neighbours, honest)
        if not math.isfinite(epsilon):
            raise ConditionError("The published accounting gives no finite ε for one round.")
        composed = composition.optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)
        found = min(found, composed)
    return found


def _per_round(
    scheme: Participation,
    protocol: Protocol,
    delta: float,
    sizes: Counter[int],
    adjacency: Adjacency,
    colluding: int,
    below: float,
) -> tuple[float, float, str]:
    """Each round's (ε, δ) alone, by whichever certificate is best for one round, composed optimally.

    Where even Gaussian noise of the same variance would not come `below`, by the quickest certificate.
    """
    rounds, fewest = sizes.total(), min(sizes)
    _check_composable(scheme, rounds)
    each = 0.5 * delta / rounds

    def composed(epsilon: float) -> float:
        return composition.optimal_composition(epsilon=epsilon, delta=each, rounds=rounds, target_delta=delta)

    law = protocol.mechanism.law(fewest - colluding)
    prove: Callable[..., Guarantee] = guarantee
    if isinstance(law, Law):
        least = gdp_epsilon(protocol.sensitivity(adjacency) / math.sqrt(law.variance), each) * _NEARLY
        prove = quick_guarantee if composed(least) >= below else guarantee
    single = prove(protocol, each, adjacency=adjacency, surviving=fewest, colluding=colluding)
    if (epsilon := composed(single.epsilon)) > LARGEST_EPSILON:
        raise ConditionError(f"Nothing worth the name is proved about {rounds} such rounds; run fewer or add noise.")
    return epsilon, rounds * single.tail, f"{single.citation}; {composition.CITATION}"


def _published(
    protocol: Protocol, delta: float, rounds: int, scheme: Participation, adjacency: Adjacency, honest: int
) -> tuple[float, float, str]:
    _check_composable(scheme, rounds)
    epsilon = published_epsilon(protocol, delta, rounds=rounds, adjacency=adjacency, noise_clients=honest)
    return epsilon, 0.0, composition.CITATION


def _check_composable(scheme: Participation, rounds: int) -> None:
    if scheme.sampled:
        raise ConditionError("composes rounds without sampling only")
    if rounds > _MOST_COMPOSED:
        raise ConditionError(f"is computed for up to {_MOST_COMPOSED:,} rounds")
