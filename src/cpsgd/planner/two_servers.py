"""Plans for two servers: the shortest uploads, d numbers below a prime and a proof that grows with the levels."""

from __future__ import annotations

from dataclasses import replace

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.planner.problem import Finished, Problem
from cpsgd.protocol import Protocol
from cpsgd.secagg.pair.shape import RoundShape

# The proof is looked at where it is at least this share of an upload; then levels up to these are tried as well.
_WORTH_A_LOOK, _FEWER_LEVELS = 0.05, (8, 2)
# Fewer levels may need as many bits more.
_MORE_BITS = (0.0, 1.0)
# How often the interval of one bit is halved in which the fewest bits lie.
_HALVINGS = 2


def upload_bytes(protocol: Protocol) -> int:
    """Returns the bytes of one client's upload to two servers, its proof included.

    Raises:
        ParameterError: The protocol is not for two servers.

    Example:
        >>> from cpsgd import plan
        >>> small = plan(clients=200, dim=1000, epsilon=2.0, delta=1e-6, bits=8, mechanism="coins", pair=True)
        >>> small.protocol.modulus, upload_bytes(small.protocol)
        (223, 2059)
    """
    if protocol.modulus is None:
        raise ParameterError("The protocol has no modulus; plan(..., pair=True) chooses one.")
    shape = RoundShape.choose(
        prime=protocol.modulus, dim=protocol.dim, task=b"upload", levels=protocol.mechanism.values
    )
    return shape.upload_bytes


def shortest_uploads(problem: Problem, enough: float) -> tuple[float, Finished] | None:
    """Returns the design with the shortest uploads whose expected squared error is at most `enough`, and its bits.

    Where none comes that near, returns the most accurate one.
    """
    found = problem.fewest_bits(enough)
    if found is None or found[1].error.total > enough:
        return found
    best = found
    for levels in _FEWER_LEVELS:
        bits, size = found[0], upload_bytes(best[1].protocol)
        if levels >= best[1].mechanism.values or size - _without_proof(best[1].protocol) < _WORTH_A_LOOK * size:
            continue
        fewer = replace(problem, setting=replace(problem.setting, most_values=levels))
        other = next(filter(None, (_attempt(fewer, enough, bits + more) for more in _MORE_BITS)), None)
        if other is not None and upload_bytes(other[1].protocol) < size:
            best, problem = other, fewer
    low, high = best[0] - 1.0, best[0]
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        other = _attempt(problem, enough, middle)
        if other is None:
            low = middle
            continue
        high = middle
        if upload_bytes(other[1].protocol) < upload_bytes(best[1].protocol):
            best = other
    return best


def _attempt(problem: Problem, enough: float, bits: float) -> tuple[float, Finished] | None:
    """Returns a design of these bits with at most `enough` error, or None."""
    try:
        found = problem.at(bits) if problem.promising(bits, enough) else None
    except (ConditionError, ParameterError):
        return None
    return (bits, found) if found is not None and found.error.total <= enough else None


def _without_proof(protocol: Protocol) -> int:
    """Returns the bytes of an upload whose proof is about two levels, which is the shortest."""
    assert protocol.modulus is not None  # planned for two servers
    return RoundShape.choose(prime=protocol.modulus, dim=protocol.dim, task=b"upload", levels=2).upload_bytes
