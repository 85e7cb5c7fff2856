"""What a report says about where noise came from."""

from __future__ import annotations

from typing import Any

import pytest

from cpsgd.reports.run_report import seed_text


def summary(*, device: str, seed: int | None) -> dict[str, Any]:
    return {"device": device, "seeded": seed is not None, "settings": {"seed": "none" if seed is None else seed}}


def test_on_the_cpu_a_seed_decides() -> None:
    assert "protects nobody" in seed_text(summary(device="cpu", seed=3))
    assert seed_text(summary(device="cpu", seed=None)) == "not seeded, the noise came from the operating system"


@pytest.mark.parametrize(("seed", "words"), [(3, "seed 3"), (None, "a seed that was not kept")])
def test_on_a_gpu_nothing_is_the_operating_systems(seed: int | None, words: str) -> None:
    text = seed_text(summary(device="cuda", seed=seed))
    for part in (words, "protects nobody", "counter (Philox)", "one draw per coordinate"):
        assert part in text
