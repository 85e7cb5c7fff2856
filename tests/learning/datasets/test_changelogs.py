"""Changelogs by maintainer: who wrote what, windows and next characters, and damaged files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from cpsgd.errors import DataError
from cpsgd.learning.datasets import changelogs
from cpsgd.learning.datasets.changelogs import ALPHABET, load_changelogs


def entry(address: str, text: str) -> str:
    return (
        f"tool (1.0) unstable; urgency=low\n\n  * {text}\n\n -- A Name <{address}>  Mon, 01 Jan 2024 10:00:00 +0000\n"
    )


def package(folder: Path, name: str, *entries: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "changelog.Debian.gz").write_bytes(gzip.compress("".join(entries).encode()))


def test_windows_are_of_one_maintainer_and_followed_by_the_next_character(tmp_path: Path) -> None:
    texts = {f"{letter}@example.org": letter * 200 for letter in "abcde"}
    package(tmp_path, "one", *(entry(address.upper(), text) for address, text in texts.items()))
    package(tmp_path, "two", entry("f@example.org", "short"))
    data = load_changelogs(tmp_path, context=60, examples=10)
    assert (data.size, data.classes, data.features.shape) == (4, len(ALPHABET), (40, 60))
    assert len(data.test_set().labels) == 10
    for client in range(data.size):
        batch = data.batch([client])
        letters = set("".join(ALPHABET[number] for number in batch.features.ravel())) & set("abcde")
        middle = {ALPHABET[number] for number in batch.labels[3:8]}
        assert len(middle) == 1  # the long run of this maintainer's letter
        assert middle <= letters


def test_entries_that_several_packages_have_count_once(tmp_path: Path) -> None:
    written = [entry("a@example.org", "x" * 300), entry("b@example.org", "y" * 300)]
    package(tmp_path, "one", *written)
    before = load_changelogs(tmp_path, context=4, examples=8)
    package(tmp_path, "two", *written)
    after = load_changelogs(tmp_path, context=4, examples=8)
    assert np.array_equal(before.features, after.features)
    assert before.fingerprint == after.fingerprint


def test_damaged_and_packed_files_are_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "one", entry("a@example.org", "x" * 300), entry("b@example.org", "y" * 300))
    expected = load_changelogs(tmp_path, context=4, examples=8).fingerprint
    whole = (tmp_path / "one" / "changelog.Debian.gz").read_bytes()
    for name, content in (("cut", whole[:-9]), ("noise", b"\x1f\x8b" + bytes(50)), ("none", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "changelog.gz").write_bytes(content)
    assert load_changelogs(tmp_path, context=4, examples=8).fingerprint == expected
    monkeypatch.setattr(changelogs, "_MOST_BYTES", 1000)
    package(tmp_path, "packed", "z" * 10**6, entry("a@example.org", "w" * 300))
    assert load_changelogs(tmp_path, context=4, examples=8).fingerprint == expected


def test_too_few_maintainers_are_refused(tmp_path: Path) -> None:
    package(tmp_path, "one", entry("a@example.org", "x" * 300))
    with pytest.raises(DataError, match="1 maintainers wrote enough"):
        load_changelogs(tmp_path)
