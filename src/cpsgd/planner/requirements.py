"""`Requirements` of a protocol, and the mechanisms that may meet them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cpsgd import _validate
from cpsgd.codec.clip import MAX_LEVELS
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Mechanism
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner.modulus import DEFAULT_OVERFLOW
from cpsgd.protocol import MAX_CLIENTS
from cpsgd.registry import MECHANISMS

BEST = "best"
"""In place of a mechanism's name: whichever is the most accurate."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The requirements of a protocol, checked by `plan`.

    Attributes:
        clients: n, messages per round.
        dim: d, coordinates of a vector.
        epsilon: ε that all rounds together may cost a client; the smaller, the more private.
        delta: δ of the guarantee, which should be far below 1 / clients; 0 for pure differential privacy.
        clip_norm: D, longer vectors are scaled down to this Euclidean norm.
        bits: Bits per coordinate of a message, up to 31; fractions, too: 1.6 allows the three values of k = 2, m = 1.
        max_error: Instead of `bits`: the expected squared error allowed; the fewest whole bits that meet it are taken.
            With neither, the fewest bits within 10 % of the Gaussian mechanism's error, or as near as can be.
        rounds: Rounds that will be run with the protocol.
        participation: Rounds that a client is in: "once" (one at most), "every" (all), "apart:ROUNDS" (any two at
            least ROUNDS apart), "poisson:RATE" or "fixed-size:RATE" (drawn at random, a share RATE of all).
        adjacency: Which data sets are neighbours: "replace-one" (a client's vector becomes any other) or "zero-out" (it
            becomes zero).
        dropout: Share of the clients that may fail to answer; the noise of the others alone keeps the guarantee.
        colluding: Clients per round who may reveal their noise to the attacker; it does not count.
        secure: For secure aggregation: sums are taken modulo the smallest number that will do, and `bits` must hold
            that.
        pair: For two servers: sums are taken modulo a prime, which `bits` must hold, and a coordinate is one of at most
            256 integers, fewer for long vectors (`cpsgd.secagg.pair.shape.most_levels`). Without `bits`, the protocol
            with the shortest uploads is taken.
        server_messages: With `pair`, messages of zero that each server adds to its sum before it reveals it. One honest
            server's messages alone then keep the guarantee, with one client's own: any number of clients may collude.
            As many as clients cost three times the variance, four times as many 2.25 times.
        rotate: Whether vectors are rotated first. Without, nothing is clipped and the error is a worst case.
        overflow: With `secure` or `pair`, the probability allowed per round that any coordinate of its sum wraps
            around.
        mean_norm: With `secure` or `pair`, a norm that the mean of a round's (clipped) vectors is known not to exceed,
            at most `clip_norm`; a smaller modulus then holds the sums. Accuracy alone rests on it: where the mean is
            longer, sums may wrap around, and privacy is the same.
        mechanism: "best" for whichever is the most accurate, or the name of one (see `cpsgd.mechanisms`) whose
            parameters are to be chosen.
        replace_one_distance: The largest Euclidean distance of any two clients' vectors, where it is known to be less
            than 2D: √2 D for one-hot vectors, for instance. Less noise is then enough. Nothing enforces it, so that the
            guarantee rests on it; needs `distance_reason`, and replace-one neighbours.
        replace_one_l1_distance: The largest sum of absolute differences of any two clients' vectors, zero among them,
            where one is known: for discrete Laplace noise without rotation. It needs `distance_reason`, too.
        distance_reason: Why no two vectors are further apart, in a sentence that goes into the protocol and into every
            guarantee.
        levels: (k, X), where every coordinate of every vector is one of k evenly spaced numbers from -X to X: (2, 0.5)
            for ±½, (3, 1.0) for -1, 0 and 1. Nothing is then lost to rounding, and noise is of whole levels
            (`whole-laplace`), without rotation. Accuracy alone rests on it: other vectors are moved to levels.
        correlated: In how many rounds a draw of noise is, where later rounds are to take away again what earlier ones
            added; "auto" chooses. The guarantee is then that of the whole run.
        workload: With `correlated`, what training makes of the rounds' means: "sgd" (the default) or "momentum", with a
            schedule as in "momentum-late". In Python also what a round's mean has moved the model by 0, 1, 2, ...
            rounds later, for plain SGD all ones.

    Example:
        >>> from cpsgd.planner import Requirements
        >>> required = Requirements(clients=1000, dim=100, epsilon=1.0, delta=1e-6, dropout=0.2)
        >>> required.clients, required.epsilon, required.dropout, str(required.participation)
        (1000, 1.0, 0.2, 'every')
    """

    clients: int
    dim: int
    epsilon: float
    delta: float
    clip_norm: float = 1.0
    bits: float | None = None
    max_error: float | None = None
    rounds: int = 1
    participation: str | Participation = "every"
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE
    dropout: float = 0.0
    colluding: int = 0
    secure: bool = False
    pair: bool = False
    server_messages: int = 0
    rotate: bool = True
    overflow: float = DEFAULT_OVERFLOW
    mean_norm: float | None = None
    mechanism: str = BEST
    replace_one_distance: float | None = None
    replace_one_l1_distance: float | None = None
    distance_reason: str | None = None
    levels: tuple[int, float] | None = None
    correlated: int | str | None = None
    workload: str | Sequence[float] | None = None

    @property
    def modular(self) -> bool:
        """Whether sums are taken modulo a number."""
        return self.secure or self.pair


def surviving(clients: int, dropout: float) -> int:
    """Returns the fewest messages of a round, where this share of the clients may fail to answer."""
    # The tolerance keeps 0.1 of 1000 from being 101 clients.
    return clients - math.ceil(clients * _validate.fraction("dropout", dropout) - 1e-9)


def mechanisms_for(required: Requirements) -> tuple[type[Mechanism], ...]:
    """Returns the mechanisms to choose among.

    Raises:
        ParameterError: The one that is named does not exist, or does not go with secure aggregation.
    """
    if required.mechanism == BEST:
        # At δ = 0 only noise with pure differential privacy is left.
        kinds = [kind for kind in MECHANISMS.values() if (kind.planned if required.delta else kind.pure)]
        kinds = [kind for kind in kinds if not kind.on_levels]
        kinds += [kind for kind in MECHANISMS.values() if kind.on_levels and required.levels is not None]
        # Noise that wraps around makes every integer below the modulus possible: there is no range to prove.
        kinds = [kind for kind in kinds if not (required.pair and kind.wraps)]
        if not kinds:
            raise ParameterError("No mechanism for two servers keeps delta=0; allow a small delta.")
        return tuple(kind for kind in kinds if not required.modular or kind.not_summed is None)
    kind = MECHANISMS[_validate.choice("mechanism", required.mechanism, (BEST, *MECHANISMS))]
    if kind.on_levels and required.levels is None:
        raise ParameterError(f"{kind.name!r} is for coordinates on known levels: give levels=(k, X) and rotate=False.")
    if required.modular and kind.not_summed is not None:
        raise ParameterError(kind.not_summed)
    if required.pair and kind.wraps:
        raise ParameterError(f"Messages of {kind.name!r} wrap around the modulus: two servers have no range to check.")
    if required.delta == 0.0 and not kind.pure:
        pure = [name for name, each in MECHANISMS.items() if each.pure]
        raise ParameterError(f"delta=0 needs noise with pure differential privacy, one of {pure}, got {kind.name!r}.")
    return (kind,)


def checked_server_messages(required: Requirements) -> int:
    """Returns the number of messages that each server adds, checked.

    Raises:
        ParameterError: It is no valid number, or has no effect here.
    """
    found = _validate.integer("server_messages", required.server_messages, low=0, high=MAX_CLIENTS // 4)
    if found and (not required.pair or required.colluding):
        raise ParameterError(
            f"server_messages={found} is for two servers (pair=True), and covers any number of colluding clients: "
            "leave colluding out."
        )
    return found


def checked_levels(required: Requirements) -> tuple[int, float] | None:
    """Returns the number of levels and their range, checked.

    Raises:
        ParameterError: They are no such numbers, vectors are rotated away from them, or the norm allows zero alone.
    """
    if required.levels is None:
        return None
    try:
        levels, reach = required.levels
    except (TypeError, ValueError):
        raise ParameterError(f"Expected levels=(k, X), a number and a range, got {required.levels!r}.") from None
    if required.rotate:
        raise ParameterError("A rotation moves coordinates away from levels: use rotate=False, or leave out levels.")
    levels = _validate.integer("levels", levels, low=2, high=MAX_LEVELS)
    reach = _validate.positive("levels", reach)
    # An even k has no level at zero.
    least = reach / (levels - 1) * (2.0 if levels % 2 else math.sqrt(required.dim))
    if required.clip_norm < least * (1.0 - 2.0**-52):
        raise ParameterError(
            f"Vectors on {levels} levels from {-reach:g} to {reach:g} have a norm of 0 or at least {least:.9g}, which "
            f"clip_norm={required.clip_norm!r} is below: use a larger one."
        )
    return levels, reach


def checked_mean_norm(required: Requirements) -> float | None:
    """Returns the bound on the mean's norm, checked.

    Raises:
        ParameterError: It is no positive number, more than D, or has no effect here.
    """
    if required.mean_norm is None:
        return None
    found = _validate.positive("mean_norm", required.mean_norm)
    if found > required.clip_norm:
        raise ParameterError(
            f"Expected mean_norm to be at most clip_norm={required.clip_norm:g}, got mean_norm={found:g}: the mean of "
            "vectors clipped to that norm is never longer. Leave mean_norm out, or clip to a larger norm."
        )
    if not required.modular:
        raise ParameterError(
            f"mean_norm={found:g} is of no use without secure aggregation: it is the modulus that becomes smaller. "
            "Use secure=True, or leave mean_norm out."
        )
    return found
