"""What others hand over to be checked: batons and the file of seeds, a ledger's signed report, and its witness."""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd._durable import is_sealed, seal
from cpsgd._record_log import RecordLog
from cpsgd.correlated import batons, seeds
from cpsgd.correlated.seeds import Journal, SeedFile
from cpsgd.errors import CpsgdError
from cpsgd.federation.client_files import Memory
from cpsgd.ledger import Ledger, signed_reports
from cpsgd.ledger.chain import Head
from cpsgd.ledger.witness import Line, Witness

from . import secure

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
MEMORY = b"cpsgd memory 1\n"
PLACE = batons.Place("run", bytes(batons.FINGERPRINT_BYTES), bands=4, round=5)


def open_baton(data: bytes) -> object:
    """A baton from whoever sent it."""
    return batons.open_baton(data, KEY, PLACE)


def baton_seeds() -> list[bytes]:
    """Batons with all slots, and with some."""
    public = KEY.public_key().public_bytes_raw()
    return [batons.seal([bytes(16)] * 3, public, PLACE), batons.seal([bytes(16), None, None], public, PLACE)]


class _Nothing:
    """Of a memory: no seeds were handed on."""

    def given(self, run: str) -> int:
        return 0

    def give(self, run: str, number: int) -> None:
        raise AssertionError("nothing is handed on here")


def _nothing_given() -> AbstractContextManager[Journal]:
    return nullcontext(_Nothing())


def read_seeds(path: Path) -> object:
    """The file of seeds beside a client's memory. What is accepted must give a seed for the round itself."""
    own, *_ = SeedFile(path, _nothing_given).draw(PLACE)
    if not isinstance(own, bytes) or len(own) != 16:
        raise AssertionError("the round has no seed of its own")
    return own


def seed_files(folder: Path) -> list[bytes]:
    """Files of one round and of several."""
    found = []
    path = folder / "seeds.lineages"
    path.unlink(missing_ok=True)
    for round in (1, 2, 3):
        SeedFile(path, _nothing_given).draw(batons.Place("run", PLACE.fingerprint, PLACE.bands, round))
        found.append(path.read_bytes())
    return found


def seal_seeds(data: bytes) -> bytes:
    """The file with the right digest."""
    return seal(seeds._KIND, data.partition(b"\n")[2]) if is_sealed(data) else data


def read_memory(path: Path) -> object:
    """A client's memory."""
    return Memory(path).history()


def memory_files(folder: Path) -> list[bytes]:
    """A memory with hashes, and one of an earlier release."""
    path = folder / "seed.memory"
    path.unlink(missing_ok=True)
    old = b"#kind abcd e30=\nrun 1 abcd\nrun 1 advertise\nrun 2 relay\n"
    with RecordLog(path, MEMORY).opened() as log:
        log.append(*old.decode().splitlines())
    return [old, path.read_bytes()]


def seal_memory(data: bytes) -> bytes:
    """The memory with the right hash in every line."""
    found, previous = b"", bytes(32)
    for line in filter(None, data.split(b"\n")):
        text = line[:-66] if line[-66:-64] == b" #" else line
        previous = hashlib.sha256(MEMORY + previous + text).digest()
        found += text + b" #" + previous.hex().encode() + b"\n"
    return found


def check_report(data: bytes) -> object:
    """A signed report."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise CpsgdError("not JSON") from None
    return signed_reports.check_report(values)


def report_seeds(book: Ledger) -> list[bytes]:
    """The report of a ledger."""
    return [json.dumps(book.report(secure.IDENTITIES[0])).encode()]


def seal_report(data: bytes) -> bytes:
    """Signs what was changed, as a signer who lies would."""
    try:
        body = json.loads(data)
        body.pop("signature", None)
        signature = secure.IDENTITIES[0].sign(signed_reports._signed(body))
        return json.dumps({**body, "signature": base64.b64encode(signature).decode()}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def read_witness(path: Path) -> object:
    """A witness's file."""
    return Witness(path).lines()


def witness_seeds() -> list[bytes]:
    """Lines with a signature and without one."""
    line = Line(Head(3, "ab" * 32), "2026-01-01T00:00:00+00:00")
    return [f"{line}\n".encode(), f"{line}\n{line.signed(secure.IDENTITIES[0])}\n".encode()]
