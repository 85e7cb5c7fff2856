"""`cpsgd pair`: one message per client, two servers; each party is a command."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators
from rich.markup import escape

from cpsgd.cli import _files, options, output
from cpsgd.cli.commands import COMMANDS
from cpsgd.cli.frame import WHOLE, command, new_app
from cpsgd.errors import CpsgdError

if TYPE_CHECKING:
    from cpsgd.engines.pair.running import PairServerOptions
    from cpsgd.engines.pair.task import PairTask, Secrets

app = new_app("pair", example=COMMANDS["pair"].example)

TaskFile = Annotated[
    Path, options.file_option("The task, task.json as `cpsgd plan --pair --out` wrote it.", name="--task")
]
Certificates = Annotated[
    Path | None,
    options.file_option("Certificates that the server's must be signed by; the system's if not given.", name="--ca"),
]
Insecure = Annotated[bool, Parameter(help="Speak plain http to other machines, where another program encrypts.")]
Rounds = Annotated[int, WHOLE, Parameter(validator=validators.Number(gte=1), help="Number of rounds.")]
_AT_ONCE = 8


@command(app, "cpsgd pair keys --rounds 10 --out helper-keys.json --public helper-public.json")
def keys(
    *,
    out: Annotated[Path, options.file_option("Where the private keys go, a new file that only you may read.")],
    public: Annotated[Path, options.file_option("Where the public keys go, for whoever runs `cpsgd plan --pair`.")],
    rounds: Rounds = 1,
    json: options.Json = False,
) -> None:
    """Make a server's own keys, so that nobody else ever has the private ones.

    Each server's operator runs this, and hands the public file to whoever runs `cpsgd plan --pair`. The server is then
    started with --keys. It deletes each key when its rounds are closed.
    """
    from cpsgd.engines.pair.running import write_keys

    count = write_keys(out, public, rounds)
    rows = [("keys", f"{count:,}"), ("private", escape(str(out))), ("public", escape(str(public)))]
    output.answer(json, {"keys": count, "private": out, "public": public}, output.facts(rows))


def _run(role: Literal["leader", "helper"], chosen: Any) -> None:
    from cpsgd.engines.pair.running import PairServerOptions, serve

    _check_extra()
    served: PairServerOptions = PairServerOptions(**vars(chosen))
    console = output.console()

    def tell(address: str) -> None:
        console.print(f"{role.capitalize()}: {address}", markup=False, soft_wrap=True)

    serve(role, served, tell)


def _check_extra() -> None:
    """Raises an error with the command to install if packages of the extra `pair` are missing."""
    missing = [name for name in ("httptools", "httpx", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise CpsgdError(f"Two servers need {', '.join(missing)}: pip install 'cpsgd[pair]'.")


def _server_options() -> Any:
    from cpsgd.engines.pair.running import PairServerOptions

    return options.from_class(PairServerOptions)


if TYPE_CHECKING:
    Server = Any  # made when the program runs
else:
    Server = Annotated[_server_options(), options.FLAT]


@command(app, "cpsgd pair leader --task task.json --secrets leader.json --keys leader-keys.json --store leader.db")
def leader(*, server: Server) -> None:
    """Run the server that clients send to, until Ctrl-C."""
    _run("leader", server)


@command(app, "cpsgd pair helper --task task.json --secrets helper.json --keys helper-keys.json --store helper.db")
def helper(*, server: Server) -> None:
    """Run the other server, until Ctrl-C."""
    _run("helper", server)


@command(app, "cpsgd pair submit vector.npy --task task.json --identity me.key --upload sent.bin")
def submit(
    vector: Annotated[Path, Parameter(name="VECTOR", help="An .npy, .npz or .csv file with one vector.")],
    /,
    *,
    task: TaskFile,
    upload: Annotated[
        Path, options.file_option("Keeps the message. A file that exists is sent as it is, and the vector is not read.")
    ],
    identity: Annotated[Path | None, options.file_option("The client's private key, where there is a roster.")] = None,
    token: Annotated[
        Path | None, options.file_option("The client's line of tokens.txt, where there are tokens.")
    ] = None,
    round: Annotated[int | None, WHOLE, Parameter(help="Number of the round; the open one if not given.")] = None,
    ca: Certificates = None,
    insecure: Insecure = False,
    key: options.Key = None,
    json: options.Json = False,
) -> None:
    """Send a vector, encoded and in two sealed parts, to the leader.

    If no answer comes, send again with the same --upload: the same bytes count once. Another message of the same
    vector would double what can be learned about it.
    """
    _check_extra()
    from cpsgd._durable import create_file
    from cpsgd.engines.pair.parties import Sender
    from cpsgd.engines.pair.running import read_tokens
    from cpsgd.engines.pair.task import PairTask
    from cpsgd.secagg import read_identity

    with Sender(
        PairTask.read(task),
        identity=None if identity is None else read_identity(identity),
        tokens=None if token is None else read_tokens(token),
        trust=ca,
        insecure=insecure,
    ) as sender:
        if not upload.exists():
            number = sender.open_round() if round is None else round
            create_file(upload, sender.prepare(_files.read_vector(vector, key), number), mode=0o600)
        verdict = sender.deliver(upload.read_bytes())
    output.answer(json, {"verdict": verdict, "upload": upload}, output.facts([("report", verdict)]))


@command(app, "cpsgd pair collect --task task.json --secrets collector.json --round 0 --out mean.npy")
def collect(
    *,
    task: TaskFile,
    secrets: Annotated[Path, options.file_option("The collector's secrets, collector.json.")],
    round: options.Round,
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the mean goes, .npy or .csv.")],
    at: Annotated[int | None, WHOLE, Parameter(help="Wait until this many reports are accepted.")] = None,
    within: Annotated[float | None, Parameter(help="Wait for reports, but no longer than this many seconds.")] = None,
    ca: Certificates = None,
    insecure: Insecure = False,
    json: options.Json = False,
) -> None:
    """End a round and write the mean of its vectors.

    Each server reveals its sum if enough reports were accepted and its budget pays. It may be asked for again. With
    --at, --within or both a round is ended by count, by time, or by whichever comes first; without, at once.
    """
    _check_extra()
    from cpsgd.engines.pair.parties import Collector
    from cpsgd.engines.pair.task import PairTask, Secrets

    _files.check_vector_output(out, task, secrets)
    with Collector(PairTask.read(task), Secrets.read(secrets), trust=ca, insecure=insecure) as collector:
        if at is not None or within is not None:
            collector.wait(round, count=at, seconds=within)
        mean, count = collector.collect(round)
    _files.write_vector(out, mean)
    rows = [("round", str(round)), ("reports", f"{count:,}"), ("written to", escape(str(out)))]
    output.answer(json, {"round": round, "reports": count, "out": out}, output.facts(rows))


@command(app, "cpsgd pair demo --clients 300")
def demo(
    *,
    clients: Annotated[int, WHOLE, Parameter(validator=validators.Number(gte=20, lte=5000), help="Clients.")] = 300,
    dim: Annotated[int, WHOLE, Parameter(validator=validators.Number(gte=2), help="Coordinates of a vector.")] = 1000,
    json: options.Json = False,
) -> None:
    """Run both servers on this machine, let clients send over HTTP, and compare the mean with the true one.

    A fifth of the clients never sends.
    """
    _check_extra()
    from cpsgd import plan
    from cpsgd.engines.pair.running import free_port, start_server, stop_server, write_task
    from cpsgd.engines.pair.task import create_task

    def say(text: str) -> None:
        if not json:
            output.console().print(text, markup=False, soft_wrap=True)

    best = plan(clients=clients, dim=dim, epsilon=4.0, delta=1e-6, bits=8, mechanism="coins", dropout=0.3, pair=True)
    addresses = {role: f"http://127.0.0.1:{free_port()}" for role in ("leader", "helper")}
    task, secrets = create_task(best.protocol, leader=addresses["leader"], helper=addresses["helper"], admission="open")
    say(f"Plan: {best.protocol.mechanism.describe()}, modulus {best.protocol.modulus}, {best.protocol.promise}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, task, secrets)
        servers: list[subprocess.Popen[str]] = []
        try:
            for role, address in addresses.items():
                servers.append(start_server(role, folder))
                say(f"{role.capitalize()}: {address}")
            figures = _play(task, secrets["collector"], say)
        finally:
            for server in servers:
                stop_server(server)
    rows = [
        ("reports", f"{figures['reports']:,} of {clients:,} clients, {figures['upload_bytes']:,} bytes each"),
        ("time", f"{figures['seconds']:.1f} s, {figures['reports'] / figures['seconds']:.0f} reports per second"),
        ("squared error", f"{figures['squared_error']:.4g}, expected {best.error.total:.4g}"),
    ]
    output.answer(json, {**figures, "expected_squared_error": best.error.total}, output.facts(rows))


def _play(task: PairTask, secrets: Secrets, say: Callable[[str], None]) -> dict[str, Any]:
    """Lets four of five clients send, and collects."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from cpsgd.engines.pair.parties import Collector, Sender

    protocol = task.protocol
    generator = np.random.default_rng()
    vectors = generator.normal(0.5, 1.0, (protocol.clients * 4 // 5, protocol.dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def send(vector: Any) -> str:
        with Sender(task) as sender:
            return sender.send(vector, 0)

    start = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as phones:
        for index, verdict in enumerate(phones.map(send, vectors), start=1):
            if verdict != "accepted":
                raise CpsgdError(f"A report was refused: {verdict}.")
            if index % 100 == 0:
                say(f"{index:,} reports accepted")
    seconds = time.perf_counter() - start
    with Collector(task, secrets) as collector:
        mean, count = collector.collect(0)
    error = float(np.sum((mean - vectors.mean(axis=0)) ** 2))
    upload = task.shape(0).upload_bytes
    return {"reports": count, "seconds": seconds, "squared_error": error, "upload_bytes": upload}
