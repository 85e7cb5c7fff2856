"""`SecureParameters`: the parameters that all parties of one round of secure aggregation agree on."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cpsgd import _validate
from cpsgd.codec import wire
from cpsgd.errors import MessageError, ParameterError
from cpsgd.secagg import graph, masks

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

MAX_CLIENTS = 2**20
MAX_BITS = 32
FINGERPRINT_BYTES = 16
_LAYOUT = struct.Struct("<IIBIIII16sQ")
_ORDER = ("clients", "dim", "bits", "neighbours", "threshold", "surviving", "quorum", "fingerprint", "round")
# Follows where the modulus is no power of two.
_MODULUS = struct.Struct("<I")


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
            of n, and on a sparse graph no fewer than `surviving`. 0 takes the fewest, and t on a complete graph. With C
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
        low = graph.smallest_threshold(n, k)
        object.__setattr__(self, "threshold", _validate.integer("threshold", self.threshold, low=low, high=k + 1))
        low = graph.smallest_quorum(n, k, self.surviving)
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
        fewest = max(2, n - graph.dropouts(n, dropout)) if surviving is None else surviving
        fewest = _validate.integer("surviving", fewest, low=2, high=n)
        neighbours, threshold = graph.neighbours_and_threshold(n, dropout, colluding, failure, fewest)
        quorum = graph.smallest_quorum(n, neighbours, fewest, colluding)
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
