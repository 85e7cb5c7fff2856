"""How settings are selected: with the same effort for all, and without the test set."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cpsgd.learning.datasets.digits import infinite_digits
from cpsgd.privacy import analytic_epsilon
from reproduction import select_settings
from reproduction.many_runs import Noise, Outcome
from reproduction.select_settings import (
    FINAL_SEEDS,
    Group,
    Size,
    Training,
    Trainings,
    drawn,
    few_bits,
    near,
    select,
    with_validation,
)


def test_selection_never_sees_the_test_images() -> None:
    whole = infinite_digits(size=1000)
    kept = with_validation(whole).base
    tested = {image.tobytes() for image in whole.base.test_images}
    assert len(kept.images) + len(kept.test_images) == len(whole.base.images)
    assert not tested & {image.tobytes() for image in (*kept.images, *kept.test_images)}
    assert len(kept.test_images) == pytest.approx(len(whole.base.images) / 5, rel=0.02)


def test_noise_is_what_the_guarantee_needs() -> None:
    """Independent noise of a mean of n vectors of norm at most 1, one of which may be replaced."""
    size = Size(10_000, 2_500, 51_370, 1e-9)
    noise = Group(2.0).noise(size).deviation
    assert analytic_epsilon(sigma=noise, sensitivity=2.0 / 10_000, delta=1e-9) == pytest.approx(2.0, rel=1e-9)
    # frontier: the sensitivity of 8 bands is √1.88 times as large for long runs.
    assert (Group(2.0, 8).noise(size).deviation / noise) ** 2 == pytest.approx(1.88, abs=0.01)
    assert Group(math.inf).noise(size) == Noise()
    np.testing.assert_allclose(Group(2.0, 4).noise(size).weights, [1.0, -0.5, -0.125, -0.0625])


@pytest.mark.slow
def test_noise_of_few_bits_is_the_plans() -> None:
    """Its prefix sums have the gain that the plan says, which also counts the clipping of coordinates."""
    size = Size(10_000, 60, 8_192, 1e-6)
    group = Group(2.0, 33, bits=4.0)
    noise, found = group.noise(size), size.plan(2.0, **few_bits(33, 4.0))
    factors = np.pad(noise.weights, (0, 60 - len(noise.weights)))
    sums = np.cumsum(np.cumsum(factors) ** 2)
    ours = sums * noise.deviation**2 + noise.left**2 * np.arange(1, 61)
    independent = Group(2.0).noise(size).deviation ** 2 * np.arange(1, 61)
    assert found.prefix is not None
    assert independent.mean() / ours.mean() == pytest.approx(found.prefix.gain, rel=0.01)


def test_every_group_is_tried_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is the one with the best mean of the last seeds, not the luckiest of the first."""
    done: list[Training] = []

    def train(_: object, settings: list, noises: list, *, seed: int, **__: object) -> list[Outcome]:
        found = []
        for setting, noise in zip(settings, noises, strict=True):
            done.append(Training(Group(2.0 if noise.deviation else math.inf), setting, seed))
            lucky = seed not in FINAL_SEEDS and setting.schedule == "constant"
            found.append(Outcome(1.0 if lucky else 1.0 / (1.0 + abs(math.log(setting.rate))), 0.0))
        return found

    monkeypatch.setattr(select_settings, "train", train)
    options = argparse.Namespace(size=Size(100, 80, 1_000, 1e-6), device="cpu", together=7, until=math.inf)
    console = Console(quiet=True)
    groups = [Group(math.inf), Group(2.0)]
    chosen = select(groups, Trainings(tmp_path / "tries.jsonl", None, options, console), 12)
    counts = {group: len({t.key for t in done if t.group == group}) for group in groups}
    assert counts[groups[0]] == counts[groups[1]] == 12 + 6 + 3 * 6
    for group in groups:
        final = {t.setting for t in done if t.group == group and t.seed in FINAL_SEEDS}
        assert chosen[group] == min(final, key=lambda s: abs(math.log(s.rate)))
    before = len(done)
    assert select(groups, Trainings(tmp_path / "tries.jsonl", None, options, console), 12) == chosen
    assert len(done) == before  # the file has them
    options.until = 0.0
    with pytest.raises(TimeoutError, match="24 trainings left"):
        select(groups, Trainings(tmp_path / "none.jsonl", None, options, console), 12)


def test_settings_without_privacy_are_not_clipped() -> None:
    plain, private = drawn(False, 20), drawn(True, 20)
    assert all(math.isinf(s.clip_norm) for s in (*plain, *near(plain[:4], 12)))
    assert all(math.isfinite(s.clip_norm) for s in (*private, *near(private[:4], 12)))
    assert len(set(near(private[:4], 12)) | set(private)) == 32
