"""Example-level privacy: a client sums its examples' clipped gradients, and one example is what is protected.

What that protects, and why, is in `cpsgd.privacy.examples`. Here are the sums, and the protocols for them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec import clip
from cpsgd.errors import ConditionError, InfeasibleError, NonFiniteError, ParameterError
from cpsgd.learning.datasets.base import Batch
from cpsgd.planner import plan
from cpsgd.privacy.examples import HEADROOM
from cpsgd.privacy.examples import example_norm as example_norm
from cpsgd.privacy.examples import example_protocol as example_protocol
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.rounds import guarantee_over_rounds
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    from cpsgd.learning.gradients import ClientUpdates

# Clients whose sums are held at a time.
_CLIENTS = 64
# How many times the planner is asked, and the largest ε it takes.
_SEARCH = 5
_LARGEST = 499.0


def plan_examples(
    clients: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    examples: int,
    clip_norm: float = 1.0,
    rounds: int = 1,
    participation: str = "once",
    **wishes: Any,
) -> Protocol:
    """A protocol for clients who send sums of at most `examples` gradients, (epsilon, delta)-DP for one of them.

    The planner is asked for protocols for whole clients, with nearly the largest ε at which one example's is kept.

    Args:
        clients: n.
        dim: d.
        epsilon: ε that all rounds may cost an example.
        delta: δ of the guarantee.
        examples: E, the most examples of a client.
        clip_norm: D, what each example's gradient is clipped to.
        rounds: Rounds that will be run.
        participation: "once" or "every".
        wishes: What else `cpsgd.planner.plan` takes, such as `bits`, `adjacency` or `dropout`.

    Returns:
        The protocol. Its `clip_norm` is that of a client's sum.

    Raises:
        InfeasibleError: No protocol does it.
    """
    check_participation(participation)
    _validate.positive("epsilon", epsilon, high=_LARGEST)
    whole = sum_norm(clip_norm, examples)
    # A certificate's μ is proportional to the distance of neighbours, and an example's is D' >= D = `clip_norm` where a
    # client's is `whole`. So the client's μ may be `ratio` times what the example's ε allows, less if D' > D. As ε/μ
    # grows with μ, this first target is at least ε E: from the wish itself one would begin with E times the noise that
    # is needed, and find a range so wide that the grid is too coarse for the proof, or nothing at all.
    allowed, ratio = gdp_mu(epsilon, delta), whole / clip_norm
    target, kept = min(_LARGEST, gdp_epsilon(allowed * ratio, delta)), epsilon
    best: Protocol | None = None
    failure = ""
    for _ in range(_SEARCH):
        try:
            found = plan(clients, dim, target, delta, whole, rounds=rounds, participation=participation, **wishes)
            proved = guarantee_over_rounds(
                _accounted(found.protocol, examples),
                delta,
                rounds=rounds,
                participation=participation,
                adjacency=found.guarantee.adjacency,
                surviving=found.surviving,
                colluding=found.colluding,
            )
        except (ConditionError, InfeasibleError) as error:
            failure = str(error)
            target = math.sqrt(target * kept)
            continue
        if proved.epsilon <= epsilon:
            best, kept = found.protocol, target
            if proved.epsilon >= 0.99 * epsilon or target >= _LARGEST:
                break
        # What the ratio really is, with the distance of examples on the grid, which depends on the protocol.
        if proved.epsilon > 0.0:
            ratio = gdp_mu(target, delta) / gdp_mu(proved.epsilon, delta)
        target = min(_LARGEST, gdp_epsilon(0.999 * allowed * ratio, delta))
    if best is None:
        raise InfeasibleError(f"No protocol keeps ε={epsilon:g} for an example among {examples}: {failure}")
    return best


def sum_norm(clip_norm: float, examples: int) -> float:
    """The `clip_norm` of a protocol for sums of so many gradients, each clipped to `clip_norm`; see `example_norm`."""
    return clip_norm * _validate.integer("examples", examples, low=1) * (1.0 + HEADROOM) * (1.0 + 2.0**-48)


def _accounted(protocol: Protocol, examples: int) -> Protocol:
    """`example_protocol`, where a protocol that it refuses is one more that does not do."""
    try:
        return example_protocol(protocol, examples)
    except ParameterError as error:
        raise ConditionError(str(error)) from None


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
