"""The frame: help, version, exit codes, imports, and the whole way through real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App
from numpy.typing import NDArray

import cpsgd
from cpsgd.cli.app import app, command_line
from cpsgd.cli.commands import COMMANDS, GROUPS, RENAMED
from cpsgd.cli.frame import new_app


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


PATHS: list[tuple[str, ...]] = [(name,) for name in COMMANDS if name not in GROUPS]
PATHS += [(group, name) for group, (members, _) in GROUPS.items() for name in members]


def app_of(path: tuple[str, ...], found: App = app) -> App:
    """Returns the command of these words."""
    for name in path:
        found = found[name]
    return found


def subcommands(path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns a command, and those of its group if it is one."""
    found = app_of(path)
    inner = [name for name in found if not name.startswith("-")]
    return [path, *((*path, name) for name in inner)]


def test_the_overview_has_ten_commands(cpsgd: Any) -> None:
    text = cpsgd.succeeds("--help").stdout
    assert re.findall(r"^│ (\w[\w-]*) ", text, re.MULTILINE) == list(COMMANDS)
    assert len(COMMANDS) == 10


@pytest.mark.parametrize("path", [(), ("table",), ("round",), *PATHS], ids=" ".join)
def test_a_help_begins_with_an_example_and_fits_a_screen(
    cpsgd: Any, path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for each in subcommands(path) if path else [()]:
        text = cpsgd.succeeds(*each, "--help").stdout
        # The example is a command that the parser understands.
        words = shlex.split(re.sub(r"\s+", " ", text.partition("\n\n")[0].removeprefix("Example: ")))
        leaf = len(subcommands(each)) == 1
        assert words[: 1 + len(each)] == ["cpsgd", *each] if leaf else words[0] == "cpsgd", text
        app.parse_args(words[1:], exit_on_error=False, print_error=False)
        assert "Usage: cpsgd" in text
        assert text.count("\n") <= 40, text


@pytest.mark.parametrize("path", [path for path in PATHS if app_of(path).default_command], ids=" ".join)
def test_the_whole_help_names_every_option(path: tuple[str, ...], invoke: Any) -> None:
    whole = command_line(full=True)
    text = invoke(whole, *path, "--help-all").stdout
    options = app_of(path, whole).assemble_argument_collection()
    assert {option.name for option in options if option.parse and option.name not in text} <= {"*"}


@pytest.mark.parametrize("name", RENAMED)
def test_old_spellings_work_and_say_the_new_one(name: str, cpsgd: Any) -> None:
    result = cpsgd(name, "nowhere.npy")
    group = RENAMED[name] if name != "mean" else "round"
    assert result.stderr.startswith(f"`cpsgd {name}` is now `cpsgd {group} {name}`.")
    assert result.exit_code == 2


def test_the_old_mean_is_of_vectors_or_of_columns(cpsgd: Any) -> None:
    np.save("updates.npy", np.full((30, 20), 0.01))
    Path("people.csv").write_text("age\n" + "40\n" * 300)
    assert "cpsgd round mean" in cpsgd.succeeds("mean", "updates.npy").stderr
    cost = ("--epsilon", 1, "--delta", 1e-6)
    result = cpsgd.succeeds("mean", "people.csv", "--columns=age", "--bounds", "age=0:100", *cost)
    assert "cpsgd table mean" in result.stderr


def test_version(invoke: Any) -> None:
    result = invoke(app, "--version")
    assert (result.exit_code, result.stdout) == (0, f"cpsgd {cpsgd.__version__}\n")


def test_every_kind_of_error_is_one_line_and_exit_code_2(invoke: Any) -> None:
    errors = {
        "refusal": (cpsgd.errors.InfeasibleError("no [bold]such\nprotocol"), "no [bold]such protocol"),
        "missing": (FileNotFoundError(2, "No such file or directory", "a[b].npy"), "a[b].npy: No such file"),
        "nameless": (OSError("the disk is gone"), "the disk is gone"),
        "memory": (MemoryError("Unable to allocate 1 TiB"), "Not enough memory. Unable to allocate 1 TiB"),
    }
    parent = new_app("parent", "")
    child = new_app("child", "")
    parent.command(child)

    @child.command
    def fail(kind: str) -> None:
        raise errors[kind][0]

    for kind, (_, text) in errors.items():
        result = invoke(parent, "child", "fail", kind)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert text in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_bug_is_not_disguised(invoke: Any) -> None:
    parent = new_app("parent", "")

    @parent.command
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        invoke(parent, "fail")


def test_tracebacks_do_not_show_local_variables(tmp_path: Path) -> None:
    program = (
        "from cpsgd.cli.frame import launch, new_app\n"
        "app = new_app('app', '')\n"
        "@app.command\n"
        "def fail():\n"
        "    data = 'sec' + 'ret'\n"
        "    raise ZeroDivisionError\n"
        "launch(app, ['fail'])\n"
    )
    result = process("-c", program, cwd=tmp_path)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "secret" not in result.stderr


def test_ctrl_c_ends_quietly(invoke: Any) -> None:
    parent = new_app("parent", "")

    @parent.command
    def wait() -> None:
        raise KeyboardInterrupt

    result = invoke(parent, "wait")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    # More than a pipe holds, so that it is written to after its other end is closed.
    program = (
        "from cpsgd.cli.frame import launch, new_app\n"
        "app = new_app('app', '')\n"
        "@app.command\n"
        "def talk():\n"
        "    for _ in range(100):\n"
        "        print('x' * 10_000)\n"
        "launch(app, ['talk'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as talker:
        assert talker.stdout is not None
        talker.stdout.read(1)
        talker.stdout.close()
        assert talker.stderr is not None
        assert talker.stderr.read() == b""
    assert talker.returncode == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clients", "2.5"), "2.5"),  # would be rounded by a parser that means well
        (("--clients", "many"), "many"),
        (("--levels", "3.0"), "3.0"),
        (("--p", "half"), "half"),
        (("--client", "3"), "Did you mean --clients"),
        (("--seed",), "--seed requires an argument"),
        (("surplus",), "surplus"),
        (("--no-json",), "--no-json"),
    ],
)
def test_misunderstandings_are_exit_code_2(cpsgd: Any, options: tuple[str, ...], words: str) -> None:
    result = cpsgd("round protocol", "--clients", 2, "--dim", 9, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.replace("│", "").replace('"', "").split())


