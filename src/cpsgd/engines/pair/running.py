"""A server as a program: opened from files, on a port, with TLS; and the files of a new task."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets as randomness
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cpsgd._durable import create_file
from cpsgd._plain import build, parse
from cpsgd.engines.pair.answers import ledger_charge
from cpsgd.engines.pair.books import Admitted, Books
from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.key_ring import KeyRing
from cpsgd.engines.pair.leader import Leader
from cpsgd.engines.pair.store import ReportStore
from cpsgd.engines.pair.task import PairTask, Secrets, make_keys, public_keys
from cpsgd.errors import ParameterError
from cpsgd.ledger import Ledger
from cpsgd.secagg.identity_files import read_roster
from cpsgd.secagg.pair.sealing import Role
from cpsgd.secagg.pair.upload import TOKEN_BYTES


@dataclass(frozen=True, kw_only=True)
class PairServerOptions:
    """The files and places of one server.

    Attributes:
        task: The task's file.
        secrets: The server's secrets. It deletes its private keys from the file, each when its rounds are closed.
        keys: Private keys that the server made itself (`cpsgd pair keys`), where the secrets have none.
        store: Where reports are counted: a file of SQLite, or an address that begins with postgresql://.
        roster: Public keys of those who may send, one per line, where the task has a roster.
        tokens: Hashes of this server's tokens, one per line, where the task has tokens.
        ledger: A ledger that pays for a round before its sum is revealed.
        population: The population whose budget pays.
        host: Address to listen on; 0.0.0.0 for all of this machine's.
        port: Port to listen on; that of the task's address if not given.
        certificate: The server's certificate, with those that it is signed by; without, it speaks plain http.
        key: The certificate's private key.
        ca: Certificates that the helper's must be signed by; the system's if not given.
        insecure: Serve plain http to other machines, where another program encrypts.
    """

    task: Path
    secrets: Path
    store: str
    keys: Path | None = None
    roster: Path | None = None
    tokens: Path | None = None
    ledger: Path | None = None
    population: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    insecure: bool = False


def open_books(role: Role, options: PairServerOptions) -> Books:
    """Opens a server's books: its store, the permitted senders and the ledger.

    Raises:
        ParameterError: Options contradict each other or the task.
        StoreError: The store cannot be opened.
    """
    task, secrets = PairTask.read(options.task), Secrets.read(options.secrets)
    if (options.ledger is None) != (options.population is None):
        raise ParameterError("Give --ledger and --population together: a budget is one population's.")
    admitted = None
    if task.admission == "roster" and options.roster is not None:
        admitted = Admitted(keys=frozenset(read_roster(options.roster)))
    elif task.admission == "tokens" and options.tokens is not None:
        admitted = Admitted(tokens=_read_hashes(options.tokens))
    elif task.admission != "open":
        raise ParameterError(f"Missing --{task.admission}: the task admits by {task.admission}.")
    charge = None
    if options.ledger is not None and options.population is not None:
        charge = ledger_charge(task, Ledger(options.ledger), options.population, role)
    file = options.secrets if options.keys is None else options.keys
    keys = KeyRing(task, role, Secrets.read(file), file)
    store = ReportStore(options.store, task=task.id, role=role, dim=task.protocol.dim)
    return Books(task, role, secrets, store, admitted=admitted, charge=charge, keys=keys)


def serve(role: Role, options: PairServerOptions, tell: Callable[[str], None]) -> None:
    """Serves until the process is stopped; calls `tell` with the address.

    Raises:
        ParameterError: Options contradict each other or the task, the port is taken, or it would serve plain http to
            other machines.
        StoreError: The store cannot be opened.
    """
    import uvicorn

    from cpsgd.engines.pair.connections import MOST_CONNECTIONS, allow_files, configured
    from cpsgd.engines.pair.intake import leader_app
    from cpsgd.engines.pair.service import helper_app
    from cpsgd.engines.pair.task import LOOPBACK

    if (options.certificate is None) != (options.key is None):
        raise ParameterError("Give --certificate and --key together.")
    if options.certificate is None and options.host not in LOOPBACK and not options.insecure:
        raise ParameterError(
            f"Serving plain http on {options.host} would show secrets to everybody on the way. Give --certificate and "
            "--key, or say --insecure where another program encrypts."
        )
    books = open_books(role, options)
    url = books.task.endpoint(role).url
    port = urlsplit(url).port if options.port is None else options.port
    if role == "leader":
        app = leader_app(Leader(books), trust=options.ca, insecure=options.insecure)
    else:
        app = helper_app(Helper(books))
    try:
        config = configured(app, options.certificate, options.key)
    except OSError as error:  # of OpenSSL, too
        raise ParameterError(f"The certificate or its key cannot be used: {error.strerror or error}.") from None
    allow_files()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((options.host, port or 0))
        except OSError as error:
            raise ParameterError(f"Port {port} of {options.host} cannot be used: {error.strerror}.") from None
        listening.listen(MOST_CONNECTIONS)
        scheme = "http" if options.certificate is None else "https"
        tell(f"{scheme}://{options.host}:{listening.getsockname()[1]}")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    books.store.close()


def write_task(
    folder: Path, task: PairTask, secrets: dict[str, Secrets], *, name: str = "task.json", tokens: int = 0
) -> list[Path]:
    """Writes a new task's files into a folder and returns them, the task's first; none may exist before.

    Args:
        folder: Is made where it is not there.
        task: Is public.
        secrets: Go to leader.json, helper.json and collector.json, which only their owner may read.
        name: Name of the task's file.
        tokens: Number of tokens to make, where the task admits by tokens. Each line of tokens.txt, which only its owner
            may read, is for one client; leader-tokens.txt and helper-tokens.txt are what the servers know them by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name, *(folder / f"{role}.json" for role in secrets)]
    for file in files:
        if file.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    create_file(files[0], json.dumps(task.to_dict(), indent=1).encode() + b"\n")
    for kept, file in zip(secrets.values(), files[1:], strict=True):
        kept.write(file)
    if tokens:
        pairs = [(randomness.token_bytes(TOKEN_BYTES), randomness.token_bytes(TOKEN_BYTES)) for _ in range(tokens)]
        lines = "".join(f"{leader.hex()} {helper.hex()}\n" for leader, helper in pairs)
        files.append(folder / "tokens.txt")
        create_file(files[-1], lines.encode(), mode=0o600)
        for side, role in enumerate(("leader", "helper")):
            hashes = sorted(hashlib.sha256(pair[side]).hexdigest() for pair in pairs)
            files.append(folder / f"{role}-tokens.txt")
            create_file(files[-1], "".join(f"{each}\n" for each in hashes).encode(), mode=0o600)
    return files


