"""Identities: long-lived Ed25519 keys, known to all from a roster, that sign what a server could otherwise forge.

As files both are in OpenSSH's formats: `ssh-keygen` makes, reads and lists them too. An identity is the file that
`ssh-keygen -t ed25519 -N ""` makes. A roster is a text with the public half of each identity in a line, as in
`authorized_keys`: `ssh-ed25519`, the key in base64, and a name for people. Lines may be empty or begin with `#`.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cpsgd._durable import create_file
from cpsgd.errors import IdentityFileError, ParameterError

_KIND = "ssh-ed25519"
_LONGEST_IDENTITY = 1 << 14
_LONGEST_ROSTER = 1 << 20
_LONGEST_NAME = 100


def create_identity(path: Path, name: str | None = None) -> Ed25519PrivateKey:
    """Returns a new identity, written to a new file that only its owner may read.

    With a name, its public line goes to a new file beside it, `.pub` at the end of its name, as ssh-keygen's does.

    Raises:
        IdentityFileError: A file exists already.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = create_identity(Path(folder, "key"), "hospital-a")
        ...     len(read_roster(Path(folder, "key.pub")))
        1
    """
    public = _public_file(path)
    if name is not None and check_name(name) and public.exists():
        raise IdentityFileError(f"{public} exists already, and no key is overwritten. Choose another name.")
    identity = Ed25519PrivateKey.generate()
    text = identity.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        create_file(path, text, mode=0o600)
    except FileExistsError:
        raise IdentityFileError(f"{path} exists already, and no key is overwritten. Choose another name.") from None
    if name is not None:
        create_file(public, f"{public_line(identity, name)}\n".encode())
    return identity


def name_of(path: Path, identity: Ed25519PrivateKey) -> str:
    """Returns the name of an identity: that in the public line beside its file, or else the file's name."""
    try:
        kind, key, name = _read(_public_file(path), _LONGEST_IDENTITY).decode("utf-8").strip().split(" ", 2)
    except (OSError, ValueError):
        return path.stem
    # Whoever has put another key there has named that one.
    return name if f"{kind} {key} {name}" == _line(identity, name) else path.stem


def _public_file(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def read_identity(path: Path) -> Ed25519PrivateKey:
    """Reads an identity file, which only its owner may be able to read, as for ssh.

    A group may read a file that belongs to somebody else, who has lent it: secrets are mounted like that.

    Raises:
        IdentityFileError: Others may read or change the file; or it does not hold an identity, or one behind a
            passphrase.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = create_identity(Path(folder, "key"))
        ...     public_line(read_identity(Path(folder, "key")), "hospital-a").split()[0]
        'ssh-ed25519'
    """
    data = _read(path, _LONGEST_IDENTITY)
    found: object = None
    # Other kinds of keys make the parser raise errors of many kinds; none of their texts may get out.
    with suppress(Exception):
        found = serialization.load_ssh_private_key(data, password=None)
    if not isinstance(found, Ed25519PrivateKey):
        raise IdentityFileError(f"{path} is not an OpenSSH private key of type Ed25519 without a passphrase.")
    _check_private(path)
    return found


def public_line(identity: Ed25519PrivateKey, name: str) -> str:
    """Returns the line of a roster by which this identity is known.

    Example:
        >>> public_line(Ed25519PrivateKey.from_private_bytes(bytes(32)), "hospital-a")
        'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop hospital-a'
    """
    return _line(identity, check_name(name))


def _line(identity: Ed25519PrivateKey, name: str) -> str:
    public = identity.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{public.decode('ascii')} {name}"


def check_name(name: str) -> str:
    """Returns the name, if it can stand in a roster."""
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise ParameterError(f"Expected a name of 1 to {_LONGEST_NAME} printable characters.")
    return name


def read_roster(path: Path) -> frozenset[bytes]:
    """Returns the raw public keys in a roster's file.

    Raises:
        IdentityFileError: A line is no public key, or a key stands there twice.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     roster = Path(folder, "roster")
        ...     _ = roster.write_text(public_line(Ed25519PrivateKey.from_private_bytes(bytes(32)), "hospital-a"))
        ...     [key.hex()[:8] for key in read_roster(roster)]
        ['3b6a27bc']
    """
    try:
        text = _read(path, _LONGEST_ROSTER).decode("utf-8")
    except UnicodeDecodeError:
        raise IdentityFileError(f"{path} is not a roster: it is not a text in UTF-8.") from None
    found: set[bytes] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.isprintable():
            # Such characters can make a line look like another one.
            raise IdentityFileError(f"{path}, line {number}: there is a character that does not show.")
        if not line.strip() or line.startswith("#"):
            continue
        key = _public_key(line)
        if key is None:
            raise IdentityFileError(f"{path}, line {number}: expected '{_KIND} KEY NAME'.")
        if key in found:
            raise IdentityFileError(f"{path}, line {number}: the same key stands in an earlier line.")
        found.add(key)
    if not found:
        raise IdentityFileError(f"{path} is not a roster: there is no key in it.")
    return frozenset(found)


def _public_key(line: str) -> bytes | None:
    kind, _, rest = line.partition(" ")
    if kind != _KIND:
        return None
    written = f"{_KIND} {rest.split(' ')[0]}".encode()
    try:
        key = serialization.load_ssh_public_key(written)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    # The parser passes over characters that are not base64, and ssh-keygen over such lines: nobody would see the key.
    plainly = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return key.public_bytes_raw() if plainly == written else None


def _check_private(path: Path) -> None:
    status = path.stat()
    open_to = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.geteuid() else 0)
    if status.st_mode & open_to:
        raise IdentityFileError(
            f"{path} may be read or changed by others than its owner, so that they could sign as this identity: "
            f"chmod 600 {path}, and make a new identity if somebody may have read it."
        )


def _read(path: Path, longest: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        raise IdentityFileError(f"{path} has more than {longest} bytes: it is another kind of file.")
    return data
