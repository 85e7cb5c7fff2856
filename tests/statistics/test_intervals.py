"""Intervals of noise on whole numbers: how often they hold, by the law itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cpsgd import statistics
from cpsgd.statistics import Count
from cpsgd.statistics.rows import interval_width


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.99, 1.0 - 1e-6])
def test_intervals_hold_as_often_as_they_say_and_hardly_more(confidence: float) -> None:
    for rate in np.geomspace(1e-4, 20.0, 400):
        alpha = math.exp(-rate)
        deviation = math.sqrt(2.0 * alpha) / (1.0 - alpha)
        inside = math.floor(interval_width(confidence, float(rate)) * deviation)
        assert 2.0 * alpha ** (inside + 1) / (1.0 + alpha) <= (1.0 - confidence) * (1.0 + 1e-9)
        if rate < 0.02:
            laplace = max(-math.log(1.0 - confidence) / math.sqrt(2.0), interval_width(confidence, None))
            assert interval_width(confidence, float(rate)) == pytest.approx(laplace, rel=0.05)


def test_a_count_has_the_interval_of_its_noise_on_one_machine_and_between_clients() -> None:
    table = {"yes": [0, 1] * 50}
    found = statistics.count(table, columns=["yes"], epsilon=2.4)
    # At ε = 2.4 noise is beyond ±1 with 1.5 %, and beyond 0 with 17 %.
    assert float(found.high[0] - found.values[0]) == pytest.approx(1.5, rel=1e-3)
    asked = Count(["yes"]).plan(100, 2.4)
    said = asked.aggregate([asked.encode(each) for each in table["yes"]])
    assert float(said.high[0] - said.values[0]) == pytest.approx(1.5, rel=1e-3)
    assert float(said.values[0]) == pytest.approx(round(float(said.values[0])), abs=1e-3)


@pytest.mark.parametrize("shape", [0.5, 0.9, 1.1, 2.0, 3.0])
def test_intervals_hold_with_more_or_fewer_messages_than_shares(shape: float) -> None:
    for rate in (0.1, 0.5, 1.0, 2.0, 3.0, 8.0):
        one_sided = stats.nbinom.pmf(np.arange(math.ceil(60.0 / rate) + 60), shape, -math.expm1(-rate))
        law = np.convolve(one_sided, one_sided[::-1])
        middle = len(one_sided) - 1
        deviation = math.sqrt(shape / 2.0) / math.sinh(0.5 * rate)
        for confidence in (0.5, 0.68, 0.9, 0.95, 0.99, 0.999):
            inside = math.floor(interval_width(confidence, rate, shape) * deviation)
            assert law[max(0, middle - inside) : middle + inside + 1].sum() >= confidence - 1e-9


def test_messages_that_were_thought_to_be_lost_widen_the_interval() -> None:
    asked = Count(["yes"]).plan(100, 3.0, dropout=0.5)
    messages = [asked.encode(each) for each in [0, 1] * 50]
    widths = [asked.aggregate(messages[:count], confidence=0.9) for count in (50, 100)]
    # With 50 shares noise is beyond 0 with 9.5 %, with twice as many with 18 %, and beyond 1 with 1.7 %.
    assert [float(each.high[0] - each.values[0]) for each in widths] == pytest.approx([0.5, 1.5], abs=0.2)
