"""Plans for the privacy of single examples, of which a client sends the sum of several clipped gradients.

What that protects, and why, is in `cpsgd.privacy.one_example`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.planner.planning import Plan, plan_for
from cpsgd.planner.problem import Problem
from cpsgd.planner.requirements import Requirements
from cpsgd.privacy.one_example import HEADROOM, most_drawn


def plan_examples(
    clients: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    examples: int,
    participation: str = "once",
    **others: Any,
) -> Plan:
    """Returns a plan for clients who send sums of their examples' gradients, (epsilon, delta)-DP for one of them.

    The planner is asked for enough range for a whole sum, and for enough noise to hide one example in it.

    Args:
        clients: n.
        dim: d.
        epsilon: ε that all rounds may cost an example.
        delta: δ of the guarantee.
        examples: N, the most examples of a client.
        participation: The rounds that an example is in: "once", "every", or "poisson:RATE" where each client draws
            each of its examples with this probability, in secret and anew for every round; that needs
            adjacency="zero-out". Clients are in all rounds, and with `correlated` keep the seeds of their noise.
        others: Further fields of `Requirements`. `clip_norm` is D, what each example's gradient is clipped to, and
            `adjacency` that of one example. A `replace_one_distance` is refused: it is about whole clients.

    Returns:
        The plan. Its guarantee is about one example; its protocol's `clip_norm` is that of a client's sum.

    Raises:
        InfeasibleError: No protocol does it.
        ParameterError: The participation does not go with examples or with the adjacency, or a replace-one distance
            is stated.

    Example:
        >>> run = {"rounds": 20, "participation": "every", "bits": 16, "secure": True}
        >>> best = plan_examples(10, 1000, 4.0, 1e-6, examples=5000, **run)
        >>> best.guarantee.epsilon <= 4.0, best.protocol.clip_norm > 5000
        (True, True)
        >>> drawn = {**run, "participation": "poisson:0.02", "adjacency": "zero-out"}
        >>> sampled = plan_examples(10, 1000, 4.0, 1e-6, examples=5000, **drawn)
        >>> sampled.guarantee.epsilon <= 4.0, f"at most {sampled.protocol.clip_norm:.0f} examples in a sum"
        (True, 'at most 237 examples in a sum')
    """
    required = Requirements(
        clients=clients, dim=dim, epsilon=epsilon, delta=delta, participation=participation, **others
    )
    if required.distance_reason is not None or required.replace_one_distance is not None:
        raise ParameterError(
            "replace_one_distance is about whole clients' vectors, of which an example is a part; leave it out."
        )
    problem = Problem.of(required)
    stated = replace(problem.target.conditions, examples=examples)
    most = most_drawn(examples, stated.participation)
    setting = replace(problem.setting, clip_norm=sum_norm(required.clip_norm, most))
    target = replace(problem.target, conditions=stated.of_one_example)
    # The setting is about whole sums and the target about one example. The search knows nothing of grids: one that is
    # coarse against a single example's share costs distance, or has no proof at all, and another mechanism is chosen.
    try:
        return plan_for(required, replace(problem, setting=setting, target=target, of_examples=stated))
    except (ConditionError, InfeasibleError, ParameterError) as error:
        raise InfeasibleError(
            f"No protocol keeps ε={rounded_up(epsilon)} for an example among {examples}: {error}"
        ) from None


def sum_norm(clip_norm: float, examples: int) -> float:
    """Returns the clip norm of a protocol for sums of `examples` gradients, each clipped to `clip_norm`."""
    return clip_norm * _validate.integer("examples", examples, low=1) * (1.0 + HEADROOM) * (1.0 + 2.0**-48)


def check_participation(scheme: str) -> None:
    """Refuses sampled clients where single examples are protected.

    Raises:
        ParameterError: The participation is sampled.
    """
    if scheme not in ("once", "every"):
        raise ParameterError(
            f"Example-level privacy is proved here for participation 'once' and 'every', not {scheme!r}: amplification "
            "by sampling clients speaks of whole clients. Silos in Flower and NVFlare can draw among their examples."
        )
