"""`cpsgd round mean`: the whole round, the three file formats, and every way a table can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Protocol, guarantee
from cpsgd.cli import mean
from cpsgd.registry import MECHANISMS

Vectors = NDArray[np.float32]


def test_json_says_what_was_sent_and_how_wrong_it_is(cpsgd: Any, vectors: Vectors) -> None:
    np.save("table.npy", vectors)
    result = cpsgd("round mean", "table.npy", "--clip-norm", 1, "--levels", 3, "--trials", 13, "--round", 5, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    protocol = Protocol.rotated_binomial(clients=40, dim=500, clip_norm=1.0, levels=3, trials=13)
    assert Protocol.from_dict(answer["protocol"]) == protocol
    assert answer["simulation"] is True
    assert (answer["clients"], answer["dim"], answer["round"]) == (40, 500, 5)
    assert (answer["name"], answer["fingerprint"]) == ("rotated-binomial", protocol.fingerprint.hex())
    assert answer["message_bytes"] == 64 + 250
    assert answer["bits_per_client"] == 8 * answer["message_bytes"]
    assert answer["total_bytes"] == 40 * answer["message_bytes"]
    assert answer["bits_per_coordinate"] == 4.0
    assert answer["sent_bits_per_coordinate"] == answer["bits_per_client"] / 500
    assert answer["compression"] == 2000 / answer["message_bytes"]

    error = answer["squared_error"]
    expected = protocol.expected_squared_error(vectors, round=5)
    assert error["noise"] == pytest.approx(expected.noise)
    assert error["rounding"] == pytest.approx(expected.rounding)
    assert error["clipping"] == pytest.approx(expected.clipping)
    assert error["expected"] == pytest.approx(expected.total)
    truth = vectors.astype(np.float64).mean(axis=0)
    estimate = np.load(answer["out"])
    assert error["measured"] == pytest.approx(float(np.sum((estimate - truth) ** 2)))
    # A sum over 500 coordinates has a relative deviation of about sqrt(2/500) = 0.063: 0.4 is over six of them, and
    # the right tail of a chi-square is exceeded there with probability below 1e-7.
    assert error["measured"] == pytest.approx(error["expected"], rel=0.4)


def test_text_says_the_same(cpsgd: Any, vectors: Vectors) -> None:
    np.save("table.npy", vectors)
    text = cpsgd("round mean", "table.npy", "--clip-norm", 1).stdout
    for words in (
        "40 of 500 coordinates",
        "314 bytes per client",
        "6.37× against float32",
        "12,560 bytes",
        "measured",
        "noise",
        "clipping",
        "simulation",
        "mean.npy",
    ):
        assert words in text
    assert "none" not in text
    assert "none: trials=0 adds no noise" in cpsgd("round mean", "table.npy", "--clip-norm", 1, "--trials", 0).stdout


def test_formats_are_equivalent(cpsgd: Any, vectors: Vectors) -> None:
    np.save("c.npy", vectors)
    np.save("fortran.npy", np.asfortranarray(vectors))
    np.save("double.npy", vectors.astype(">f8"))
    np.savez("one.npz", vectors)
    np.savez_compressed("two.npz", labels=np.arange(40), table=vectors)
    np.savetxt("plain.csv", vectors, delimiter=",")
    header = ",".join(f'"x{i}"' for i in range(500))
    body = Path("plain.csv").read_text().replace("\n", "\r\n\r\n")
    Path("header.csv").write_bytes(("\ufeff" + header + "\r\n" + body).encode())
    options = ("--clip-norm", 5, "--levels", 65536, "--trials", 0, "--json")
    errors = []
    for name in ("c.npy", "fortran.npy", "double.npy", "one.npz", "two.npz", "plain.csv", "header.csv"):
        key = ("--key", "table") if name == "two.npz" else ()
        result = cpsgd.succeeds("round mean", name, *options, *key, "--out", "out.npy")
        answer = json.loads(result.stdout)
        assert (answer["clients"], answer["dim"]) == (40, 500)
        errors.append([answer["squared_error"][part] for part in ("rounding", "clipping")])
        assert answer["squared_error"]["measured"] < 1e-3
    # The rows are clipped and rounded alike, up to the last digit of float32 arithmetic.
    np.testing.assert_allclose(errors, np.broadcast_to(errors[0], (7, 2)), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_blocks_and_threads_change_nothing(
    cpsgd: Any, vectors: Vectors, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    np.save("table.npy", vectors)
    np.savetxt("table.csv", vectors, delimiter=",")
    options = ("--clip-norm", 5, "--trials", 0, "--levels", 65536, "--json", "--out", "out.npy")
    whole = json.loads(cpsgd("round mean", f"table.{suffix}", *options, "--threads", 1).stdout)
    # Blocks of three rows, the last of one.
    monkeypatch.setattr(mean, "_BLOCK", 3 * 500)
    parts = json.loads(cpsgd("round mean", f"table.{suffix}", *options, "--threads", 3).stdout)
    assert parts["clients"] == whole["clients"] == 40
    for part in ("rounding", "clipping"):
        assert parts["squared_error"][part] == pytest.approx(whole["squared_error"][part], rel=1e-9)
    np.testing.assert_allclose(np.load("out.npy"), vectors.mean(axis=0), atol=2e-3)


def test_progress_goes_to_a_terminal_on_stderr(cpsgd: Any, vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("table.npy", vectors)
    assert cpsgd("round mean", "table.npy", "--clip-norm", 1).stderr == ""
    # What rich takes for "there is a terminal".
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = cpsgd("round mean", "table.npy", "--clip-norm", 1, "--json")
    assert "40/40" in result.stderr
    assert json.loads(result.stdout)["clients"] == 40


def test_mean_as_csv_is_one_row(cpsgd: Any, vectors: Vectors) -> None:
    np.save("table.npy", vectors)
    options = ("--clip-norm", 2, "--levels", 65536, "--trials", 0)
    cpsgd.succeeds("round mean", "table.npy", *options, "--out", "mean.csv")
    assert Path("mean.csv").read_text().count("\n") == 1
    np.testing.assert_allclose(np.loadtxt("mean.csv", delimiter=","), vectors.mean(axis=0), atol=1e-3)


def test_other_protocols(cpsgd: Any, vectors: Vectors) -> None:
    np.save("table.npy", vectors)
    gaussian = cpsgd.json("round mean", "table.npy", "--clip-norm", 2, "--sigma", 0.1)
    assert gaussian["name"] == "gaussian"
    assert gaussian["squared_error"]["noise"] == pytest.approx(500 * 0.01 / 40)
    plain = cpsgd.json("round mean", "table.npy", "--clip-norm", 2, "--no-rotate", "--p", 0.3)
    assert (plain["name"], plain["protocol"]["p"]) == ("binomial", 0.3)
    seeded = cpsgd.json("round mean", "table.npy", "--clip-norm", 2, "--seed", 9, "--range", 0.3)
    assert seeded["protocol"]["rotation_seed"] == 9
    assert seeded["protocol"]["coordinate_range"] == 0.3


def test_protocol_file(cpsgd: Any, vectors: Vectors) -> None:
    np.save("table.npy", vectors)
    protocol = Protocol.rotated_binomial(clients=1000, dim=500, clip_norm=1.0, levels=2, trials=6)
    Path("p.json").write_text(protocol.to_json())
    answer = cpsgd.json("round mean", "table.npy", "--protocol", "p.json")
    assert Protocol.from_dict(answer["protocol"]) == protocol
    assert answer["clients"] == 40
    assert "made for 1,000" in cpsgd("round mean", "table.npy", "--protocol", "p.json").stdout

    cpsgd.refuses(
        "leave out --levels, --range", "round mean", "table.npy", "--protocol", "p.json", "--levels", 2, "--range", 1
    )
    np.save("narrow.npy", vectors[:, :9])
    cpsgd.refuses("500 coordinates", "round mean", "narrow.npy", "--protocol", "p.json")
    for text in ("{", "[]", '{"clients": 3}', "\udcff", "x" * 70_000):
        Path("p.json").write_bytes(text.encode(errors="surrogateescape"))
        cpsgd.refuses("p.json", "round mean", "table.npy", "--protocol", "p.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clip-norm", -1), "clip_norm"),
        (("--clip-norm", "nan"), "clip_norm"),
        (("--clip-norm", 1, "--levels", 1), "levels"),
        (("--clip-norm", 1, "--p", 1), "p in"),
        (("--clip-norm", 1, "--sigma", 1, "--trials", 3, "--no-rotate"), "No mechanism has trials, sigma together"),
        (("--clip-norm", 1, "--mechanism", "gaussian", "--trials", 3), "has no trials; leave that out"),
        (("--clip-norm", 1, "--sigma", 1, "--no-rotate", "--seed", 3), "leave out --rotate, --seed"),
        (("--clip-norm", 1, "--mechanism", "laplace"), f"one of {list(MECHANISMS)}"),
        (("--clip-norm", 1, "--no-rotate", "--seed", 3), "--seed"),
        (("--clip-norm", 1, "--out", "mean.txt"), ".npy or .csv"),
        (("--clip-norm", 1, "--out", "nowhere/mean.npy"), "folder does not exist"),
        (("--clip-norm", 1, "--out", "folder.npy"), "is a folder"),
        (("--clip-norm", 1, "--out", "./table.npy"), "overwrite"),
        (("--clip-norm", 1, "--key", "x"), "--key"),
    ],
)
def test_wrong_options(cpsgd: Any, vectors: Vectors, options: tuple[object, ...], words: str) -> None:
    Path("folder.npy").mkdir()
    np.save("table.npy", vectors)
    result = cpsgd.refuses(words, "round mean", "table.npy", *options)
    assert result.stdout == ""
    assert not Path("mean.npy").exists()


def test_the_clip_norm_does_not_follow_the_data(cpsgd: Any, vectors: Vectors) -> None:
    for size in (0.1, 10.0):
        np.save("table.npy", size * vectors)
        facts = cpsgd.json("round mean", "table.npy")
        assert facts["protocol"]["clip_norm"] == 1.0


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(
    cpsgd: Any, vectors: Vectors, monkeypatch: pytest.MonkeyPatch, suffix: str, bad: float
) -> None:
    table = vectors.copy()
    table[7, 3] = table[7, 9] = table[8, 0] = table[30, 1] = bad
    np.save("table.npy", table)
    np.savez("table.npz", table)
    np.savetxt("table.csv", table, delimiter=",")
    monkeypatch.setattr(mean, "_BLOCK", 500)
    result = cpsgd("round mean", f"table.{suffix}", "--clip-norm", 1, "--threads", 4)
    assert result.exit_code == 2
    assert f"table.{suffix}, row 7: NaN or infinite at coordinate 3 " in result.stderr
    assert not Path("mean.npy").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,3\n4,secret,6\n", "line 2, column 2: not a number"),
        ("1,2,3\n\n4,5,\n", "line 3, column 3: not a number"),
        ("a,b,c\n1,2,3\n4,5,six\n", "line 3, column 3: not a number"),
        ("1,two,3\n4,5,6\n", "line 1, column 2: not a number"),
        ("a,b,c\n1,2,3\n4,5\n", "line 3: has 2 cells where the first line has 3"),
        ("1,2,3\n4,5,6,7\n", "line 2: has 4 cells"),
        ("0,1,2\n4,5,6\n", "line 1: counts 0, 1, 2"),
        ("1,2,3\n,,\n", "line 2, column 1: not a number"),
        ("a,b,c\n", "no row of numbers"),
        ("", "no row of numbers"),
        ("1;2;3\n4;5;6\n", "line 2, column 1: not a number"),
        ("1,2\n" + "3" * 200_000 + ",4\n", "line 2: not cells separated by commas"),
        ("1,2\n\udcff,3\n", "not a text file"),
    ],
)
def test_wrong_csv(cpsgd: Any, text: str, words: str) -> None:
    Path("table.csv").write_bytes(text.encode(errors="surrogateescape"))
    result = cpsgd.refuses(words, "round mean", "table.csv", "--clip-norm", 1)
    assert "table.csv" in result.stderr
    for private in ("secret", "six", "two"):
        assert private not in result.stderr


def test_wrong_arrays(cpsgd: Any, vectors: Vectors) -> None:
    np.save("line.npy", vectors[0])
    np.save("cube.npy", vectors[None])
    np.save("empty.npy", vectors[:0])
    np.save("complex.npy", vectors + 1j)
    np.save("text.npy", np.array([["a"]]))
    np.save("object.npy", np.array([[None]]), allow_pickle=True)
    np.save("whole.npy", vectors)
    Path("cut.npy").write_bytes(Path("whole.npy").read_bytes()[:-1])
    Path("garbage.npy").write_bytes(b"garbage")
    Path("nothing.npy").write_bytes(b"")
    Path("garbage.npz").write_bytes(b"PK\x03\x04 garbage")
    Path("whole.npz").write_bytes(Path("whole.npy").read_bytes())
    np.savez("several.npz", a=vectors, b=vectors)
    np.savez("object.npz", np.array([[None]]))
    np.savez("pair.npz")
    Path("folder.npy").mkdir()
    damaged = bytearray(Path("several.npz").read_bytes())
    damaged[1000] ^= 1
    Path("damaged.npz").write_bytes(damaged)
    np.savez("single.npz", vectors)
    misdirected = bytearray(Path("single.npz").read_bytes())
    place = misdirected.rindex(b"PK\x05\x06") + 16
    misdirected[place : place + 4] = b"\xf0\xff\xff\xff"  # where the list of members begins
    Path("misdirected.npz").write_bytes(misdirected)
    for name, words in {
        "line.npy": "two dimensions",
        "cube.npy": "two dimensions",
        "empty.npy": "empty",
        "complex.npy": "real numbers",
        "text.npy": "real numbers",
        "object.npy": "not a readable .npy",
        "cut.npy": "not a readable .npy",
        "garbage.npy": "not a readable .npy",
        "nothing.npy": "not a readable .npy",
        "garbage.npz": "not a readable .npz",
        "whole.npz": "not a readable .npz",
        "object.npz": "not a readable .npz",
        "misdirected.npz": "not a readable .npz",
        "several.npz": "a, b; choose one with --key",
        "pair.npz": "(none)",
        "folder.npy": "directory",
        "table.txt": "expected an .npy, .npz or .csv file",
        "nowhere.csv": "No such file",
        "nowhere.npz": "No such file",
    }.items():
        result = cpsgd("round mean", name, "--clip-norm", 1, "--out", "out.npy")
        assert result.exit_code == 2, name
        assert words in result.stderr, (name, result.stderr)
        assert name in result.stderr
    result = cpsgd("round mean", "several.npz", "--key", "c", "--clip-norm", 1)
    assert "no array 'c', but a, b" in result.stderr
    result = cpsgd("round mean", "damaged.npz", "--key", "a", "--clip-norm", 1)
    assert "not a readable .npz" in result.stderr
    assert not Path("out.npy").exists()


def test_integers_and_a_single_client(cpsgd: Any) -> None:
    np.save("table.npy", np.array([[3, 0, -4]], dtype=np.int8))
    options = ("--clip-norm", 5, "--range", 5, "--levels", 65536, "--trials", 0)
    cpsgd.succeeds("round mean", "table.npy", *options)
    np.testing.assert_allclose(np.load("mean.npy"), [3, 0, -4], atol=1e-3)


def test_the_planner_chooses_what_keeps_epsilon(cpsgd: Any) -> None:
    vectors = np.random.default_rng(1).standard_normal((1500, 300)) / 300**0.5
    np.save("table.npy", vectors)
    facts = cpsgd.json("round mean", "table.npy", "--epsilon", 2, "--delta", 1e-6, "--bits", 4)
    assert 1.9 < facts["epsilon"] <= 2
    assert facts["delta"] == 1e-6
    assert facts["bits_per_coordinate"] <= 4
    protocol = Protocol.from_dict(facts["protocol"])
    assert facts["epsilon"] == guarantee(protocol, 1e-6).epsilon
    text = cpsgd(
        "round mean", "table.npy", "--epsilon", 2, "--delta", 1e-6, "--seed", 3, "--mechanism", "binomial"
    ).stdout
    assert "at δ = 1e-06, replace-one" in text
    assert "proved by" in text


def test_epsilon_is_for_the_rows_that_are_there(cpsgd: Any) -> None:
    np.save("table.npy", np.zeros((500, 40)))
    protocol = Protocol.rotated_binomial(clients=100_000, dim=40, clip_norm=1.0, levels=2, trials=14)
    Path("p.json").write_text(protocol.to_json())
    facts = cpsgd.json("round mean", "table.npy", "--protocol", "p.json", "--delta", 1e-6)
    assert facts["epsilon"] == guarantee(protocol, 1e-6, surviving=500).epsilon > guarantee(protocol, 1e-6).epsilon


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--epsilon", 2), "--delta"),
        (("--bits", 4), "--epsilon"),
        (("--epsilon", 2, "--delta", 1e-6, "--levels", 3, "--range", 1), "--levels, --range"),
        (("--epsilon", 2, "--delta", 1e-6, "--bits", 1, "--mechanism", "binomial"), "bits"),
        (("--trials", 0, "--delta", 1e-6), "no noise"),
    ],
)
def test_wishes_that_cannot_be_met(cpsgd: Any, vectors: Vectors, options: tuple[object, ...], words: str) -> None:
    np.save("table.npy", vectors)
    cpsgd.refuses(words, "round mean", "table.npy", *options)
    assert not Path("mean.npy").exists()


def test_a_stated_distance(cpsgd: Any) -> None:
    rows = np.eye(8, dtype=np.float32)[np.random.default_rng(0).integers(8, size=500)]
    np.save("table.npy", rows)
    stated = ("--replace-one-distance", 1.4142136, "--distance-reason", "rows are one-hot")
    common = ("round mean", "table.npy", "--epsilon", 2, "--delta", 1e-6, "--bits", 6)
    found = cpsgd.json(*common, *stated)
    usual = cpsgd.json(*common)
    assert found["epsilon"] <= 2.0
    assert found["squared_error"]["noise"] == pytest.approx(0.5 * usual["squared_error"]["noise"], rel=0.1)
    protocol = Protocol.from_dict(found["protocol"])
    assert (protocol.replace_one_distance, protocol.distance_reason) == (1.4142136, "rows are one-hot")
    text = cpsgd("round mean", "table.npy", "--levels", 9, "--trials", 40, "--delta", 1e-6, *stated).stdout
    assert "replace-one distance 1.41421 because rows are one-hot" in text
    Path("p.json").write_text(protocol.to_json(), encoding="utf-8")
    cpsgd.succeeds("round mean", "table.npy", "--protocol", "p.json")
    cpsgd.refuses(
        "leave out --replace-one-distance, --distance-reason",
        "round mean",
        "table.npy",
        "--protocol",
        "p.json",
        *stated,
    )


def test_a_mean_that_is_charged_and_cannot_be_written_says_both(
    cpsgd: Any, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save("table.npy", vectors)
    cpsgd("budget", "create", "b.ledger", "--population", "p", "--epsilon", 90, "--delta", 1e-6)

    def full(path: Path, vector: Vectors) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("cpsgd.cli._files.write_vector", full)
    command = ("round mean", "table.npy", "--clip-norm", 1, "--levels", 3, "--trials", 200)
    cpsgd.refuses(
        "mean.npy: No space left on device. It was charged to the ledger",
        *command,
        "--ledger",
        "b.ledger",
        "--population",
        "p",
    )
    assert cpsgd.json("budget", "show", "b.ledger")["populations"][0]["rounds"] == 1
    assert "charged" not in cpsgd(*command).stderr
