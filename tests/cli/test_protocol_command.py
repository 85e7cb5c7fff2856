"""`cpsgd round protocol`: the file, and what it promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpsgd import Protocol, guarantee

ROUND = ("--clients", 1000, "--dim", 4096, "--clip-norm", 2)


def test_the_file_is_the_protocol(cpsgd: Any) -> None:
    for options, expected in {
        (): Protocol.rotated_binomial(clients=1000, dim=4096, clip_norm=2.0, levels=2, trials=14),
        ("--no-rotate", "--levels", 5, "--trials", 9, "--p", 0.25, "--range", 1.5): Protocol.binomial(
            clients=1000, dim=4096, clip_norm=2.0, levels=5, trials=9, p=0.25, coordinate_range=1.5
        ),
        ("--seed", 3, "--rotate"): Protocol.rotated_binomial(
            clients=1000, dim=4096, clip_norm=2.0, levels=2, trials=14, rotation_seed=3
        ),
        ("--sigma", 0.5): Protocol.gaussian(clients=1000, dim=4096, clip_norm=2.0, sigma=0.5),
    }.items():
        result = cpsgd("round protocol", *ROUND, *options, "--out", "p.json")
        assert (result.exit_code, result.stderr) == (0, "")
        found = Protocol.from_json(Path("p.json").read_text())
        assert replace(found, promise=None) == expected
        assert found.promise is not None
        proved = guarantee(expected, 1e-6).epsilon
        assert proved <= found.promise.claim.epsilon < 1.001 * proved + 1e-12
        assert found.fingerprint.hex() in result.stdout


def test_without_a_file_stdout_holds_the_json_alone(cpsgd: Any) -> None:
    result = cpsgd("round protocol", *ROUND)
    protocol = Protocol.from_json(result.stdout)
    assert protocol.fingerprint.hex() in result.stderr


def test_promises(cpsgd: Any) -> None:
    answer = cpsgd.json("round protocol", *ROUND)
    protocol = Protocol.from_dict(answer["protocol"])
    bound = protocol.error_bound()
    assert answer["error_bound"] == {"squared_error": bound.squared_error, "theorem": bound.theorem, "reason": None}
    assert answer["bits_per_client"] == 8 * (64 + 2048)
    assert answer["compression"] == pytest.approx(4 * 4096 / (64 + 2048))
    assert answer["bits_per_coordinate"] == 4.0
    assert answer["out"] is None

    text = cpsgd("round protocol", *ROUND, "--out", "p.json").stdout
    for words in ("2,112 bytes", "4.125 bits per coordinate", "7.76× against float32", "Theorem 4", "p.json"):
        assert words in text


def test_a_bound_that_does_not_apply_is_explained(cpsgd: Any) -> None:
    answer = cpsgd.json("round protocol", *ROUND, "--range", 0.1)
    assert answer["error_bound"]["squared_error"] is None
    assert "Theorem 4 needs coordinate_range" in answer["error_bound"]["reason"]
    assert (
        "none is published: Theorem 4 needs"
        in cpsgd("round protocol", *ROUND, "--range", 0.1, "--out", "p.json").stdout
    )


def test_an_existing_file_is_described(cpsgd: Any) -> None:
    protocol = Protocol.rotated_binomial(clients=9, dim=50, clip_norm=1.0, levels=2, trials=6, modulus=64)
    Path("p.json").write_text(protocol.to_json())
    answer = cpsgd.json("round protocol", "--protocol", "p.json")
    assert Protocol.from_dict(answer["protocol"]) == protocol
    assert "sums modulo 64" in cpsgd("round protocol", "--protocol", "p.json").stderr
    cpsgd.refuses("--clients", "round protocol", "--protocol", "p.json", "--clients", 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dim", 5, "--clip-norm", 1), "--clients and --dim"),
        (("--clients", 5, "--clip-norm", 1), "--clients and --dim"),
        (("--clients", 0, "--dim", 5, "--clip-norm", 1), "clients"),
        (("--clients", 5, "--dim", 0, "--clip-norm", 1, "--no-rotate"), "dim"),
        ((*ROUND, "--out", "nowhere/p.json"), "folder does not exist"),
        (("--protocol", "nowhere.json"), "nowhere.json: No such file"),
    ],
)
def test_wrong_options(cpsgd: Any, options: tuple[object, ...], words: str) -> None:
    result = cpsgd.refuses(words, "round protocol", *options)
    assert result.stdout == ""
