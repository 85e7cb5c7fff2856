"""The audit of everything finds what an audit of one planned protocol in one round cannot. All randomness is fixed."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Aggregator, Guarantee, Protocol, guarantee
from cpsgd.audit import Case, Encode, Start, all_cases, survey
from cpsgd.audit.cases import DELTA, left_out, usual
from cpsgd.audit.checks import Check
from cpsgd.audit.surveys import Coverage, Made, Survey, law_checked
from cpsgd.codec import pipeline
from cpsgd.mechanisms import Binomial, binomial
from cpsgd.randomness import Keystream
from cpsgd.registry import MECHANISMS

from . import test_coin_faults, test_faults
from .faults import Integers, noise_of, noiseless, spoiled

auditing = sys.modules["cpsgd.audit.auditing"]

# What `cpsgd audit` plays of each protocol's law by default.
ROUNDS = 1_500
SHARE = 1e-8
COUNTED = [case for case in all_cases() if case.sampler == "counted coins"]
QUIET = COUNTED[1]
MODULAR = next(case for case in all_cases() if case.sampler == "counted coins, modulo")


def checked(case: Case, made: Made | None = None) -> Coverage:
    return law_checked(case, rounds=ROUNDS, surviving=None, share=SHARE, made=made, seed=1)


def failed(found: Coverage) -> set[str]:
    return {check.name.removesuffix(" in several rounds") for check in found.checks if not check.passed}


# ------------------------------------------------------------------ what is covered


def test_every_mechanism_is_covered_or_said_not_to_be() -> None:
    covered = {case.protocol.mechanism.name for case in all_cases()}
    assert covered | left_out().keys() == set(MECHANISMS)
    assert left_out().keys() == {"gaussian", "discrete-laplace", "rounded-correlated"}
    assert usual("gaussian") == ()


@pytest.mark.slow
@pytest.mark.parametrize("case", usual("discrete-laplace"), ids=lambda case: str(case.claimed))
def test_a_mechanism_with_its_usual_parameters_has_the_law_of_its_summands(case: Case) -> None:
    assert law_checked(case, rounds=150, surviving=None, share=1e-6, seed=1).passed


def test_every_mechanism_has_an_attack_and_little_noise_even_and_odd_dimensions_and_rounds() -> None:
    for name in {case.protocol.mechanism.name for case in all_cases()}:
        cases = [case for case in all_cases() if case.protocol.mechanism.name == name]
        assert {case.claimed for case in cases} == {True, False}
        assert {case.protocol.dim % 2 for case in cases} == {0, 1}
        assert all({number % 2 for number in case.rounds} == {0, 1} for case in cases)
    # Both of the Binomial mechanism's samplers.
    counted = {
        binomial.uses_coins(m.trials, m.p) for c in all_cases() if isinstance(m := c.protocol.mechanism, Binomial)
    }
    assert counted == {True, False}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in (QUIET, MODULAR) else pytest.mark.thorough) for case in all_cases()],
    ids=lambda case: f"{case.name}, d={case.protocol.dim}",
)
@pytest.mark.usefixtures("fixed_seed")
def test_the_product_passes(case: Case) -> None:
    found = checked(case)
    assert failed(found) == set()
    # Limits that honest rounds never come near would find nothing.
    near = {check.name.removesuffix(" in several rounds"): check.statistic for check in found.checks}
    assert min(near["unbiased"], near["law"]) > 0.1


# ------------------------------------------------------------------ faults that an audit once missed


def silent(protocol: Protocol, when: Any) -> tuple[Encode, Start]:
    """No coins but their mean, in some rounds."""
    mean = np.uint32(noise_of(protocol).trials // 2)

    def integers(vector: Any, round: int) -> NDArray[np.uint32]:
        if when(round):
            return pipeline.integers(noiseless(protocol), vector, round) + mean
        return pipeline.integers(protocol, vector, round)

    return spoiled(protocol, integers)


def two_coins_fewer(protocol: Protocol) -> tuple[Encode, Start]:
    """The mean is kept."""
    fewer = dataclasses.replace(noise_of(protocol), trials=noise_of(protocol).trials - 2)
    other = dataclasses.replace(protocol, mechanism=fewer)
    return spoiled(protocol, lambda vector, round: pipeline.integers(other, vector, round) + np.uint32(1))


def loose_clip(protocol: Protocol) -> tuple[Encode, Start]:
    """Two percent too long."""
    loose = dataclasses.replace(protocol, clip_norm=1.02 * protocol.clip_norm)
    return spoiled(protocol, lambda vector, round: pipeline.integers(loose, vector, round))


def two_bits(protocol: Protocol, *, nearest: bool) -> tuple[Encode, Start]:
    """Rounding compares with two random bits: its odds are quarters."""
    noise = noise_of(protocol)
    grid, generator = noise.grid, np.random.default_rng(3)

    def integers(vector: Any, round: int) -> NDArray[np.uint32]:
        points = np.clip(pipeline.to_grid(protocol, vector, round), -grid.limit, grid.limit)
        quarters = 4.0 * (points + grid.limit) / 2.0**grid.fraction_bits
        quarters = np.rint(quarters) if nearest else np.floor(quarters)
        levels = np.floor((quarters + generator.integers(0, 4, protocol.dim)) / 4.0).astype(np.uint32)
        return levels + binomial.sample(noise.trials, noise.p, protocol.dim, Keystream())

    return spoiled(protocol, integers)


class _OneMore(Integers):
    def reduced(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        assert self.protocol.modulus is not None
        return sums % np.uint64(self.protocol.modulus + 1)


FAULTS: dict[str, tuple[Case, Made, set[str]]] = {
    "no coins": (QUIET, lambda protocol: silent(protocol, lambda round: True), {"spread", "law", "variance"}),
    "no coins in odd rounds": (
        QUIET,
        lambda protocol: silent(protocol, lambda round: round % 2),
        {"spread", "variance"},
    ),
    "no coins after the first round": (QUIET, lambda protocol: silent(protocol, bool), {"spread", "law", "variance"}),
    "no coins as planned": (COUNTED[0], lambda protocol: silent(protocol, lambda round: True), {"spread", "variance"}),
    "two coins fewer, the mean kept": (QUIET, two_coins_fewer, {"variance"}),
    "clip norm 1.02": (QUIET, loose_clip, {"unbiased"}),
    "two bits, down": (QUIET, lambda protocol: two_bits(protocol, nearest=False), {"unbiased"}),
    "two bits, to the nearest": (QUIET, lambda protocol: two_bits(protocol, nearest=True), {"unbiased"}),
    "modulus and one": (MODULAR, lambda protocol: (protocol.encode_integers, _OneMore), {"unbiased"}),
}
MORE = {"no coins", "no coins after the first round", "no coins as planned", "two bits, to the nearest"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in MORE else ()) for name in FAULTS]
)
@pytest.mark.usefixtures("fixed_seed")
def test_a_fault_is_found(name: str) -> None:
    case, made, expected = FAULTS[name]
    assert expected <= failed(checked(case, made))


@pytest.mark.thorough
@pytest.mark.usefixtures("fixed_seed")
def test_the_same_code_without_its_fault_passes() -> None:
    assert failed(checked(QUIET, lambda protocol: silent(protocol, lambda round: False))) == set()
    assert failed(checked(MODULAR, lambda protocol: (protocol.encode_integers, Integers))) == set()


@pytest.mark.usefixtures("fixed_seed")
def test_sums_decoded_modulo_one_more_are_found_without_any_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.decode

    def wrong(protocol: Protocol, sums: Any, count: int, round: int) -> NDArray[np.float32]:
        assert protocol.modulus is not None
        return real(dataclasses.replace(protocol, modulus=protocol.modulus + 1), sums, count, round)

    monkeypatch.setattr(pipeline, "decode", wrong)
    assert "modulus" in failed(checked(MODULAR))


@pytest.mark.usefixtures("fixed_seed")
def test_a_claim_of_six_tenths_is_found_and_the_law_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def boasting(*arguments: Any, **options: Any) -> Guarantee:
        real = guarantee(*arguments, **options)
        return dataclasses.replace(real, claim=dataclasses.replace(real.claim, epsilon=0.6 * real.epsilon))

    monkeypatch.setattr(auditing, "guarantee", boasting)
    monkeypatch.setenv("CPSGD_SIMD", "this")
    (found,) = survey(COUNTED[:1], DELTA, rounds=1_000, seed=1).covered
    assert failed(found) == {"claim"}


def test_the_number_of_faults_is_the_one_that_is_published() -> None:
    """All of the three lists, and the two that are seeded in the server's half and in the claim."""
    published = re.search(r"each of (\d+) variants", (Path(__file__).parents[2] / "SECURITY.md").read_text())
    assert published is not None
    assert int(published[1]) == len(FAULTS) + len(test_faults.ALL) + len(test_coin_faults.ALL) + 2


