"""Who is whose neighbour, and how many neighbours and which threshold are enough: exact tails and a union bound.

The graph is a circle in random order on which each client is tied to the k/2 next on either side (Bell, Bonawitz,
Gascón, Lepoint, Raykova 2020, after Harary). Seen from one client its k neighbours are a uniform choice among the
n - 1 others; so the number of them in any set that was fixed without looking at the graph is hypergeometric, and its
tails are computed exactly. Everybody computes the graph from the announced session, so that the server cannot tell
different clients different ones. Let D clients drop out and C collude with the server.

A round **fails** if the shares of some needed secret are too few. A survivor's seed needs t of the k + 1 shares of
itself and its neighbours; a dropped client's key needs t of the shares of its k neighbours. With a union bound over the
clients,

    P(fails) <= (n - D) P(H(n-1, n-1-D, k) < t - 1) + D P(H(n-1, n-D, k) < t),

H(N, K, k) the number of marked among k drawn of N with K marked.

A graph is **insecure** if an active server could get both secrets of an honest client, or if a server that follows the
protocol sees the sums of parts of the survivors:

* Each honest holder reveals one kind of share of a client and colluding ones both, so both secrets take 2t shares out
  of k + 1 + c, c the colluding neighbours. Excluded by 2t > k + 1 + c, which also means c < t: colluding clients alone
  learn nothing. P(some honest client has c >= 2t - k - 1) <= (n - C) P(H(n-1, C, k) >= 2t - k - 1).
* The masks between honest survivors hide everything but the sum over each connected part. A circle with ties to the
  k/2 next on either side falls into parts only if k/2 clients in a row are missing (in two places even), so
  P(parts) <= n P(given k/2 in a row are missing), also hypergeometric, with C + D missing. Where the clients would
  agree to a sum with more than D missing, n - `surviving` takes the place of D.

In a complete graph nothing is left to chance: a round fails if and only if n - D < t, and it is secure for 2t > n + C.
Up to 64 clients it costs little, so it is what they get.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import InfeasibleError

if TYPE_CHECKING:
    from cpsgd.secagg.parameters import SecureParameters

# SciPy's tails are good to far more digits than this; a bound may only be too large.
_ROUND_UP = 1.0 + 1e-6
_COMPLETE_UP_TO = 64


def neighbours(clients: int, degree: int, session: bytes, index: int) -> tuple[int, ...]:
    """The neighbours of client `index`, in increasing order.

    Example:
        >>> neighbours(4, 3, bytes(16), 2)
        (0, 1, 3)
        >>> all(5 in neighbours(100, 10, bytes(16), j) for j in neighbours(100, 10, bytes(16), 5))
        True
    """
    if degree == clients - 1:
        return tuple(other for other in range(clients) if other != index)
    order, position = _circle(clients, session)
    steps = np.arange(1, degree // 2 + 1)
    places = int(position[index]) + np.concatenate([-steps, steps])
    return tuple(sorted(order[places % clients].tolist()))


@lru_cache(maxsize=4)
def _circle(clients: int, session: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The clients in the order of 64-bit numbers from an AES-256 keystream, and each client's place in it."""
    key = hashlib.sha256(b"cpsgd secagg 1 graph" + session).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * clients))
    # A stable sort, so that all agree even if two numbers were equal.
    order = np.argsort(np.frombuffer(stream, "<u8"), kind="stable")
    position = np.empty(clients, dtype=np.int64)
    position[order] = np.arange(clients)
    return order, position


@dataclass(frozen=True)
class Risk:
    """Upper bounds for one round.

    Attributes:
        failure: Probability that too few shares of some secret are left, so that the round ends without a sum.
        insecurity: Probability that the graph lets a server that follows the protocol and those who collude learn more
            than one sum, or an active server both secrets of an honest client.
    """

    failure: float
    insecurity: float


def dropouts(clients: int, dropout: float) -> int:
    """How many clients `dropout` means, rounded up."""
    _validate.fraction("dropout", dropout)
    # The tolerance keeps 0.1 of 1000 from being 101 clients.
    return math.ceil(clients * dropout - 1e-9)


