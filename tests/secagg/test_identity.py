from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import CpsgdError, IdentityFileError, ParameterError
from cpsgd.secagg import create_identity, public_line, read_identity, read_roster
from cpsgd.secagg.keys import public_bytes

from .rounds import IDENTITIES, ROSTER

LINES = [public_line(identity, f"silo {number}") for number, identity in enumerate(IDENTITIES)]


def roster(folder: Path, text: str | bytes) -> Path:
    path = folder / "roster"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_an_identity_is_read_as_it_was_written_and_nobody_else_may(tmp_path: Path) -> None:
    path = tmp_path / "silo"
    before = os.umask(0)
    try:
        made = create_identity(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_bytes(read_identity(path)) == public_bytes(made)
    assert public_bytes(create_identity(tmp_path / "other")) != public_bytes(made)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o602, 0o620, 0o601, 0o677])
def test_an_identity_that_others_may_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "silo"
    create_identity(path)
    path.chmod(mode)
    with pytest.raises(IdentityFileError, match=f"chmod 600 {path}"):
        read_identity(path)
    path.chmod(0o400)
    read_identity(path)


def test_a_group_may_read_an_identity_that_was_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "silo"
    create_identity(path)
    path.chmod(0o440)
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    read_identity(path)
    path.chmod(0o444)
    with pytest.raises(IdentityFileError, match="others"):
        read_identity(path)


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "silo"
    create_identity(path)
    kept = path.read_bytes()
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for existing in (path, tmp_path, tmp_path / "dangling"):
        with pytest.raises(IdentityFileError, match="exists already"):
            create_identity(existing)
    assert path.read_bytes() == kept
    assert not (tmp_path / "elsewhere").exists()
    # Nor is a private key written whose public one has no place.
    (tmp_path / "named.pub").touch()
    with pytest.raises(IdentityFileError, match=r"named\.pub exists already"):
        create_identity(tmp_path / "named", "north")
    assert not (tmp_path / "named").exists()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_openssh_reads_ours_and_we_read_openssh(tmp_path: Path) -> None:
    ours = create_identity(tmp_path / "ours")
    printed = subprocess.run(
        ["ssh-keygen", "-y", "-f", tmp_path / "ours"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split()[:2] == public_line(ours, "x").split()[:2]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "theirs"], check=True)
    theirs = read_identity(tmp_path / "theirs")
    assert read_roster(tmp_path / "theirs.pub") == {public_bytes(theirs)}
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "pass phrase", "-f", tmp_path / "theirs"], check=True)
    with pytest.raises(IdentityFileError, match="without a passphrase"):
        read_identity(tmp_path / "theirs")


def test_other_private_keys_are_refused_without_a_word_of_them(tmp_path: Path) -> None:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    plain = IDENTITIES[0].private_bytes(*form, serialization.NoEncryption())
    wrong = {
        "empty": b"",
        "text": b"secret\n",
        "public": LINES[0].encode(),
        "elliptic": ec.generate_private_key(ec.SECP256R1()).private_bytes(*form, serialization.NoEncryption()),
        "pkcs8": IDENTITIES[0].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        "cut": plain[:200],
        "damaged": plain[:100] + b"AAAA" + plain[104:],
        "long": plain + b"\n" * (1 << 14),
    }
    for name, data in wrong.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
        with pytest.raises(
            IdentityFileError, match=f"{name} (is not an OpenSSH private key|has more than 16384 bytes)"
        ) as caught:
            read_identity(tmp_path / name)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_roster_is_a_set_of_lines(tmp_path: Path) -> None:
    assert read_roster(roster(tmp_path, "\n".join(LINES))) == ROSTER
    commented = "# our silos\n\n" + "\r\n".join(reversed(LINES)) + "\n  \n#\n"
    assert read_roster(roster(tmp_path, commented)) == ROSTER
    nameless = " ".join(LINES[0].split()[:2])
    assert read_roster(roster(tmp_path, nameless)) == {public_bytes(IDENTITIES[0])}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("# nobody\n", "no key"),
        (f"{LINES[0]}\n{LINES[1]}\n{LINES[0].replace('silo 0', 'silo 7')}", "line 3: the same key"),
        (f"{LINES[0]}\nsecret", "line 2: expected"),
        (f" {LINES[0]}", "line 1: expected"),
        (f'command="x" {LINES[0]}', "line 1: expected"),
        (LINES[0].replace("ssh-ed25519", "ssh-rsa"), "line 1: expected"),
        (LINES[0].replace("ssh-ed25519", "ssh-ed25519-cert-v01@openssh.com"), "line 1: expected"),
        (LINES[0].replace("ssh-ed25519 ", "ssh-ed25519  "), "line 1: expected"),
        (LINES[0][:40], "line 1: expected"),
        (LINES[0][:60] + "=" + LINES[0][61:], "line 1: expected"),
        ("ssh-ed25519", "line 1: expected"),
        # Base64 with something in it that a lenient decoder passes over; ssh-keygen does not list such a line.
        *((LINES[0][:60] + junk + LINES[0][60:], "line 1: expected") for junk in ("*", "-", "=", "\u00e9")),
        *((LINES[0].replace(" silo", junk + " silo"), "line 1: expected") for junk in ("*", "=", "==", "\u00e9")),
        (LINES[0] + "\u202ehidden", "line 1: there is a character"),
        (LINES[0] + "\x1b[2K", "line 1: there is a character"),
        (f"{LINES[0]}\x0b{LINES[1]}", "line 1: there is a character"),
        (f"{LINES[0]}\u2028{LINES[1]}", "line 1: there is a character"),
        (b"\xff" + LINES[0].encode(), "not a text"),
        (LINES[0] + "\n" * (1 << 20), "more than"),
    ],
)
def test_other_rosters_are_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(IdentityFileError, match=words) as caught:
        read_roster(roster(tmp_path, text))
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


@given(st.text(max_size=120))
def test_what_a_line_is_written_with_is_read_back(name: str) -> None:
    identity = Ed25519PrivateKey.from_private_bytes(bytes(32))
    try:
        line = public_line(identity, name)
    except ParameterError:
        assert not name or len(name) > 100 or not name.isprintable()
        return
    assert "\n" not in line
    assert len(line.split(" ", 2)) == 3


@given(st.binary(max_size=300), st.sampled_from([b"", LINES[0].encode() + b"\n"]))
def test_any_bytes_are_a_roster_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, before: bytes
) -> None:
    path = roster(tmp_path_factory.getbasetemp(), before + data)
    try:
        found = read_roster(path)
    except CpsgdError:
        return
    assert all(len(key) == 32 for key in found)


@pytest.mark.parametrize("name", ["", "a" * 101, "a\nb"])
def test_names_that_cannot_stand_in_a_roster(name: str) -> None:
    with pytest.raises(ParameterError, match="1 to 100 printable"):
        public_line(IDENTITIES[0], name)
    assert public_line(IDENTITIES[0], "a" * 100).endswith(" " + "a" * 100)
