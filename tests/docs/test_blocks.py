"""Every command and code block that a reader may copy is run, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from cpsgd.cli.app import app
from tests.docs.blocks import REASONS, Block, Runner, blocks, matches

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "reproduction").rglob("*.md")),
]
SLOW = {"docs/command-line.md", "docs/flower.md", "docs/how-to/own-data.md", "docs/tutorials/train.md"}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def runs(block: Block) -> bool:
    """Whether a test of this file runs it; doctest and pytest run the others."""
    return "output" in block.said or not (block.doctest or "not run" in block.said or block.language == "text")


def pages(*, thorough: bool) -> list[Any]:
    """Pages with something to run; for the thorough tests, those with a block that is for them only."""
    found = []
    for name, page in zip(NAMES, PAGES, strict=True):
        todo = [block for block in blocks(page) if runs(block)]
        chosen = any("thorough" in block.said for block in todo) if thorough else bool(todo)
        if chosen:
            found.append(pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else []))
    return found


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Runner:
    """Runs blocks in an empty folder, on a terminal of 120 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return Runner(
        call=lambda *arguments: invoke(app, *arguments),
        parse=lambda arguments: app.parse_args(arguments, exit_on_error=False, print_error=False),
    )


@pytest.mark.parametrize("page", pages(thorough=False))
def test_blocks_do_what_the_page_shows(page: Path, runner: Runner) -> None:
    todo = [block for block in blocks(page) if runs(block)]
    for block in todo:
        if "thorough" not in block.said:
            runner.run(block)
    if page.name == "command-line.md":
        assert runner.compared >= 9


@pytest.mark.thorough
@pytest.mark.parametrize("page", pages(thorough=True))
def test_long_blocks_do_what_the_page_shows(page: Path, runner: Runner) -> None:
    for block in blocks(page):
        if runs(block):
            runner.run(block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_is_not_run_says_why(page: Path, runner: Runner) -> None:
    for block in blocks(page):
        assert block.language, f"{block}: a block without a language; `text` is not run."
        if "not run" in block.said:
            assert block.said["not run"].startswith(REASONS), f"{block}: {block.said['not run']}"
            runner.glance(block)
        if block.doctest:  # pytest looks for these below the paths of its configuration
            assert page == ROOT / "README.md" or page.is_relative_to(ROOT / "docs"), str(block)


def written(path: Path, text: str) -> list[Block]:
    path.write_text(text, encoding="utf-8")
    return list(blocks(path))


def test_a_wrong_output_is_noticed(tmp_path: Path, runner: Runner) -> None:
    (right, wrong) = written(
        tmp_path / "page.md",
        "```console\n$ cpsgd --version\ncpsgd 0...\n```\n\n```console\n$ cpsgd --version\ncpsgd 9.9\n```\n",
    )
    runner.run(right)
    with pytest.raises(AssertionError, match=r"page\.md, line 6"):
        runner.run(wrong)


def test_a_command_that_fails_is_noticed(tmp_path: Path, runner: Runner) -> None:
    (block,) = written(tmp_path / "page.md", "```console\n$ cpsgd round encode nothing.npy\n```\n")
    with pytest.raises(AssertionError, match="nothing"):
        runner.run(block)


def test_what_python_prints_is_compared(tmp_path: Path, runner: Runner) -> None:
    code, right, noisy, wrong = written(
        tmp_path / "page.md",
        "```python\nprint('mean', 12.5)\n```\n\n<!-- output -->\n```text\nmean 12.5\n```\n\n"
        "<!-- output: noisy -->\n```text\nmean   7.25\n```\n\n<!-- output -->\n```text\nmean 7.25\n```\n",
    )
    for block in (code, right, noisy):
        runner.run(block)
    with pytest.raises(AssertionError, match=r"page\.md, line 16"):
        runner.run(wrong)


def test_other_programs_and_languages_must_be_marked(tmp_path: Path, runner: Runner) -> None:
    for block in written(tmp_path / "page.md", "```console\n$ make test\n```\n\n```rust\nfn main() {}\n```\n"):
        with pytest.raises(AssertionError, match=r"page\.md"):
            runner.run(block)


def test_what_is_not_run_is_looked_at(tmp_path: Path, runner: Runner) -> None:
    for text in (
        "console\n$ cpsgd train --no-such-option 3\n",
        "python\nfrom cpsgd import nothing\n",
        "python\nx = (\n",
    ):
        (block,) = written(tmp_path / "page.md", f"<!-- not run: needs minutes -->\n```{text}```\n")
        with pytest.raises((CycloptsError, ImportError, SyntaxError)):
            runner.glance(block)


def test_comments_above_a_block_belong_to_it(tmp_path: Path) -> None:
    first, second = written(
        tmp_path / "page.md",
        "<!-- not run: needs a GPU -->\n<!-- before:\nx = 1\ny = 2\n-->\n\n```python\nx\n```\ntext\n"
        "```python\ny\n```\n",
    )
    assert first.said == {"not run": "needs a GPU", "before": "x = 1\ny = 2"}
    assert second.said == {}


def test_digits_differ_only_where_the_page_says_so() -> None:
    assert matches("size 12,345 and 3", "size 999 and 4", ("size",))
    assert not matches("size 12,345 and 3", "size 999 and 4", ("other",))
    assert not matches("size 12,345 and 3", "size 999", ("size",))
    assert matches("error 1.5 measured, 2 expected", "error 1.7e-3 measured, 2 expected")
    assert not matches("error 1.5 measured, 2 expected", "error 1.5 measured, 3 expected")
    assert matches("a\n...\nz", "a\nb\nc\nz")
    assert not matches("a\n...\nz", "a\nb\nc")
