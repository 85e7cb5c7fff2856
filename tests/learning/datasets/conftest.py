"""Data files where there are any, a small stand-in for MNIST where not, and a web server to download from."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from cpsgd.learning.datasets import ImageDataset, mnist


def folder_with(part: str) -> Path:
    """The data folder that has this subfolder."""
    beside = Path(__file__).parents[3].parent / "shared" / "data"
    for folder in (os.environ.get("CPSGD_DATA_DIR"), beside):
        if folder and (Path(folder) / part).is_dir():
            return Path(folder)
    pytest.skip(f"needs data files: set CPSGD_DATA_DIR to a folder that has the folder {part}")


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The data folder with the real MNIST."""
    return folder_with("mnist")


@pytest.fixture(scope="session")
def vectors_folder() -> Path:
    """The folder with the output of the original infinite MNIST."""
    return folder_with("infimnist") / "infimnist"


@pytest.fixture(scope="session")
def real_mnist(mnist_folder: Path) -> ImageDataset:
    return mnist.load_mnist(mnist_folder)


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose MNIST has 30 training and 20 test images; the module takes it for the real one."""
    folder = tmp_path / "data"
    (folder / "mnist").mkdir(parents=True)
    random = np.random.default_rng(0)
    parts = []
    for part, shape in zip(mnist.PARTS, [(30, 28, 28), (30,), (20, 28, 28), (20,)], strict=True):
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        content = header + random.integers(0, 256 if len(shape) == 3 else 10, shape, dtype=np.uint8).tobytes()
        packed = gzip.compress(content, mtime=0)
        (folder / "mnist" / part.name).write_bytes(packed)
        parts.append(
            mnist.Part(
                part.name,
                len(packed),
                hashlib.sha256(packed).hexdigest(),
                len(content),
                hashlib.sha256(content).hexdigest(),
            )
        )
    monkeypatch.setattr(mnist, "PARTS", tuple(parts))
    return folder


@dataclass
class Server:
    """A web server's files and manners. `cuts` are the bytes after which the next answers break off."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    cuts: list[int] = field(default_factory=list)
    content_range: str | None = None
    # An answer pauses before its end until this is set.
    go_on: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server()
    state.go_on.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.requests.append((self.path, wanted))
            content = state.files.get(self.path.strip("/"))
            if content is None:
                self.send_error(404)
                return
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            self.send_response(206 if begin else 200)
            if begin:
                told = state.content_range or f"bytes {begin}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", told)
            if state.lengths:
                self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            body = content[begin:]
            if state.cuts:
                body = body[: state.cuts.pop(0)]
            half = len(body) // 2
            # The client may have hung up.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:half])
                if state.go_on.wait(60):
                    self.wfile.write(body[half:])

        def log_message(self, *arguments: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{httpd.server_port}/"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.go_on.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()
