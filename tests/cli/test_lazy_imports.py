"""The command line starts quickly: nothing is imported that a command does not need."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from inspect import cleandoc

import pytest

from cpsgd.cli.commands import COMMANDS, GROUPS

OTHER_PACKAGES = ("dp_accounting", "flwr", "matplotlib", "nvflare", "pandas", "pyarrow", "scipy", "sklearn", "torch")


EVERY = {name: command for name, command in COMMANDS.items() if name not in GROUPS}
EVERY |= {f"{group} {name}": command for group, (members, _) in GROUPS.items() for name, command in members.items()}


def imported(program: str, names: tuple[str, ...]) -> str:
    """Runs Python in a fresh process, and says which of these modules it has imported then."""
    script = (
        "import sys, contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    {program}\n"
        f"print(*({set(names)!r} & sys.modules.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.strip()


OURS = ("cpsgd.planner.planning", "cpsgd.privacy.accountant", "cpsgd.learning", "cpsgd.ledger")


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("--help", ()),
        ("mean nowhere.npy --clip-norm 1", ()),
        ("sum nowhere.csv --columns a --bounds a=0:1 --epsilon 1 --delta 1e-6", ()),
        ("encode nowhere.npy --protocol p.json --round 1 --out m", ()),
        ("budget show none.ledger", ("cpsgd.ledger", "cpsgd.privacy.accountant")),
        ("train --rounds many", ("cpsgd.learning", "cpsgd.ledger", "cpsgd.privacy.accountant")),
    ],
)
def test_a_command_that_fails_at_once_imports_nothing_heavy(command: str, needed: tuple[str, ...]) -> None:
    forbidden = tuple(name for name in OTHER_PACKAGES + OURS if name not in needed)
    assert imported(f"from cpsgd.cli.app import main; main({command.split()!r})", forbidden) == ""


def test_the_package_imports_nothing_heavy() -> None:
    assert imported("import cpsgd; cpsgd.RoundSimulator", OTHER_PACKAGES + OURS) == ""


def test_the_overview_imports_no_command() -> None:
    modules = tuple({f"cpsgd.cli.{command.place.partition(':')[0]}" for command in EVERY.values()})
    assert imported("from cpsgd.cli.app import main; main(['--help'])", (*modules, "numpy")) == ""


def test_a_name_brings_what_it_needs() -> None:
    assert imported("import cpsgd; cpsgd.PrivateMean", ("torch",)) == "torch"
    planning = "from cpsgd.planner import plan; plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=4)"
    assert imported(planning, ("cpsgd.planner.planning", "matplotlib")) == "cpsgd.planner.planning"


@pytest.mark.parametrize("name", EVERY)
def test_the_overviews_line_is_the_commands_own(name: str) -> None:
    place, line = EVERY[name].place, EVERY[name].line
    module, _, function = place.partition(":")
    command = getattr(import_module(f"cpsgd.cli.{module}"), function)
    if function == "app":
        assert command.help in (None, "", line)
    else:
        assert " ".join(cleandoc(command.__doc__).partition("\n\n")[0].split()) == line
