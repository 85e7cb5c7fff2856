from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.codec import pipeline
from cpsgd.errors import NonFiniteError
from cpsgd.randomness import Keystream


def protocol(dim: int) -> Protocol:
    return Protocol.rotated_binomial(clients=10, dim=dim, clip_norm=1.0, levels=2, trials=14)


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 51_370])
def test_memory_begins_on_a_cache_line(size: int) -> None:
    memory = pipeline.floats(size)
    assert memory.shape == (size,)
    assert memory.ctypes.data % 64 == 0


def test_what_is_taken_is_lent_to_nobody_else() -> None:
    pipeline.give_back(pipeline.floats(100))
    first, second = pipeline.take(100), pipeline.take(100)
    assert not np.shares_memory(first, second)
    pipeline.give_back(first)
    assert np.shares_memory(pipeline.take(100), first)
    assert pipeline.take(101).size == 101


def test_types_are_kept_apart() -> None:
    pipeline.give_back(floats := pipeline.floats(100))
    taken = pipeline.take(100, np.dtype(np.uint8))
    assert (taken.dtype, taken.size, taken.ctypes.data % 64) == (np.uint8, 100, 0)
    pipeline.give_back(taken)
    assert np.shares_memory(pipeline.take(100), floats)
    assert np.shares_memory(pipeline.take(100, np.dtype(np.uint8)), taken)


def test_threads_do_not_share() -> None:
    pipeline.give_back(mine := pipeline.floats(64))
    theirs: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: theirs.append(pipeline.take(64)))
    thread.start()
    thread.join()
    assert not np.shares_memory(mine, theirs[0])


def test_long_vectors_are_not_kept() -> None:
    pipeline.give_back(kept := pipeline.floats(3))
    long = np.empty(pipeline.LARGEST_KEPT + 1, np.float32)
    pipeline.give_back(long)
    assert np.shares_memory(pipeline.take(3), kept)


def test_a_message_does_not_depend_on_what_was_there_before() -> None:
    one, x = protocol(1000), np.linspace(-1.0, 1.0, 1000)
    expected = pipeline.encode(one, x, 0, Keystream(bytes(16)))
    for before in (np.nan, 1e30):
        pipeline.give_back(np.full(1000, before, np.float32))
        assert pipeline.encode(one, x, 0, Keystream(bytes(16)))[64 + 4 :] == expected[64 + 4 :]


def test_a_mean_is_no_memory_that_is_written_again() -> None:
    one = protocol(1000)
    mean = one.decode_sum(one.encode_integers(np.ones(1000), 0), 1, 0)
    before = mean.copy()
    for _ in range(3):
        one.encode(np.full(1000, 7.0), 0)
        one.encode_integers(np.full(1000, 7.0), 0)
    np.testing.assert_array_equal(mean, before)


def test_a_refused_vector_leaves_the_memory_to_the_next() -> None:
    one = protocol(100)
    bad = np.full(100, np.nan)
    pipeline.give_back(kept := pipeline.floats(100))
    with pytest.raises(NonFiniteError):
        one.encode(bad, 0)
    assert np.shares_memory(pipeline.take(100), kept)


@pytest.mark.parametrize("dim", [2**20, 10**6 + 1])
def test_memory_of_a_threads_first_message(dim: int) -> None:
    one, x, sizes = protocol(dim), np.zeros(dim, np.float32), []
    one.encode(x, 0)  # tables and signs are made once

    def first() -> None:
        tracemalloc.start()
        try:
            message = one.encode(x, 0)
            sizes.append(tracemalloc.get_traced_memory()[1] - len(message))
        finally:
            tracemalloc.stop()

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert sizes[0] <= 1.5 * x.nbytes
