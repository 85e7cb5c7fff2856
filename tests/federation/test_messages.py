from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.codec.wire import checksum
from cpsgd.errors import (
    ChecksumError,
    CpsgdError,
    MagicError,
    ParameterError,
    StageError,
    TrailingBytesError,
    TruncatedError,
    VersionError,
    WireError,
)
from cpsgd.federation import messages
from cpsgd.federation.messages import (
    HEADER_BYTES,
    MAX_PROTOCOL_BYTES,
    MAX_REASON_BYTES,
    STAGES,
    VERSION,
    Pair,
    Request,
)
from cpsgd.secagg import Stage

REQUEST = Request(Stage.MASK, 7, 30, 9, protocol='{"é": 1}', payload=b"\x00\xff", examples=5)
NUMBERS = st.integers(0, 2**64 - 1)
REQUESTS = st.builds(
    Request,
    stage=st.sampled_from(STAGES),
    round=NUMBERS,
    rounds=NUMBERS,
    surviving=NUMBERS,
    examples=NUMBERS,
    protocol=st.text(st.characters(codec="utf-8"), max_size=50),
    payload=st.binary(max_size=200),
)


def sealed(data: bytes) -> bytes:
    """The bytes with the checksum that fits them, as a stranger would write it."""
    start = HEADER_BYTES - 4
    return data[:start] + struct.pack("<I", checksum(data[:start], data[HEADER_BYTES:])) + data[HEADER_BYTES:]


@given(REQUESTS)
def test_requests_there_and_back(request: Request) -> None:
    data = request.to_bytes()
    assert Request.from_bytes(data) == request
    assert len(data) == HEADER_BYTES + len(request.protocol.encode()) + len(request.payload)


def test_the_format_is_fixed() -> None:
    """Clients and servers of different releases must read the same."""
    data = Request(Stage.SHARE, 1, 2, 3, protocol="{}", payload=b"p", examples=4).to_bytes()
    numbers = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 4))
    fields = b"cpsf\x02\x02" + numbers + b"\x02\0\0\0"
    assert data == fields + struct.pack("<I", checksum(fields, b"{}p")) + b"{}p"


@settings(max_examples=300)
@given(REQUESTS, st.data())
def test_no_part_of_a_request_is_one(request: Request, data: st.DataObject) -> None:
    written = request.to_bytes()
    with pytest.raises(WireError):
        Request.from_bytes(written[: data.draw(st.integers(0, len(written) - 1))])
    with pytest.raises(WireError):
        Request.from_bytes(written + data.draw(st.binary(min_size=1, max_size=9)))


@settings(max_examples=300)
@given(REQUESTS, st.data())
def test_a_changed_bit_is_found(request: Request, data: st.DataObject) -> None:
    written = bytearray(request.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(written) - 1))
    written[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        Request.from_bytes(bytes(written))


@settings(max_examples=500)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda rest: b"cpsf\x02" + rest)))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for tried in (data, sealed(data)):
        try:
            found = Request.from_bytes(tried)
        except CpsgdError:
            continue
        assert found.to_bytes() == tried


