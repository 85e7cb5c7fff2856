"""A witness: heads of a ledger in a second place, which show that a ledger went back in time.

A chain shows that records were changed, not that the last of them are gone or that all were written anew. For that one
needs an earlier head, kept where the writer of the ledger's file cannot change it. A witness is a text of such heads,
one per line, the newest last:

    cpsgd-witness 1 NUMBER HASH TIME [KEY SIGNATURE]

Signed lines say who saw the head, and can be kept anywhere: printed, mailed, in somebody else's log. The signature, by
Ed25519, is over "cpsgd ledger witness 1" and the line without key and signature.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpsgd._durable import append, hold
from cpsgd.errors import LedgerAccessError, LedgerBusyError, LedgerStorageError, ParameterError, WitnessError
from cpsgd.ledger.chain import Head

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MARK = "cpsgd-witness"
_VERSION = "1"
_DOMAIN = "cpsgd ledger witness 1\n"
# Two writers may append in another order than they wrote, so the newest head is looked for among the last lines.
_END = 1 << 14


@dataclass(frozen=True)
class Line:
    """One line of a witness: a head that was seen.

    Attributes:
        head: The head.
        time: The time, by the witness's clock.
        key: Raw public key of the signer; None without a signature.
        signature: The signature.
    """

    head: Head
    time: str
    key: bytes | None = None
    signature: bytes = b""

    def __str__(self) -> str:
        if self.key is None:
            return self._said
        return f"{self._said} {base64.b64encode(self.key).decode()} {base64.b64encode(self.signature).decode()}"

    @property
    def _said(self) -> str:
        return f"{_MARK} {_VERSION} {self.head.number} {self.head.hash} {self.time}"

    def signed(self, identity: Ed25519PrivateKey) -> Line:
        """Returns a copy of the line with a signature."""
        from cpsgd.secagg.keys import public_bytes

        signature = identity.sign((_DOMAIN + self._said).encode())
        return Line(self.head, self.time, public_bytes(identity), signature)

    def check(self, signers: Iterable[bytes]) -> None:
        """Raises `WitnessError` unless one of these keys has signed it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if self.key is None or self.key not in set(signers):
            raise WitnessError(
                f"The line of the witness for head {self.head.number} is not signed by whom it should be."
            )
        try:
            Ed25519PublicKey.from_public_bytes(self.key).verify(self.signature, (_DOMAIN + self._said).encode())
        except (InvalidSignature, ValueError):
            raise WitnessError(f"The signature of the witness for head {self.head.number} is wrong.") from None

    @classmethod
    def parse(cls, text: str) -> Line:
        """Returns the line that `str` wrote; raises `ParameterError` for anything else."""
        words = text.split(" ")
        try:
            if len(words) not in (5, 7) or words[:2] != [_MARK, _VERSION] or not text.isprintable():
                raise ValueError
            number, digest, time = int(words[2]), words[3], words[4]
            if number < 0 or len(bytes.fromhex(digest)) != 32 or str(number) != words[2]:
                raise ValueError
            key, signature = (base64.b64decode(word, validate=True) for word in words[5:]) if words[5:] else (None, b"")
        except (ValueError, binascii.Error):
            raise ParameterError("Expected a line of a witness: cpsgd-witness 1 NUMBER HASH TIME.") from None
        return cls(Head(number, digest), time, key, signature)


class Witness:
    """A file of heads that only grows."""

    def __init__(self, path: Path) -> None:
        """Names the file, which need not exist yet."""
        self.path = path

    @contextmanager
    def held(self, timeout: float) -> Iterator[None]:
        """Keeps others from appending, in whichever process. The file must exist.

        A file system without locks is no obstacle: heads are compared all the same.

        Raises:
            LedgerBusyError: Another process has held it for this many seconds.
        """
        try:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_APPEND), "r+b")
        except OSError as error:
            raise LedgerAccessError(f"{self.path}: {error.strerror}. Nothing was recorded.") from None
        with file:
            try:
                hold(file, timeout)
            except TimeoutError:
                raise LedgerBusyError(
                    f"{self.path}: another process has held it for {timeout:g} s; try again."
                ) from None
            except OSError:
                pass
            yield

    def append(self, line: Line) -> None:
        """Adds a line; on the disk when this returns.

        Raises:
            LedgerStorageError: That failed. The ledger's record was written before, and stays.
        """
        new = not self.path.exists()
        try:
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "r+b") as file:
                # What a crash has left of a line stays a line of its own, which says nothing.
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                torn = file.read(1) not in (b"", b"\n")
                append(file, ("\n" * torn + f"{line}\n").encode())
        except OSError as error:
            if new:
                with suppress(OSError):
                    self.path.unlink()
            raise LedgerStorageError(
                f"{self.path}: {error.strerror or error}. The record is on the ledger, but its head is not with the "
                "witness. Nothing may be released; make room, and repeat the same call: it charges nothing more."
            ) from None

    def lines(self, *, last: bool = False) -> list[Line]:
        """Returns all lines, or the last `last` ones. Skips invalid lines, such as half a line after a crash.

        Raises:
            LedgerAccessError: There is no such file, or it may not be read.
            WitnessError: There is no head in it.
        """
        try:
            with self.path.open("rb") as file:
                if last:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
                data = file.read()
        except OSError as error:
            raise LedgerAccessError(
                f"{self.path}: {error.strerror}. `cpsgd budget witness` begins a witness of a ledger."
            ) from None
        found = []
        for text in data.decode("utf-8", "replace").split("\n"):
            try:
                found.append(Line.parse(text))
            except ParameterError:
                continue
        if not found:
            raise WitnessError(f"{self.path} is no witness: it holds no head of a ledger.")
        return found

    def newest(self) -> Head:
        """Returns the newest head: the one with the largest number among the last lines."""
        return max((line.head for line in self.lines(last=True)), key=lambda head: head.number)
