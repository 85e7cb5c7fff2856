"""Settings from files that anybody may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd.errors import ParameterError
from cpsgd.learning.settings import Settings, read_file


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("huge.toml", "epsilon = " + "9" * 400, "epsilon"),
        ("list.toml", "preset = []", "preset"),
        ("deep.json", "[" * 100_000, "cannot be read"),
        ("deep.toml", "a = " + "[" * 100_000, "cannot be read"),
        ("array.json", "[]", "does not hold settings"),
        ("bytes.toml", "\udcff", "cannot be read"),
        ("memory.toml", "memory_limit = 0", r"memory_limit \(in MiB\) in \[1, "),
        ("bytes.json", '{"memory_limit": 1073741824}', r"memory_limit \(in MiB\) in \[1, "),
        ("size.toml", 'memory_limit = "1 GiB"', "memory_limit to be of type int"),
        ("flag.json", '{"rounds": true}', "rounds"),
        ("nested.json", '{"lr": ' + "[" * 500 + "]" * 500 + "}", "lr"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ParameterError, match=message) as raised:
        Settings.of(read_file(path))
    assert len(str(raised.value)) < 700
