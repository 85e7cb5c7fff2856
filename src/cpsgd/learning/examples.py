"""Example-level privacy: a client sums its examples' clipped gradients, and one example is what is protected.

What that protects, and why, is in `cpsgd.privacy.examples`. Here are the sums, and the protocols for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec import clip
from cpsgd.errors import ConditionError, InfeasibleError, NonFiniteError, ParameterError
from cpsgd.learning.datasets.base import Batch
from cpsgd.planner import Plan, modulus
from cpsgd.planner.planning import best_plan
from cpsgd.planner.wishes import Wishes
from cpsgd.privacy.adjacency import Adjacency, check_adjacency
from cpsgd.privacy.examples import HEADROOM
from cpsgd.privacy.examples import example_norm as example_norm
from cpsgd.privacy.examples import example_protocol as example_protocol
from cpsgd.privacy.participation import Participation
from cpsgd.privacy.rounds import RoundsGuarantee, guarantee_over_rounds
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    from cpsgd.learning.gradients import ClientUpdates

# Clients whose sums are held at a time.
_CLIENTS = 64


def plan_examples(
    clients: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    examples: int,
    clip_norm: float = 1.0,
    bits: float | None = None,
    rounds: int = 1,
    participation: str = "once",
    adjacency: Adjacency = "replace-one",
    dropout: float = 0.0,
    colluding: int = 0,
    secure: bool = False,
    overflow: float = modulus.DEFAULT_OVERFLOW,
) -> Plan:
    """A plan for clients who send sums of at most `examples` gradients, (epsilon, delta)-DP for one of them.

    The planner is asked for enough range for a whole sum, and for enough noise to hide one example in it.

    Args:
        clients: n.
        dim: d.
        epsilon: ε that all rounds may cost an example.
        delta: δ of the guarantee.
        examples: E, the most examples of a client.
        clip_norm: D, what each example's gradient is clipped to.
        bits: Bits per coordinate; by default the fewest within 10 % of the Gaussian mechanism's error.
        rounds: Rounds that will be run.
        participation: "once" or "every".
        adjacency: "replace-one" or "zero-out", of one example.
        dropout: Share of the clients that may fail to answer.
        colluding: Clients who may tell their noise.
        secure: Sums are taken modulo the smallest modulus.
        overflow: With `secure`, the probability allowed a round that its sum wraps around.

    Returns:
        The plan. Its guarantee is about one example; its protocol's `clip_norm` is that of a client's sum.

    Raises:
        InfeasibleError: No protocol does it.

    Example:
        >>> best = plan_examples(10, 1000, 4.0, 1e-6, examples=5000, rounds=20, participation="every", secure=True)
        >>> best.guarantee.epsilon <= 4.0, best.protocol.clip_norm > 5000
        (True, True)
    """
    check_participation(participation)
    requirements = Wishes.of(
        clients=clients,
        dim=dim,
        epsilon=epsilon,
        delta=delta,
        clip_norm=clip_norm,
        rounds=rounds,
        participation=Participation.parse(participation),
        adjacency=check_adjacency(adjacency),
        dropout=dropout,
        colluding=colluding,
        overflow=_validate.probability("overflow", overflow) if secure else None,
        rotate=True,
    )
    setting = replace(requirements.setting, clip_norm=sum_norm(clip_norm, examples))
    try:
        return best_plan(_ExampleRequirements(setting, requirements.target, colluding, examples), bits=bits)
    except (ConditionError, InfeasibleError, ParameterError) as error:
        raise InfeasibleError(f"No protocol keeps ε={epsilon:g} for an example among {examples}: {error}") from None


@dataclass(frozen=True)
class _ExampleRequirements(Wishes):
    """Requirements whose setting is about whole sums and whose target is about one example."""

    examples: int

    def proved(self, protocol: Protocol) -> RoundsGuarantee:
        """The guarantee for one example."""
        return guarantee_over_rounds(
            example_protocol(protocol, self.examples),
            self.target.delta,
            rounds=self.target.rounds,
            participation=self.target.participation,
            adjacency=self.target.adjacency,
            surviving=self.setting.surviving,
            colluding=self.colluding,
        )


def sum_norm(clip_norm: float, examples: int) -> float:
    """The `clip_norm` of a protocol for sums of so many gradients, each clipped to `clip_norm`; see `example_norm`."""
    return clip_norm * _validate.integer("examples", examples, low=1) * (1.0 + HEADROOM) * (1.0 + 2.0**-48)


def check_participation(scheme: str) -> None:
    """Raises `ParameterError` where clients are sampled."""
    if scheme not in ("once", "every"):
        raise ParameterError(
            f"Example-level privacy is proved for participation 'once' and 'every', not {scheme!r}: amplification by "
            "sampling clients speaks of whole clients."
        )


class ExampleSums:
    """Clients' sums of their examples' clipped gradients, as rows of float32.

    Sums are taken in float64 and rounded once. Of a client with more than `examples` examples the first ones count. A
    gradient with NaN or infinity counts as zero: whatever an example is, it moves the sum by at most D.
    """

    def __init__(self, gradients: ClientUpdates, clip_norm: float, examples: int) -> None:
        """Takes gradients of single examples from `gradients`; `clip_norm` is that of a client's sum."""
        self.dim = gradients.dim
        self._gradients = gradients
        self._examples = examples
        self._bound = example_norm(clip_norm, examples)

    def chunks(self, batch: Batch) -> Iterator[NDArray[np.float32]]:
        """The sums of the batch's clients in their order, some rows at a time."""
        counts = np.minimum(batch.counts, self._examples)
        # Places within clients, of which the first ones count.
        places = np.arange(len(batch.labels)) - np.repeat(np.cumsum(batch.counts) - batch.counts, batch.counts)
        kept = np.flatnonzero(places < self._examples)
        gradients = self._each(Batch(batch.features[kept], batch.labels[kept], np.ones(len(kept), dtype=np.int64)))
        size = max(1, min(_CLIENTS, self._gradients.memory_limit // (16 * self.dim)))
        for start in range(0, len(counts), size):
            part = counts[start : start + size]
            sums = np.zeros((len(part), self.dim))
            for client, count in enumerate(part):
                for gradient in itertools.islice(gradients, int(count)):
                    try:
                        factor = clip.factor(gradient, self._bound)
                    except NonFiniteError:
                        continue
                    sums[client] += gradient * np.float64(factor)
            yield sums.astype(np.float32)

    def _each(self, singles: Batch) -> Iterator[NDArray[np.float32]]:
        for chunk in self._gradients.chunks(singles):
            yield from chunk
