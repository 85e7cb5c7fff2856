"""Every parser that reads bytes from outside, with inputs to start from. What is to be fuzzed goes into `TARGETS`.

A target's `parse` returns, or raises a `CpsgdError`; anything else is a finding. Where a checksum would stop nearly all
changed inputs at the door, `seal` makes it right again, as somebody who means harm would.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pyarrow import feather, parquet

from cpsgd import ledger
from cpsgd._record_log import End, record_line
from cpsgd.aggregator import Aggregator
from cpsgd.cli import _files
from cpsgd.codec import wire
from cpsgd.codec._kernels import kernels
from cpsgd.errors import CpsgdError
from cpsgd.learning import checkpoints, settings
from cpsgd.learning.datasets import mnist
from cpsgd.ledger import chain
from cpsgd.mechanisms import SampledCoins
from cpsgd.neighbours import Participation
from cpsgd.protocol import Protocol
from cpsgd.secagg import public_line, read_identity, read_roster
from cpsgd.tables import labels, open_table

from . import pairs, requests, secure, trusted

ROUND = 7
ROTATED = Protocol.rotated_binomial(clients=3, dim=33, clip_norm=1.0, levels=5, trials=11)
GAUSSIAN = Protocol.gaussian(clients=3, dim=9, clip_norm=1.0, sigma=0.5)
SAMPLED = Protocol(clients=3, dim=200, clip_norm=1.0, mechanism=SampledCoins(rate=0.2, theta=0.5, coordinate_range=0.2))


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: Its name on the command line.
        parse: What is fuzzed.
        seeds: Makes valid inputs.
        seal: Repairs checksums.
        tokens: Parts of inputs that chance would hardly hit upon.
        share: Part of the inputs it gets, relative to the others.
    """

    name: str
    parse: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    seal: Callable[[bytes], bytes] = field(default=lambda data: data)
    tokens: tuple[bytes, ...] = ()
    share: float = 1.0


NUMBERS = (b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"true", b"null", b"[]", b"{}", b'""', b"9" * 400, b"[" * 900)


@cache
def folder() -> Path:
    """Where files are put for parsers that read files: in memory, if the system has such a place."""
    shared = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="cpsgd-fuzz-", dir=shared if shared.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A parser of bytes from one of files."""

    def parse(data: bytes) -> object:
        path = folder() / name
        path.write_bytes(data)
        path.chmod(0o600)  # an identity that others may read is refused
        return read(path)

    return parse


# ------------------------------------------------------------------ messages and saved states


def add_message(data: bytes) -> None:
    """`Aggregator.add`, and that a refusal leaves no trace."""
    protocol = SAMPLED if data[4:5] == b"\x02" else GAUSSIAN if len(data) % 4 == 0 else ROTATED
    aggregator = Aggregator(protocol, ROUND)
    aggregator.add(valid_message(protocol))
    before = aggregator.sums
    try:
        aggregator.add(data)
    except CpsgdError:
        if aggregator.count != 1 or aggregator.sums.tobytes() != before.tobytes():
            raise AssertionError("a refused message changed the aggregator") from None
        raise
    if aggregator.count != 2:
        raise AssertionError("an accepted message was not counted")


@cache
def valid_message(protocol: Protocol) -> bytes:
    """A message to compare with."""
    return protocol.encode(np.zeros(protocol.dim), ROUND)


def messages() -> list[bytes]:
    """Messages of all protocols, and one for another round."""
    found = [p.encode(np.linspace(-0.1, 0.1, p.dim), ROUND) for p in (ROTATED, GAUSSIAN, SAMPLED)]
    return [*found, ROTATED.encode(np.zeros(ROTATED.dim), ROUND + 1)]


def seal_message(data: bytes) -> bytes:
    """The message with the right CRC-32C."""
    if len(data) < wire.HEADER_BYTES:
        return data
    buffer = np.frombuffer(data, dtype=np.uint8)
    start = wire.HEADER_BYTES - 4
    checksum = kernels.crc32c(buffer[wire.HEADER_BYTES :], kernels.crc32c(buffer[:start]))
    return data[:start] + checksum.to_bytes(4, "little") + data[wire.HEADER_BYTES :]


def restore(data: bytes) -> None:
    """`Aggregator.restore`; what it accepts must be able to go on."""
    known = {protocol.fingerprint: protocol for protocol in (GAUSSIAN, SAMPLED)}
    protocol = known.get(data[6:22], ROTATED)
    aggregator = Aggregator.restore(protocol, data)
    if aggregator.count:
        aggregator.mean()
    if Aggregator.restore(protocol, aggregator.save()).count != aggregator.count:
        raise AssertionError("a restored state is not saved as it was")


def states() -> list[bytes]:
    """Saved aggregators: empty, and with messages."""
    found = []
    for protocol in (ROTATED, GAUSSIAN, SAMPLED):
        aggregator = Aggregator(protocol, ROUND)
        found.append(aggregator.save())
        aggregator.add(protocol.encode(np.zeros(protocol.dim), ROUND))
        aggregator.add(protocol.encode(np.zeros(protocol.dim), ROUND))
        found.append(aggregator.save())
    return found


def seal_state(data: bytes) -> bytes:
    """The state with the right digest."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


