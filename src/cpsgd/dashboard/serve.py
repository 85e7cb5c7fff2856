"""The dashboard on a port of this machine."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from cpsgd.dashboard.folder import Folder
from cpsgd.errors import CpsgdError

HOST = "127.0.0.1"
"""Where the dashboard listens, and nowhere else."""


def serve(path: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serves the dashboard of a folder until Ctrl-C; `tell` is given the address once it answers.

    Raises:
        CpsgdError: What it needs is not installed, the folder does not exist, or the port is taken.
    """
    try:
        import uvicorn

        from cpsgd.dashboard.app import Dashboard
    except ImportError as error:
        raise CpsgdError(f"The dashboard needs {error.name}: pip install 'cpsgd[dashboard]'.") from None
    folder = Folder.at(path)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with contextlib.closing(listening):
        if sys.platform != "win32":  # where it would let two programs share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise CpsgdError(
                f"Port {port} cannot be used: {error.strerror}. Leave --port out for a free one."
            ) from None
        listening.listen()
        port = listening.getsockname()[1]
        token = secrets.token_urlsafe(32)
        config = uvicorn.Config(
            Dashboard(folder).app(token=token, port=port),
            access_log=False,
            log_level="warning",
            server_header=False,
            # Streams last as long as their pages are open.
            timeout_graceful_shutdown=1,
        )
        tell(f"http://{HOST}:{port}/?token={token}")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
