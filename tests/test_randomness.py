from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

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


def test_private_streams_are_aes_128_in_counter_mode_from_block_two(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(16))
    monkeypatch.setattr("os.urandom", lambda size: key[:size])
    expected = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(300_032))[32:]
    stream = Keystream()
    taken = b"".join(stream.take(size).tobytes() for size in (1, 15, 0, 17, 299_967))
    assert taken == expected


def test_a_private_stream_goes_on_under_a_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    def urandom(size: int) -> bytes:
        keys.append(bytes([len(keys)]) * size)
        return keys[-1]

    monkeypatch.setattr("os.urandom", urandom)
    monkeypatch.setattr("cpsgd.randomness._REKEYED_AFTER", 1000)
    stream = Keystream()
    taken = [stream.take(400).tobytes() for _ in range(6)]
    assert len(keys) == 3
    assert len(set(taken)) == 6
    fresh = Cipher(algorithms.AES128(keys[1]), modes.CTR(bytes(16))).encryptor().update(bytes(432))[32:]
    assert taken[2] == fresh
    # One that was given its key has to be what others derive.
    assert Keystream(bytes(16)).take(3000).size == 3000
    assert len(keys) == 3


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


def test_a_stream_does_not_go_on_in_a_forked_child() -> None:
    stream = Keystream()
    stream.take(10)
    child = os.fork()
    if child == 0:
        try:
            stream.take(10)
        except RuntimeError:
            os._exit(17)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert stream.take(10).size == 10  # the parent's own stream is untouched


MESSAGES_OF_MANY_PROCESSES = """
import multiprocessing, sys
import numpy as np
from cpsgd import Protocol
from cpsgd.simulation.cpu import RoundSimulator

protocol = Protocol.rotated_binomial(clients=8, dim=64, clip_norm=1.0, levels=4, trials=200)

def work(queue):
    integers = protocol.encode_integers(np.zeros(64), round=0).tobytes()
    simulator = RoundSimulator(protocol, round=0)
    simulator.add(np.zeros((2, 64), dtype=np.float32))
    queue.put((integers, protocol.encode(np.zeros(64), round=0)[64:], simulator.mean().tobytes()))

if __name__ == "__main__":
    protocol.encode(np.zeros(64), round=0)  # whatever the first message leaves behind, children inherit it
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    processes = [context.Process(target=work, args=(queue,)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=100) for _ in processes]
    work(queue)
    found.append(queue.get(timeout=100))
    for process in processes:
        process.join(100)
    print([len(set(kind)) for kind in zip(*found)])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_two_processes_share_noise(method: str, tmp_path: Path) -> None:
    script = tmp_path / "many.py"
    script.write_text(MESSAGES_OF_MANY_PROCESSES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), method], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "[5, 5, 5]\n", done.stderr


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