def changed(position: int, value: bytes) -> bytes:
    data = REQUEST.to_bytes()
    return sealed(data[:position] + value + data[position + len(value) :])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MagicError),
        (b"cpsg" + REQUEST.to_bytes()[4:], MagicError),
        (b"cpsf", TruncatedError),
        (REQUEST.to_bytes()[: HEADER_BYTES - 1], TruncatedError),
        (changed(4, b"\0"), VersionError),
        (changed(4, b"\1"), VersionError),
        (b"cpsf\3", VersionError),
        (changed(5, b"\6"), StageError),
        (changed(38, struct.pack("<I", 12)), TruncatedError),
        (changed(38, struct.pack("<I", 2**32 - 1)), TruncatedError),
        (changed(HEADER_BYTES, b"\xff"), WireError),
        (REQUEST.to_bytes()[:-1], ChecksumError),
        (REQUEST.to_bytes() + b"x", ChecksumError),
        ("cpsf", WireError),
        (bytearray(REQUEST.to_bytes()), WireError),
        (None, WireError),
    ],
)
def test_what_is_refused_and_how(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Request.from_bytes(data)
    assert type(caught.value) is error


def test_another_version_is_named() -> None:
    with pytest.raises(VersionError, match=rf"version 3 of the requests, and this client version {VERSION}"):
        Request.from_bytes(changed(4, b"\3"))


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="at most 65536 bytes"):
        Request(Stage.UPLOAD, 1, 1, 2, protocol="x" * (MAX_PROTOCOL_BYTES + 1)).to_bytes()
    longest = Request(Stage.UPLOAD, 1, 1, 2, protocol="x" * MAX_PROTOCOL_BYTES)
    assert Request.from_bytes(longest.to_bytes()) == longest
    size = len(REQUEST.to_bytes())
    monkeypatch.setattr(messages, "MAX_REQUEST_BYTES", size)
    assert Request.from_bytes(REQUEST.to_bytes()) == REQUEST
    pair = Pair(bytes(size), bytes(size - 10))
    assert len(pair.to_bytes()) == 2 * size
    assert Pair.from_bytes(pair.to_bytes()) == pair
    with pytest.raises(TrailingBytesError):
        Pair.from_bytes(pair.to_bytes() + b"x")
    monkeypatch.setattr(messages, "MAX_REQUEST_BYTES", size - 1)
    with pytest.raises(TrailingBytesError):
        Request.from_bytes(REQUEST.to_bytes())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stage": Stage.DONE}, StageError),
        ({"stage": "dance"}, StageError),
        ({"stage": 3}, StageError),
        ({"round": -1}, ParameterError),
        ({"round": 2**64}, ParameterError),
        ({"round": "one"}, ParameterError),
        ({"rounds": 2.5}, ParameterError),
        *(({name: 2**64}, ParameterError) for name in ("rounds", "surviving", "examples")),
        ({"surviving": True}, ParameterError),
        ({"examples": -5}, ParameterError),
    ],
)
def test_requests_that_cannot_be_made(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        Request(**{**vars(REQUEST), **changes})


# ---------------------------------------------------------------------- pairs


@given(st.binary(max_size=50), st.binary(max_size=50), st.booleans())
def test_pairs_there_and_back(first: bytes, second: bytes, refused: bool) -> None:
    pair = Pair(first, second, refused)
    assert Pair.from_bytes(pair.to_bytes()) == pair


def test_the_format_of_pairs_is_fixed() -> None:
    assert Pair(b"one", b"three").to_bytes() == b"cpsp\x01\x00\x03\0\0\0onethree"
    assert Pair.without(b"one", "é").to_bytes() == b"cpsp\x01\x01\x03\0\0\0one" + "é".encode()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MagicError),
        (b"cpsf\x01\x00\x03\0\0\0onethree", MagicError),
        (None, MagicError),
        (b"cpsp", TruncatedError),
        (b"cpsp\x01\x00\x03\0\0", TruncatedError),
        (b"cpsp\x02\x00\x03\0\0\0onethree", VersionError),
        (b"cpsp\x01\x02\x03\0\0\0onethree", WireError),
        (b"cpsp\x01\x00\x09\0\0\0onethree", WireError),
        (b"cpsp\x01\x00\xff\xff\xff\xffonethree", WireError),
    ],
)
def test_what_is_no_pair(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Pair.from_bytes(data)
    assert type(caught.value) is error


def test_sizes_of_pairs_and_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(Pair.without(b"", "é" * 10_000).second) == MAX_REASON_BYTES
    assert len(Pair(b"", b"\xff" * 10_000, refused=True).reason) == MAX_REASON_BYTES
    monkeypatch.setattr(messages, "MAX_REQUEST_BYTES", 4)
    with pytest.raises(TrailingBytesError):
        Pair.from_bytes(Pair(b"one", b"three").to_bytes())
