"""`SecureParameters`: what all parties of one round agree on; and how many neighbours and shares suffice.

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

import math
import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cpsgd import _validate
from cpsgd.codec import wire
from cpsgd.errors import InfeasibleError, MessageError, ParameterError
from cpsgd.secagg import masks

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

MAX_CLIENTS = 2**20
MAX_BITS = 32
FINGERPRINT_BYTES = 16
_LAYOUT = struct.Struct("<IIBIIII16sQ")
_ORDER = ("clients", "dim", "bits", "neighbours", "threshold", "surviving", "quorum", "fingerprint", "round")
# Follows where the modulus is no power of two.
_MODULUS = struct.Struct("<I")
# SciPy's tails are good to far more digits than this; a bound may only be too large.
_ROUND_UP = 1.0 + 1e-6
_COMPLETE_UP_TO = 64
_LISTS_TRIED = 1e9


@dataclass(frozen=True, kw_only=True)
class SecureParameters:
    """The parameters of one round; frozen, hashable, to bytes and back.

    Attributes:
        clients: n, the clients invited; they are numbered 0..n-1.
        dim: d, integers per client.
        bits: b, the bits that hold an integer; sums are taken modulo 2^b where no other modulus is given.
        neighbours: k, clients each client shares masks with: n - 1 (all others), or an even number below that.
        threshold: t, how many of the k + 1 shares of a secret (one stays with its owner) give the secret.
            2t > k + 1, so that honest clients who reveal one kind of share each never reveal both secrets of anybody;
            and t > k/2 + 1 on a sparse graph, so that no stretch of its circle can be unmasked by itself.
        surviving: The fewest contributions whose sum may be revealed. Clients refuse to unmask fewer.
        quorum: q, how many clients must have signed the same survivors and keys before anybody unmasks: more than half
            of n, and on a sparse graph no fewer than `surviving`. 0 takes the fewest, and t on a complete  With C
            colluding clients there is one set of survivors for all if 2q > n + C.
        fingerprint: 16 bytes that identify what the integers mean, `Protocol.fingerprint`.
        round: Number of the round.
        modulus: M, where sums are taken modulo another number than 2^b; it takes b bits, too. None for 2^b.

    Example:
        >>> parameters = SecureParameters.choose(10, 1000, 12, fingerprint=bytes(16), round=3)
        >>> parameters.neighbours, parameters.threshold, parameters.upload_bytes
        (9, 6, 1500)
        >>> SecureParameters.from_bytes(parameters.to_bytes()) == parameters
        True
    """

    clients: int
    dim: int
    bits: int
    neighbours: int
    threshold: int
    fingerprint: bytes
    round: int
    surviving: int = 2
    quorum: int = 0
    modulus: int | None = None

    def __post_init__(self) -> None:
        n = _validate.integer("clients", self.clients, low=2, high=MAX_CLIENTS)
        normal: dict[str, object] = {
            "clients": n,
            "dim": _validate.integer("dim", self.dim, low=1, high=wire.DEFAULT_MAX_DIM),
            "bits": _validate.integer("bits", self.bits, low=1, high=MAX_BITS),
            "neighbours": _validate.integer("neighbours", self.neighbours, low=1, high=n - 1),
            "round": _validate.integer("round", self.round, low=0, high=wire.MAX_ROUND),
            "surviving": _validate.integer("surviving", self.surviving, low=2, high=n),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        k = self.neighbours
        if k % 2 and k != n - 1:
            raise ParameterError(f"Expected neighbours to be even, or {n - 1} for all others, got neighbours={k}.")
        low = smallest_threshold(n, k)
        object.__setattr__(self, "threshold", _validate.integer("threshold", self.threshold, low=low, high=k + 1))
        low = smallest_quorum(n, k, self.surviving)
        # Who takes a larger threshold on a complete graph has colluding clients in mind.
        quorum = self.quorum or (max(low, self.threshold) if k == n - 1 else low)
        object.__setattr__(self, "quorum", _validate.integer("quorum", quorum, low=low, high=n))
        if self.modulus is not None:
            high = 2**self.bits
            modulus = _validate.integer("modulus", self.modulus, low=high // 2 + 1, high=high)
            object.__setattr__(self, "modulus", None if modulus == high else modulus)
        if not isinstance(self.fingerprint, bytes) or len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ParameterError("Expected fingerprint to be 16 bytes.")

    @classmethod
    def choose(
        cls,
        clients: int,
        dim: int,
        bits: int,
        *,
        fingerprint: bytes,
        round: int,
        dropout: float = 0.1,
        colluding: int = 0,
        failure: float = 1e-9,
        surviving: int | None = None,
        modulus: int | None = None,
    ) -> Self:
        """Returns the fewest neighbours, and the threshold, that make failure and insecurity improbable.

        Args:
            clients: n.
            dim: d.
            bits: b.
            fingerprint: Fingerprint of the protocol that the integers belong to.
            round: Number of the round.
            dropout: Share of the clients that may fall silent, at whatever stage.
            colluding: Clients who may tell the server all they know.
            failure: Bound on the probability that a round with that many dropouts fails, and also on the probability
                that the graph is insecure against that many colluding clients (`cpsgd.secagg.risk` states both).
            surviving: The fewest contributions whose sum may be revealed; by default all but the dropouts. The graph
                is chosen to be secure with so few.
            modulus: M, where it is not 2^b.

        Raises:
            InfeasibleError: Not even a complete graph tolerates this many dropouts and colluding clients: those who are
                left could not be a quorum.
        """
        n = _validate.integer("clients", clients, low=2, high=MAX_CLIENTS)
        fewest = max(2, n - dropouts(n, dropout)) if surviving is None else surviving
        fewest = _validate.integer("surviving", fewest, low=2, high=n)
        neighbours, threshold = neighbours_and_threshold(n, dropout, colluding, failure, fewest)
        quorum = smallest_quorum(n, neighbours, fewest, colluding)
        return cls(
            clients=n,
            dim=dim,
            bits=bits,
            neighbours=neighbours,
            threshold=threshold,
            fingerprint=fingerprint,
            round=round,
            surviving=fewest,
            quorum=quorum,
            modulus=modulus,
        )

    @classmethod
    def for_protocol(
        cls,
        protocol: Protocol,
        *,
        round: int,
        clients: int | None = None,
        dropout: float = 0.1,
        colluding: int = 0,
        failure: float = 1e-9,
        surviving: int | None = None,
        accept_epsilon: float | None = None,
    ) -> Self:
        """Returns the parameters that carry a protocol's integers (see `choose`).

        Args:
            protocol: A protocol planned with `plan(..., secure=True)`.
            round: Number of the round.
            clients: Number of invited clients: by default, and at most, as many as the protocol is planned for.
            dropout: As in `choose`.
            colluding: As in `choose`.
            failure: As in `choose`.
            surviving: As in `choose`; by default as many as the protocol's promise needs, where it has one.
            accept_epsilon: Lets the sum of fewer be revealed if the ε that is then true is at most this.

        Raises:
            GuaranteeError: The sum of so few would keep neither the promise nor `accept_epsilon`.
        """
        protocol.check_integers()
        modulus = protocol.modulus
        if modulus is None:
            raise ParameterError("Expected a protocol with a modulus, got none; plan(..., secure=True) chooses one.")
        clients = protocol.clients if clients is None else clients
        if clients > protocol.clients:
            raise ParameterError(
                f"Expected at most clients={protocol.clients}, got {clients}: the sums of more could overflow."
            )
        if surviving is None and protocol.promise is not None:
            # Where fewer are invited, all of them, which may be refused below.
            surviving = min(protocol.promise.conditions.surviving, clients)
        found = cls.choose(
            clients,
            protocol.dim,
            (modulus - 1).bit_length(),
            fingerprint=protocol.fingerprint,
            round=round,
            dropout=dropout,
            colluding=colluding,
            failure=failure,
            surviving=surviving,
            modulus=modulus,
        )
        # Now, as the sum itself tells as much as the mean that is decoded from it.
        protocol.release(found.surviving, accept_epsilon=accept_epsilon)
        return found

    @property
    def masks(self) -> masks.Masks:
        """The masks, which also write integers as bytes."""
        return masks.Masks(2**self.bits if self.modulus is None else self.modulus)

    @property
    def upload_bytes(self) -> int:
        """Bytes of the packed integers, without the frame."""
        return self.masks.size_bytes(self.dim)

    @property
    def version(self) -> int:
        """The version of the messages: 5, and 6 where the modulus is no power of two."""
        return 5 if self.modulus is None else 6

    def to_bytes(self) -> bytes:
        """Returns all fields, in 49 bytes, or 53 where the modulus is no power of two."""
        data = _LAYOUT.pack(*(getattr(self, name) for name in _ORDER))
        return data if self.modulus is None else data + _MODULUS.pack(self.modulus)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote.

        Raises:
            MessageError: No parameters are written like this.
        """
        size = _LAYOUT.size
        if len(data) not in (size, size + _MODULUS.size):
            raise MessageError(f"Parameters take {size} or {size + _MODULUS.size} bytes, got {len(data)}.")
        modulus = _MODULUS.unpack(data[size:])[0] if data[size:] else None
        try:
            found = cls(**dict(zip(_ORDER, _LAYOUT.unpack(data[:size]), strict=True)), modulus=modulus)
        except ParameterError as error:
            raise MessageError(f"The parameters are not valid: {error}") from None
        if found.modulus != modulus:
            raise MessageError("The parameters are not valid: a power of two is not written out as the modulus.")
        return found


# ---------------------------------------------------------------------- risks


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
    """Returns a bound on the probability that some honest client has too many colluding neighbours.

    The server may try `_LISTS_TRIED` lists of keys.
    """
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
