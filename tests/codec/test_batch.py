from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol
from cpsgd.codec import batch, pipeline, wire
from cpsgd.errors import NonFiniteError, ParameterError, VectorError
from cpsgd.mechanisms import SampledCoins


def protocol(dim: int, clients: int = 10) -> Protocol:
    return Protocol.rotated_binomial(clients=clients, dim=dim, clip_norm=1.0, levels=4096, trials=16)


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_messages_come_in_the_order_of_their_vectors(threads: int | None) -> None:
    one = protocol(50)
    vectors = np.zeros((40, 50))
    vectors[np.arange(40), np.arange(40)] = 1.0
    for vector, message in zip(vectors, one.encode_many(vectors, 3, threads=threads), strict=True):
        aggregator = Aggregator(one, 3)
        aggregator.add(message)
        np.testing.assert_allclose(aggregator.mean(), vector, atol=0.1)


def test_each_message_has_noise_and_an_id_of_its_own() -> None:
    messages = list(protocol(1000).encode_many([np.zeros(1000)] * 30, 0, threads=3))
    assert len({message[wire.HEADER_BYTES :] for message in messages}) == 30
    assert len({wire.read(message).message_id for message in messages}) == 30


def test_other_mechanisms_and_kinds_of_vectors() -> None:
    mechanism = SampledCoins(rate=0.05, theta=0.5, coordinate_range=0.02)
    one = Protocol(clients=3, dim=5000, clip_norm=1.0, mechanism=mechanism)
    aggregator = Aggregator(one, 0)
    for message in one.encode_many([np.zeros(5000, np.float32), [0.0] * 5000, np.zeros(5000, np.int8)], 0):
        aggregator.add(message)
    assert aggregator.count == 3
    assert list(one.encode_many([], 0)) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_vectors_are_read_only_a_few_ahead(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_COORDINATES", 200)
    read: list[int] = []

    def vectors() -> Iterator[np.ndarray]:
        for number in range(1000):
            read.append(number)
            yield np.zeros(100)

    messages = protocol(100).encode_many(vectors(), 0, threads=threads)
    assert not read
    for taken, _ in enumerate(messages, start=1):
        # Two vectors to a part; the parts that wait, the one that is taken from, and nothing else.
        assert len(read) <= taken + 2 * (2 * threads + 1)
        if taken == 100:
            break
    messages.close()
    assert len(read) < 120


def test_a_bad_vector_is_refused_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_COORDINATES", 1)
    bad = np.zeros((5, 8))
    bad[3, 2] = np.nan
    messages = protocol(8).encode_many(bad, 0, threads=2)
    assert [len(next(messages)) for _ in range(3)] == [protocol(8).message_bytes] * 3
    with pytest.raises(NonFiniteError):
        next(messages)
    with pytest.raises(VectorError, match="8 coordinates"):
        list(protocol(8).encode_many(np.zeros((2, 9)), 0))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_comes_before_an_error_is_not_lost(threads: int) -> None:
    bad = np.zeros((60, 8))
    bad[37, 2] = np.inf

    def failing() -> Iterator[np.ndarray]:
        yield from np.zeros((41, 8))
        raise OSError("no more clients")

    for vectors, error, before in ((bad, NonFiniteError, 37), (failing(), OSError, 41)):
        messages = protocol(8).encode_many(vectors, 0, threads=threads)
        assert len([next(messages) for _ in range(before)]) == before
        with pytest.raises(error) as caught:
            next(messages)
        if error is NonFiniteError:
            assert caught.value.__notes__ == ["It is vector 37, counted from 0."]


def test_what_is_no_vectors_is_refused_at_once() -> None:
    for given in (None, 5):
        with pytest.raises(VectorError, match="one per client, got"):
            protocol(8).encode_many(given, 0)  # type: ignore[arg-type]
    with pytest.raises(VectorError, match="8 coordinates"):
        list(protocol(8).encode_many(np.zeros(8), 0))


def test_wrong_arguments_are_refused_at_once() -> None:
    for arguments in ({"round": -1}, {"round": 0, "threads": 0}, {"round": 0, "threads": 1.5}):
        with pytest.raises(ParameterError, match=r"round|threads"):
            protocol(8).encode_many(np.zeros((2, 8)), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_callers_thread_is_one_of_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_COORDINATES", 1)
    encode, seen = pipeline.encode, set()

    def noted(*arguments: Any) -> bytes:
        seen.add(threading.get_ident())
        return encode(*arguments)

    monkeypatch.setattr(pipeline, "encode", noted)
    assert len(list(protocol(8).encode_many(np.zeros((50, 8)), 0, threads=threads))) == 50
    assert len(seen - {threading.get_ident()}) <= threads - 1


def test_no_thread_stays_behind() -> None:
    before = threading.active_count()
    messages = protocol(100).encode_many(np.zeros((1000, 100)), 0, threads=4)
    next(messages)
    messages.close()
    assert threading.active_count() == before
    assert batch.processors() >= 1


@pytest.mark.parametrize(("dim", "threads"), [(batch._SHORT - 1, 1), (batch._SHORT, 7)])
def test_short_vectors_are_encoded_by_one_thread(dim: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(batch, "processors", lambda: 7)
    monkeypatch.setattr(batch, "_messages", lambda protocol, vectors, round, count: asked.append(count))
    protocol(dim).encode_many([], 0)
    assert asked == [threads]
