"""The audit of everything finds what an audit of one planned protocol in one round cannot. All randomness is fixed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Aggregator, Guarantee, Protocol, guarantee
from cpsgd.audit import Case, Encode, Start, all_cases, exact_checks, levels, survey, surveys
from cpsgd.audit import __main__ as answering
from cpsgd.audit.cases import DELTA, left_out, usual
from cpsgd.audit.checks import Check
from cpsgd.audit.surveys import Coverage, Made, Survey, law_checked
from cpsgd.codec import pipeline
from cpsgd.errors import ParameterError, WorkerError
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
    assert left_out().keys() == {"gaussian", "discrete-laplace", "whole-laplace", "rounded-correlated"}
    assert usual("gaussian") == ()
    for name in ("skellam", "discrete-gaussian", "rounded-gaussian"):
        loud, quiet = (case.protocol.mechanism.noise.variance for case in usual(name))
        assert quiet == pytest.approx(0.1 * loud, rel=0.03)


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


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for all that plays rounds, and notes what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def law(case: Case, **given: Any) -> Coverage:
        asked.append(("law", case, given))
        return Coverage(case, "this", given["rounds"], case.rounds, (Check("law", "?", 0.5, 1.0),), "same")

    def attack(protocol: Protocol, delta: float, **given: Any) -> Any:
        asked.append(("attack", protocol, delta, given))
        checked = (Check("attack", "?", 0.5, 1.0),)
        claimed = SimpleNamespace(epsilon=2.0)
        return SimpleNamespace(
            checks=checked, claims=(), surviving=3, rounds=given["rounds"], claimed=claimed, lower_bound=0.25
        )

    @contextlib.contextmanager
    def started(names: Any, cases: Any, **given: Any) -> Any:
        asked.append(("started", names, given))
        there = vars(Check("there", "?", 0.5, 1.0))
        yield lambda name: [
            {"checks": [there], "rounds": 7, "digest": "other" if (name, case) == ("two", QUIET) else "same"}
            for case in cases
        ]

    monkeypatch.setattr(surveys, "law_checked", law)
    monkeypatch.setattr(surveys, "audit", attack)
    monkeypatch.setattr(surveys, "check_size", lambda *given: asked.append(("size", *given)))
    monkeypatch.setattr(exact_checks, "claim", lambda *given: Check("claim", "?", float(given[3]), 4.0))
    monkeypatch.setattr(levels, "others", lambda: ("one", "two"))
    monkeypatch.setattr(levels, "started", started)
    return asked


def test_every_protocol_is_played_at_every_level(stubs: list[tuple[Any, ...]]) -> None:
    planned, heard = COUNTED[0], list[int]()
    found = survey([planned, QUIET], DELTA, rounds=1_001, surviving=3, seed=5, progress=heard.append)
    # Two protocols at three levels share the false alarms, and the attack's rounds half of what is left here.
    share = 1e-6 / 6
    halves = {"rounds": 500, "surviving": 3, "share": 0.5 * share, "made": None, "seed": 5}
    attack = {"adjacency": "replace-one", "rounds": 1_001, "surviving": 3, "round": 0, "encode": None}
    assert stubs == [
        ("size", planned.protocol, 3, 1_001),
        ("size", QUIET.protocol, 3, 1_001),
        ("started", ("one", "two"), {"rounds": 500, "surviving": 3, "share": share}),
        ("law", planned, halves),
        ("attack", planned.protocol, DELTA, {**attack, "start": Aggregator, "seed": 5, "false_alarm": 0.5 * share}),
        ("law", QUIET, halves),
    ]
    assert heard == [1] * 6
    assert [(each.case, each.level, each.rounds) for each in found.covered] == [
        *((planned, "this", 1_501), (QUIET, "this", 500)),
        *((case, level, 7) for level in ("one", "two") for case in (planned, QUIET)),
    ]
    names = [[check.name for check in each.checks] for each in found.covered]
    assert names == [["attack", "claim", "law"], ["law"], *[["there"]] * 4]
    assert all(each.passed for each in found.covered)
    assert (found.agreement.statistic, found.passed) == (1.0, False)
    assert found.levels == ("this", "one", "two")
    assert [(each["claimed"], each["found"]) for each in found.to_dict()["covered"][:2]] == [(2.0, 0.25), (None, None)]


def test_other_code_is_played_at_one_level(stubs: list[tuple[Any, ...]]) -> None:
    code: Any = ("its encode", "its start")
    found = survey(COUNTED[:1], DELTA, rounds=1, made=lambda protocol: code)
    assert [asked[:2] for asked in stubs] == [
        ("size", COUNTED[0].protocol), ("started", ()), ("law", COUNTED[0]), ("attack", COUNTED[0].protocol),
    ]  # fmt: skip
    assert (stubs[0][2], stubs[2][2]["rounds"]) == (COUNTED[0].protocol.clients, 0)
    assert (stubs[3][3]["encode"], stubs[3][3]["start"], stubs[3][3]["false_alarm"]) == (*code, 0.5e-6)
    assert (found.agreement.statistic, found.passed, len(found.covered)) == (0.0, True, 1)
    for wrong in ({"rounds": 0}, {"surviving": 0}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            survey(COUNTED[:1], DELTA, **{"rounds": 1, **wrong})


def test_every_vector_is_played_once_at_least() -> None:
    for rounds, played in ((0, 24), (24, 24), (47, 24), (48, 48)):
        found = law_checked(QUIET, rounds=rounds, surviving=None, share=1e-6, seed=1)
        assert (found.rounds, found.numbers, found.passed) == (played, QUIET.rounds, True)


def test_a_process_of_a_level_answers_with_finite_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"cases": [[QUIET.sampler, QUIET.protocol.to_json()]] * 2, "rounds": 9, "surviving": 2, "share": 1e-7}
    given: list[Any] = []

    def law(case: Case, **more: Any) -> Coverage:
        given.append((case.name, case.protocol, more))
        return Coverage(case, "", 5, (0,), (Check("a", "?", math.inf, 1.0), Check("b", "?", 0.5, None)), "digest")

    monkeypatch.setattr(answering, "law_checked", law)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    answering.main()
    assert given == [(QUIET.name, QUIET.protocol, {"rounds": 9, "surviving": 2, "share": 1e-7})] * 2
    checks = [vars(Check("a", "?", sys.float_info.max, 1.0)), vars(Check("b", "?", 0.5, None))]
    answer = {"checks": checks, "rounds": 5, "digest": "digest"}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [answer] * 2


def test_nothing_runs_on_after_a_survey_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    working, killed = threading.Event(), threading.Event()

    class Waiting:
        returncode = -9

        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            begun.append(env["CPSGD_SIMD"])

        def __enter__(self) -> Waiting:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def communicate(self, _: str) -> tuple[str, str]:
            working.set()
            killed.wait(60)
            return "", ""

        def kill(self) -> None:
            killed.set()

    def stop(_: object) -> None:
        assert working.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("cpsgd.audit.levels.subprocess.Popen", Waiting)
    with (
        pytest.raises(KeyboardInterrupt),
        levels.started(("one", "two"), [QUIET], rounds=1, surviving=None, share=1e-6) as answer,
    ):
        stop(answer)
    assert killed.is_set()
    assert begun == ["one"]


@pytest.mark.parametrize(("code", "error", "said"), [(1, "\nBad: a\n b\n", " b"), (2, " \n", "no reason given")])
def test_a_level_that_fails_is_said_to(code: int, error: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(returncode=code, communicate=lambda _: ("", error), kill=lambda: None)
    monkeypatch.setattr("cpsgd.audit.levels.subprocess.Popen", lambda *_, **__: contextlib.nullcontext(ended))
    with (
        pytest.raises(WorkerError, match=f"level one did not end: {said}$"),
        levels.started(("one",), [QUIET], rounds=1, surviving=None, share=1e-6) as answer,
    ):
        answer("one")


def test_what_is_attacked_is_planned_for_an_epsilon_near_two() -> None:
    planned = {case.name: case.protocol for case in all_cases() if case.claimed}
    for name in ("binomial, counted coins", "skellam", "discrete-gaussian", "rounded-gaussian, fine Gaussian"):
        assert 1.9 < guarantee(planned[name], DELTA).epsilon < 2.0


def test_runs_are_played_to_their_last_round() -> None:
    runs = [case for case in all_cases() if case.protocol.mechanism.memory.one_event]
    assert len(runs) == 4
    for case in runs:
        assert (case.rounds[0], case.rounds[-1]) == (0, case.protocol.mechanism.memory.rounds - 1)
