"""Warns of plans whose means would be mostly noise."""

from __future__ import annotations

import math

from cpsgd._numbers import rounded_up
from cpsgd.planner.planning import Plan


def utility_warning(plan: Plan) -> str | None:
    """Returns why a round's mean would be mostly noise, and remedies; None where it would not.

    The error of the mean is compared with the clip norm D, the most that the mean itself can be. The suggestions follow
    how the error grows: with the square roots of the dimension and of the rounds, and with one over the clients and
    over ε. They are rough, and each alone brings the error down to D.

    Example:
        >>> from cpsgd import plan
        >>> print(utility_warning(plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=4)))
        None
        >>> print(utility_warning(plan(clients=10, dim=900, epsilon=2.0, delta=1e-6, bits=16)))
        The predicted error of a round's mean has norm 1..., and the mean itself at most 1 (the clip norm): ...
    """
    error, most = math.sqrt(plan.error.total), plan.protocol.clip_norm
    if error <= most:
        return None
    times = error / most
    protocol = plan.protocol
    helps = [f"{math.ceil(protocol.clients * times):,} clients", f"ε = {rounded_up(plan.target_epsilon * times, 3)}"]
    if (rounds := math.floor(plan.rounds / times**2)) >= 1:
        helps.append(f"{rounds:,} round{'s' if rounds > 1 else ''}")
    if (dim := math.floor(protocol.dim / times**2)) >= 1:
        helps.append(f"a model of {dim:,} parameters")
    return (
        f"The predicted error of a round's mean has norm {error:.3g}, and the mean itself at most {most:.3g} (the clip "
        f"norm): a model would learn mostly noise. It takes about {', '.join(helps[:-1])} or {helps[-1]} to make them "
        "equal, and more to learn well. Updates smaller than the clip norm fare worse; clip closer to their norms."
    )
