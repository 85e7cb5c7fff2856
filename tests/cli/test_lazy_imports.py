"""The command line starts quickly: nothing heavy is imported before a command runs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_commands_import_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "import cpsgd.cli.app\n"
        "heavy = {'matplotlib', 'dp_accounting', 'torch', 'flwr', 'sklearn'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_planning_needs_no_matplotlib() -> None:
    script = (
        "import sys\n"
        "from cpsgd.planner import plan\n"
        "plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=4)\n"
        "sys.exit('matplotlib' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
