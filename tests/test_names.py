"""What `import cpsgd` offers, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import cpsgd


def test_every_name_is_found_and_listed() -> None:
    for name in ("Aggregator", "Guarantee", "Plan", "PrivateMean", "Protocol", "RoundSimulator", "guarantee", "plan"):
        assert getattr(cpsgd, name).__name__ == name
        assert name in dir(cpsgd)


def test_pytorch_is_loaded_by_what_needs_it_only() -> None:
    script = (
        "import sys, cpsgd\n"
        "cpsgd.RoundSimulator\n"
        "before = 'torch' in sys.modules\n"
        "cpsgd.PrivateMean\n"
        "sys.exit(before or 'torch' not in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
