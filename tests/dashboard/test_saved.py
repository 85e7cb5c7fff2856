"""A run's page as one file: all figures of a finished run, nothing from outside, and no script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from cpsgd.dashboard import run_view, runs
from tests.dashboard.parsed import check_harmless
from tests.dashboard.samples import EVIL, summary, write_hostile, write_rounds, write_run


@pytest.fixture
def page(tmp_path: Path) -> str:
    return run_view.write(write_run(tmp_path / "done", finished=True)).read_text(encoding="utf-8")


def test_the_file_lies_in_the_folder_of_the_run(tmp_path: Path) -> None:
    assert run_view.write(write_run(tmp_path / "done", finished=True)) == tmp_path / "done" / "report.html"


def test_it_needs_nothing_from_outside(page: str) -> None:
    links = re.findall(r"""(?:src|href|url|action)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in page
    assert "<svg" in page


def test_its_policy_allows_its_own_style_and_nothing_else(page: str) -> None:
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:" in page


def test_it_says_what_the_run_was(page: str) -> None:
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    for words in (
        "done: private training on digits",
        "Finished round 4 of 10",
        "ε = 1 spent of 2; protects nobody",
        "35.00% test accuracy, private",
        "90.00% test accuracy, no privacy",
        "4 bits per coordinate",
        "8.0× shorter than float32",
        "private 4 35.00% 1.7000 1; protects nobody 4 50 bytes 16 kB 6",
        "no privacy 4 90.00% 1.7000 ∞ 32 400 bytes 16 kB 6",
        "proved by a theorem",
        "a simulation that protects nobody, since its noise follows from seed 3",
        "published bound ε = 3 for the same protocol, by paper-theorem",
        "limit ε = 2",
        "sent per client and round",
    ):
        assert words in text


def test_numbers_of_every_place_can_be_pointed_at(page: str) -> None:
    text = re.sub(r"<[^>]+>", "", page)
    for number, value in ((1, "20 %"), (4, "35 %")):
        assert f"round {number}■ private {value}" in text


def test_regression_is_called_by_its_name(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", finished=True)
    write_rounds(path, 3, accuracy=None, r_squared=0.5)
    text = run_view.saved_page(runs.read(path, "r"))
    assert "Test R² and loss" in text
    assert "0.5000" in text


def test_a_hostile_folder_gets_nothing_in(tmp_path: Path) -> None:
    folder = write_hostile(tmp_path)
    (name,) = (path for path in folder.iterdir() if path.is_dir())
    text = run_view.saved_page(runs.read(name, name.name))
    assert "window.hacked" in text  # it is shown
    assert "{{7*7}}" in text
    check_harmless(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"guarantee": {}},
        {"guarantee": [1]},
        {"guarantee": {"epsilon": "<b>", "delta": {}, "participation": 3}},
        {"guarantee": summary("r")["guarantee"] | {"epsilon": 10**400}},
        {"guarantee": summary("r")["guarantee"] | {"delta": 10**400}},
        {"paper_bound": None},
        {"paper_bound": {"epsilon": 10**400, "method": "m"}},
        {"results": "none"},
        {"results": [1, None, {"name": ["x"]}]},
        {"protocol": 3},
        {"settings": None, "seeded": True},
        {"float32_bytes": 0, "dataset": None, "source": {"a": [{}]}},
        {"device": "cuda", "unit": EVIL},
        {},
    ],
)
def test_a_summary_of_another_shape_is_no_failure(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write_run(tmp_path / "r", finished=True)
    (path / "summary.json").write_text(json.dumps(summary("r") | changes if changes else {}))
    text = run_view.saved_page(runs.read(path, "r"))
    assert "Finished" in text
    assert "<b>" not in text.replace("<b>ε", "").replace("<b>protects nobody", "").replace("<li><b>", "")


def test_settings_without_end_are_cut(tmp_path: Path) -> None:
    deep: object = 1
    for _ in range(400):
        deep = {"a": [deep]}
    wide = {f"key {number}": "x" * 5_000 for number in range(300)}
    text = run_view.saved_page(runs.read(write_run(tmp_path / "r", deep=deep, **wide), "r"))
    assert len(text) < 1_000_000
    assert "…" in text


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 1e100, 10**400, True, "1", None, [], float("nan")])
def test_any_figures_can_be_shown(tmp_path: Path, value: object) -> None:
    path = write_run(tmp_path / "r", finished=True, epsilon=value, rounds=value)
    write_rounds(path, 3, loss=value, accuracy=value, epsilon=value, bytes_total=value, seconds=value)
    assert "Finished" in run_view.saved_page(runs.read(path, "r"))


@pytest.mark.parametrize("value", [-1.0, -30.0, -1e99])
def test_figures_below_zero_can_be_shown(tmp_path: Path, value: float) -> None:
    path = write_run(tmp_path / "r", epsilon=value)
    write_rounds(path, 3, accuracy=value, epsilon=value)
    write_rounds(path / "baselines" / "no-privacy", 3, accuracy=value)
    assert "In numbers" not in run_view.saved_page(runs.read(path, "r"))


def test_a_run_without_rounds_has_no_charts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r")
    write_rounds(path, 0)
    write_rounds(path / "baselines" / "no-privacy", 0)
    shown = run_view.view(runs.read(path, "r"))
    assert shown["charts"] == []
    assert "No round has been written down yet" in run_view.saved_page(runs.read(path, "r"))
