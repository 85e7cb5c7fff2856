"""Errors of the planner, which name the nearest requirements that can be met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from cpsgd._numbers import bits_of, rounded_up
from cpsgd.errors import InfeasibleError
from cpsgd.planner.problem import WHOLE_BITS, Problem
from cpsgd.planner.search import MAX_BITS, Contest, Design, feasible, roughly_feasible, values_of

# Up to how many times as many clients as would roughly do are tried, until certificates agree.
_MOST_MORE_CLIENTS = 64
# Bits below one that are named where still fewer were asked for.
_SHARES = tuple(2.0**-power for power in range(1, 17))


def too_few_bits(problem: Problem, bits: float | None) -> InfeasibleError:
    """Returns the error for bits without a design: it names the fewest bits, and the fewest clients, that have one.

    Both are found roughly, and then certified: what is named can be had.
    """
    asked = bits_of(bits) if bits is not None else f"up to {MAX_BITS} bits"
    reason = "every certificate needs more noise than that holds, whatever ε is"
    fewest = min(kind.fewest_values for kind in problem.setting.mechanisms)
    least = math.log2(fewest)
    # Mechanisms that leave coordinates out take less than a bit.
    shares = _SHARES if fewest == 1 else ()
    if problem.setting.overflow is None and bits is not None and values_of(bits) < fewest:
        reason = f"rounding and noise need at least {fewest} values, log2({fewest}) = {least:.4g} bits"
    elif problem.setting.overflow is not None:
        reason = "the sums of so many clients' noise alone do not fit the modulus, or there is too little noise"
    remedies = []
    more = [b for b in {least, *shares, *WHOLE_BITS} if b > (bits or 0.0)]
    smallest = next((b for b in sorted(more) if _roughly(problem, b) and _certainly(problem, b)), None)
    if smallest is not None:
        remedies.append(f"bits={smallest:.4g} is the fewest that will do")
    enough = _enough_clients(problem, bits if bits is not None else MAX_BITS)
    if enough is not None:
        remedies.append(f"about {enough:,} clients would do at {asked}")
    remedies.append("or a larger delta, which needs less noise")
    return InfeasibleError(
        f"No protocol with {asked} per coordinate keeps δ={problem.target.claim.delta:g} for "
        f"{problem.setting.clients:,} clients: {reason}. The nearest that can be had: {'; '.join(remedies)}."
    )


def _enough_clients(problem: Problem, bits: float) -> int | None:
    """Returns the fewest clients, within a factor 1.1, for which these bits have a design; None if no number helps."""
    clients = problem.setting.clients
    rough = _first(clients, 2**32, lambda n: _roughly(_scaled(problem, n), bits))
    if rough is None:
        return None
    return _first(rough - 1, _MOST_MORE_CLIENTS * rough, lambda n: _certainly(_scaled(problem, n), bits))


def _scaled(problem: Problem, clients: int) -> Problem:
    """Returns the requirements for more clients, with an unchanged share of dropouts."""
    surviving, conditions = problem.setting.surviving * clients // problem.setting.clients, problem.target.conditions
    conditions = replace(conditions, sizes=((surviving, conditions.rounds),))
    return replace(
        problem,
        setting=replace(problem.setting, clients=clients, surviving=surviving),
        target=replace(problem.target, conditions=conditions),
    )


def _roughly(problem: Problem, bits: float) -> bool:
    return roughly_feasible(problem.setting, problem.target, bits)


def _certainly(problem: Problem, bits: float) -> bool:
    return feasible(problem.setting, problem.target, bits)


def too_accurate(problem: Problem, bits: float, best: Design, max_error: float) -> InfeasibleError:
    """Returns the error for a `max_error` out of reach: it names the smallest error at this ε and the ε needed."""
    error = best.error.total
    remedy = f"The smallest error at ε={rounded_up(problem.target.claim.epsilon)} is {error:.4g}, with bits={bits:g}"
    needed = _smallest_epsilon(problem, bits, max_error)
    if needed is not None:
        remedy += f"; max_error={max_error:g} needs about epsilon={rounded_up(needed, 3)}"
    return InfeasibleError(
        f"No protocol was found whose expected squared error is at most {max_error:g} "
        f"(the Gaussian mechanism itself has {problem.gaussian_squared_error:.4g}). {remedy}, or more clients."
    )


def _smallest_epsilon(problem: Problem, bits: float, max_error: float) -> float | None:
    """Returns the smallest ε (within 2 %, rounded up) at which these bits reach the error."""
    if problem.target.conditions.participation.rate < 1.0:
        return None  # each trial would be a search of its own

    def reached(epsilon: float) -> bool:
        claim = replace(problem.target.claim, epsilon=epsilon)
        design = Contest(problem.setting, replace(problem.target, claim=claim), bits).draft(max_error)
        return design is not None and design.error.total <= max_error

    low = high = problem.target.claim.epsilon
    while not reached(high):
        low, high = high, 2.0 * high
        if high > 100.0:
            return None
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _first(low: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """Returns the smallest number above `low` that is enough, within a factor 1.1; None if none up to `most` is."""
    step = 1
    while not enough(low + step):
        low, step = low + step, max(2 * step, low // 4)
        if low + step > most:
            return None
    high = low + step
    while high > max(1.1 * low, low + 1):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
