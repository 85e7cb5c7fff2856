"""Intervals of noise on whole numbers: how often they hold, by the law itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