# ------------------------------------------------------------------ texts


def protocol_text(data: bytes) -> None:
    """`Protocol.from_json`; what it accepts must survive a round trip."""
    protocol = Protocol.from_json(data)
    if Protocol.from_json(protocol.to_json()) != protocol:
        raise AssertionError("a protocol is not written as it was read")


def protocols() -> list[bytes]:
    """Protocols of all kinds."""
    secure = Protocol.binomial(clients=2, dim=5, clip_norm=0.1, levels=3, trials=9, p=0.25, modulus=64)
    return [p.to_json().encode() for p in (ROTATED, GAUSSIAN, secure)]


def setting_seeds(dump: Callable[[dict[str, object]], str]) -> Callable[[], list[bytes]]:
    """Settings as files."""
    changes: list[dict[str, object]] = [
        {},
        {"preset": "paper", "rounds": 250, "epsilon": 1, "baselines": False},
        {"levels": 3, "trials": 13, "range": 0.03, "lr": 0.5},
    ]
    return lambda: [dump({**change}).encode() for change in changes]


def as_toml(values: dict[str, object]) -> str:
    """Plain values as TOML."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def read_settings(path: Path) -> None:
    """A settings file as `cpsgd train` reads it."""
    settings.Settings.of(settings.read_file(path))


# ------------------------------------------------------------------ identities


def read_members(path: Path) -> None:
    """A roster; what it accepts must be keys."""
    if not all(len(key) == 32 for key in read_roster(path)):
        raise AssertionError("a key of a roster has not 32 bytes")


def roster_seeds() -> list[bytes]:
    """Rosters of one and of several."""
    lines = [public_line(identity, "a silo") for identity in secure.IDENTITIES]
    return [lines[0].encode(), "\n".join(["# silos", *lines, ""]).encode(), "\r\n".join(lines).encode()]


def identity_seeds() -> list[bytes]:
    """Private keys of the right and of another kind."""
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    keys = secure.IDENTITIES[0], ec.derive_private_key(7, ec.SECP256R1())
    return [key.private_bytes(*form) for key in keys]


# ------------------------------------------------------------------ a run directory


def checkpoint_seeds() -> list[bytes]:
    """Checkpoints with tensors and plain values."""
    path = folder() / "seed.bin"
    found = []
    for state in ({}, {"round": 3, "model": {"w": torch.zeros(4)}, "charged": {0: 5}, "config": {"a": [1.5, None]}}):
        checkpoints.save(path, state)
        found.append(path.read_bytes())
    return found


def seal_checkpoint(data: bytes) -> bytes:
    """The checkpoint with the right digest."""
    start = len(checkpoints._MAGIC) + 32
    return checkpoints._MAGIC + hashlib.sha256(data[start:]).digest() + data[start:]


def charge_seeds() -> list[bytes]:
    """Logs of charges, one with a line that a crash left unfinished."""
    path = folder() / "seed.jsonl"
    path.unlink(missing_ok=True)
    log = checkpoints.ChargeLog(path)
    for number in range(3):
        log.append(number, 100 - number)
    return [b"", path.read_bytes(), path.read_bytes()[:-9]]


def seal_charges(data: bytes) -> bytes:
    """The log with the right checksum in every line."""
    texts = [line.rsplit(b" ", 1)[0] for line in data.splitlines()]
    return b"".join(text + b" %08x\n" % zlib.crc32(text) for text in texts)


# ------------------------------------------------------------------ the ledger


def ledger_records(data: bytes) -> None:
    """Records of a ledger, a line each, in a chain that holds."""
    path = folder() / "records.ledger"
    end, lines = End(), []
    for text in data.decode("utf-8", "replace").splitlines():
        if text.isascii() and text.isprintable():
            line, end = record_line(chain.DOMAIN, text, end)
            lines.append(line)
    path.write_bytes(b"".join(lines))
    ledger.Ledger(path)


def record_seeds() -> list[bytes]:
    """All kinds of records."""
    lines = [row["body"] for row in written_ledger().export()["records"]]
    return ["\n".join(lines[:count]).encode() for count in range(2, len(lines) + 1)]


def ledger_seeds() -> list[bytes]:
    """A ledger's file."""
    return [written_ledger().path.read_bytes()]


