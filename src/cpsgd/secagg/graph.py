"""The graph of neighbours; and the number of neighbours and the threshold that suffice, by exact tails.

The graph is a circle in random order on which each client is tied to the k/2 next on either side (Bell, Bonawitz,
Gascón, Lepoint, Raykova 2020, after Harary). Seen from one client its k neighbours are a uniform choice among the n - 1
others. So the number of them in any set that does not depend on the graph is hypergeometric, and its tails are computed
exactly. Everybody computes the graph from the list of all who take part, so that the server cannot show different
graphs to different clients. Numbers are given out before the keys in that list are drawn, so that the server cannot
choose who is where. Let D clients drop out and C collude with the server.

A round **fails** if the shares of some needed secret are too few. A survivor's seed needs t of the k + 1 shares of
itself and its neighbours; a dropped client's key needs t of the shares of its k neighbours. With a union bound over the
clients,

    P(fails) <= (n - D) P(H(n-1, n-1-D, k) < t - 1) + D P(H(n-1, n-D, k) < t),

H(N, K, k) the number of marked among k drawn of N with K marked.

A graph is **insecure** if an active server could get both secrets of an honest client, or the sum of a part of those
who signed the survivors:

* Each honest holder reveals one kind of share of a client and colluding ones both, so both secrets take 2t shares out
  of k + 1 + c, c the colluding neighbours. Excluded by 2t > k + 1 + c, which also means c < t: colluding clients alone
  learn nothing.
* A server that knows the graph can drop k/2 clients in a row on either side of a stretch of it. Of a client at the
  stretch's end it then gets k/2 + 1 + c' shares at most, c' the colluding among the k/2 that are missing on one side.
  Excluded by t > k/2 + 1 + c', whoever drops out (docs/secure-aggregation.md has the proof). This implies the former,
  for c <= 2c'. P(not so for some honest client) <= 2 (n - C) P(H(n-1, C, k/2) >= t - k/2 - 1). While the round waits,
  the server can try several lists, with other keys of colluding clients: the bound allows for 10^9 of them.
* Also counted, though the round would only fail: that the honest survivors are in several parts. The circle falls
  apart only if k/2 clients in a row are missing (in two places even), so P(parts) <= n P(given k/2 in a row are
  missing), also hypergeometric, with C + D missing. Where the clients would agree to a sum with more than D missing,
  n - `surviving` takes the place of D.

In a complete graph nothing is left to chance: a round fails if and only if n - D < t, and it is secure for 2t > n + C.
Up to 64 clients it costs little, so it is what they get. Either needs a quorum q with 2q > n + C.
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
_LISTS_TRIED = 1e9


def neighbours(clients: int, degree: int, session: bytes, index: int) -> tuple[int, ...]:
    """Returns the neighbours of client `index`, in increasing order.

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
    """Returns the clients in the order of 64-bit numbers from an AES-256 keystream, and each client's place in it."""
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
        insecurity: Probability that the graph lets an active server and those who collude learn both secrets of an
            honest client, or the sum of a part of those who signed. 1 where the quorum lets two sets of survivors be
            signed.
    """

    failure: float
    insecurity: float


def dropouts(clients: int, dropout: float) -> int:
    """Returns the number of clients that `dropout` means, rounded up."""
    _validate.fraction("dropout", dropout)
    # The tolerance keeps 0.1 of 1000 from being 101 clients.
    return math.ceil(clients * dropout - 1e-9)


def risk(parameters: SecureParameters, *, dropout: float = 0.1, colluding: int = 0) -> Risk:
    """Returns bounds on the risks of a round with these parameters, as proved in this module's description.

    Example:
        >>> from cpsgd.secagg import SecureParameters
        >>> parameters = SecureParameters.choose(1000, 1, 8, fingerprint=bytes(16), round=0, colluding=50)
        >>> found = risk(parameters, dropout=0.1, colluding=50)
        >>> parameters.neighbours, parameters.threshold, found.failure < 1e-9, found.insecurity < 1e-9
        (136, 97, True, True)
    """
    n = parameters.clients
    dropped = dropouts(n, dropout)
    colluding = _validate.integer("colluding", colluding, low=0, high=n)
    k, t, missing = parameters.neighbours, parameters.threshold, max(dropped, n - parameters.surviving)
    failure = 1.0 if n - dropped < parameters.quorum else _risk(n, k, t, dropped, colluding).failure
    insecurity = 1.0 if 2 * parameters.quorum <= n + colluding else _risk(n, k, t, missing, colluding).insecurity
    return Risk(failure, insecurity)


def smallest_threshold(clients: int, neighbours: int) -> int:
    """Returns the fewest shares that may give a secret if nobody colludes."""
    return clients // 2 + 1 if neighbours == clients - 1 else neighbours // 2 + 2


def smallest_quorum(clients: int, neighbours: int, surviving: int, colluding: int = 0) -> int:
    """Returns the smallest quorum for which two different sets of survivors cannot both have enough signatures.

    In a complete graph any quorum is tied to all survivors, so all of them are in the sum. On a sparse graph only
    the clients that signed are known to be.
    """
    majority = (clients + colluding) // 2 + 1
    return majority if neighbours == clients - 1 else max(majority, surviving)


def neighbours_and_threshold(
    clients: int, dropout: float, colluding: int, failure: float, surviving: int
) -> tuple[int, int]:
    """Returns the fewest neighbours, and the smallest threshold, for which both risks are at most `failure`."""
    n = clients
    dropped = dropouts(n, dropout)
    missing = max(dropped, n - surviving)
    colluding = _validate.integer("colluding", colluding, low=0)
    _validate.probability("failure", failure)
    threshold = (n + colluding) // 2 + 1
    if threshold > n - dropped:
        raise InfeasibleError(
            f"Of {n} clients {dropped} may drop out and {colluding} may collude: secure aggregation needs "
            f"2 (clients - dropouts) > clients + colluding. At most {max(0, n - 2 * dropped - 1)} may collude."
        )
    for k in range(2, n - 1, 2) if n > _COMPLETE_UP_TO else ():
        # The connectivity does not depend on t, and rules out small k at once.
        if _parts(n, k, missing, colluding) > failure:
            continue
        candidates = range(smallest_threshold(n, k), k + 2)
        # The insecurity falls with t.
        first = bisect_left(candidates, True, key=lambda t: _risk(n, k, t, missing, colluding).insecurity <= failure)
        for t in candidates[first : first + 1]:
            if _risk(n, k, t, dropped, colluding).failure <= failure:
                return k, t
    return n - 1, threshold


def _risk(n: int, k: int, t: int, dropped: int, colluding: int) -> Risk:
    """Returns bounds on both risks for n clients with k neighbours and threshold t, by the hypergeometric law."""
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
    insecurity = _crowded(n, k, t, colluding) + _parts(n, k, dropped, colluding)
    return Risk(min(1.0, failure * _ROUND_UP), min(1.0, insecurity))


def _crowded(n: int, k: int, t: int, colluding: int) -> float:
    """Bounds the probability that an honest client has too many colluding neighbours, over all lists tried."""
    from scipy.stats import hypergeom

    row = k // 2
    some = float(hypergeom.sf(t - row - 2, n - 1, min(colluding, n - 1), row))
    return 2 * (n - colluding) * some * _ROUND_UP * _LISTS_TRIED


def _parts(n: int, k: int, dropped: int, colluding: int) -> float:
    """Returns a bound on the probability that the honest survivors are not connected."""
    missing, row = min(n, dropped + colluding), k // 2
    if missing < row:
        return 0.0
    logarithm = sum(math.log((missing - i) / (n - i)) for i in range(row))
    return min(1.0, n * math.exp(logarithm) * _ROUND_UP)
