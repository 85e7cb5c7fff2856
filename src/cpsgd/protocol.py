"""`Protocol`: the frozen parameters of one kind of round, and what a round with them promises.

Symbols of the paper (Agarwal, Suresh, Yu, Kumar, McMahan: "cpSGD", NeurIPS 2018) and their names here:

| paper | here | meaning |
|---|---|---|
| n | `clients` | clients a round is planned for |
| d | `dim` | coordinates of a vector |
| D | `clip_norm` | bound on a vector's Euclidean norm, enforced by clipping |
| X^max | `coordinate_range` | each (rotated) coordinate is clipped to [-X^max, X^max] |
| k | `levels` | levels a coordinate is rounded to |
| m, p | `trials`, `p` | the noise a client adds to a coordinate is Binomial(m, p) |
| s | `scale` | distance of two levels, 2 X^max / (k - 1) |
| σ | `sigma` | standard deviation a client adds in the Gaussian protocol |
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from cpsgd import _validate
from cpsgd.codec import noise, pack, pipeline, quantize, wire
from cpsgd.errors import ParameterError, VectorError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from cpsgd.error import ErrorBound, ExpectedError

ProtocolName = Literal["gaussian", "binomial", "rotated-binomial"]

MAX_CLIENTS = 2**32 - 1
MAX_DIM = 2**32 - 1
MAX_RADIX = 2**32 - 1
# Outside this interval float32 arithmetic could overflow or vanish on the way through the codec.
_NORM_LIMITS = (1e-20, 1e20)
_MAX_GRID_NORM = 1e25


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The parameters all parties of a round share; frozen, hashable, JSON round-trip.

    Use the constructors named after the paper's protocols: `Protocol.gaussian`, `Protocol.binomial` for
    π_sk(Bin(m,p)) and `Protocol.rotated_binomial` for Rot(π_sk(Bin(m,p))).

    Attributes:
        clients: n, the clients a round is planned for. The mean is always over the messages received.
        dim: d, coordinates of a vector.
        clip_norm: D, longer vectors are scaled down to this Euclidean norm.
        coordinate_range: X^max, (rotated) coordinates are clipped to plus or minus this.
        levels: k >= 2 (0 in the Gaussian protocol).
        trials: m >= 0; 0 is quantization without noise, hence without privacy.
        p: success probability of the Binomial noise, strictly between 0 and 1.
        rotate: whether vectors are rotated before they are rounded.
        modulus: sums are taken modulo this (secure aggregation), or None for plain sums.
        sigma: standard deviation each client adds in the Gaussian protocol, None in the others.
        rotation_seed: the announced public seed of the rotation, a 64-bit number. Privacy does not depend on it.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=14)
        >>> protocol.name, protocol.radix, protocol.message_bytes
        ('rotated-binomial', 16, 114)
        >>> Protocol.from_json(protocol.to_json()) == protocol
        True
    """

    clients: int
    dim: int
    clip_norm: float
    coordinate_range: float
    levels: int
    trials: int
    p: float = 0.5
    rotate: bool = True
    modulus: int | None = None
    sigma: float | None = None
    rotation_seed: int = 0

    def __post_init__(self) -> None:
        low, high = _NORM_LIMITS
        if not isinstance(self.rotate, bool | np.bool_):
            raise ParameterError(f"Expected rotate to be True or False, got {reprlib.repr(self.rotate)}.")
        normal: dict[str, object] = {
            "rotate": bool(self.rotate),
            "clients": _validate.integer("clients", self.clients, low=1, high=MAX_CLIENTS),
            "dim": _validate.integer("dim", self.dim, low=1, high=MAX_DIM),
            "clip_norm": _validate.positive("clip_norm", self.clip_norm, low=low, high=high),
            "coordinate_range": _validate.positive("coordinate_range", self.coordinate_range, low=low, high=high),
            "p": _validate.probability("p", self.p),
            "rotation_seed": _validate.integer("rotation_seed", self.rotation_seed, low=0, high=2**64 - 1),
        }
        if self.sigma is None:
            normal["levels"] = _validate.integer("levels", self.levels, low=2, high=quantize.MAX_LEVELS)
            normal["trials"] = _validate.integer("trials", self.trials, low=0, high=noise.MAX_TRIALS)
            if self.modulus is not None:
                # A modulus under k + m could not even hold one client's value.
                smallest = self.levels + self.trials
                normal["modulus"] = _validate.integer("modulus", self.modulus, low=smallest, high=MAX_RADIX)
        else:
            normal["sigma"] = _validate.positive("sigma", self.sigma, low=low, high=high)
            normal["levels"] = normal["trials"] = 0
            if (self.levels, self.trials, self.rotate, self.modulus) != (0, 0, False, None):
                raise ParameterError(
                    "The Gaussian protocol has no levels, trials, rotation or modulus; use Protocol.gaussian(...)."
                )
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if self.sigma is None and self.clip_norm * quantize.unit(self.coordinate_range, self.levels) > _MAX_GRID_NORM:
            raise ParameterError(
                f"Expected coordinate_range={self.coordinate_range:g} not to be so small against "
                f"clip_norm={self.clip_norm:g}: every coordinate would be clipped to nothing."
            )

    # ------------------------------------------------------------------ the paper's protocols by name

    @classmethod
    def gaussian(cls, *, clients: int, dim: int, clip_norm: float, sigma: float) -> Self:
        """The Gaussian protocol π_g (section 5.1): clipped floats plus N(0, σ²) per client, the baseline."""
        return cls(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            coordinate_range=clip_norm,
            levels=0,
            trials=0,
            rotate=False,
            sigma=sigma,
        )

    @classmethod
    def binomial(
        cls,
        *,
        clients: int,
        dim: int,
        clip_norm: float,
        levels: int,
        trials: int,
        p: float = 0.5,
        coordinate_range: float | None = None,
        modulus: int | None = None,
    ) -> Self:
        """π_sk(Bin(m, p)) (section 5.2): stochastic k-level rounding plus Binomial noise.

        `coordinate_range` defaults to the paper's choice, X^max = D.
        """
        return cls(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            coordinate_range=clip_norm if coordinate_range is None else coordinate_range,
            levels=levels,
            trials=trials,
            p=p,
            rotate=False,
            modulus=modulus,
        )

    @classmethod
    def rotated_binomial(
        cls,
        *,
        clients: int,
        dim: int,
        clip_norm: float,
        levels: int,
        trials: int,
        p: float = 0.5,
        coordinate_range: float | None = None,
        delta: float = 1e-9,
        modulus: int | None = None,
        rotation_seed: int = 0,
    ) -> Self:
        """Rot(π_sk(Bin(m, p))) (section 5.3): the same after a public random rotation.

        `coordinate_range` defaults to the paper's choice, X^max = 2 D √(log(2nd/δ)/d), which is the only use of
        `delta` here. The planner chooses far smaller ranges.
        """
        if coordinate_range is None:
            coordinate_range = paper_coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)
        return cls(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            coordinate_range=coordinate_range,
            levels=levels,
            trials=trials,
            p=p,
            rotate=True,
            modulus=modulus,
            rotation_seed=rotation_seed,
        )

    @property
    def name(self) -> ProtocolName:
        """Which of the paper's three protocols this is."""
        if self.sigma is not None:
            return "gaussian"
        return "rotated-binomial" if self.rotate else "binomial"

    # ------------------------------------------------------------------ as data

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The protocol with these fields; unknown or missing names are refused."""
        if not isinstance(data, dict):
            raise ParameterError(f"Expected a JSON object with a protocol's fields, got {type(data).__name__}.")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in data.keys() - known)
        if unknown:
            raise ParameterError(f"Unknown protocol fields {reprlib.repr(unknown)}; known are {sorted(known)}.")
        missing = sorted({"clients", "dim", "clip_norm", "coordinate_range", "levels", "trials"} - data.keys())
        if missing:
            raise ParameterError(f"Missing protocol fields {missing}.")
        return cls(**data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The protocol written by `to_json`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"A protocol file must hold a JSON object: {error}.") from None
        return cls.from_dict(data)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that stand for all parameters; every message carries them.

        SHA-256 of the canonical JSON (sorted names, no spaces, floats as exact hexadecimal), first 16 bytes.
        """
        plain = {name: v.hex() if isinstance(v, float) else v for name, v in self.to_dict().items()}
        text = "cpsgd protocol v1" + json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]

    # ------------------------------------------------------------------ the client's half

    def encode(self, vector: ArrayLike, round: int) -> bytes:
        """One client's message: clip, rotate, round, add noise, pack.

        Args:
            vector: `dim` real numbers.
            round: Number of the round, from 0; fixes the rotation and is checked by the aggregator.

        Returns:
            The message, `message_bytes` long. Each call draws fresh noise from the operating system's generator: send
            one message for a vector and a round, since the noise of several would average out.

        Raises:
            NonFiniteError: A coordinate is NaN or infinite.
            VectorError: The vector does not have `dim` coordinates.
        """
        return pipeline.encode(self, vector, round)

    def encode_integers(self, vector: ArrayLike, round: int) -> NDArray[np.uint32]:
        """One client's integers, for carriers that add them up themselves: secure aggregation, an all-reduce.

        What `encode` would pack into a message: numbers 0..k+m-1, one a coordinate, with fresh noise in each call.

        Raises:
            NonFiniteError: A coordinate is NaN or infinite.
            VectorError: The vector does not have `dim` coordinates.
        """
        return pipeline.integers(self, vector, round)

    def decode_sum(self, sums: NDArray[np.uint32] | NDArray[np.uint64], count: int, round: int) -> NDArray[np.float32]:
        """The mean of `count` clients' vectors from the sum of their integers, taken modulo `modulus` if there is one.

        Example:
            >>> protocol = Protocol.rotated_binomial(clients=2, dim=3, clip_norm=1.0, levels=4096, trials=16)
            >>> sums = sum(protocol.encode_integers([0.5, 0.0, -0.3], round=0) for _ in range(2))
            >>> bool(np.allclose(protocol.decode_sum(sums, 2, round=0), [0.5, 0.0, -0.3], atol=0.05))
            True
        """
        if self.sigma is not None:
            raise ParameterError("The Gaussian protocol sends floats: there are no sums of integers to decode.")
        _validate.integer("count", count, low=1)
        _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        if sums.shape != (self.dim,) or sums.dtype not in (np.uint32, np.uint64):
            raise VectorError(f"Expected {self.dim} sums of uint32 or uint64, got {sums.dtype} of shape {sums.shape}.")
        return pipeline.decode(self, sums, count, round)

    # ------------------------------------------------------------------ promises

    @property
    def scale(self) -> float:
        """S = 2 X^max / (k - 1), the distance of two levels."""
        if self.sigma is not None:
            raise ParameterError("The Gaussian protocol sends floats: it has no scale.")
        return 2.0 * self.coordinate_range / (self.levels - 1)

    @property
    def radix(self) -> int:
        """How many values a packed coordinate can take: the modulus, or k + m; 0 for floats."""
        return 0 if self.sigma is not None else (self.modulus or self.levels + self.trials)

    @property
    def bits_per_coordinate(self) -> float:
        """log2 of the radix, what the paper counts (k + m values without a modulus); 32 for floats."""
        return 32.0 if self.sigma is not None else math.log2(self.radix)

    @property
    def message_bytes(self) -> int:
        """Bytes of one message as it is sent, header included."""
        return wire.HEADER_BYTES + pack.payload_bytes(self.dim, self.radix)

    @property
    def bits_per_client(self) -> int:
        """Bits of one message as it is sent, header included."""
        return 8 * self.message_bytes

    def error_bound(self) -> ErrorBound:
        """The paper's bound on the expected squared error of the mean, with the theorem it comes from."""
        from cpsgd import error

        return error.paper_bound(self)

    def expected_squared_error(self, vectors: Iterable[ArrayLike], round: int) -> ExpectedError:
        """The exact expected squared error of the mean of these vectors, split by cause.

        The expectation is over the clients' private randomness, for the rotation of this round.
        """
        from cpsgd import error

        return error.expected(self, vectors, round)


def paper_coordinate_range(*, clients: int, dim: int, clip_norm: float, delta: float) -> float:
    """X^max = 2 D √(log(2nd/δ)/d), the paper's range for Rot(π_sk(Bin(m, p)))."""
    _validate.probability("delta", delta)
    _validate.integer("clients", clients, low=1, high=MAX_CLIENTS)
    _validate.integer("dim", dim, low=1, high=MAX_DIM)
    _validate.positive("clip_norm", clip_norm)
    return 2.0 * clip_norm * math.sqrt(math.log(2.0 * clients * dim / delta) / dim)
