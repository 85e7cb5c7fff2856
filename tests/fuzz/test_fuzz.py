"""A short run of the fuzzer, with the same changes to inputs every time; `make fuzz` is the long one."""

from __future__ import annotations

import random

import pytest

from cpsgd.errors import CpsgdError

from .driver import MEMORY, FindingError, check, fuzz, limited_memory
from .mutations import LONGEST, mutate
from .targets import TARGETS, Target

INPUTS = 4000


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_only_typed_errors_and_bounded_memory(target: Target) -> None:
    accepted = fuzz(target, max(50, round(INPUTS * target.share)), seed=1)
    # Neither all nor none get through, save where a file is only right with one known checksum.
    assert accepted > 0 or target.name == "idx"


@pytest.mark.parametrize("target", [t for t in TARGETS if t.name != "idx"], ids=lambda target: target.name)
def test_what_it_starts_from_is_valid_and_stays_so_when_sealed(target: Target) -> None:
    for data in target.seeds():
        assert check(target, data) == check(target, target.seal(data))
    assert any(check(target, data) for data in target.seeds())


def refuse(data: bytes) -> None:
    raise CpsgdError("no")


def crash(data: bytes) -> None:
    if b"\xff" in data:
        raise KeyError("oops")


def hoard(data: bytes) -> int:
    return len(bytearray(2 * MEMORY))


def test_the_fuzzer_finds_things() -> None:
    assert fuzz(Target("refuses", refuse, lambda: [b"seed"]), 100, seed=0) == 0
    with pytest.raises(FindingError, match="crashes: KeyError"):
        fuzz(Target("crashes", crash, lambda: [b"seed"]), 1000, seed=0)
    with limited_memory(), pytest.raises(FindingError, match="MemoryError"):
        check(Target("hoards", hoard, lambda: []), b"")
    assert hoard(b"") == 2 * MEMORY  # and the limit is gone again


def test_mutations_repeat_and_stay_short() -> None:
    first, second = (random.Random(5) for _ in range(2))
    seeds = [b"abc" * 5000, b"", b"x"]
    for _ in range(500):
        seed = first.choice(seeds)
        changed = mutate(seed, seeds, (b"token",), first)
        assert second.choice(seeds) == seed
        assert mutate(seed, seeds, (b"token",), second) == changed
        assert len(changed) <= LONGEST
