from __future__ import annotations

import pytest

from cpsgd import Plan, plan
from cpsgd.errors import ParameterError, ThresholdError
from cpsgd.federation.carrying import Gathering, Pace, StageClock
from cpsgd.federation.choreography import MaskedExchange, begin_round
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.secagg import Stage

from .local import DIM, RUN, Client

PACE = Pace(nodes=100.0, stage=60.0, grace=5.0)


@pytest.mark.parametrize(
    "seen",
    [
        # Pairs of connected nodes and a time, and whether the round begins then: with everybody;
        [(4, 0.0, True)],
        # with enough, after the grace period;
        [(2, 50.0, False), (3, 51.0, False), (3, 55.0, False), (3, 56.0, True)],
        # which begins again when one has left;
        [(3, 1.0, False), (2, 5.0, False), (3, 7.0, False), (3, 12.0, True)],
        # or when time is up.
        [(2, 99.0, False), (2, 100.0, True)],
    ],
)
def test_when_a_round_begins(seen: list[tuple[int, float, bool]]) -> None:
    gathering = Gathering(PACE, wanted=4, needed=3, began=0.0)
    assert [gathering.over(connected, now) for connected, now, _ in seen] == [over for _, _, over in seen]


@pytest.fixture
def federation(small_plan: Plan) -> tuple[RoundSession[str], dict[str, Client]]:
    clients = {name: Client() for name in "abcd"}
    return begin_round(Terms(plan=small_plan), 1, list(clients), run=RUN), clients


def answer(session: RoundSession[str], clients: dict[str, Client], *names: str) -> None:
    requests = session.requests()
    for name in names:
        session.receive(name, clients[name].ask(requests[name]))


def test_a_stage_ends_at_once_when_all_have_answered(
    federation: tuple[RoundSession[str], dict[str, Client]],
) -> None:
    session, clients = federation
    clock = StageClock(PACE, session, 0.0)
    assert not clock.end(1.0)
    answer(session, clients, *"abcd")
    assert clock.end(2.0)
    assert session.stage is Stage.SHARE


def test_enough_answers_and_a_grace_period_end_a_stage(
    federation: tuple[RoundSession[str], dict[str, Client]],
) -> None:
    session, clients = federation
    clock = StageClock(PACE, session, 0.0)
    answer(session, clients, *"ab")
    assert not clock.end(20.0)
    answer(session, clients, "c")
    assert session.waiting == {"d"}
    assert not clock.end(21.0)
    # As long again as the others took, which is more than the grace period.
    assert not clock.end(41.0)
    assert clock.end(42.0)
    assert session.report.dropped == {"d": "no answer in time"}
    # The rest of the round goes on with the three.
    while session.stage is not None:
        clock = StageClock(PACE, session, 0.0)
        answer(session, clients, *session.requests())
        assert clock.end(0.0)
    assert session.release() is not None


def test_who_falls_silent_after_its_upload_holds_nobody_up() -> None:
    """All six uploads are needed. What comes then takes a quorum of four, and one to spare before the last stage."""
    six = plan(6, DIM, 8.0, 1e-5, rounds=3, secure=True, colluding=1, bits=14, mechanism="binomial")
    clients = {name: Client() for name in "abcdef"}
    session = begin_round(Terms(plan=six), 1, list(clients), run=RUN)
    assert session.fewest == 6
    for stage, answers, early in [
        ("advertise", "abcde", False),
        ("share", "abcde", False),
        ("mask", "abcde", False),
        ("confirm", "abcd", False),
        ("confirm", "e", True),
        ("unmask", "abc", False),
        ("unmask", "d", True),
    ]:
        assert session.stage is not None
        assert session.stage.value == stage
        clock = StageClock(PACE, session, 0.0)
        answer(session, clients, *answers)
        assert not clock.end(1.0)
        assert clock.end(30.0) is early
        if stage in ("advertise", "share", "mask"):
            answer(session, clients, "f")
            assert clock.end(30.0)
    assert session.release() is not None
    assert session.report.survivors == 6


def test_who_has_failed_is_not_waited_for(federation: tuple[RoundSession[str], dict[str, Client]]) -> None:
    session, clients = federation
    clock = StageClock(PACE, session, 0.0)
    answer(session, clients, *"abc")
    session.drop("d", "RuntimeError: no disk")
    assert not session.waiting
    assert clock.end(0.1)


def test_the_deadline_ends_a_stage_also_without_enough(
    federation: tuple[RoundSession[str], dict[str, Client]],
) -> None:
    session, clients = federation
    clock = StageClock(PACE, session, 0.0)
    answer(session, clients, "a")
    assert not clock.end(59.0)
    assert clock.end(60.0)
    assert session.stage is None
    assert session.release() is None


def test_a_stage_that_cannot_end_early_stays_open(
    federation: tuple[RoundSession[str], dict[str, Client]],
) -> None:
    """The count may be right and the round stuck all the same, as where shares do not fit: it waits for the others."""
    session, clients = federation
    answer(session, clients, *"ab")
    assert not session.close(early=True)
    assert session.stage is Stage.ADVERTISE
    assert session.report.dropped == {}
    answer(session, clients, "c")
    assert session.close(early=True)
    assert session.stage is Stage.SHARE


def test_a_clock_waits_on_for_a_stage_that_cannot_end_early(
    federation: tuple[RoundSession[str], dict[str, Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(self: object) -> None:
        raise ThresholdError("shares do not fit")

    session, clients = federation
    clock = StageClock(PACE, session, 100.0)
    assert not clock.end(101.0)
    answer(session, clients, *"abc")
    assert not clock.end(102.0)
    with monkeypatch.context() as patch:
        patch.setattr(MaskedExchange, "close", stuck)
        assert not clock.end(120.0)
    assert session.stage is Stage.ADVERTISE
    assert clock.end(121.0)
    assert session.stage is Stage.SHARE


@pytest.mark.parametrize("changes", [{"nodes": 0.0}, {"stage": -1.0}, {"grace": -1.0}, {"stage": float("nan")}])
def test_bad_paces(changes: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        Pace(**changes)