def risk(parameters: SecureParameters, *, dropout: float = 0.1, colluding: int = 0) -> Risk:
    """What `dropout` and `colluding` do to a round with these parameters, as proved in this module's description.

    Example:
        >>> from cpsgd.secagg import SecureParameters
        >>> parameters = SecureParameters.choose(1000, 1, 8, fingerprint=bytes(16), round=0, colluding=50)
        >>> found = risk(parameters, dropout=0.1, colluding=50)
        >>> parameters.neighbours, parameters.threshold, found.failure < 1e-9, found.insecurity < 1e-9
        (84, 54, True, True)
    """
    n = parameters.clients
    dropped = dropouts(n, dropout)
    colluding = _validate.integer("colluding", colluding, low=0, high=n)
    k, t, missing = parameters.neighbours, parameters.threshold, max(dropped, n - parameters.surviving)
    return Risk(_risk(n, k, t, dropped, colluding).failure, _risk(n, k, t, missing, colluding).insecurity)


def neighbours_and_threshold(
    clients: int, dropout: float, colluding: int, failure: float, surviving: int
) -> tuple[int, int]:
    """The fewest neighbours, and the smallest threshold with them, for which both risks are at most `failure`."""
    n = clients
    dropped = dropouts(n, dropout)
    missing = max(dropped, n - surviving)
    colluding = _validate.integer("colluding", colluding, low=0)
    _validate.probability("failure", failure)
    for k in range(2, n - 1, 2) if n > _COMPLETE_UP_TO else ():
        # The connectivity does not depend on t, and rules out small k at once.
        if _parts(n, k, missing, colluding) > failure:
            continue
        threshold = _smallest_threshold(n, k, missing, colluding, failure)
        if threshold is not None and _risk(n, k, threshold, dropped, colluding).failure <= failure:
            return k, threshold
    threshold = (n + colluding) // 2 + 1
    if threshold > n - dropped:
        raise InfeasibleError(
            f"Of {n} clients {dropped} may drop out and {colluding} may collude: secure aggregation needs "
            f"2 (clients - dropouts) > clients + colluding. At most {max(0, n - 2 * dropped - 1)} may collude."
        )
    return n - 1, threshold


def _smallest_threshold(n: int, k: int, dropped: int, colluding: int, failure: float) -> int | None:
    candidates = range((k + 1) // 2 + 1, k + 2)
    # The insecurity falls with t.
    first = bisect_left(candidates, True, key=lambda t: _risk(n, k, t, dropped, colluding).insecurity <= failure)
    return candidates[first] if first < len(candidates) else None


def _risk(n: int, k: int, t: int, dropped: int, colluding: int) -> Risk:
    if k == n - 1:
        return Risk(float(n - dropped < t), float(2 * t <= n + colluding))
    # Slow to import, and not needed for a complete graph.
    from scipy.stats import hypergeom

    alive, lost = n - dropped, dropped
    failure = 0.0
    if alive:
        failure += alive * float(hypergeom.cdf(t - 2, n - 1, alive - 1, k))
    if lost:
        failure += lost * float(hypergeom.cdf(t - 1, n - 1, alive, k))
    honest = n - colluding
    both = honest * float(hypergeom.sf(2 * t - k - 2, n - 1, min(colluding, n - 1), k))
    insecurity = both + _parts(n, k, dropped, colluding)
    return Risk(min(1.0, failure * _ROUND_UP), min(1.0, insecurity * _ROUND_UP))


def _parts(n: int, k: int, dropped: int, colluding: int) -> float:
    """Bound on the probability that the honest survivors are not connected."""
    missing, row = min(n, dropped + colluding), k // 2
    if missing < row:
        return 0.0
    logarithm = sum(math.log((missing - i) / (n - i)) for i in range(row))
    return min(1.0, n * math.exp(logarithm) * _ROUND_UP)
