from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cpsgd.randomness import Keystream, public_bits


def test_keystream_is_aes_128_ctr() -> None:
    key = bytes(range(16))
    expected = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(300_000))
    stream = Keystream(key)
    taken = b"".join(stream.take(size).tobytes() for size in (1, 15, 0, 17, 299_967))
    assert taken == expected


def test_a_fill_longer_than_the_run_of_zeros() -> None:
    size = (1 << 19) + 5
    assert Keystream(bytes(16)).take(size)[-5:].any()


def test_streams_differ() -> None:
    assert len({Keystream().take(16).tobytes() for _ in range(100)}) == 100


def test_a_forked_child_draws_other_bytes() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, Keystream().take(32).tobytes())
        os._exit(0)
    ours = Keystream().take(32).tobytes()
    os.waitpid(child, 0)
    assert os.read(read, 32) != ours
    os.close(read)
    os.close(write)


def test_the_key_stays_inside() -> None:
    stream = Keystream(b"very secret key!")
    assert "secret" not in repr(stream)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copier(stream)


def test_public_bits_are_fixed_for_ever() -> None:
    # SHA-256("cpsgd rotation v1" ‖ 0 ‖ 0) keys AES-256-CTR; the first bytes, computed once and never to change.
    assert public_bits("cpsgd rotation v1", 0, 0, 8).tobytes().hex() == "0b85431d076b7108"
    assert not np.array_equal(public_bits("a", 0, 0, 8), public_bits("b", 0, 0, 8))
