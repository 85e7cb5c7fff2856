"""Draws and threads of PyTorch are put back as they were found."""

from __future__ import annotations

import pytest
import torch

from cpsgd.learning.devices import fixed_draws, one_thread


def test_draws_repeat_and_leave_no_trace() -> None:
    before = torch.get_rng_state()
    draws = []
    for seed in (3, 3, 4):
        with fixed_draws(seed, torch.device("cpu")):
            draws.append(torch.rand(5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_are_put_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), one_thread():
            _ = 1 // (torch.get_num_threads() - 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
