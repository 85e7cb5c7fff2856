"""`Protocol`: the frozen parameters of one kind of round, and what a round with them promises.

Symbols of the paper (Agarwal, Suresh, Yu, Kumar, McMahan: "cpSGD", NeurIPS 2018) and their names here:

| paper | here | meaning |
|---|---|---|
| n | `clients` | clients a round is planned for |
| d | `dim` | coordinates of a vector |
| D | `clip_norm` | bound on a vector's Euclidean norm, enforced by clipping |
| X^max | `mechanism.coordinate_range` | each (rotated) coordinate is clipped to [-X^max, X^max] |
| k | `mechanism.levels` | levels a coordinate is rounded to |
| m, p | `mechanism.trials`, `mechanism.p` | the noise a client adds to a coordinate is Binomial(m, p) |
| s | `scale` | distance of two levels, 2 X^max / (k - 1) |
| σ | `mechanism.sigma` | standard deviation a client adds in the Gaussian protocol |
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cpsgd import _plain, _validate, registry
from cpsgd._display import html_table
from cpsgd._numbers import bits_of, rounded_up
from cpsgd.codec import batch, pipeline, rotate, wire
from cpsgd.codec.pack import Format
from cpsgd.errors import ParameterError, VectorError
from cpsgd.expectation import Expectation
from cpsgd.mechanisms import Binomial, ErrorBound, ExpectedError, Gaussian, Mechanism
from cpsgd.neighbours import Adjacency
from cpsgd.paper import bounds
from cpsgd.promise import Promise

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from cpsgd.privacy.guarantees import Guarantee

MAX_CLIENTS = 2**32 - 1
MAX_DIM = 2**32 - 1
MAX_RADIX = 2**32 - 1
# Outside this interval float32 arithmetic could overflow or vanish on the way through the codec.
NORM_LIMITS = (1e-20, 1e20)
"""Between these D must be."""
_MAX_GRID_NORM = 1e25

# Fields of a protocol file beside those of its mechanism.
_SHARED = ("clients", "dim", "clip_norm", "rotate", "modulus", "rotation_seed")
# Also there, but only if it was stated: files and fingerprints of 0.1.0, which knew none of it, stay as they are.
_STATED = ("replace_one_distance", "replace_one_l1_distance", "distance_reason")


_LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The parameters all parties of a round share; frozen, hashable, JSON round-trip.

    Use the constructors named after the paper's protocols (`Protocol.gaussian`, `Protocol.binomial` for π_sk(Bin(m,p))
    and `Protocol.rotated_binomial` for Rot(π_sk(Bin(m,p)))), or give any mechanism of `cpsgd.mechanisms`.

    Attributes:
        clients: n, the clients a round is planned for. The mean is always over the messages received.
        dim: d, coordinates of a vector.
        clip_norm: D, longer vectors are scaled down to this Euclidean norm.
        mechanism: Turns a coordinate into an integer: rounding, noise, and the parameters of both.
        rotate: Whether vectors are rotated first.
        modulus: Sums are taken modulo this (secure aggregation), or None for plain sums.
        rotation_seed: The announced public seed of the rotation, a 64-bit number. Privacy does not depend on it.
        replace_one_distance: The largest Euclidean distance of any two clients' vectors once they are clipped, zero
            among them, where it is known to be less than 2D; None where nothing but D is known. Nothing enforces it:
            every guarantee for replace-one neighbours then rests on it, and says so.
        replace_one_l1_distance: The largest sum of absolute differences of any two clients' vectors, zero among them,
            where one is known. Discrete Laplace noise rests on it. It needs a reason, too, and no rotation.
        distance_reason: Why no two vectors are further apart, in a sentence.
        promise: The claim that was planned with these parameters, which releases are held to; None without one.

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
    mechanism: Mechanism
    rotate: bool = True
    modulus: int | None = None
    rotation_seed: int = 0
    replace_one_distance: float | None = None
    replace_one_l1_distance: float | None = None
    distance_reason: str | None = None
    promise: Promise | None = None

    def __post_init__(self) -> None:
        low, high = NORM_LIMITS
        if not isinstance(self.mechanism, Mechanism):
            raise ParameterError(
                f"Expected mechanism to be one of cpsgd.mechanisms, got {reprlib.repr(self.mechanism)}."
            )
        if not isinstance(self.rotate, bool | np.bool_):
            raise ParameterError(f"Expected rotate to be True or False, got {reprlib.repr(self.rotate)}.")
        normal: dict[str, object] = {
            "rotate": bool(self.rotate),
            "clients": _validate.integer("clients", self.clients, low=1, high=MAX_CLIENTS),
            "dim": _validate.integer("dim", self.dim, low=1, high=MAX_DIM),
            "clip_norm": _validate.positive("clip_norm", self.clip_norm, low=low, high=high),
            "rotation_seed": _validate.integer("rotation_seed", self.rotation_seed, low=0, high=2**64 - 1),
        }
        grid = self.mechanism.grid
        if grid is None and (self.rotate or self.modulus is not None):
            raise ParameterError(f"The {self.mechanism.name} protocol sends floats: it has no rotation or modulus.")
        if self.modulus is not None and self.mechanism.not_summed is not None:
            raise ParameterError(self.mechanism.not_summed)
        if self.mechanism.wraps:
            if self.modulus not in (None, self.mechanism.values):
                raise ParameterError(
                    f"Expected modulus={self.mechanism.values}, what clients' integers are taken modulo, got "
                    f"modulus={self.modulus}; leave it out."
                )
            normal["modulus"] = self.mechanism.values
        elif self.modulus is not None:
            # A smaller modulus could not even hold one client's value.
            normal["modulus"] = _validate.integer("modulus", self.modulus, low=self.mechanism.values, high=MAX_RADIX)
        if self.promise is not None:
            if not isinstance(self.promise, Promise):
                raise ParameterError(f"Expected promise to be a Promise, got {type(self.promise).__name__}.")
            _validate.integer("promise.surviving", self.promise.conditions.surviving, low=1, high=int(self.clients))
        l1 = check_l1_distance(self.replace_one_l1_distance, clip_norm=self.clip_norm, rotate=self.rotate)
        distance = check_distance(self.replace_one_distance, self.distance_reason, clip_norm=self.clip_norm, l1=l1)
        normal |= {"replace_one_distance": distance, "replace_one_l1_distance": l1}
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if grid is not None and self.clip_norm * grid.unit > _MAX_GRID_NORM:
            raise ParameterError(
                f"Expected the range of coordinates ({self.mechanism.describe()}) not to be so small against "
                f"clip_norm={self.clip_norm:g}: every coordinate would be clipped to nothing."
            )

    # ------------------------------------------------------------------ the paper's protocols by name

    @classmethod
    def gaussian(cls, *, clients: int, dim: int, clip_norm: float, sigma: float) -> Self:
        """Returns the Gaussian protocol π_g (section 5.1): clipped floats plus N(0, σ²) per client, the baseline."""
        return cls(clients=clients, dim=dim, clip_norm=clip_norm, mechanism=Gaussian(sigma=sigma), rotate=False)

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
        """Returns π_sk(Bin(m, p)) (section 5.2): stochastic k-level rounding plus Binomial noise.

        `coordinate_range` defaults to the paper's choice, X^max = D.
        """
        reach = clip_norm if coordinate_range is None else coordinate_range
        return cls(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            mechanism=Binomial(levels=levels, trials=trials, p=p, coordinate_range=reach),
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
        """Returns Rot(π_sk(Bin(m, p))) (section 5.3): the same after a public random rotation.

        `coordinate_range` defaults to the paper's choice, X^max = 2 D √(log(2nd/δ)/d), which is the only use of
        `delta` here. The planner chooses far smaller ranges.
        """
        reach = coordinate_range
        if reach is None:
            reach = bounds.coordinate_range(clients=clients, dim=dim, clip_norm=clip_norm, delta=delta)
        return cls(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            mechanism=Binomial(levels=levels, trials=trials, p=p, coordinate_range=reach),
            modulus=modulus,
            rotation_seed=rotation_seed,
        )

    @property
    def name(self) -> str:
        """The mechanism's name, and whether vectors are rotated: "gaussian", "binomial", "rotated-binomial", ..."""
        return f"rotated-{self.mechanism.name}" if self.rotate else self.mechanism.name

    # ------------------------------------------------------------------ as data

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, the mechanism's among them, as plain JSON values."""
        return _fields(vars(self))

    def to_json(self) -> str:
        """Returns the fields as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the protocol with these fields; unknown or missing names are refused."""
        return cls(**_arguments(data))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the protocol that `to_json` wrote."""
        return cls.from_dict(_plain.parse(text, "A protocol file"))

    def __repr__(self) -> str:
        promise = "" if self.promise is None else f", promises ε ≤ {rounded_up(self.promise.claim.epsilon)}"
        return (
            f"{type(self).__name__}({self.name}, clients={self.clients}, dim={self.dim}, clip_norm={self.clip_norm:g}, "
            f"{bits_of(self.bits_per_coordinate)} per coordinate{promise})"
        )

    def _repr_html_(self) -> str:
        modulus = [] if self.modulus is None else [("sums", f"modulo {self.modulus:,}")]
        stated = self.assumption(Adjacency.REPLACE_ONE)
        rows = [
            ("mechanism", ("rotation, " if self.rotate else "") + self.mechanism.title),
            ("parameters", f"D = {self.clip_norm:g}, {self.mechanism.describe()}"),
            *modulus,
            ("message", f"{self.message_bytes:,} bytes, {bits_of(self.bits_per_coordinate)} per coordinate"),
            *([] if stated is None else [("assuming", stated)]),
            ("promised", "nothing" if self.promise is None else str(self.promise)),
            ("fingerprint", self.fingerprint.hex()),
        ]
        return html_table(f"Protocol for {self.clients:,} clients of {self.dim:,} coordinates", rows)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that identify all parameters and the promise; every message carries them.

        SHA-256 of the canonical JSON (sorted names, no spaces, floats as exact hexadecimal), first 16 bytes.
        """
        exact = json.dumps(_exact(self.to_dict()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"cpsgd protocol v1{exact}".encode()).digest()[:16]

    # ------------------------------------------------------------------ the client's half

    def encode(self, vector: ArrayLike, round: int, *, seeds: Any = None) -> bytes:
        """Returns one client's message: clip, rotate, round, add noise, pack.

        Args:
            vector: `dim` real numbers.
            round: Number of the round, from 0; fixes the rotation and is checked by the aggregator.
            seeds: The client's state of noise (`mechanism.memory.update`), empty for independent noise. For correlated
                noise, seeds of 16 bytes, the newest first: one for this round, which no other message may use, then
                those of the rounds before, None where there is none. By default noise is fresh.

        Returns:
            The message, `message_bytes` long (on average, where lengths vary). Each call draws fresh noise from the
            operating system's generator: send one message for a vector and a round, since the noise of several would
            average out.

        Raises:
            NonFiniteError: A coordinate is NaN or infinite.
            VectorError: The vector does not have `dim` coordinates.
            ParameterError: Seeds are given that are none of a lineage, or the protocol's run has no such round.
        """
        return pipeline.encode(self, vector, round, seeds=seeds)

    def encode_many(
        self, vectors: Iterable[ArrayLike], round: int, *, threads: int | None = None
    ) -> Generator[bytes, None, None]:
        """Returns the messages of many clients, in order, encoded by several threads at once.

        For one process that stands for many clients: a gateway, a simulation with real messages. Vectors are read a few
        ahead of the messages that are taken, so that neither need fit in memory.

        Args:
            vectors: One per client, each as `encode` takes it; the rows of a matrix, for example.
            round: Number of the round.
            threads: Number of threads, the caller's among them; by default as many as this process has processors, and
                one for vectors so short (below 2^16) that several would be slower.

        Raises:
            NonFiniteError: A coordinate is NaN or infinite; raised when that vector's turn comes, after the messages of
                all before it.
            VectorError: A vector does not have `dim` coordinates; likewise. Or `vectors` are none.

        Example:
            >>> protocol = Protocol.rotated_binomial(clients=3, dim=4, clip_norm=1.0, levels=2, trials=14)
            >>> [len(message) for message in protocol.encode_many(np.zeros((3, 4)), round=0)]
            [66, 66, 66]
        """
        return batch.encode_many(self, vectors, round, threads)

    def encode_integers(self, vector: ArrayLike, round: int, *, seeds: Any = None) -> NDArray[np.uint32]:
        """Returns one client's integers, for transports that add them up themselves: secure aggregation, an all-reduce.

        What `encode` would pack into a message: one number below `mechanism.values` per coordinate, with fresh noise
        in each call. Where integers wrap around (discrete-laplace), guarantees are about sums modulo `modulus`: let
        nobody see a sum that is not reduced.

        Raises:
            NonFiniteError: A coordinate is NaN or infinite.
            VectorError: The vector does not have `dim` coordinates.
        """
        self.check_integers()
        return pipeline.integers(self, vector, round, seeds=seeds)

    def rotation_signs(self, round: int) -> NDArray[np.uint8]:
        """Returns the public signs of a round's rotation; one for all rounds, where noise is correlated over them."""
        return rotate.signs(self.dim, self.rotation_seed, self.mechanism.memory.rotation_round(round))

    def decode_sum(
        self,
        sums: NDArray[np.uint32] | NDArray[np.uint64],
        count: int,
        round: int,
        *,
        accept_epsilon: float | None = None,
    ) -> NDArray[np.float32]:
        """Returns the mean of `count` clients' vectors from the sum of their integers (modulo `modulus`, if set).

        With a promise, the release is held to it, or to `accept_epsilon` in its place: see `release`.

        Raises:
            GuaranteeError: So few clients keep neither.

        Example:
            >>> protocol = Protocol.rotated_binomial(clients=2, dim=3, clip_norm=1.0, levels=4096, trials=16)
            >>> sums = sum(protocol.encode_integers([0.5, 0.0, -0.3], round=0) for _ in range(2))
            >>> bool(np.allclose(protocol.decode_sum(sums, 2, round=0), [0.5, 0.0, -0.3], atol=0.05))
            True
        """
        self.check_integers()
        _validate.integer("count", count, low=1)
        _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        if sums.shape != (self.dim,) or sums.dtype not in (np.uint32, np.uint64):
            raise VectorError(f"Expected {self.dim} sums of uint32 or uint64, got {sums.dtype} of shape {sums.shape}.")
        self.release(count, accept_epsilon=accept_epsilon)
        return pipeline.decode(self, sums, count, round)

    # ------------------------------------------------------------------ promises

    def release(self, messages: int, *, accept_epsilon: float | None = None) -> Guarantee | None:
        """Refuses a release with this many messages if it does not keep the promise; see `cpsgd.privacy.release`.

        Returns:
            What is proved of it, by the accountant; None where nothing was promised.

        Raises:
            GuaranteeError: The ε that is true is more than was promised, or than `accept_epsilon` where that is given.
        """
        if self.promise is None and accept_epsilon is None:
            return None
        if accept_epsilon is not None:
            accept_epsilon = _validate.positive("accept_epsilon", accept_epsilon)
        # Imported here: clients need no accountant.
        from cpsgd.privacy.release import check_release

        return check_release(self, _validate.integer("messages", messages, low=1), accept_epsilon=accept_epsilon)

    def check_integers(self) -> None:
        """Refuses a protocol that sends floats, or leaves coordinates out, for transports that add up integers.

        Raises:
            ParameterError: It does.
        """
        self._check_grid()
        if self.mechanism.not_summed is not None:
            raise ParameterError(self.mechanism.not_summed)

    def _check_grid(self) -> None:
        if self.mechanism.grid is None:
            raise ParameterError(
                f"The {self.name} protocol sends floats: it has no integers to add up. Use one of the others."
            )

    @property
    def scale(self) -> float:
        """s, the size of one unit of the integers: 2 X^max / (k - 1), the distance of two levels."""
        self._check_grid()
        return self.mechanism.scale

    @property
    def format(self) -> Format:
        """The layout of a message, which also says how messages are summed."""
        return self.mechanism.format(self.clip_norm, self.modulus)

    @property
    def radix(self) -> int:
        """Number of values of a packed coordinate: the modulus, or the mechanism's values; 0 for floats."""
        return self.format.radix

    @property
    def bits_per_coordinate(self) -> float:
        """log2 of the radix, what the paper counts (k + m values without a modulus); 32 for floats.

        The share of coordinates that a message holds, where it holds bits of some.
        """
        return self.format.bits

    @property
    def message_bytes(self) -> int:
        """Bytes of one message as it is sent, header included; on average, where lengths vary."""
        return wire.HEADER_BYTES + self.format.average_bytes(self.dim)

    @property
    def longest_message_bytes(self) -> int:
        """Bytes that no message exceeds, header included."""
        return wire.HEADER_BYTES + self.format.payload_bytes(self.dim)

    @property
    def bits_per_client(self) -> int:
        """Bits of one message as it is sent, header included; on average, where lengths vary."""
        return 8 * self.message_bytes

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the largest Euclidean distance of two neighbours in units of the noise's law, rounded up."""
        return self.mechanism.sensitivity(
            dim=self.dim,
            clip_norm=self.clip_norm,
            adjacency=adjacency,
            replace_one_distance=self.replace_one_distance,
        )

    @property
    def largest_norm(self) -> float:
        """The largest norm of a client's vector in units of the noise's law, rounded up."""
        return self.sensitivity(Adjacency.ZERO_OUT)

    def l1_sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the largest sum of absolute differences of two neighbours in units of the noise's law, rounded up."""
        mechanism, stated = self.mechanism, self.replace_one_l1_distance
        if adjacency is not Adjacency.REPLACE_ONE:
            stated = None  # the norm alone bounds a vector and zero
        return mechanism.extent.l1_sensitivity(mechanism.grid, self.sensitivity(adjacency), self.dim, adjacency, stated)

    def levels_apart(self, adjacency: Adjacency) -> int | None:
        """Returns the most levels between two neighbours' rounded vectors; see `Mechanism.levels_apart`."""
        return self.mechanism.levels_apart(dim=self.dim, clip_norm=self.clip_norm, adjacency=adjacency)

    def reach(self, adjacency: Adjacency) -> float:
        """Returns the largest distance of two neighbours in one coordinate, in units of the noise's law."""
        return self.mechanism.extent.reach(adjacency)

    def assumption(self, adjacency: Adjacency) -> str | None:
        """Returns the assumption about vectors that a guarantee rests on; None if everything is enforced.

        Example:
            >>> noise = Gaussian(sigma=0.1)
            >>> stated = {"replace_one_distance": 2**0.5, "distance_reason": "rows are one-hot"}
            >>> protocol = Protocol(clients=9, dim=4, clip_norm=1.0, mechanism=noise, rotate=False, **stated)
            >>> protocol.assumption(Adjacency.REPLACE_ONE)
            'replace-one distance 1.41421 because rows are one-hot'
        """
        if self.distance_reason is None or adjacency is not Adjacency.REPLACE_ONE:
            return None
        stated = [] if self.replace_one_distance is None else [f"replace-one distance {self.replace_one_distance:.6g}"]
        if self.replace_one_l1_distance is not None:
            stated.append(f"replace-one L1 distance {self.replace_one_l1_distance:.6g}")
        return f"{' and '.join(stated)} because {self.distance_reason}"

    def error_bound(self) -> ErrorBound:
        """Returns the published bound on the expected squared error of the mean, with the theorem it comes from.

        Raises:
            ConditionError: There is none that covers the protocol.
        """
        return self.mechanism.error_bound(
            clients=self.clients, dim=self.dim, clip_norm=self.clip_norm, rotate=self.rotate
        )

    def expected_squared_error(self, vectors: Iterable[ArrayLike], round: int) -> ExpectedError:
        """Returns the exact expected squared error of the mean of these vectors, split by cause.

        The expectation is over the clients' private randomness, for the rotation of this round.
        """
        expectation = Expectation(self, round)
        for vector in vectors:
            expectation.add(vector)
        return expectation.error()


# ---------------------------------------------------------------------- as data


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a protocol's file as plain JSON values, from those of the protocol."""
    shared = {name: values[name] for name in _SHARED}
    stated = {name: values[name] for name in _STATED if values[name] is not None}
    promise = {} if values["promise"] is None else {"promise": values["promise"].to_dict()}
    return {**shared, **values["mechanism"].to_fields(values["clip_norm"]), **stated, **promise}


def _arguments(data: object) -> dict[str, Any]:
    """Returns the arguments that make the protocol with these fields.

    Raises:
        ParameterError: There are unknown fields, or some are missing.
    """
    if not isinstance(data, dict):
        raise ParameterError(f"Expected a JSON object with a protocol's fields, got {type(data).__name__}.")
    missing = sorted({"clients", "dim", "clip_norm"} - data.keys())
    if missing:
        raise ParameterError(f"Missing protocol fields {missing}.")
    kind = registry.of_file(data)
    known = (*_SHARED, *_STATED)
    shared = {name: data[name] for name in known if name in data}
    own = {name: value for name, value in data.items() if name not in (*known, "mechanism", "promise")}
    if "promise" in data:
        shared["promise"] = Promise.from_dict(data["promise"])
    return {**shared, "mechanism": kind.of_fields(own, data["clip_norm"])}


def _exact(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with floats as text that loses nothing."""
    return {
        name: v.hex() if isinstance(v, float) else _exact(v) if isinstance(v, dict) else v for name, v in data.items()
    }


def check_l1_distance(distance: float | None, *, clip_norm: float, rotate: bool) -> float | None:
    """Returns the L1 distance that is stated, or None.

    Raises:
        ParameterError: It is less than D, or vectors are rotated.
    """
    if distance is None:
        return None
    stated = _validate.positive("replace_one_l1_distance", distance)
    if rotate:
        raise ParameterError("A rotation keeps no L1 distance: leave out replace_one_l1_distance, or use rotate=False.")
    # Sums of absolute values are no less than the norm, and zero is among the vectors.
    if stated < clip_norm:
        raise ParameterError(
            f"Expected replace_one_l1_distance at least clip_norm={clip_norm:g}, got {stated!r}: a vector of that norm "
            "is at least as far from zero, which stands for vectors that are broken or missing."
        )
    return stated


def check_distance(
    distance: float | None, reason: str | None, *, clip_norm: float, l1: float | None = None
) -> float | None:
    """Returns the replace-one distance that is stated beyond clipping, or None.

    Raises:
        ParameterError: It is not between D and 2D, or this or an L1 distance comes without a reason, or a reason
            without either.
    """
    if distance is None and l1 is None:
        if reason is not None:
            raise ParameterError("A distance_reason needs a replace_one_distance; give both or neither.")
        return None
    if distance is None:
        _check_reason(reason, f"{l1:g} in L1 distance")
        return None
    stated = _validate.positive("replace_one_distance", distance)
    # Zero is sent in place of a vector that is not finite, and to fill a cohort up.
    if stated < clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at least clip_norm={clip_norm:g}, got replace_one_distance={stated!r}: "
            "zero stands for vectors that are broken or missing, and clip_norm is how far one may be from it. Subtract "
            "a public vector near all of them and lower clip_norm, or state clip_norm."
        )
    if stated > 2.0 * clip_norm:
        raise ParameterError(
            f"Expected replace_one_distance at most 2 clip_norm = {2.0 * clip_norm:g}, which clipping already "
            f"enforces, got replace_one_distance={stated!r}; leave it out."
        )
    _check_reason(reason, f"{stated:g}")
    return stated


def _check_reason(reason: object, distance: str) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise ParameterError(
            f"Expected distance_reason to say why no two vectors are further apart than {distance}, got "
            f"{reprlib.repr(reason)}: guarantees rest on it, and whoever reads one must be able to judge it."
        )
    # It is shown on terminals, and travels in files and messages.
    if len(reason) > _LONGEST_REASON or not reason.isprintable():
        raise ParameterError(
            f"Expected distance_reason to be one line of at most {_LONGEST_REASON} printable characters, got "
            f"{len(reason)} characters."
        )
