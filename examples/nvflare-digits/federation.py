"""An NVFlare federation on one machine: a server and sites as processes on 127.0.0.1.

It has mutual TLS by NVFlare's provisioning, and a roster, an identity and a memory for each site.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cpsgd.secagg import create_identity, public_line

ADMIN = "admin@example.org"
_MARK = "CPSGD_FEDERATION"
_START_SECONDS = 120.0
_STOP_SECONDS = 20.0


class Federation:
    """A server and sites; everything they write is in `folder`. All processes end on exit."""

    def __init__(self, folder: Path, sites: Sequence[str], port: int) -> None:
        """Starts nothing yet."""
        self.folder, self.sites, self.roster = folder, list(sites), folder / "roster"
        self._port, self._mark = port, uuid.uuid4().hex
        self._kits = folder / "workspace" / "federation" / "prod_00"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._provision()
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def admin_kit(self) -> Path:
        """The startup kit for submitting jobs."""
        return self._kits / ADMIN

    def memory(self, site: str) -> Path:
        """Returns the path of a site's memory, in which it counts its answers."""
        return self.folder / f"{site}.memory"

    def logs(self) -> str:
        """Returns the output of all processes."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def environment(self) -> dict[str, str]:
        """Returns the environment of all processes: NVFlare's scripts call python3, and write to the home folder."""
        return {
            **os.environ,
            "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
            "HOME": str(self.folder),
            "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "10",  # else a job waits 15 minutes for a site that has died
            "OMP_NUM_THREADS": "1",
            _MARK: self._mark,
        }

    def _provision(self) -> None:
        """Makes certificates and startup kits, and then the settings of each site's operator."""
        # NVFlare binds to 127.0.0.1 only where the server is called localhost.
        people = [
            {"name": "localhost", "type": "server", "org": "example", "fed_learn_port": self._port},
            {"name": ADMIN, "type": "admin", "org": "example", "role": "project_admin"},
            *({"name": site, "type": "client", "org": "example"} for site in self.sites),
        ]
        builders = [
            {
                "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": "nvflare.lighter.impl.cert.CertBuilder"},
            {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
        ]
        project = {"api_version": 3, "name": "federation", "participants": people, "builders": builders}
        (self.folder / "project.yml").write_text(json.dumps(project))  # which is YAML, too
        command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "workspace"]
        subprocess.run(command, cwd=self.folder, env=self.environment(), check=True, stdout=subprocess.DEVNULL)
        identities = {site: create_identity(self.folder / f"{site}.identity") for site in self.sites}
        # The sites tell each other these lines, and not through the server.
        self.roster.write_text("".join(public_line(identities[site], site) + "\n" for site in self.sites))
        for site in self.sites:
            local = self._kits / site / "local"
            conditions = {
                "cpsgd-memory": str(self.memory(site)),
                "cpsgd-identity": str(self.folder / f"{site}.identity"),
                "cpsgd-roster": str(self.roster),
            }
            (local / "cpsgd.json").write_text(json.dumps(conditions))
            # NVFlare sends a site's error log to the server, and errors may quote data.
            resources = json.loads((local / "resources.json.default").read_text())
            (local / "resources.json").write_text(json.dumps({**resources, "allow_log_streaming": False}))

    def _start(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        self._spawn("localhost")
        while not self._listens():
            self._check(deadline)
        for site in self.sites:
            self._spawn(site)
        while (self.folder / "localhost.log").read_text().count("New client") < len(self.sites):
            self._check(deadline)

    def _spawn(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                ["bash", str(self._kits / name / "startup" / "sub_start.sh"), "--once"],
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False

    def _check(self, deadline: float) -> None:
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"The federation did not start (ended: {ended}).\n{self.logs()}")
        time.sleep(0.2)

    def kill(self, site: str) -> None:
        """Kills a site with its job processes."""
        while found := [pid for pid in self.living() if _is_of(pid, self._kits / site)]:
            _kill(found)
            self._processes[site].poll()
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends all processes: by a request, then by force."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + 5.0
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        # Repeated with a deadline, because a process may have started another meanwhile.
        deadline = time.monotonic() + _STOP_SECONDS
        while (left := self.living()) and time.monotonic() < deadline:
            _kill(left)
            for process in self._processes.values():
                process.poll()
            time.sleep(0.1)

    def living(self) -> list[int]:
        """Returns the processes with this federation's mark in their environment, also those that NVFlare started."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


def _is_of(pid: int, kit: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"{kit}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
