"""`cpsgd round identity`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from cpsgd.secagg import public_line, read_identity, read_roster
from cpsgd.secagg.keys import public_bytes


def test_lines_make_a_roster(cpsgd: Any) -> None:
    lines = []
    for name in ("north", "south"):
        result = cpsgd("round identity", "create", f"{name}.key")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == cpsgd("round identity", "show", f"{name}.key").stdout
        lines.append(result.stdout)
    assert [line.split()[2] for line in lines] == ["north", "south"]
    Path("roster").write_text("".join(lines))
    assert read_roster(Path("roster")) == {public_bytes(read_identity(Path(f"{n}.key"))) for n in ("north", "south")}
    assert stat.S_IMODE(Path("north.key").stat().st_mode) == 0o600


def test_json_and_a_name(cpsgd: Any) -> None:
    made = cpsgd.json("round identity", "create", "key", "--name", "Klinik Süd")
    assert made == {"file": "key", "public_key": public_line(read_identity(Path("key")), "Klinik Süd")}
    shown = cpsgd.json("round identity", "show", "key")
    assert shown["public_key"] == public_line(read_identity(Path("key")), "Klinik Süd")
    assert Path("key.pub").read_text(encoding="utf-8") == shown["public_key"] + "\n"
    given = cpsgd("round identity", "show", "key", "--name", "west").stdout
    assert given == public_line(read_identity(Path("key")), "west") + "\n"
    # The private key is in the file and nowhere else.
    secret = "".join(Path("key").read_text().split("\n")[2:-2])
    assert secret[-40:] not in json.dumps([made, shown])


@pytest.mark.parametrize("beside", [b"", b"ssh-ed25519 AAAA other", b"\xff\xfe", b"x" * 10**6])
def test_a_public_file_of_another_key_names_nobody(cpsgd: Any, beside: bytes) -> None:
    cpsgd("round identity", "create", "north.key", "--name", "given")
    Path("north.key.pub").write_bytes(beside)
    assert cpsgd("round identity", "show", "north.key").stdout.split()[2:] == ["north"]
    Path("north.key.pub").unlink()
    assert cpsgd("round identity", "show", "north.key").stdout.split()[2:] == ["north"]


def test_a_public_file_is_not_overwritten_either(cpsgd: Any) -> None:
    Path("key.pub").write_text("mine")
    result = cpsgd("round identity", "create", "key")
    assert (result.exit_code, "key.pub exists already" in result.stderr) == (2, True)
    assert (Path("key.pub").read_text(), Path("key").exists()) == ("mine", False)


def test_nothing_is_overwritten(cpsgd: Any) -> None:
    Path("key").write_text("mine")
    cpsgd.refuses("exists already", "round identity", "create", "key")
    assert Path("key").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "a\nssh-ed25519 b", "x" * 101, "\u202e"])
def test_a_name_that_could_mislead_makes_no_file(cpsgd: Any, name: str) -> None:
    cpsgd.refuses("printable", "round identity", "create", "key", "--name", name)
    assert not Path("key").exists()


def test_files_that_are_no_identity(cpsgd: Any) -> None:
    Path("text").write_text("secret")
    for file, words in (("text", "not an OpenSSH private key"), ("none", "No such file"), (".", "Is a directory")):
        result = cpsgd.refuses(words, "round identity", "show", file)
        assert "secret" not in result.stderr
        assert not result.stdout
    assert cpsgd("round identity", "create", "nowhere/key").exit_code == 2
