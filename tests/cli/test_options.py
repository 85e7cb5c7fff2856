"""Options are made from the library's dataclasses: names, types, defaults and help."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest

from cpsgd.cli import options, train
from cpsgd.cli.app import command_line
from cpsgd.cli.frame import new_app
from cpsgd.learning.settings import Settings
from cpsgd.planner.requirements import Requirements


@dataclass(frozen=True, kw_only=True)
class Library:
    """What a library takes.

    Attributes:
        size: How many. With `fast_mode` few; 3 if None.
        kind: Which.
        fast_mode: Whether it hurries.
        careful: Whether it looks twice.
        name: A text, or a number that stands for one.
    """

    size: int
    kind: Literal["a", "b"] = "a"
    fast_mode: bool = True
    careful: bool = False
    name: str | int = "x"


def command(made: type[Any], seen: list[Any]) -> Any:
    app = new_app("app")

    def run(*, chosen: Any) -> None:
        seen.append(chosen)

    run.__annotations__["chosen"] = Annotated[made, options.FLAT]
    app.default(run)
    return app


def test_names_types_and_defaults_are_the_librarys(invoke: Any) -> None:
    seen: list[Any] = []
    app = command(options.from_class(Library), seen)
    assert invoke(app, "--size", 4).exit_code == 0
    assert vars(seen[-1]) == vars(Library(size=4))
    arguments = ("--size", 4, "--kind", "b", "--no-fast-mode", "--careful", "--name", "7")
    assert invoke(app, *arguments).exit_code == 0
    # What may be text is text, and the library reads it.
    assert vars(seen[-1]) == vars(Library(size=4, kind="b", fast_mode=False, careful=True, name="7"))
    for wrong in ((), ("--size", "4.0"), ("--size", 4, "--kind", "c"), ("--size", 4, "--no-careful")):
        assert invoke(app, *wrong).exit_code == 2
    assert len(seen) == 2


def test_the_help_is_the_docstring(invoke: Any) -> None:
    text = " ".join(invoke(command(options.from_class(Library), []), "--help").stdout.replace("│", "").split())
    assert "How many. With --fast-mode few; 3 if not given. [required]" in text
    assert "Which. [choices: a, b] [default: a]" in text
    assert "--fast-mode --no-fast-mode Whether it hurries. [default: True]" in text
    assert "--careful Whether it looks twice. --name" in text


def test_what_was_said_can_be_told_from_what_was_not(invoke: Any) -> None:
    made = options.from_class(Library, "size", "fast_mode", unset=True)
    assert [entry.name for entry in fields(made)] == ["size", "fast_mode"]
    assert options.given(made()) == {}
    assert options.given(made(size=0, fast_mode=False)) == {"size": 0, "fast_mode": False}


@pytest.mark.parametrize(("name", "library"), [("train", Settings), ("plan", Requirements)])
def test_every_field_is_an_option_with_a_help(invoke: Any, name: str, library: type[Any]) -> None:
    text = invoke(command_line(full=True), name, "--help-all").stdout
    for entry in fields(library):
        option = "--" + entry.name.replace("_", "-")
        # In capitals, what the option takes.
        assert len(re.findall(rf"^[│* ]+{option} (?:--no-\S+|[A-Z]+)? +[^│\[ ]", text, flags=re.MULTILINE)) == 1, option


def test_panels_name_settings_that_exist() -> None:
    named = [name for names in train._PANELS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= {entry.name for entry in fields(Settings)}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --clients 9 --dim 3 --epsilon 1 --delta 1e-6 --plot x.xyz", "ending in .png"),
        ("kmeans nowhere.npy --clusters 2 --radius 1 --epsilon 1 --delta 1e-6", "nowhere.npy: No such file"),
        ("train --run ../x", "name of a folder"),
    ],
)
def test_options_left_out_pass_where_pydantic_is_loaded(command: str, words: str) -> None:
    """Another package may have imported it, and then the command line checks types by it."""
    pytest.importorskip("pydantic")
    program = f"import pydantic; from cpsgd.cli.app import main; main({command.split()})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # It comes as far as the command, which refuses what it is given.
    assert words in done.stderr