# ------------------------------------------------------------------ levels


def test_other_levels_are_played_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPSGD_SIMD", raising=False)
    monkeypatch.setattr("cpsgd.audit.levels.kernels.supported_levels", lambda: [], raising=True)
    heard: list[int] = []
    found = survey([QUIET], DELTA, rounds=1_000, seed=1, progress=heard.append)
    assert found.passed
    assert len(found.levels) == 2
    assert found.levels[1] == "numpy"
    assert sum(heard) == 2
    here, there = found.covered
    assert (here.digest, here.rounds) == (there.digest, there.rounds)
    assert [check.name for check in here.checks] == [check.name for check in there.checks]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["levels_agree"] is True
    assert [each["level"] for each in data["covered"]] == list(found.levels)


@pytest.mark.usefixtures("fixed_seed")
def test_levels_that_make_other_integers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPSGD_SIMD", "this")
    here = survey([QUIET], DELTA, rounds=1_000, seed=1)
    assert here.passed
    other = dataclasses.replace(here, agreement=dataclasses.replace(here.agreement, statistic=1.0))
    assert not other.passed


def test_a_forced_level_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpsgd.audit import levels

    monkeypatch.setenv("CPSGD_SIMD", "baseline")
    assert levels.others() == ()
    monkeypatch.delenv("CPSGD_SIMD")
    assert "numpy" in levels.others()
    assert levels.current() not in levels.others()


def test_the_servers_half_may_be_the_products() -> None:
    made: Made = lambda protocol: (protocol.encode, Aggregator)  # noqa: E731
    assert survey([QUIET], DELTA, rounds=1_000, made=made, seed=1).levels == (checked(QUIET).level,)


def test_one_check_that_fails_is_enough() -> None:
    good, bad = Check("a", "?", 1.0, 2.0), Check("b", "?", 3.0, 2.0)
    for checks, passed in (((good, good), True), ((good, bad), False), ((bad, good), False)):
        assert Coverage(QUIET, "", 1, (0,), checks, "").passed is passed
    for agreement, check, passed in ((good, good, True), (bad, good, False), (good, bad, False)):
        covered = tuple(Coverage(QUIET, "", 1, (0,), (each,), "") for each in (good, check))
        assert Survey(covered, agreement, 1e-6).passed is passed


def test_runs_are_played_to_their_last_round() -> None:
    runs = [case for case in all_cases() if case.protocol.mechanism.memory.one_event]
    assert len(runs) == 4
    for case in runs:
        assert (case.rounds[0], case.rounds[-1]) == (0, case.protocol.mechanism.memory.rounds - 1)