def test_of_two_the_last_counts(cpsgd: Any) -> None:
    result = cpsgd("round protocol", "--clients", 2, "--dim", 9, "--no-rotate", "--clients", 3, "--rotate", "--json")
    protocol = json.loads(result.stdout)["protocol"]
    assert (protocol["clients"], protocol["rotate"]) == (3, True)


def test_all_halves_through_real_processes(tmp_path: Path, vectors: NDArray[np.float32]) -> None:
    def run(*arguments: str) -> str:
        result = process("-m", "cpsgd", *" ".join(arguments).split(), cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        return result.stdout

    some = vectors[:3]
    np.save(tmp_path / "table.npy", some)
    # No noise and many levels, so that the mean comes out nearly exactly.
    parameters = ("--clip-norm", "5", "--levels", "65536", "--trials", "0")
    run("round protocol", "--clients", "3", "--dim", "500", *parameters, "--out", "protocol.json")
    for i, vector in enumerate(some):
        np.save(tmp_path / f"{i}.npy", vector)
        run("round encode", f"{i}.npy", "--protocol", "protocol.json", "--round", "4", "--out", f"{i}.message")
    messages = [f"{i}.message" for i in range(3)]
    answer = run(
        "round aggregate", *messages, "--protocol", "protocol.json", "--round", "4", "--out", "halves.npy", "--json"
    )
    assert json.loads(answer)["count"] == 3
    run("round mean", "table.npy", *parameters, "--out", "whole.npy")

    truth = some.mean(axis=0)
    for name in ("halves.npy", "whole.npy"):
        np.testing.assert_allclose(np.load(tmp_path / name), truth, atol=1e-3)


def test_a_failing_process_prints_one_line(tmp_path: Path) -> None:
    result = process("-m", "cpsgd", "round", "mean", "nowhere.npy", "--clip-norm", "1", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "Error: nowhere.npy: No such file or directory.\n"


def test_output_survives_a_terminal_without_greek(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "cpsgd", "round", "protocol", "--clients", "9", "--dim", "9", "--clip-norm", "1"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert result.returncode == 0
    assert b"\\u03c0_sk" in result.stderr


def test_options_that_are_missing_are_named(cpsgd: Any) -> None:
    cpsgd.refuses("Missing --epsilon: see cpsgd table mean --help.", "table", "mean", "people.csv")
    cpsgd.refuses("Missing --delta: see cpsgd plan --help.", "plan", "--dim", 3, "--epsilon", 1)
