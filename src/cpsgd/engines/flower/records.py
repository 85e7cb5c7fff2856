"""Flower's records: a request or an answer as bytes, metrics, and a model's arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from cpsgd.errors import StageError, VersionError, WireError
from cpsgd.federation.extras import Extras
from cpsgd.federation.messages import VERSION, Arrays

RECORD = "cpsgd"  # our record in messages, in replies and in a client's state
REQUEST = "request"  # the bytes in a message; beside them stands the version, which release 0.1.0 reads as well
EXTRAS = "extras"  # beside a request for an update: what rides on it
UPLOAD = "upload"  # the one array of a reply
ROUND = "round"  # in our record as train functions see it: the round that the mod has accepted
STATE = "state"  # the bytes in a client's state
METRICS = "metrics"  # the record with the metrics a client allows to leave
# Serialization of the upload's bytes: as they are. NumPy's would let a stranger announce a shape to be allocated.
_PLAIN = "cpsgd.bytes"
# How Flower tells of an exception in a ClientApp; its simulator puts one of Ray's and a traceback around it.
_RAISED = re.compile(r"<class '(?:[^']*[.(])?(\w+)\)?'>:<'(.*)'>", re.DOTALL)
_SIMULATED = "Exception ClientAppException occurred. Message: "


def make_message(
    request: bytes, node: int, round: int, records: RecordDict | None = None, extras: str | None = None
) -> Message:
    """Returns a message with the request; for training, also with the model, settings and extras."""
    ours = ConfigRecord({"version": VERSION, REQUEST: request})
    if extras is not None:
        ours[EXTRAS] = extras
    content = RecordDict({RECORD: ours, **dict((records or {}).items())})
    return Message(content, dst_node_id=node, message_type=MessageType.TRAIN, group_id=str(round))


def read_request(message: Message) -> bytes:
    """Returns the request in a message from the server.

    Raises:
        StageError: The message is not part of a round of cpsgd.
        VersionError: The server speaks another version.
        WireError: The request is missing.
    """
    record = message.content.config_records.get(RECORD)
    if record is None:
        raise StageError(
            "The server asked for training without a cpsgd record: what it would get is not protected, so nothing is "
            "sent. Use CpsgdStrategy on the server."
        )
    if record.get("version") != VERSION:
        raise VersionError(
            f"The server speaks version {record.get('version')!r} of the records, and this client version {VERSION}: "
            "install the same release on both."
        )
    request = record.get(REQUEST)
    if not isinstance(request, bytes):
        raise WireError("The server's record has no request.")
    return request


def read_extras(message: Message) -> Extras | None:
    """Returns the numbers that the server wants to ride on the update, or None.

    Raises:
        WireError: It cannot be read.
    """
    text = message.content.config_records[RECORD].get(EXTRAS)
    return None if text is None else Extras.from_json(str(text))


def make_reply(request: Message, payload: bytes, metrics: dict[str, Any]) -> Message:
    """Returns a reply with the client's bytes in one flat array, and the metrics that may leave."""
    upload = Array(dtype="uint8", shape=(len(payload),), stype=_PLAIN, data=payload)
    content = RecordDict({RECORD: ArrayRecord({UPLOAD: upload})})
    if metrics:
        content[METRICS] = MetricRecord(metrics)
    return Message(content, reply_to=request)


def read_reply(reply: Message) -> tuple[bytes, Mapping[str, object]]:
    """Returns the client's bytes, and the metrics beside them.

    Raises:
        WireError: The reply is not one of ours.
    """
    record = reply.content.array_records.get(RECORD)
    if record is None or list(record) != [UPLOAD]:
        raise WireError("The reply does not hold one upload.")
    upload = record[UPLOAD]
    if upload.stype != _PLAIN or upload.dtype != "uint8" or tuple(upload.shape) != (len(upload.data),):
        raise WireError("The upload is not a flat array of bytes.")
    return upload.data, reply.content.metric_records.get(METRICS, {})


def read_error(reply: Message) -> str | None:
    """Returns the reason of an error as `ShareError: ...`; Flower writes `<class '...ShareError'>:<'...'>`.

    Flower's simulator tells the error's text and not its class: then it is the text alone.
    """
    reason = reply.error.reason
    found = _RAISED.fullmatch(reason or "")
    if found is None:
        return reason
    _, simulated, text = found[2].rpartition(_SIMULATED)
    return text.strip() if simulated else f"{found[1]}: {found[2]}"


def read_arrays(record: ArrayRecord) -> Arrays:
    """Returns a model's arrays."""
    return {name: array.numpy() for name, array in record.items()}


def make_arrays(arrays: Arrays) -> ArrayRecord:
    """Returns a model as Flower carries it."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
