"""Next characters in the changelogs of Debian's packages: text that belongs to people, a client per maintainer.

A machine that runs Debian has such files in /usr/share/doc. Each entry of a changelog ends with the name and address of
who wrote it, so that the data are naturally federated: people differ in how much they write, and in how.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import DataError
from cpsgd.learning.datasets.arrays import ArrayDataset, from_arrays
from cpsgd.learning.datasets.partitions import by_client

ALPHABET = "?\n abcdefghijklmnopqrstuvwxyz0123456789.,:;-+*/()[]<>#'\"=_@!&~%"
"""The characters that are told apart; capitals count as small letters, and all others as the first."""

FOLDER = Path("/usr/share/doc")
# Longest text that is read of a file: a small file can be packed so that it fills a disk.
_MOST_BYTES = 1 << 24
_SIGNED = re.compile(r"^ -- .*<([^<>\s]+)>  ")
_NUMBERS = np.zeros(0x110000, dtype=np.uint8)
_NUMBERS[[ord(each) for each in ALPHABET]] = np.arange(len(ALPHABET))


def load_changelogs(
    folder: Path | str = FOLDER, *, context: int = 32, examples: int = 32, test_share: float = 0.2
) -> ArrayDataset:
    """Returns windows of `context` characters with the next character, equally many per maintainer.

    Args:
        folder: Has PACKAGE/changelog*.gz.
        context: Characters before the one to be told.
        examples: Windows of a maintainer, spread evenly over the text. Who wrote less than these need is left out.
        test_share: This share of the maintainers is for testing and takes no part.

    Raises:
        DataError: Fewer than two maintainers wrote enough.
    """
    _validate.integer("context", context, low=1)
    _validate.integer("examples", examples, low=1)
    texts = _texts(Path(folder))
    windows, owners = [], []
    # By hash, so that who is tested does not follow from names.
    for owner in sorted(texts, key=lambda each: hashlib.sha256(each.encode()).digest()):
        numbers = texts[owner]
        if len(numbers) < context + examples:
            continue
        ends = np.linspace(context, len(numbers) - 1, examples).astype(np.int64)
        windows.append(numbers[ends[:, None] + np.arange(-context, 1)])
        owners.append(owner)
    aside = max(1, round(test_share * len(owners)))
    if len(owners) < aside + 1:
        raise DataError(
            f"{len(owners)} maintainers wrote enough in the changelogs of {folder}, and two are the least: name a "
            "folder of packages, as /usr/share/doc of Debian, or ask for fewer examples."
        )
    test, train = np.concatenate(windows[:aside]), np.concatenate(windows[aside:])
    return from_arrays(
        train[:, :-1],
        train[:, -1],
        test_features=test[:, :-1],
        test_labels=test[:, -1],
        partition=by_client(np.repeat(np.arange(len(owners) - aside), examples)),
        classes=len(ALPHABET),
        name="changelogs",
    )


def _texts(folder: Path) -> dict[str, NDArray[np.uint8]]:
    """Returns each maintainer's whole text, as numbers; an entry that several packages share counts once."""
    found: dict[str, list[str]] = {}
    known: set[bytes] = set()
    for path in sorted(folder.glob("*/changelog*.gz")):
        for owner, text in _entries(_read(path)):
            name = hashlib.sha256(text.encode()).digest()
            if name not in known:
                known.add(name)
                found.setdefault(owner, []).append(text)
    return {owner: numbers_of("\n".join(texts)) for owner, texts in found.items()}


def _read(path: Path) -> str:
    """Returns the text of a file; nothing where it is damaged."""
    try:
        with gzip.open(path) as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        return ""


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yields the address and the text of each signed entry."""
    lines: list[str] = []
    for line in text.split("\n"):
        signed = _SIGNED.match(line)
        if signed is None:
            lines.append(line)
            continue
        yield signed[1].lower(), "\n".join(lines).strip()
        lines = []


def numbers_of(text: str) -> NDArray[np.uint8]:
    """Returns the position in the alphabet of each character of a text.

    Example:
        >>> numbers_of("Fix é").tolist()
        [8, 11, 26, 2, 0]
    """
    found: NDArray[np.uint8] = _NUMBERS[np.frombuffer(text.lower().encode("utf-32-le", "replace"), dtype="<u4")]
    return found
