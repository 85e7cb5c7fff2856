"""What travels in Flower's records: one small record of ours a message, and a model's arrays as one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from cpsgd.codec import wire
from cpsgd.errors import (
    ParameterError,
    RoundError,
    StageError,
    TruncatedError,
    VersionError,
    WireError,
)

VERSION = 1
"""Version of the records below; client and server must agree."""

RECORD = "cpsgd"
"""Name of our record in messages, in replies and in a client's state."""

UPLOAD = "upload"
"""Name of the one array of a reply."""

METRICS = "metrics"
"""Name of the record with the metrics a client allows to leave."""

Stage = Literal["advertise", "share", "mask", "confirm", "unmask", "upload"]
"""What a message asks for: a stage of secure aggregation ("confirm" with a roster only), or an upload without it."""

# Serialization of the upload's bytes: as they are. NumPy's would let a stranger announce a shape to be allocated.
_PLAIN = "cpsgd.bytes"
_MOST_METRICS = 100


@dataclass(frozen=True)
class Request:
    """What the server asks of a client.

    Attributes:
        stage: The stage.
        round: Number of the round.
        rounds: Rounds that the server means to run in all.
        surviving: The fewest uploads of which the server will release a mean.
        protocol: The protocol as JSON, in the messages that begin a client's part in a round.
        payload: The stage's message of secure aggregation, empty without.
        examples: The most examples of a client's sum where single examples are protected, 0 where whole clients are.
    """

    stage: Stage
    round: int
    rounds: int
    surviving: int
    protocol: str = ""
    payload: bytes = b""
    examples: int = 0

    def to_record(self) -> ConfigRecord:
        """As Flower carries it."""
        return ConfigRecord({"version": VERSION, **vars(self)})

    @classmethod
    def from_message(cls, message: Message) -> Request:
        """Reads the record of a message from the server.

        Raises:
            StageError: The message is not part of a round of cpsgd.
            VersionError: The server speaks another version.
            WireError: A field is missing or no such thing as it should be.
        """
        record = message.content.config_records.get(RECORD)
        if record is None:
            raise StageError(
                "The server asked for training without a cpsgd record: what it would get is not protected, so nothing "
                "is sent. Use CpsgdStrategy on the server."
            )
        if record.get("version") != VERSION:
            raise VersionError(f"The server speaks version {record.get('version')!r} of the records, not {VERSION}.")
        expected = {
            "stage": str,
            "round": int,
            "rounds": int,
            "surviving": int,
            "protocol": str,
            "payload": bytes,
            "examples": int,
        }
        for name, kind in expected.items():
            if type(record.get(name)) is not kind:
                raise TruncatedError(f"The server's record has no {name} of type {kind.__name__}.")
        stage, round, rounds, surviving, protocol, payload, examples = (record[name] for name in expected)
        if stage not in get_args(Stage):
            raise StageError(f"Unknown stage {str(stage)[:20]!r}.")
        if not 0 <= cast(int, round) <= wire.MAX_ROUND:
            raise RoundError("The round's number is out of range.")
        return cls(
            stage=cast(Stage, stage),
            round=cast(int, round),
            rounds=cast(int, rounds),
            surviving=cast(int, surviving),
            protocol=cast(str, protocol),
            payload=cast(bytes, payload),
            examples=cast(int, examples),
        )


def make_message(request: Request, node: int, records: RecordDict | None = None) -> Message:
    """A message with the request, and with the model and the app's settings where the client is to train."""
    content = RecordDict({RECORD: request.to_record()})
    for name, record in (records or RecordDict()).items():
        content[name] = record
    return Message(content, dst_node_id=node, message_type=MessageType.TRAIN, group_id=str(request.round))


def make_reply(request: Message, payload: bytes, metrics: dict[str, int | float] | None = None) -> Message:
    """A reply with the client's bytes in one flat array, and the metrics that may leave."""
    upload = Array(dtype="uint8", shape=(len(payload),), stype=_PLAIN, data=payload)
    content = RecordDict({RECORD: ArrayRecord({UPLOAD: upload})})
    if metrics:
        content[METRICS] = MetricRecord(dict(metrics))
    return Message(content, reply_to=request)


def read_reply(reply: Message, limit: int) -> bytes:
    """The client's bytes.

    Raises:
        WireError: The reply is not one of ours, or larger than `limit` bytes.
    """
    record = reply.content.array_records.get(RECORD)
    if record is None or list(record) != [UPLOAD]:
        raise WireError("The reply does not hold one upload.")
    upload = record[UPLOAD]
    if upload.stype != _PLAIN or upload.dtype != "uint8" or tuple(upload.shape) != (len(upload.data),):
        raise WireError("The upload is not a flat array of bytes.")
    if len(upload.data) > limit:
        raise WireError(f"The upload has {len(upload.data)} bytes; no honest one has more than {limit}.")
    return upload.data


def read_metrics(reply: Message) -> dict[str, float]:
    """The metrics of a reply that are single finite numbers, up to a sane number of them."""
    record = reply.content.metric_records.get(METRICS) or MetricRecord()
    numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    finite = [(name, value) for name, value in numbers.items() if np.isfinite(value)]
    return dict(finite[:_MOST_METRICS])


def flatten(arrays: ArrayRecord, dim: int) -> NDArray[np.float32]:
    """All arrays one after the other as one vector.

    Raises:
        ParameterError: They are not float arrays of `dim` coordinates in all.
    """
    parts = [array.numpy() for array in arrays.values()]
    for name, part in zip(arrays, parts, strict=True):
        if part.dtype.kind != "f":
            raise ParameterError(
                f"The model's array {name!r} is of type {part.dtype}, and only floats can be averaged. Leave counters "
                "and the like out of the arrays that travel."
            )
    size = sum(part.size for part in parts)
    if size != dim:
        raise ParameterError(f"The model has {size} coordinates and the plan {dim}; plan with dim={size}.")
    return np.concatenate([part.reshape(-1) for part in parts]).astype(np.float32)


def unflatten(vector: NDArray[np.float32], like: ArrayRecord) -> ArrayRecord:
    """The vector as arrays with the names, shapes and types of `like`."""
    arrays, start = ArrayRecord(), 0
    for name, array in like.items():
        part = vector[start : start + int(np.prod(array.shape, dtype=np.int64))]
        arrays[name] = Array(part.reshape(array.shape).astype(array.dtype))
        start += part.size
    return arrays


def alike(first: ArrayRecord, second: ArrayRecord) -> bool:
    """Whether two models have arrays of the same names and shapes, in the same order."""
    return [(name, tuple(array.shape)) for name, array in first.items()] == [
        (name, tuple(array.shape)) for name, array in second.items()
    ]