def write_keys(private: Path, public: Path, rounds: int) -> int:
    """Writes a server's new private keys, and a file with the public ones; returns their number.

    Raises:
        FileExistsError: One of the files exists.
    """
    keys = make_keys(rounds)
    Secrets(private=keys).write(private)
    shown = {"keys": [key.hex() for key in public_keys(keys)]}
    create_file(public, json.dumps(shown, indent=1).encode() + b"\n")
    return len(keys)


def read_public_keys(path: Path) -> tuple[bytes, ...]:
    """Returns the keys in a file that `write_keys` wrote.

    Raises:
        ParameterError: It holds something else.
    """
    return build(_PublicKeys, parse(path.read_bytes(), str(path))).keys


@dataclass(frozen=True)
class _PublicKeys:
    keys: tuple[bytes, ...]


def read_tokens(path: Path) -> tuple[bytes, bytes]:
    """Returns a client's two tokens from the first line of a file.

    Raises:
        ParameterError: It holds none.
    """
    with contextlib.suppress(ValueError, IndexError):
        leader, helper = (bytes.fromhex(word) for word in path.read_text().splitlines()[0].split())
        if len(leader) == len(helper) == TOKEN_BYTES:
            return leader, helper
    raise ParameterError(f"{path} does not begin with two tokens of {TOKEN_BYTES} bytes in hexadecimal.")


def _read_hashes(path: Path) -> frozenset[bytes]:
    try:
        found = frozenset(bytes.fromhex(line) for line in path.read_text().split())
    except ValueError:
        found = frozenset()
    if not found or any(len(each) != 32 for each in found):
        raise ParameterError(f"{path} is not a list of SHA-256 hashes, one per line.")
    return found


def free_port() -> int:
    """Returns a port of this machine that is free now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    role: str, folder: Path, *, options: Sequence[str] = (), log: Path | None = None
) -> subprocess.Popen[str]:
    """Starts a server as a process of its own, and returns when it listens. The caller ends it.

    Args:
        role: "leader" or "helper".
        folder: Holds the task's files, as `write_task` wrote them.
        options: Further words for the command line.
        log: Where complaints go; stderr if not given.

    Raises:
        ParameterError: It does not start; it has complained why.
    """
    words = ["--task", str(folder / "task.json"), "--secrets", str(folder / f"{role}.json")]
    words += ["--store", str(folder / f"{role}.db"), *options]
    # One thread for arrays: the other cores have work of their own.
    settings = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with contextlib.nullcontext() if log is None else log.open("a") as complaints:
        program = subprocess.Popen(
            [sys.executable, "-m", "cpsgd", "pair", role, *words],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **settings},
        )
    assert program.stdout is not None
    if not program.stdout.readline().startswith(role.capitalize()):
        stop_server(program)
        raise ParameterError(f"The {role} did not start.")
    return program


def stop_server(program: subprocess.Popen[str]) -> int:
    """Ends a server's process and returns its exit code."""
    program.terminate()
    code = program.wait(timeout=60.0)
    assert program.stdout is not None
    program.stdout.close()
    return code
