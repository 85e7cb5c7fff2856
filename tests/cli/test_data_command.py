"""`cpsgd data mnist`, against a web server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cpsgd.learning.datasets import mnist


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a mirror; it serves four small files that are taken for MNIST's."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    parts = []
    for part in mnist.PARTS:
        content = part.name.encode() * 100
        packed = gzip.compress(content, mtime=0)
        (folder / part.name).write_bytes(packed)
        digests = [hashlib.sha256(blob).hexdigest() for blob in (packed, content)]
        parts.append(mnist.Part(part.name, len(packed), digests[0], len(content), digests[1]))
    monkeypatch.setattr(mnist, "PARTS", tuple(parts))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(folder)))
    monkeypatch.setattr(mnist, "MIRRORS", (f"http://127.0.0.1:{httpd.server_port}/",))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_downloads_once(cpsgd: Any, mirror: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    result = cpsgd("data", "mnist", "--dir", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("downloaded") == 4
    assert "verified" in result.stdout
    for part in mnist.PARTS:
        assert str(folder / "mnist" / part.name) in result.stdout
        assert (folder / "mnist" / part.name).read_bytes() == (mirror / part.name).read_bytes()
    result = cpsgd.succeeds("data", "mnist", "--dir", folder)
    assert result.stdout.count("was there") == 4


def test_json_and_the_variable(cpsgd: Any, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPSGD_DATA_DIR", str(tmp_path / "variable"))
    result = cpsgd.succeeds("data", "mnist", "--json")
    expected = [{"path": str(tmp_path / "variable" / "mnist" / part.name), "downloaded": True} for part in mnist.PARTS]
    assert json.loads(result.stdout) == {"dataset": "mnist", "files": expected}


def test_offline_is_one_clear_line(cpsgd: Any, mirror: Path, tmp_path: Path) -> None:
    for file in mirror.iterdir():
        file.unlink()
    result = cpsgd("data", "mnist", "--dir", tmp_path / "data")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: Could not download train-images-idx3-ubyte.gz (http://127.0.0.1")
    assert str(tmp_path / "data" / "mnist") in result.stderr
    assert result.stderr.count("\n") == 1


def test_progress_on_a_terminal(cpsgd: Any, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = cpsgd.succeeds("data", "mnist", "--dir", tmp_path / "data", "--json")
    assert "train-images-idx3-ubyte.gz" in result.stderr
    assert len(json.loads(result.stdout)["files"]) == 4


def test_help(cpsgd: Any) -> None:
    assert "mnist" in cpsgd("data", "--help").stdout
    assert "CPSGD_DATA_DIR" in cpsgd("data", "mnist", "--help").stdout
