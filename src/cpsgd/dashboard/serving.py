"""The dashboard on a port of this machine."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from cpsgd.dashboard.folder import Folder
from cpsgd.errors import CpsgdError

if TYPE_CHECKING:
    from uvicorn import Server

    from cpsgd.dashboard.pair_page import PairWatch

HOST = "127.0.0.1"
"""Where the dashboard listens, and nowhere else."""


def prepare(folder: Folder, listening: socket.socket, pair: PairWatch | None = None) -> tuple[Server, str]:
    """Returns a server on a bound socket, and the address to open, which holds a new token."""
    from uvicorn import Config, Server

    from cpsgd.dashboard.guard import TOKEN
    from cpsgd.dashboard.web import Dashboard

    class Ending(Server):
        """A server that ends open streams before it waits for them."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            dashboard.end()
            super().handle_exit(sig, frame)

    port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    dashboard = Dashboard(folder, pair)
    config = Config(
        dashboard.app(token=token, port=port),
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=5,
    )
    return Ending(config), f"http://{HOST}:{port}/?{TOKEN}={token}"


def serve(path: Path, port: int, tell: Callable[[str], None], pair: PairWatch | None = None) -> None:
    """Serves the dashboard of a folder, and of a task's servers, until Ctrl-C; `tell` is given the address to open.

    Raises:
        CpsgdError: What it needs is not installed, the folder does not exist, or the port is taken.
    """
    folder = Folder.at(path)
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listening:
        if sys.platform != "win32":  # where it would let two programs share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise CpsgdError(
                f"Port {port} cannot be used: {error.strerror}. Leave --port out for a free one."
            ) from None
        try:
            server, address = prepare(folder, listening, pair)
        except ImportError as error:
            raise CpsgdError(f"The dashboard needs {error.name}: pip install 'cpsgd[dashboard]'.") from None
        listening.listen()
        tell(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
