"""`PatientConnection`: bounds what a connection may cost a server before a request is there to be answered.

uvicorn waits for ever for the head of a request, takes one of any length, and keeps any number of connections. Here a
connection is closed that sends no whole head in time, or too many bytes or headers, or that does not read its answer;
further ones are not taken.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Seconds for the head of a request, and bytes that are read while no request is under way.
HEAD_SECONDS, _HEAD_BYTES = 10.0, 1 << 20
# Connections at a time; headers of a request, and requests that one may send before the first is answered.
MOST_CONNECTIONS, _MOST_HEADERS, _PIPELINED = 4096, 100, 8


class PatientConnection(HttpToolsProtocol):
    """One connection. It is closed if two checks in a row find no request, or an answer that is not being read."""

    _before: tuple[object, int] = (None, 0)
    _look: asyncio.TimerHandle | None = None
    _unasked: tuple[object, int] = (None, 0)

    def connection_made(self, transport: Any) -> None:
        """Takes a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_idle)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_if_idle(self) -> None:
        last, before = self._before
        unsent = self.transport.get_write_buffer_size()
        if last is self.cycle and (self._idle or 0 < before <= unsent):  # nothing has moved since the last look
            self.transport.abort()
            return
        self._before = self.cycle, unsent
        self._look = self.loop.call_later(HEAD_SECONDS, self._end_if_idle)

    def data_received(self, data: bytes) -> None:
        """Takes bytes, unless there are too many that belong to no request."""
        last, size = self._unasked
        size = size if last is self.cycle else 0  # a request came since
        self._unasked = self.cycle, size + len(data) if self._idle else 0
        if self._unasked[1] > _HEAD_BYTES:
            self.transport.abort()
        else:
            super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header, unless there are too many: each header object needs more memory than its bytes."""
        if len(self.headers) < _MOST_HEADERS:
            super().on_header(name, value)
        else:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Takes a request, unless too many wait for their answers."""
        if len(self.pipeline) < _PIPELINED:
            super().on_headers_complete()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)


def configured(app: Any, certificate: Path | None = None, key: Path | None = None, **options: Any) -> uvicorn.Config:
    """Returns settings to serve an application within these bounds; with a certificate, only by TLS 1.3."""
    usual: dict[str, Any] = {"access_log": False, "log_level": "warning", "timeout_graceful_shutdown": 5}
    config = uvicorn.Config(
        app, **usual | options, http=PatientConnection, server_header=False, ws="none", backlog=MOST_CONNECTIONS
    )
    config.load()
    if certificate is not None:
        config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
        config.ssl.load_cert_chain(certificate, key)
    return config


def allow_files() -> None:
    """Raises this process's limit on open files for all connections, as far as the system allows."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MOST_CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
