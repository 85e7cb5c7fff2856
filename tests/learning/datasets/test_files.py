"""Downloads from a real web server on this machine, in all the ways they go wrong."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsgd.errors import DataError
from cpsgd.learning.datasets import files

CONTENT = bytes(range(251)) * 4_000
NAME = "file.gz"


def fetch(*servers: Any, target: Path, **options: Any) -> None:
    urls = [server if isinstance(server, str) else server.url + NAME for server in servers]
    files.fetch(urls, target, size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(), **options)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / NAME


@pytest.fixture
def part(target: Path) -> Path:
    target.parent.mkdir(parents=True)
    return target.with_name(NAME + ".part")


def test_a_file_arrives_whole_and_alone(server: Any, target: Path) -> None:
    server.files[NAME] = CONTENT
    seen: list[int] = []
    fetch(server, target=target, progress=seen.append)
    assert target.read_bytes() == CONTENT
    assert os.listdir(target.parent) == [NAME]
    assert server.requests == [(f"/{NAME}", None)]
    assert seen == sorted(set(seen))
    assert seen[-1] == len(CONTENT)


@pytest.mark.parametrize(
    ("left", "manners", "asked"),
    [
        pytest.param(CONTENT[:700_001], {}, ["bytes=700001-"], id="continues"),
        pytest.param(b"x" * 5_000, {"ranges": False}, ["bytes=5000-"], id="without ranges all again"),
        pytest.param(
            CONTENT[:5_000],
            {"lengths": False, "content_range": "bytes 5000-1003999/*"},
            ["bytes=5000-"],
            id="no length",
        ),
        pytest.param(CONTENT[:5_000], {"lengths": False, "ranges": False}, ["bytes=5000-"], id="no length, no ranges"),
        pytest.param(b"?" * 10, {}, ["bytes=10-", None], id="wrong leftovers"),
        pytest.param(b"?" * len(CONTENT), {}, [None], id="wrong leftovers of the right size"),
        pytest.param(b"?" * (len(CONTENT) + 1), {}, [None], id="too long leftovers"),
    ],
)
def test_what_an_earlier_attempt_left(
    server: Any, target: Path, part: Path, left: bytes, manners: dict[str, Any], asked: list[str | None]
) -> None:
    server.files[NAME] = CONTENT
    for name, value in manners.items():
        setattr(server, name, value)
    part.write_bytes(left)
    fetch(server, target=target)
    assert target.read_bytes() == CONTENT
    assert [range_ for _, range_ in server.requests] == asked


def test_a_broken_connection_is_taken_up_again(server: Any, target: Path) -> None:
    server.files[NAME] = CONTENT
    server.cuts = [300_000, 200_000]
    fetch(server, target=target)
    assert target.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-", "bytes=500000-"]


def test_a_connection_that_always_breaks_is_given_up_and_what_came_is_kept(
    server: Any, target: Path, part: Path
) -> None:
    server.files[NAME] = CONTENT
    server.cuts = [300_000, 0]
    with pytest.raises(DataError, match="ended after 300,000 of 1,004,000 bytes"):
        fetch(server, target=target)
    assert not target.exists()
    assert part.read_bytes() == CONTENT[:300_000]
    fetch(server, target=target)
    assert target.read_bytes() == CONTENT


def test_a_killed_download_is_resumed(server: Any, target: Path, part: Path) -> None:
    server.files[NAME] = CONTENT
    server.go_on.clear()
    program = (
        "from pathlib import Path; from cpsgd.learning.datasets.files import fetch; "
        f"fetch([{server.url + NAME!r}], Path({str(target)!r}), size={len(CONTENT)}, sha256='')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        end = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 100_000):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    server.go_on.set()
    assert not target.exists()
    have = part.stat().st_size
    fetch(server, target=target)
    assert target.read_bytes() == CONTENT
    assert server.requests[1] == (f"/{NAME}", f"bytes={have}-")


def test_a_wrong_file_never_gets_the_name(server: Any, target: Path, part: Path) -> None:
    server.files[NAME] = CONTENT[:-1] + b"!"
    target.write_bytes(b"old")
    with pytest.raises(DataError, match="checksum is wrong"):
        fetch(server, target=target)
    assert target.read_bytes() == b"old"
    assert not part.exists()
    assert len(server.requests) == 1


def test_a_wrong_file_on_a_bad_line_is_given_up_as_well(server: Any, target: Path) -> None:
    server.files[NAME] = CONTENT[:-1] + b"!"
    server.cuts = [500_000, len(CONTENT)] * 3
    with pytest.raises(DataError, match="checksum is wrong"):
        fetch(server, target=target)
    assert len(server.requests) == 2


@pytest.mark.parametrize("lengths", [True, False])
def test_a_file_of_another_size_is_refused(server: Any, target: Path, part: Path, lengths: bool) -> None:
    server.lengths = lengths
    server.files[NAME] = CONTENT * 2
    with pytest.raises(DataError, match="2,008,000 bytes instead" if lengths else "more than 1,004,000"):
        fetch(server, target=target)
    assert not target.exists()
    assert not part.exists() or part.stat().st_size <= len(CONTENT)


@pytest.mark.parametrize("told", ["bytes 4-1003999/1004000", "nonsense", "bytes */1004000"])
def test_bytes_from_elsewhere_are_refused(server: Any, target: Path, part: Path, told: str) -> None:
    server.files[NAME] = CONTENT
    server.content_range = told
    part.write_bytes(CONTENT[:10])
    with pytest.raises(DataError, match=r"from 4 on|Content-Range"):
        fetch(server, target=target)
    assert part.read_bytes() == CONTENT[:10]


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}/{NAME}"


def test_the_next_mirror_is_tried(server: Any, target: Path, nobody: str) -> None:
    server.files[NAME] = CONTENT
    fetch(nobody, server.url + "missing", server, target=target)
    assert target.read_bytes() == CONTENT


def test_offline_the_error_names_every_address_and_the_remedy(server: Any, target: Path, nobody: str) -> None:
    with pytest.raises(DataError) as caught:
        fetch(nobody, server, target=target)
    message = str(caught.value)
    for text in (nobody, "Connection refused", server.url, "HTTP status 404", str(target.parent)):
        assert text in message


def test_a_silent_server_is_not_waited_for_endlessly(
    server: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files[NAME] = CONTENT
    server.go_on.clear()
    monkeypatch.setattr(files, "_TIMEOUT_SECONDS", 0.2)
    server.cuts = [len(CONTENT), 0, 0]
    with pytest.raises(DataError, match="timed out"):
        fetch(server, target=target)


def test_trouble_with_the_disk_is_not_the_servers_fault(server: Any, target: Path, part: Path) -> None:
    server.files[NAME] = CONTENT
    part.mkdir()
    with pytest.raises(IsADirectoryError):
        fetch(server, target=target)


def test_only_web_addresses(target: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    with pytest.raises(DataError, match="not an HTTP address"):
        fetch((tmp_path / NAME).as_uri(), target=target)
