"""The names that `import cpsgd` offers."""

from __future__ import annotations

import cpsgd


def test_every_name_is_found_and_listed() -> None:
    for name in ("Aggregator", "Guarantee", "Plan", "PrivateMean", "Protocol", "RoundSimulator", "guarantee", "plan"):
        assert getattr(cpsgd, name).__name__ == name
        assert name in dir(cpsgd)
