"""What rounds cost as equivalent Gaussians, and what these cost together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Normal, Steps
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon
from cpsgd.privacy.certificate import gaussian_certificate
from cpsgd.privacy.products import smoothed_certificate
from cpsgd.privacy.single import CITATIONS, normal_cost

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

SAMPLED_TAIL_SHARE = 0.01
"""Share of δ that pays for the certificate's tails under sampling, where trying several would take too long."""

TAIL_SHARES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)
"""Shares of δ for the certificates' tails that are tried without sampling."""

COMPOSED = {
    "once": "each client is in one round only, so the costliest round counts",
    "every": "Gaussians compose as √Σμ² (Dong, Roth and Su 2022, Corollary 3.3)",
    "poisson": "Poisson-sampled Gaussian by dp_accounting: privacy loss distributions (Doroshenko, Ghazi, Kamath, "
    "Kumar, Manurangsi 2022) or Rényi (Mironov, Talwar, Zhang 2019)",
    "fixed-size": "sampling without replacement (docs/accounting.md, section 12), on Balle, Barthe and Gaboardi 2018, "
    "Theorem 2, and Zhu, Dong and Wang 2022, Theorem 10",
}
"""By scheme of participation, why equivalent Gaussians of rounds compose as they do."""


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
    mechanism.memory.check_messages(surviving, protocol.clients)
    mechanism.memory.check_honest(honest, colluding, protocol.clients)
    mechanism.memory.check_run(1, scheme)
    law = mechanism.noise.law(honest)
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
    variation = honest * protocol.dim * mechanism.noise.variation
    return Rounds(certificate.mu, count, counted * certificate.tail_mass * (1.0 + 1e-15), variation)


def joint_cost(protocol: Protocol, adjacency: Adjacency, honest: int, count: int, tail: float) -> Rounds:
    """What `count` rounds cost if all their coordinates are smoothed together, with a tail of this mass per round.

    Rounds that are √w-GDP together compose with others as if each of them were √(w/count)-GDP.

    Raises:
        ConditionError: There is no smoothed certificate.
    """
    law = protocol.mechanism.noise.law(honest)
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
        variation=honest * protocol.dim * protocol.mechanism.noise.variation,
    )


def counted_tail(scheme: Participation) -> float:
    """The share of a certificate's tail that counts: with fixed-size sampling only that of rounds the client is in."""
    return math.nextafter(scheme.rate, 1.0) if scheme.scheme == "fixed-size" else 1.0


def gaussian_epsilon(
    protocol: Protocol,
    delta: float,
    sizes: Counter[int],
    scheme: Participation,
    adjacency: Adjacency,
    colluding: int,
    shares: Sequence[float],
) -> tuple[float, float]:
    """The smallest ε of rounds as equivalent Gaussians over these shares of δ for the tails, and what tails then spend.

    `sizes` is how many rounds ended with how many clients.

    Raises:
        ConditionError: Nothing is proved about so many rounds with so little noise.
    """
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
        if protocol.mechanism.noise.variation > 0.0:
            reason += ", or so large that the noise sampler's resolution spends δ"
        raise ConditionError(f"Nothing is proved about {sizes.total()} such rounds ({reason}); run fewer or add noise.")
    return best


def composition_citation(schemes: Iterable[str]) -> str:
    """The theorems behind composing equivalent Gaussians of rounds with these schemes of participation."""
    certificates = [CITATIONS["gaussian-certificate"], CITATIONS["smoothed-certificate"]]
    return "; ".join([*certificates, *(COMPOSED[scheme] for scheme in sorted(schemes))])
