from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.engines.flower import _records
from cpsgd.engines.flower._records import RECORD, UPLOAD, Request
from cpsgd.errors import CpsgdError, ParameterError, WireError

from .local import model, task

REQUEST = Request("mask", 7, 30, 9, protocol="{}", payload=b"\x00\xff")


def message(content: RecordDict) -> Message:
    with task():
        return Message(content, dst_node_id=5, message_type="train")


def test_requests_there_and_back() -> None:
    made = _records.make_message(REQUEST, 5, RecordDict({"arrays": model(3)}))
    assert Request.from_message(made) == REQUEST
    assert set(made.content) == {RECORD, "arrays"}
    assert made.metadata.group_id == "7"


def test_uploads_there_and_back() -> None:
    reply = _records.make_reply(message(RecordDict()), b"abc", {"loss": 0.5})
    assert _records.read_reply(reply, 3) == b"abc"
    assert _records.read_metrics(reply) == {"loss": 0.5}
    with pytest.raises(WireError, match="no honest one"):
        _records.read_reply(reply, 2)


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(-5, 5), max_size=3),
)
FIELDS = st.sampled_from(["version", "stage", "round", "rounds", "surviving", "protocol", "payload", "other"])


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(FIELDS, VALUES, max_size=4), removed=st.sets(FIELDS, max_size=1))
def test_any_record_is_read_or_refused(changes: dict[str, Any], removed: set[str]) -> None:
    fields = {name: value for name, value in {**REQUEST.to_record(), **changes}.items() if name not in removed}
    try:
        found = Request.from_message(message(RecordDict({RECORD: ConfigRecord(fields)})))
    except CpsgdError:
        return
    # What is accepted has every field, of the right type.
    for name, value in vars(found).items():
        assert fields[name] == value
        assert type(fields[name]) is type(value)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(["uint8", "float32", ""]),
    shape=st.lists(st.integers(0, 40), max_size=2).map(tuple),
    stype=st.sampled_from(["cpsgd.bytes", "numpy.ndarray", ""]),
    data=st.binary(max_size=40),
    names=st.lists(st.sampled_from([UPLOAD, "x"]), max_size=2, unique=True),
)
def test_any_reply_is_read_or_refused(
    dtype: str, shape: tuple[int, ...], stype: str, data: bytes, names: list[str]
) -> None:
    array = Array(dtype, shape, stype, data)
    reply = message(RecordDict({RECORD: ArrayRecord(dict.fromkeys(names, array))}))
    try:
        found = _records.read_reply(reply, 30)
    except WireError:
        return
    assert (found, names, len(found) <= 30) == (data, [UPLOAD], True)


@pytest.mark.parametrize("record", [ConfigRecord({UPLOAD: b"abc"}), MetricRecord({UPLOAD: 1.0})])
def test_replies_of_another_kind(record: Any) -> None:
    with pytest.raises(WireError):
        _records.read_reply(message(RecordDict({RECORD: record})), 100)


def test_models_are_one_vector_and_keep_their_types() -> None:
    arrays = ArrayRecord(
        {
            "half": Array(np.arange(6, dtype=np.float16).reshape(2, 3)),
            "double": Array(np.array(7.0)),
            "none": Array(np.zeros((0, 4), np.float32)),
        }
    )
    vector = _records.flatten(arrays, 7)
    np.testing.assert_array_equal(vector, np.array([0, 1, 2, 3, 4, 5, 7], np.float32))
    back = _records.unflatten(vector + 1, arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name].numpy(), array.numpy() + 1)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(ParameterError, match="plan with dim=5"):
        _records.flatten(model(5), 6)
    with pytest.raises(ParameterError, match="'n' is of type int64"):
        _records.flatten(ArrayRecord({"n": Array(np.arange(3))}), 3)
    assert _records.alike(model(5), model(5))
    assert not _records.alike(model(5), model(6))
    assert not _records.alike(model(5), ArrayRecord(dict(reversed(list(model(5).items())))))
