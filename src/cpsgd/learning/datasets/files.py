"""The folder of data files, and downloads that survive interruptions.

A download is written to `NAME.part`. If it is interrupted, it continues there, if the server supports HTTP ranges. The
file gets its name by an atomic rename, when its size and SHA-256 are right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from cpsgd.errors import DataError

VARIABLE = "CPSGD_DATA_DIR"

_BLOCK = 1 << 16
_TIMEOUT_SECONDS = 30.0


class _TransferError(Exception):
    """The server did not send the file."""


def data_folder(folder: Path | str | None = None) -> Path:
    """Returns the folder of data files: the one given, else `CPSGD_DATA_DIR`, else `cpsgd` in the user's cache."""
    if folder is None:
        folder = os.environ.get(VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "cpsgd")
    return Path(folder).expanduser()


def find_file(folder: Path, subfolder: str, name: str) -> Path | None:
    """Returns the file in the data folder's subfolder or in the data folder itself; None if it is not there."""
    return next((path for path in (folder / subfolder / name, folder / name) if path.is_file()), None)


def fetch(
    urls: Sequence[str], target: Path, *, size: int, sha256: str, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Downloads one file; continues an earlier attempt.

    Args:
        urls: Addresses of the file; tried in order.
        target: Path of the file. An old file is replaced when the new one is complete and right.
        size: Its bytes.
        sha256: Its SHA-256 in hexadecimal.
        progress: Called with the number of bytes that have arrived.

    Raises:
        DataError: None of the addresses gave the right file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures = []
    for url in urls:
        # Whether all bytes came from this address.
        pure = _length(part) == 0
        while True:
            before = _length(part)
            try:
                _transfer(url, part, size, progress)
            except _TransferError as error:
                failures.append(f"{url}: {error}")
                # A broken connection is tried again as long as bytes arrive.
                if _length(part) > before:
                    continue
                break
            if _sha256(part) == sha256:
                os.replace(part, target)
                return
            part.unlink()
            failures.append(f"{url}: the checksum is wrong")
            if pure:
                break
            pure = True
    raise DataError(
        f"Could not download {target.name} ({'; '.join(failures)}). "
        f"Try again later, or put the file into {target.parent} yourself."
    )


def _transfer(url: str, part: Path, size: int, progress: Callable[[int], None]) -> None:
    """Downloads the rest of `part`; raises `_TransferError` and keeps the bytes that arrived."""
    have = _length(part)
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    # No compression in transit.
    headers = {"User-Agent": "cpsgd", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with _open(Request(url, headers=headers)) as response:
        begin, total = _position(response)
        if total not in (None, size):
            raise _TransferError(f"it has {total:,} bytes instead of {size:,}")
        if begin not in (0, have):
            raise _TransferError(f"it sent bytes from {begin:,} on instead of from {have:,}")
        # A server without ranges sends everything.
        with part.open("ab" if begin else "wb") as file:
            for block in _blocks(response):
                if file.tell() + len(block) > size:
                    raise _TransferError(f"it has more than {size:,} bytes")
                file.write(block)
                progress(file.tell())
            file.flush()
            os.fsync(file.fileno())
    if (have := _length(part)) < size:
        raise _TransferError(f"the connection ended after {have:,} of {size:,} bytes")


def _open(request: Request) -> HTTPResponse:
    try:
        response = urlopen(request, timeout=_TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        raise _TransferError(f"HTTP status {error.code}") from None
    except URLError as error:
        raise _TransferError(str(error.reason)) from None
    except (OSError, HTTPException) as error:
        raise _TransferError(str(error) or type(error).__name__) from None
    if not isinstance(response, HTTPResponse):
        raise _TransferError("not an HTTP address")
    return response


def _position(response: HTTPResponse) -> tuple[int, int | None]:
    """Returns the position in the file where the answer begins, and the size of the whole file if it is known."""
    if response.status == 206:
        # bytes BEGIN-END/TOTAL
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        begin = span.partition("-")[0]
        if not begin.isdecimal() or not (total.isdecimal() or total == "*"):
            raise _TransferError("an answer without a proper Content-Range")
        return int(begin), int(total) if total.isdecimal() else None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    try:
        while block := response.read(_BLOCK):
            yield block
    except (OSError, HTTPException) as error:
        raise _TransferError(str(error) or type(error).__name__) from None


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
