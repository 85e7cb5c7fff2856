from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.engines.flower import records
from cpsgd.engines.flower.records import RECORD, REQUEST, UPLOAD
from cpsgd.errors import CpsgdError, WireError
from cpsgd.federation.messages import VERSION

from .local import model, task

ASKED = b"a request"


def message(content: RecordDict) -> Message:
    with task():
        return Message(content, dst_node_id=5, message_type="train")


RAY = "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run()\n  File \"x.py\"\n"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("<class 'cpsgd.errors.ShareError'>:<'a share is wrong'>", "ShareError: a share is wrong"),
        (RAY + "Exception ClientAppException occurred. Message: the limit is 1.\n'>", "the limit is 1."),
        ("<class 'ClientAppException'>:<'\nException ClientAppException occurred. Message: no'>", "no"),
        ("the node is gone", "the node is gone"),
    ],
)
def test_reasons_of_errors(reason: str, told: str) -> None:
    with task():
        assert records.read_error(Message(Error(0, reason), reply_to=message(RecordDict()))) == told


def test_requests_there_and_back() -> None:
    made = records.make_message(ASKED, 5, 7, RecordDict({"arrays": model(3)}))
    assert records.read_request(made) == ASKED
    assert set(made.content) == {RECORD, "arrays"}
    assert made.metadata.group_id == "7"


def test_uploads_there_and_back() -> None:
    reply = records.make_reply(message(RecordDict()), b"abc", {"loss": 0.5})
    upload, metrics = records.read_reply(reply)
    assert upload == b"abc"
    assert dict(metrics) == {"loss": 0.5}


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(-5, 5), max_size=3),
)
FIELDS = st.sampled_from(["version", REQUEST, "other"])


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(FIELDS, VALUES, max_size=4), removed=st.sets(FIELDS, max_size=1))
def test_any_record_is_read_or_refused(changes: dict[str, Any], removed: set[str]) -> None:
    whole = {"version": VERSION, REQUEST: ASKED, **changes}
    fields = {name: value for name, value in whole.items() if name not in removed}
    try:
        found = records.read_request(message(RecordDict({RECORD: ConfigRecord(fields)})))
    except CpsgdError:
        return
    # What is accepted has every field, of the right type.
    assert fields["version"] == VERSION
    assert type(found) is bytes
    assert fields[REQUEST] == found


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
        found, metrics = records.read_reply(reply)
    except WireError:
        return
    assert (found, names, metrics) == (data, [UPLOAD], {})


@pytest.mark.parametrize("record", [ConfigRecord({UPLOAD: b"abc"}), MetricRecord({UPLOAD: 1.0})])
def test_replies_of_another_kind(record: Any) -> None:
    with pytest.raises(WireError):
        records.read_reply(message(RecordDict({RECORD: record})))


def test_models_there_and_back() -> None:
    arrays = {"half": np.arange(6, dtype=np.float16).reshape(2, 3), "double": np.array(7.0)}
    back = records.read_arrays(records.make_arrays(arrays))
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
