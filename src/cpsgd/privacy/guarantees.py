"""`guarantee`: the smallest ε that is proved for a run, and the theorem behind it."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.one_example import example_protocol, most_drawn, overflow
from cpsgd.privacy.proofs import all_proofs, best
from cpsgd.privacy.proofs.argument import check
from cpsgd.promise import Claim, Surviving
from cpsgd.protocol import Protocol
from cpsgd.run import Run

CITATIONS = {proof.name: proof.citation for proof in all_proofs()}
"""The theorem behind every method."""

COMPARISONS = frozenset(proof.name for proof in all_proofs() if proof.comparison)
"""Methods whose ε is shown but never returned as the guarantee: what a mechanism's authors published."""

# Rounds are sorted into at most this many sizes, each rounded down: fewer certificates, never less privacy.
_MOST_SIZES = 32
_SECRET_EXAMPLES = "which of its examples a client draws must never leave it: ε rests on it"


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
        """The kind of neighbouring data sets."""
        return self.run.adjacency

    @property
    def noise_clients(self) -> int:
        """Number of honest clients whose noise was counted, in the round with the fewest."""
        return self.run.honest

    @property
    def assumption(self) -> str | None:
        """The assumption about the vectors (`Protocol.assumption`); None where everything is enforced."""
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
        """Returns the guarantee's text beside ε, as rows of a label and its value."""
        rows = [("proved by", self.citation), ("noise of", f"{self.noise_clients:,} clients")]
        if self.assumption is not None:
            rows.append(("assuming", self.assumption))
        if self.tail:
            rows.append(("tails", f"{self.tail:.2g} of δ"))
        for method, found in self.alternatives:
            rows.append(("otherwise", f"{method}: {found if isinstance(found, str) else rounded_up(found)}"))
        many = f"{self.rounds:,} rounds" if self.rounds > 1 else "1 round"
        rows.append(("covers", f"{many}, participation {self.participation}"))
        if (secrecy := self.participation.secrecy) is not None:
            rows.append(("secret", secrecy if self.run.examples is None else _SECRET_EXAMPLES))
        return rows

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
    adjacency: Adjacency | str | None = None,
    surviving: int | None = None,
    colluding: int | None = None,
) -> Guarantee:
    """Returns the smallest ε proved for a run, or for one round of a protocol, and the theorem behind it.

    Only noise that really is in the sum, and that nobody can subtract, protects: that of surviving - colluding clients.
    Where noise is correlated over rounds, the guarantee is that of the whole run.

    Args:
        subject: A run; or a protocol, with the arguments below for one round of it.
        delta: δ in [0, 1), in total; 0 for pure differential privacy, which few mechanisms have.
        adjacency: "replace-one" (the paper's, and the default) or "zero-out".
        surviving: Number of clients whose messages are in the sum; all of the protocol's if None.
        colluding: Number of those who may reveal their noise to somebody who sees the result; nobody if None.

    Raises:
        ConditionError: No noise, or no method applies; the message says what would help.
        ParameterError: A run is given, and conditions beside its own.

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
        given = {"adjacency": adjacency, "surviving": surviving, "colluding": colluding}
        if others := ", ".join(name for name, value in given.items() if value is not None):
            raise ParameterError(f"A Run has conditions of its own: give {others} to Run.of.")
        return _proved(subject, delta)
    adjacency = Adjacency.REPLACE_ONE if adjacency is None else adjacency
    colluding = 0 if colluding is None else colluding
    if surviving == 0:
        raise ConditionError("No client's noise is in the sum (surviving=0): there is no privacy.")
    _validate.integer("colluding", colluding, low=0, high=subject.clients if surviving is None else surviving)
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
    """Returns the guarantee by the proof with the smallest ε."""
    return _remembered(run, _validate.fraction("delta", delta))


@lru_cache(maxsize=256)
def _remembered(run: Run, delta: float) -> Guarantee:
    """Returns the guarantee for a valid δ, from a cache: plans, promises, ledgers and audits ask the same question."""
    mechanism = run.protocol.mechanism
    if delta == 0.0 and not mechanism.pure:
        raise ParameterError(
            f"Expected delta in (0, 1), got delta=0: the noise of {mechanism.name} has no pure differential privacy. "
            "Use a mechanism that has it (discrete-laplace), or a delta above 0."
        )
    seen, lost = accounted(run), 0.0
    check(seen)
    if run.examples is not None:
        lost = run.rounds * overflow(run.examples, run.participation) * (1.0 + 1e-12)
    left = (delta - lost) * (1.0 - 1e-15) if lost else delta
    if lost and left <= 0.0:
        spent = f"The chance that a client draws too many examples, {lost:.2g}, alone spends δ={delta:g}"
        raise ConditionError(f"{spent}; use a larger δ, or participation 'every'.")
    proof, proved, found = best(seen, left)
    label = proof.label(seen)
    others = tuple((name, r if isinstance(r, str) else r.epsilon) for name, r in found.items() if name != label)
    if run.examples is not None:
        # The paper's theorem would be about sums whose norm is one example's.
        others = tuple(pair for pair in others if not pair[0].startswith("paper-theorem"))
    return Guarantee(Claim(proved.epsilon, delta), run, label, proved.citation, proved.tail + lost, others)


def accounted(run: Run) -> Run:
    """Returns the run that proofs are about: of whole clients, and of not too many different numbers of messages."""
    run = run.of_one_client
    protocol, conditions = run.protocol, run.conditions
    if run.examples is not None:
        protocol = example_protocol(protocol, most_drawn(run.examples, run.participation))
        conditions = conditions.of_one_example
    return Run(protocol, replace(conditions, sizes=_grouped(conditions.sizes)))


def _grouped(sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Counts the rounds by their number of messages; where many numbers differ, they are rounded down."""
    if len(sizes) <= _MOST_SIZES:
        return sizes
    low, high = sizes[0][0], sizes[-1][0]
    step = (high / low) ** (1.0 / (_MOST_SIZES - 1)) * (1.0 + 1e-9)
    floors = sorted({math.floor(low * step**i) for i in range(_MOST_SIZES)})
    rounded: Counter[int] = Counter()
    for size, count in sizes:
        rounded[max(floor for floor in floors if floor <= size)] += count
    return tuple(sorted(rounded.items()))
