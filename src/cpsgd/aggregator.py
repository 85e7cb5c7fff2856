"""`Aggregator`: the server's half of a round. Takes messages one at a time and yields the mean."""

from __future__ import annotations

import hashlib
import struct
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd.codec import pipeline, wire
from cpsgd.errors import (
    ChecksumError,
    DimensionError,
    DuplicateError,
    EmptyError,
    FingerprintError,
    MagicError,
    ParameterError,
    RoundError,
    TrailingBytesError,
    TruncatedError,
    VersionError,
    WireError,
)
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    from cpsgd.privacy.guarantees import Guarantee

# A saved state: magic, version, fingerprint, round, message count; then ids, sums and a SHA-256 of all that.
_STATE_MAGIC = b"cpsa"
_STATE_VERSION = 1
_STATE = struct.Struct("<4sH16sQQ")
_ID_BYTES = 16
_DIGEST_BYTES = 32


class Aggregator:
    """Sums the messages of one round and returns their mean.

    A message is either accepted whole or refused with a `WireError` that leaves the aggregator as it was. Memory is the
    sums (4 or 8 bytes per coordinate) and 16 bytes per message for the ids that reveal a repetition. Methods may be
    called from several threads. It pickles, as `save` and `restore` do.

    Example:
        >>> from cpsgd import Aggregator, Protocol
        >>> protocol = Protocol.rotated_binomial(clients=2, dim=3, clip_norm=1.0, levels=1024, trials=0)
        >>> aggregator = Aggregator(protocol, round=0)
        >>> aggregator.add(protocol.encode([0.5, 0.0, 0.1], round=0))
        >>> aggregator.add(protocol.encode([0.1, 0.2, 0.1], round=0))
        >>> aggregator.count
        2
        >>> aggregator.mean().round(1)
        array([0.3, 0.1, 0.1], dtype=float32)
    """

    def __init__(self, protocol: Protocol, round: int, *, max_dim: int = wire.DEFAULT_MAX_DIM) -> None:
        """Starts an empty round.

        Args:
            protocol: The protocol that messages must have been made with.
            round: Number of the round they must have been made for.
            max_dim: The largest dimension to allocate memory for.

        Raises:
            DimensionError: The protocol's dimension is over `max_dim`.
        """
        _validate.instance("protocol", protocol, Protocol, "A plan has one: plan.protocol.")
        if protocol.dim > max_dim:
            raise DimensionError(
                f"The protocol has {protocol.dim} coordinates, over the limit max_dim={max_dim}; raise it if meant."
            )
        self.protocol = protocol
        self.round = _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        self._max_dim = max_dim
        self._fingerprint = protocol.fingerprint
        self._format = protocol.format
        self._ids: set[bytes] = set()
        self._sums = self._format.empty(protocol.dim)
        self._lock = Lock()

    @property
    def count(self) -> int:
        """Messages accepted so far."""
        return len(self._ids)

    @property
    def sums(self) -> NDArray[Any]:
        """A copy of the sums of the messages: integers, or floats where the protocol sends floats.

        Where messages wrap around, sums are reduced as well: only then are they what a guarantee is about.
        """
        with self._lock:
            found: NDArray[Any] = self._sums.copy()
        return found % self.protocol.modulus if self.protocol.mechanism.wraps else found

    def __repr__(self) -> str:
        return (
            f"Aggregator(round {self.round}, {self.count:,} messages of {self.protocol.clients:,} planned, "
            f"{self.protocol.name})"
        )

    def _repr_html_(self) -> str:
        promise = self.protocol.promise
        rows = [
            ("messages", f"{self.count:,} of {self.protocol.clients:,} planned"),
            ("protocol", f"{self.protocol.name}, {self.protocol.dim:,} coordinates"),
            ("promised", "nothing" if promise is None else str(promise)),
        ]
        return html_table(f"Aggregator of round {self.round}", rows)

    def add(self, message: bytes | bytearray | memoryview) -> None:
        """Accepts one message.

        Raises:
            WireError: The message is damaged, was made for another protocol or round, holds a value no honest client
                sends, or was accepted before. The subclass says which; nothing was changed.
            ParameterError: It is of another type than bytes.
        """
        if not isinstance(message, bytes | bytearray | memoryview):
            raise ParameterError(f"Expected a message as bytes, which `encode` returns, got {type(message).__name__}.")
        # A copy of what the caller could still change while it is being checked and added.
        data = message if isinstance(message, bytes) else bytes(message)
        parsed = wire.read(data, max_dim=self._max_dim, version=self._format.version)
        if parsed.fingerprint != self._fingerprint or parsed.radix != self._format.radix:
            raise FingerprintError("The message was made with other protocol parameters than this aggregator's.")
        if parsed.dim != self.protocol.dim:
            raise DimensionError(f"The message has {parsed.dim} coordinates, the protocol {self.protocol.dim}.")
        if parsed.round != self.round:
            raise RoundError(f"The message was made for round {parsed.round}, this is round {self.round}.")
        chosen = self._format.chosen(parsed.message_id, parsed.dim)
        self._format.check(parsed.payload, parsed.dim if chosen is None else chosen.size)
        with self._lock:
            if parsed.message_id in self._ids:
                raise DuplicateError("A message with this id was accepted before.")
            self._sums = self._format.widened(self._sums, self.count + 1)
            self._format.add(parsed.payload, self._sums, chosen)
            self._ids.add(parsed.message_id)

    def merge(self, other: Aggregator) -> None:
        """Adds all messages of another aggregator of the same round (tree aggregation); `other` stays as it is.

        Raises:
            WireError: It is for another protocol or round, or a message was accepted by both. Nothing was changed.
        """
        if other is self:
            raise DuplicateError("An aggregator cannot be merged with itself.")
        if other._fingerprint != self._fingerprint:
            raise FingerprintError("The other aggregator is for a protocol with other parameters.")
        if other.round != self.round:
            raise RoundError(f"The other aggregator is for round {other.round}, this one for round {self.round}.")
        with other._lock:
            ids, sums = set(other._ids), other._sums.copy()
        with self._lock:
            if not self._ids.isdisjoint(ids):
                raise DuplicateError("A message was accepted by both aggregators.")
            self._sums = self._format.widened(self._sums, self.count + len(ids)) + sums
            self._ids |= ids

    def guarantee(self, *, accept_epsilon: float | None = None) -> Guarantee | None:
        """Returns the guarantee of the mean of the messages so far; None where the protocol promises nothing.

        Raises:
            EmptyError: No message has been accepted.
            GuaranteeError: It is less than was promised, or than `accept_epsilon` where that is given.
        """
        if not (count := self.count):
            raise EmptyError("There is no mean yet: no message has been accepted.")
        return self.protocol.release(count, accept_epsilon=accept_epsilon)

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        """Returns the unbiased estimate of the mean of the vectors behind the messages really received.

        The noise in it is that of these messages alone. A protocol made by `plan` promises an ε for a number of them,
        and with fewer the mean is refused. A protocol without a promise is released with any number: ask
        `cpsgd.guarantee` with `surviving=aggregator.count` what that protects.

        Args:
            accept_epsilon: Release it all the same if the ε that is true is at most this; `guarantee` says what it is.

        Raises:
            EmptyError: No message has been accepted.
            GuaranteeError: So few messages keep neither what was promised nor `accept_epsilon`.
        """
        # Messages are never taken back, so that what is proved now holds for what is decoded below.
        self.guarantee(accept_epsilon=accept_epsilon)
        with self._lock:
            return pipeline.decode(self.protocol, self._sums, self.count, self.round)

    def save(self) -> bytes:
        """Returns the whole state as bytes, for `restore`."""
        with self._lock:
            head = _STATE.pack(_STATE_MAGIC, _STATE_VERSION, self._fingerprint, self.round, self.count)
            sums = self._sums.astype(self._format.saved).tobytes()
            body = head + b"".join(sorted(self._ids)) + sums
        return body + hashlib.sha256(body).digest()

    def __reduce__(self) -> tuple[Any, ...]:
        # Not as attributes: a lock cannot be sent, and what arrives is checked.
        return partial(type(self).restore, self.protocol, self.save(), max_dim=self._max_dim), ()

    @classmethod
    def restore(cls, protocol: Protocol, state: bytes, *, max_dim: int = wire.DEFAULT_MAX_DIM) -> Self:
        """Returns the aggregator that `save` wrote.

        Raises:
            WireError: The state is damaged or was saved for another protocol.
        """
        state = bytes(state)
        if len(state) < _STATE.size + _DIGEST_BYTES:
            raise TruncatedError(f"A saved state has at least {_STATE.size + _DIGEST_BYTES} bytes, got {len(state)}.")
        magic, version, fingerprint, round, count = _STATE.unpack_from(state)
        if magic != _STATE_MAGIC:
            raise MagicError("Not a saved aggregator: the first four bytes are not 'cpsa'.")
        if version != _STATE_VERSION:
            raise VersionError(f"State version {version} is not readable here; this release reads {_STATE_VERSION}.")
        if fingerprint != protocol.fingerprint:
            raise FingerprintError("The state was saved for a protocol with other parameters.")
        expected = _STATE.size + count * _ID_BYTES + protocol.dim * 8 + _DIGEST_BYTES
        if len(state) != expected:
            kind = TruncatedError if len(state) < expected else TrailingBytesError
            raise kind(f"The saved state should have {expected} bytes, got {len(state)}.")
        if hashlib.sha256(memoryview(state)[:-_DIGEST_BYTES]).digest() != state[-_DIGEST_BYTES:]:
            raise ChecksumError("The digest does not match: the saved state was damaged.")

        aggregator = cls(protocol, round, max_dim=max_dim)
        start = _STATE.size
        ids = {state[start + i * _ID_BYTES : start + (i + 1) * _ID_BYTES] for i in range(count)}
        if len(ids) != count:
            raise WireError("The saved state repeats a message id.")
        start += count * _ID_BYTES
        form = aggregator._format
        sums = np.frombuffer(state, form.saved, protocol.dim, start)
        form.check_sums(sums, count)
        aggregator._sums = form.widened(aggregator._sums, count)
        aggregator._sums = sums.astype(aggregator._sums.dtype)
        aggregator._ids = ids
        return aggregator
