"""A Flower federation of real processes on 127.0.0.1: TLS, node authentication, and identities with a roster.

Every wait has a deadline, and `stop` ends every process that was started, also those that Flower's own started.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import cpsgd
from cpsgd.secagg import create_identity, public_line

_MARK = "CPSGD_TEST_FEDERATION"
_START_SECONDS = 90.0
_STOP_SECONDS = 20.0
_COMMAND_SECONDS = 120.0
# Below the ports that systems give to outgoing connections, which could take one between the choice and its use.
_PORTS = range(20_000, 30_000)
_NURSERY = Path(__file__).with_name("nursery.py")


class Process:
    """A fork of the nursery, in a session of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def ended(self) -> bool:
        """Whether it has: the nursery leaves no zombies."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def wait(self, timeout: float) -> None:
        """Waits until it has ended.

        Raises:
            TimeoutError: It has not.
        """
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"Process {self.pid} did not end within {timeout:g} s.")
            time.sleep(0.05)


class Federation:
    """A SuperLink with `nodes` SuperNodes, which know their number as `partition-id`."""

    def __init__(self, directory: Path, nodes: int, *, database: bool = False, task: Path | None = None) -> None:
        """Starts nothing yet; keys, certificates and logs will be in `directory`, and the SuperLink's database, if any.

        Without a database a SuperLink forgets everything with its process. `task` is a task of two servers, if any.
        """
        self.directory = directory
        self._database, self._task = database, task
        self.nodes = nodes
        self.roster = directory / "roster"
        self.supernodes: list[Process] = []
        self._mark = uuid.uuid4().hex
        self._commands = itertools.count()
        self._nursery: subprocess.Popen[bytes] | None = None
        self._daemons: list[Process] = []
        self._port, *self._node_ports = free_ports(1 + nodes)
        self._killed: set[int] = set()
        self.environment = {
            **os.environ,
            _MARK: self._mark,
            "PYTHONPATH": str(Path(cpsgd.__file__).parents[1]),
            "FLWR_HOME": str(directory / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the SuperLink, registers the nodes' keys, and starts the SuperNodes."""
        with (self.directory / "nursery.log").open("ab") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, _NURSERY],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        write_certificate(self.directory)
        home = self.directory / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{self._port}"\n'
            f'root-certificates = "{self.directory / "ca.crt"}"\n'
        )
        self._start_superlink()
        identities = [create_identity(self.directory / f"identity-{node}") for node in range(self.nodes)]
        lines = [public_line(identity, f"node-{node}") + "\n" for node, identity in enumerate(identities)]
        self.roster.write_text("".join(lines))
        for node in range(self.nodes):
            write_node_key(self.directory, node)
            self._flwr("supernode", "register", str(self.directory / f"node-{node}.pub"), "local")
        for node in range(self.nodes):
            self.supernodes.append(self._start_node(node))

    def _start_superlink(self) -> None:
        """Starts the SuperLink and waits until it listens."""
        state = ("--database", str(self.directory / "state.db")) if self._database else ()
        self._superlink = self._spawn(
            "superlink",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--ssl-ca-certfile", str(self.directory / "ca.crt")),
            *("--ssl-certfile", str(self.directory / "server.crt")),
            *("--ssl-keyfile", str(self.directory / "server.key")),
            "--enable-supernode-auth",
            *state,
        )
        self._wait_for_port(self._superlink)

    def _start_node(self, node: int) -> Process:
        return self._spawn(
            f"node-{node}",
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self._port}"),
            *("--root-certificates", str(self.directory / "ca.crt")),
            *("--auth-supernode-private-key", str(self.directory / f"node-{node}.key")),
            *("--port", str(self._node_ports[node])),
            *("--node-config", self._node_config(node)),
        )

    def restart_superlink(self) -> None:
        """Kills the SuperLink and whatever it has started at once, and starts it again."""
        os.killpg(self._superlink.pid, signal.SIGKILL)
        self._superlink.wait(10)
        self._start_superlink()

    def restart_node(self, node: int, timeout: float = 150.0) -> int:
        """Kills a SuperNode and its ClientApp at once, and starts it again with the same files until it stays.

        Flower takes a killed node for online until two heartbeats of 30 s are missing, and sends a second one away.

        Returns:
            How often it was sent away.
        """
        self.kill_node(node)
        activated, refused = self._activated(), 0
        deadline = time.monotonic() + timeout
        self.supernodes[node] = self._start_node(node)
        while self._activated() == activated:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"The node was not let in within {timeout:g} s:\n{self.logs()}")
            if self.supernodes[node].ended():
                refused += 1
                time.sleep(15.0)  # as RestartSec of a systemd unit
                self.supernodes[node] = self._start_node(node)
            time.sleep(0.2)
        self._killed.discard(node)
        return refused

    def _activated(self) -> int:
        return (self.directory / "superlink.log").read_text().count("Activated node_id")

    def begin(self, app: Path, config: Mapping[str, object]) -> str:
        """Has Flower run an app; returns the run's number."""
        overrides = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        started = json.loads(self._flwr("run", str(app), "local", "--run-config", overrides, "--format", "json"))
        return str(started["run-id"])

    def kill_server(self, waiting: Path, timeout: float) -> None:
        """Kills a ServerApp at once when it has written its process number to this file."""
        deadline = time.monotonic() + timeout
        while not waiting.exists():
            self._check_nodes()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"The server did not come so far within {timeout:g} s:\n{self.logs()}")
            time.sleep(0.2)
        pid = int(waiting.read_text())
        assert pid in self.living()
        os.kill(pid, signal.SIGKILL)

    def run(self, app: Path, timeout: float, last: Path, config: Mapping[str, object]) -> str:
        """Runs an app to its end and returns its log; `last` is the file that it writes at the end.

        Raises:
            TimeoutError: It took longer than `timeout` seconds.
            AssertionError: The run failed.
        """
        number = self.begin(app, config)
        deadline = time.monotonic() + timeout
        asked = time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.5)
            self._check_nodes()
            if time.monotonic() < asked + (1.0 if last.exists() else 20.0):
                continue
            status = json.loads(self._flwr("ls", "--run-id", number, "local", "--format", "json"))
            asked = time.monotonic()
            state = str(status["runs"][0]["status"])
            if state.startswith("finished"):
                if state != "finished:completed":
                    raise AssertionError(f"The run ended as {state}:\n{self.logs()}")
                return self.logs()
        raise TimeoutError(f"The run did not end within {timeout:g} s:\n{self.logs()}")

    def _node_config(self, node: int) -> str:
        files = {
            "cpsgd-memory": self.directory / f"memory-{node}",
            "cpsgd-identity": self.directory / f"identity-{node}",
            **({"cpsgd-roster": self.roster} if self._task is None else {"cpsgd-task": self._task}),
        }
        return f"partition-id={node} " + " ".join(f'{name}="{path}"' for name, path in files.items())

    def kill_node(self, node: int) -> None:
        """Kills a SuperNode and its ClientApp at once, without a word to anybody."""
        self._killed.add(node)
        os.killpg(self.supernodes[node].pid, signal.SIGKILL)
        self.supernodes[node].wait(10)

    def memory(self, node: int) -> list[list[str]]:
        """The words of the lines in a node's memory, without the hashes."""
        return [line.split()[:3] for line in (self.directory / f"memory-{node}").read_text().splitlines()]

    def logs(self) -> str:
        """What all processes wrote."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.log")))

    def stop(self) -> None:
        """Ends everything: politely, then by force."""
        if self._nursery is None:
            return
        for process in self._daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for process in self._daemons:
            with contextlib.suppress(TimeoutError):
                process.wait(max(0.1, deadline - time.monotonic()))
        # Again until none is left, for a process may have started another meanwhile; but not for ever.
        deadline = time.monotonic() + _STOP_SECONDS
        while (left := self.living()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._nursery.poll()
            time.sleep(0.1)
        self._nursery.communicate(timeout=10)

    def living(self) -> list[int]:
        """Processes that carry this federation's mark in their environment and have not ended."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def _spawn(self, name: str, *command: str) -> Process:
        """Starts a process that stays."""
        process = self._fork(command, self.directory / f"{name}.log")
        self._daemons.append(process)
        return process

    def _fork(self, command: Sequence[str], output: Path, **more: object) -> Process:
        """Asks the nursery for a process."""
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        asked = {"command": command, "session": True, "output": str(output), **more}
        self._nursery.stdin.write(json.dumps(asked).encode() + b"\n")
        self._nursery.stdin.flush()
        return Process(int(self._nursery.stdout.readline()))

    def _flwr(self, *arguments: str) -> str:
        """Runs Flower's command line and returns what it prints."""
        output = self.directory / f"flwr-{next(self._commands)}.log"
        status = output.with_suffix(".status")
        self._fork(("flwr", *arguments), output, status=str(status)).wait(_COMMAND_SECONDS)
        if not status.exists() or status.read_text() != "0":
            raise AssertionError(f"{' '.join(arguments)} failed:\n{self.logs()}")
        return output.read_text()

    def _check_nodes(self) -> None:
        """A SuperNode that has ended by itself is waited for in vain."""
        for node, process in enumerate(self.supernodes):
            if node not in self._killed and process.ended():
                raise AssertionError(f"SuperNode {node} has ended:\n{self.logs()}")

    def _wait_for_port(self, superlink: Process) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if superlink.ended():
                raise AssertionError(f"The SuperLink ended before it opened its port:\n{self.logs()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
                return
            time.sleep(0.2)
        raise TimeoutError(f"The SuperLink did not open its port within {_START_SECONDS:g} s:\n{self.logs()}")


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("Too few ports are free.")


def write_certificate(directory: Path) -> None:
    """A certificate authority of our own, and a certificate of 127.0.0.1 by it."""
    now = datetime.datetime.now(datetime.UTC)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = {
        key: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        for key, text in (("ca", "cpsgd test authority"), ("server", "127.0.0.1"))
    }

    def begin(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(names[subject])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    signing = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    root = (
        begin("ca", authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = (
        begin("server", server)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    (directory / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (directory / "server.crt").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (directory / "server.key").write_bytes(_private(server, serialization.PrivateFormat.TraditionalOpenSSL))


def write_node_key(directory: Path, node: int) -> None:
    """A key pair by which a SuperNode is known."""
    key = ec.generate_private_key(ec.SECP384R1())
    (directory / f"node-{node}.key").write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (directory / f"node-{node}.pub").write_bytes(public)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
