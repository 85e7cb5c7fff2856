"""`guarantee`: the smallest ε that is proved for a run, and the theorem behind it."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Normal, RoundedNormal, Steps
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.costs import COMPOSED, SAMPLED_TAIL_SHARE, TAIL_SHARES, gaussian_epsilon
from cpsgd.privacy.proofs import Proof, per_round_proof, published_proof, renyi_proof, smoothed_proof
from cpsgd.privacy.single import CITATIONS, accounted, best_proof
from cpsgd.promise import Claim, Surviving
from cpsgd.protocol import Protocol
from cpsgd.run import Run

_PER_ROUND = "per-round guarantee + optimal composition"
# Rounds are sorted into at most this many sizes, each rounded down: fewer certificates, never less privacy.
_MOST_SIZES = 32


@dataclass(frozen=True, repr=False)
class Guarantee:
    """A proved statement: the run is (epsilon, delta)-differentially private.

    Attributes:
        claim: The proved (ε, δ), ε rounded up and everything included in δ.
        run: The rounds it is about.
        method: Name of the method that proved it, a key of `CITATIONS`.
        citation: The theorem behind it.
        tail: The part of δ that pays for outputs far out in the noise's tails and for the noise sampler's finite
            resolution.
        alternatives: The other methods with the ε they prove, or the reason why they prove none.

    Example:
        >>> from cpsgd import Protocol
        >>> given = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=12)
        >>> proved = guarantee(given, 1e-6)
        >>> proved.method, proved.noise_clients, proved.to_dict()["delta"]
        ('gaussian-certificate', 1000, 1e-06)
    """

    claim: Claim
    run: Run
    method: str
    citation: str
    tail: float
    alternatives: tuple[tuple[str, float | str], ...]

    @property
    def epsilon(self) -> float:
        """ε, rounded up."""
        return self.claim.epsilon

    @property
    def delta(self) -> float:
        """δ in total, everything included."""
        return self.claim.delta

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets are neighbours."""
        return self.run.adjacency

    @property
    def noise_clients(self) -> int:
        """Number of honest clients whose noise was counted, in the round with the fewest."""
        return self.run.honest

    @property
    def assumption(self) -> str | None:
        """What is taken on trust about the vectors (`Protocol.assumption`); None where all is enforced."""
        return None if self.run.examples is not None else self.run.protocol.assumption(self.run.adjacency)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.run.rounds

    @property
    def participation(self) -> Participation:
        """The rounds that a client takes part in."""
        return self.run.participation

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values; the alternatives as a list of objects with `method` and `epsilon` or `reason`."""
        names = ("epsilon", "delta", "adjacency", "method", "citation", "tail", "noise_clients", "assumption", "rounds")
        alternatives = [
            {"method": method, "reason" if isinstance(found, str) else "epsilon": found}
            for method, found in self.alternatives
        ]
        values = {name: getattr(self, name) for name in names}
        return {**values, "participation": str(self.participation), "alternatives": alternatives}

    def _rows(self) -> list[tuple[str, str]]:
        """Returns all that is said of it beside ε."""
        rows = [("proved by", self.citation), ("noise of", f"{self.noise_clients:,} clients")]
        if self.assumption is not None:
            rows.append(("assuming", self.assumption))
        if self.tail:
            rows.append(("tails", f"{self.tail:.2g} of δ"))
        for method, found in self.alternatives:
            rows.append(("otherwise", f"{method}: {found if isinstance(found, str) else rounded_up(found)}"))
        many = f"{self.rounds:,} rounds" if self.rounds > 1 else "1 round"
        rows.append(("covers", f"{many}, participation {self.participation}"))
        secrecy = self.participation.secrecy
        return rows if secrecy is None else [*rows, ("secret", secrecy)]

    @property
    def _headline(self) -> str:
        return f"{self.claim}, {self.adjacency} adjacency"

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
    subject: Run | Protocol,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    surviving: int | None = None,
    colluding: int = 0,
) -> Guarantee:
    """Returns the smallest ε proved for a run, or for one round of a protocol, and the theorem behind it.

    Only noise that really is in the sum, and that nobody can subtract, protects: that of surviving - colluding clients.
    Where noise is correlated over rounds, the guarantee is that of the whole run.

    Args:
        subject: A run; or a protocol, with the arguments below for one round of it.
        delta: δ in (0, 1), in total.
        adjacency: "replace-one" (the paper's) or "zero-out".
        surviving: Number of clients whose messages are in the sum; all of the protocol's if None.
        colluding: Number of those who may tell their noise to whoever sees the result.

    Raises:
        ConditionError: No noise, or no method applies; the message says what would help.

    Example:
        >>> from cpsgd import Protocol, Run
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16)
        >>> found = guarantee(protocol, delta=1e-9)
        >>> found.method, f"{found.epsilon:.3f}"
        ('smoothed-certificate', '0.531')
        >>> f"{guarantee(Run.of(protocol, rounds=10), delta=1e-9).epsilon:.2f}"
        '1.77'
    """
    if isinstance(subject, Run):
        return _proved(subject, delta)
    return _proved(Run.of(subject, adjacency=adjacency, surviving=surviving, colluding=colluding), delta)


def guarantee_over_rounds(
    protocol: Protocol,
    delta: float,
    *,
    rounds: int | None = None,
    participation: str | Participation = "every",
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    surviving: Surviving | None = None,
    colluding: int = 0,
) -> Guarantee:
    """Returns the smallest ε proved for all the rounds together: `guarantee` of `Run.of` with these arguments.

    Raises:
        ConditionError: No method applies; the message says what would help.

    Example:
        >>> from cpsgd import Protocol
        >>> protocol = Protocol.rotated_binomial(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16)
        >>> f"{guarantee_over_rounds(protocol, 1e-9, surviving=[10_000] * 5 + [8_000] * 5).epsilon:.2f}"
        '1.93'
    """
    run = Run.of(
        protocol,
        rounds=rounds,
        participation=participation,
        adjacency=adjacency,
        surviving=surviving,
        colluding=colluding,
    )
    return _proved(run, delta)


def _proved(run: Run, delta: float) -> Guarantee:
    _validate.probability("delta", delta)
    protocol, scheme, neighbours = accounted(run), run.participation, run.adjacency
    colluding, count = run.colluding, run.rounds
    memory = protocol.mechanism.memory
    memory.check_run(count, scheme)
    if memory.charged_rounds(scheme.counted_rounds(count)) == 1 and not scheme.sampled:
        single = best_proof(run, delta)
        return Guarantee(
            Claim(single.epsilon, delta), run, single.method, single.citation, single.tail, _shown(run, single.others)
        )
    if run.honest < 1:
        raise ConditionError(
            f"A round ended with {run.surviving} clients of whom {colluding} may collude: it protects nobody; "
            "refuse it."
        )
    sizes = _grouped(run)
    law = protocol.mechanism.noise.law(run.honest)
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
        _PER_ROUND: partial(per_round_proof, run),
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
        found[name] = _attempt(lambda: published_proof(protocol, delta, count, scheme, neighbours, run.honest))
    others = tuple((name, r if isinstance(r, str) else r[0]) for name, r in found.items() if name != best)
    return Guarantee(Claim(epsilon, delta), run, best, citation, tail, _shown(run, others))


Result = Proof | str
"""A proof, or the reason why there is none."""


def _attempt(prove: Callable[[], Proof]) -> Result:
    try:
        return prove()
    except ConditionError as reason:
        return str(reason)


def _shown(run: Run, others: tuple[tuple[str, float | str], ...]) -> tuple[tuple[str, float | str], ...]:
    """Leaves out the paper's theorem for single examples: it would be about sums whose norm is one example's."""
    return others if run.examples is None else tuple(pair for pair in others if not pair[0].startswith("paper-theorem"))


def _grouped(run: Run) -> Counter[int]:
    """Returns the number of rounds by number of clients, these rounded down where there are very many of them."""
    sizes = Counter(dict(run.sizes))
    if len(sizes) <= _MOST_SIZES:
        return sizes
    low, high = min(sizes), max(sizes)
    step = (high / low) ** (1.0 / (_MOST_SIZES - 1)) * (1.0 + 1e-9)
    floors = sorted({math.floor(low * step**i) for i in range(_MOST_SIZES)})
    rounded: Counter[int] = Counter()
    for size, count in sizes.items():
        rounded[max(floor for floor in floors if floor <= size)] += count
    return rounded
