"""`cpsgd round encode|aggregate`: the two halves, through files that may be damaged, foreign or repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Aggregator, Protocol

Vectors = NDArray[np.float32]

PROTOCOL = Protocol.rotated_binomial(clients=4, dim=500, clip_norm=2.0, levels=1000, trials=7)
HALF = ("--protocol", "p.json", "--round", 3)


@pytest.fixture
def messages(cpsgd: Any, vectors: Vectors) -> list[str]:
    """Files of four messages for round 3, beside the protocol's."""
    Path("p.json").write_text(PROTOCOL.to_json())
    for i in range(4):
        Path(f"{i}.message").write_bytes(PROTOCOL.encode(vectors[i], 3))
    return [f"{i}.message" for i in range(4)]


def mean_of(files: list[str]) -> Vectors:
    aggregator = Aggregator(PROTOCOL, 3)
    for name in files:
        aggregator.add(Path(name).read_bytes())
    return aggregator.mean()


def test_encode_makes_a_message(cpsgd: Any, vectors: Vectors) -> None:
    Path("p.json").write_text(PROTOCOL.to_json())
    np.save("line.npy", vectors[0])
    np.save("row.npy", vectors[:1].astype(np.float64))
    np.savez("two.npz", a=vectors[0], b=vectors)
    np.savetxt("row.csv", vectors[:1], delimiter=",")
    contents = set()
    for name in ("line.npy", "row.npy", "two.npz", "row.csv", "line.npy"):
        key = ("--key", "a") if name == "two.npz" else ()
        result = cpsgd("round encode", name, *HALF, *key, "--out", "out.message", "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        answer = json.loads(result.stdout)
        assert (answer["vector"], answer["out"], answer["round"]) == (name, "out.message", 3)
        assert answer["fingerprint"] == PROTOCOL.fingerprint.hex()
        message = Path("out.message").read_bytes()
        assert len(message) == answer["message_bytes"] == PROTOCOL.message_bytes
        contents.add(message)
        aggregator = Aggregator(PROTOCOL, 3)
        aggregator.add(message)
        # One level is 0.003 wide and the noise has a deviation of 1.3 levels: 0.1 is over twenty deviations.
        np.testing.assert_allclose(aggregator.mean(), vectors[0], atol=0.1)
    # Fresh noise and a fresh id every time.
    assert len(contents) == 5
    assert "out.message" in cpsgd("round encode", "line.npy", *HALF, "--out", "out.message").stdout


def test_encode_refuses_what_it_cannot_encode(cpsgd: Any, vectors: Vectors) -> None:
    Path("p.json").write_text(PROTOCOL.to_json())
    bad = vectors[0].copy()
    bad[17] = np.nan
    np.save("nan.npy", bad)
    np.save("short.npy", bad[:9])
    np.save("table.npy", vectors)
    np.savetxt("table.csv", vectors, delimiter=",")
    np.save("good.npy", vectors[0])
    for name, words in {
        "nan.npy": "nan.npy: vector is NaN or infinite at coordinate 17",
        "short.npy": "short.npy: Expected a vector of 500 coordinates",
        "table.npy": "table.npy: expected one vector",
        "table.csv": "table.csv: expected one vector, got 40 rows",
        "nowhere.npy": "nowhere.npy: No such file",
    }.items():
        cpsgd.refuses(words, "round encode", name, *HALF, "--out", "out.message")
    assert cpsgd("round encode", "good.npy", *HALF, "--out", "good.npy").exit_code == 2
    assert cpsgd("round encode", "good.npy", *HALF, "--out", "p.json").exit_code == 2
    assert (
        cpsgd("round encode", "good.npy", "--protocol", "p.json", "--round", -1, "--out", "out.message").exit_code == 2
    )
    assert not Path("out.message").exists()


def test_aggregate_writes_the_mean(cpsgd: Any, messages: list[str]) -> None:
    result = cpsgd("round aggregate", *messages, *HALF, "--out", "mean.npy", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    # So little noise proves nothing, and that is said.
    assert "No method proves anything" in answer.pop("reason")
    assert answer == {
        "accepted": 4,
        "refused": [],
        "count": 4,
        "clients": 4,
        "round": 3,
        "fingerprint": PROTOCOL.fingerprint.hex(),
        "released": True,
        "epsilon": None,
        "delta": 1e-6,
        "method": None,
        "guarantee": None,
        "out": "mean.npy",
        "state": None,
    }
    np.testing.assert_array_equal(np.load("mean.npy"), mean_of(messages))
    assert "4 accepted, 0 refused" in cpsgd("round aggregate", *messages, *HALF, "--out", "mean.csv").stdout
    np.testing.assert_array_equal(np.loadtxt("mean.csv", delimiter=",", dtype=np.float32), mean_of(messages))


def test_bad_messages_are_refused_by_name_and_the_others_count(
    cpsgd: Any, messages: list[str], vectors: Vectors
) -> None:
    good = Path(messages[0]).read_bytes()
    tampered = bytearray(good)
    tampered[100] ^= 4
    Path("tampered").write_bytes(tampered)
    Path("cut").write_bytes(good[:-1])
    Path("empty").write_bytes(b"")
    Path("longer").write_bytes(good + b"\0")
    Path("other-round").write_bytes(PROTOCOL.encode(vectors[0], 4))
    other = Protocol.rotated_binomial(clients=5, dim=500, clip_norm=2.0, levels=1000, trials=7)
    Path("other-protocol").write_bytes(other.encode(vectors[0], 3))
    Path("foreign").write_bytes(bytes(200))
    Path("folder").mkdir()
    with Path("huge").open("wb") as file:
        # Mostly a hole: would not fit into memory, and must not be read.
        file.write(good)
        file.truncate(1 << 38)
    bad = {
        "tampered": "ChecksumError",
        "cut": "TruncatedError",
        "empty": "TruncatedError",
        "longer": "TrailingBytesError",
        "other-round": "RoundError",
        "other-protocol": "FingerprintError",
        "foreign": "MagicError",
        "folder": "IsADirectoryError",
        "huge": "TrailingBytesError",
        "nowhere": "FileNotFoundError",
    }
    files = [messages[0], *bad, messages[1], messages[0]]
    result = cpsgd("round aggregate", *files, *HALF, "--out", "mean.npy", "--state", "sums", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["accepted"], answer["count"], answer["out"], answer["state"]) == (2, 2, "mean.npy", "sums")
    refused = [(entry["file"], entry["error"]) for entry in answer["refused"]]
    assert refused == [*bad.items(), (messages[0], "DuplicateError")]
    assert all(entry["reason"] for entry in answer["refused"])
    np.testing.assert_array_equal(np.load("mean.npy"), mean_of(messages[:2]))
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Refused {name}" for name, _ in refused]
    # Nothing refused has left a trace.
    assert Aggregator.restore(PROTOCOL, Path("sums").read_bytes()).count == 2


def test_messages_may_arrive_in_several_calls(cpsgd: Any, messages: list[str]) -> None:
    # Without --out the mean is not even computed.
    first = cpsgd("round aggregate", messages[0], *HALF, "--state", "sums", "--json")
    assert (first.exit_code, json.loads(first.stdout)["out"]) == (0, None)
    assert not list(Path().glob("*.npy"))
    second = cpsgd.succeeds("round aggregate", *messages[1:3], *HALF, "--state", "sums", "--out", "mean.npy")
    assert "2 accepted, 0 refused, 3 with those before" in second.stdout
    np.testing.assert_array_equal(np.load("mean.npy"), mean_of(messages[:3]))

    before = Path("sums").read_bytes()
    repeated = cpsgd("round aggregate", *messages[:3], *HALF, "--state", "sums", "--json")
    assert repeated.exit_code == 1
    assert json.loads(repeated.stdout)["count"] == 3
    assert Path("sums").read_bytes() == before
    third = cpsgd("round aggregate", *messages[2:], *HALF, "--state", "sums", "--out", "mean.npy", "--json")
    assert third.exit_code == 1
    assert json.loads(third.stdout)["count"] == 4
    np.testing.assert_array_equal(np.load("mean.npy"), mean_of(messages))
    # No draft of a file is left behind.
    assert not list(Path().glob(".*.tmp"))


def test_a_state_that_does_not_fit_is_left_alone(cpsgd: Any, messages: list[str]) -> None:
    cpsgd("round aggregate", messages[0], *HALF, "--state", "sums")
    before = Path("sums").read_bytes()
    cpsgd.refuses(
        "sums: was saved for round 3, this is round 4",
        "round aggregate",
        messages[1],
        "--protocol",
        "p.json",
        "--round",
        4,
        "--state",
        "sums",
    )
    other = Protocol.rotated_binomial(clients=5, dim=500, clip_norm=2.0, levels=1000, trials=7)
    Path("other.json").write_text(other.to_json())
    cpsgd.refuses(
        "sums: The state was saved for a protocol with other parameters",
        "round aggregate",
        messages[1],
        "--protocol",
        "other.json",
        "--round",
        3,
        "--state",
        "sums",
    )
    assert Path("sums").read_bytes() == before
    damaged = before[:-1] + bytes([before[-1] ^ 1])
    Path("sums").write_bytes(damaged)
    cpsgd.refuses("damaged", "round aggregate", messages[1], *HALF, "--state", "sums", "--out", "mean.npy")
    assert Path("sums").read_bytes() == damaged
    assert not Path("mean.npy").exists()


def test_when_all_are_refused_nothing_is_written(cpsgd: Any, messages: list[str]) -> None:
    Path("bad").write_bytes(b"bad")
    result = cpsgd("round aggregate", "bad", *HALF, "--state", "sums", "--out", "mean.npy", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["out"] is None
    assert "Did not write mean.npy" in result.stderr
    assert not Path("mean.npy").exists()
    assert not Path("sums").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--out"),
        (("--out", "mean.txt"), ".npy or .csv"),
        (("--out", "nowhere/mean.npy"), "folder does not exist"),
        (("--state", "nowhere/sums"), "folder does not exist"),
        (("--state", "0.message"), "overwrite"),
        (("--state", "p.json"), "overwrite"),
        (("--out", "same.npy", "--state", "same.npy"), "two files"),
    ],
)
def test_wrong_options(cpsgd: Any, messages: list[str], options: tuple[object, ...], words: str) -> None:
    before = {path: path.read_bytes() for path in Path().iterdir()}
    cpsgd.refuses(words, "round aggregate", *messages, *HALF, *options)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
