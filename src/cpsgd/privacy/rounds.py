"""The guarantee of many rounds of one protocol, also where rounds end with different numbers of clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd import _validate
from cpsgd.adjacency import Adjacency
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Normal, RoundedNormal, Steps
from cpsgd.participation import Participation
from cpsgd.privacy.costs import COMPOSED, SAMPLED_TAIL_SHARE, TAIL_SHARES, check_run, gaussian_epsilon
from cpsgd.privacy.guarantees import CITATIONS, Guarantee, guarantee
from cpsgd.privacy.proofs import Proof, per_round_proof, published_proof, renyi_proof, smoothed_proof

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

_PER_ROUND = "per-round guarantee + optimal composition"
# Rounds are sorted into at most this many sizes, each rounded down: fewer certificates, never less privacy.
_MOST_SIZES = 32


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
        check_run(correlation, count, scheme)
    if (count == 1 and not scheme.sampled) or scheme.scheme == "once" or correlation is not None:
        single = guarantee(protocol, delta, adjacency=neighbours, surviving=fewest, colluding=colluding)
        return RoundsGuarantee(**vars(single), rounds=count, participation=scheme)
    _validate.integer("colluding", colluding, low=0)
    if fewest - colluding < 1:
        raise ConditionError(
            f"A round ended with {fewest} clients of whom {colluding} may collude: it protects nobody; refuse it."
        )
    law = protocol.mechanism.noise.law(fewest - colluding)
    exact, steps = isinstance(law, Normal), isinstance(law, Steps)
    method = "gaussian-analytic" if exact else "smoothed-certificate" if steps else "gaussian-certificate"
    if isinstance(law, RoundedNormal):
        method = "rounded-gaussian"
    found: dict[str, Result] = {}
    if not (steps and scheme.scheme == "every"):
        citation = f"{CITATIONS[method]}; {COMPOSED[scheme.scheme]}"
        shares = [0.0] if exact else [SAMPLED_TAIL_SHARE] if scheme.rate < 1.0 else TAIL_SHARES
        found[method] = _attempt(
            lambda: (*gaussian_epsilon(protocol, delta, sizes, scheme, neighbours, colluding, shares), citation)
        )
    # For sampled rounds, too: given who was drawn, a client is in some of the rounds only.
    methods: dict[str, Callable[..., Proof]] = {
        "smoothed-certificate": smoothed_proof,
        "renyi-certificate": renyi_proof,
        _PER_ROUND: partial(per_round_proof, scheme),
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
        found[name] = _attempt(lambda: published_proof(protocol, delta, count, scheme, neighbours, fewest - colluding))
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


Result = Proof | str
"""A proof, or the reason why there is none."""


def _attempt(prove: Callable[[], Proof]) -> Result:
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