def written_ledger() -> ledger.Ledger:
    """A ledger with a budget and a round."""
    path = folder() / "seed.ledger"
    path.unlink(missing_ok=True)
    book = ledger.Ledger(path)
    book.create(ledger.Budget(population="all", epsilon=9.0, delta=1e-3))
    protocol = Protocol.rotated_binomial(clients=99, dim=9, clip_norm=1.0, levels=2, trials=200)
    book.release(book.reserve("all", ledger.RoundEvent(protocol, survivors=90)), survivors=95)
    return book


# ------------------------------------------------------------------ people's data


def arrays() -> list[bytes]:
    """Arrays as .npy files."""
    found = []
    for array in (np.zeros((2, 3)), np.arange(3, dtype=np.int16)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        found.append(buffer.getvalue())
    return found


def archives() -> list[bytes]:
    """Arrays as .npz files."""
    plain, packed = io.BytesIO(), io.BytesIO()
    np.savez(plain, x=np.zeros((2, 3)))
    np.savez_compressed(packed, x=np.ones((2, 3), dtype=np.float32), y=np.zeros(3))
    return [plain.getvalue(), packed.getvalue()]


def read_rows(path: Path) -> None:
    """The rows of a file as `cpsgd round mean` reads them."""
    _files.read_points(_files.open_rows(path))


def read_columns(path: Path) -> None:
    """The columns of a table, as `cpsgd.statistics` reads them."""
    table = open_table(path)
    for chunk in table.chunks(table.names[:2]):
        for name, column in chunk.items():
            labels(name, column)


def arrow_files(write: Callable[[pyarrow.Table, io.BytesIO], object]) -> Callable[[], list[bytes]]:
    """A small table in one of Arrow's formats."""

    def made() -> list[bytes]:
        buffer = io.BytesIO()
        write(pyarrow.table({"a": [1.0, 2.0, 3.0], "b": ["x", "y", "z"]}), buffer)
        return [buffer.getvalue()]

    return made


def read_idx(path: Path) -> None:
    """One of MNIST's files."""
    mnist.read(path, mnist.TEST_LABELS)


def idx_seeds() -> list[bytes]:
    """Files that begin like MNIST's."""
    head = b"\x00\x00\x08\x01" + (10_000).to_bytes(4, "big")
    return [gzip.compress(head + bytes(10_000)), gzip.compress(head), gzip.compress(bytes(10**6))]


TARGETS = (
    Target("message", add_message, messages, seal_message, share=3.0),
    Target("frame", wire.read, messages, seal_message),
    Target("state", restore, states, seal_state),
    Target("protocol", protocol_text, protocols, tokens=NUMBERS, share=2.0),
    Target(
        "settings-json", as_file("settings.json", read_settings), setting_seeds(json.dumps), tokens=(b'"lr":', *NUMBERS)
    ),
    Target(
        "settings-toml", as_file("settings.toml", read_settings), setting_seeds(as_toml), tokens=(b"lr=", *NUMBERS)
    ),
    Target("participation", lambda data: Participation.parse(data.decode("utf-8", "replace")),
           lambda: [b"once", b"every", b"poisson:0.25", b"fixed-size:0.5"], tokens=(b"poisson:", b"nan", b"1e-400")),
    Target("checkpoint", as_file("checkpoint.bin", checkpoints.load), checkpoint_seeds, seal_checkpoint, share=0.2),
    Target(
        "charges", as_file("charges.jsonl", checkpoints.ChargeLog), charge_seeds, seal_charges,
        tokens=(b'{"round":', b'"survivors":', *NUMBERS), share=0.5,
    ),
    Target("ledger", as_file("budgets.ledger", ledger.Ledger), ledger_seeds, share=0.2),
    Target("ledger-records", ledger_records, record_seeds, tokens=(b'"kind":', *NUMBERS), share=0.5),
    Target("report", trusted.check_report, lambda: trusted.report_seeds(written_ledger()), trusted.seal_report,
           tokens=(b'"since":', *NUMBERS), share=0.2),
    Target("witness", as_file("witness", trusted.read_witness), trusted.witness_seeds, tokens=(b"cpsgd-witness 1 ",)),
    Target("baton", trusted.open_baton, trusted.baton_seeds),
    Target("memory", as_file("memory", trusted.read_memory), lambda: trusted.memory_files(folder()),
           trusted.seal_memory, tokens=(b"#kind ", b"#peers ", b"ahead-", *NUMBERS), share=0.2),
    Target("seeds", as_file("memory.lineages", trusted.read_seeds), lambda: trusted.seed_files(folder()),
           trusted.seal_seeds, tokens=(b'"seeds":', *NUMBERS), share=0.2),
    Target("secagg-client", secure.to_client, secure.client_seeds, secure.seal, share=0.2),
    Target("secagg-server", secure.to_server, secure.server_seeds, secure.seal, share=0.2),
    Target("secagg-state", secure.restore, secure.state_seeds, secure.seal_state, share=0.5),
    Target("request", requests.ask, requests.request_seeds, requests.seal_request, share=0.2),
    Target("pair", pairs.ask, pairs.request_seeds, pairs.seal_requests, share=0.1),
    Target("pair-answer", pairs.answer, pairs.answer_seeds, pairs.seal_answers, share=0.1),
    Target("client-state", requests.go_on, requests.progress_seeds, tokens=(b'"round":', *NUMBERS), share=0.5),
    Target(
        "roster", as_file("roster", read_members), roster_seeds,
        tokens=(b"ssh-ed25519 ", b"ssh-rsa ", b"AAAAC3NzaC1lZDI1NTE5AAAAI", b"\n", "\u202e".encode()), share=0.5,
    ),
    Target("identity", as_file("identity", read_identity), identity_seeds, share=0.5),
    Target("npy", as_file("rows.npy", read_rows), arrays, tokens=(b"'<f4'", b"'O'", b"(1099511627776, 2)"), share=0.3),
    Target("npz", as_file("rows.npz", read_rows), archives, share=0.2),
    Target("table-csv", as_file("t.csv", read_columns), lambda: [b'a,b\n1,x\n"2, 3",y\n\n4,"z""w"\n'], tokens=NUMBERS),
    Target("table-gz", as_file("t.csv.gz", read_columns), lambda: [gzip.compress(b"a,b\n1,x\n2,y\n")], share=0.2),
    Target("table-parquet", as_file("t.parquet", read_columns), arrow_files(parquet.write_table), share=0.2),
    Target("table-feather", as_file("t.feather", read_columns), arrow_files(feather.write_feather), share=0.3),
    Target("csv", as_file("rows.csv", read_rows), lambda: [b"a,b\n1,2\n3,4.5\n", b"1\n2\n"], tokens=NUMBERS),
    Target("idx", as_file("labels.gz", read_idx), idx_seeds, share=0.3),
)  # fmt: skip
"""All of them."""
