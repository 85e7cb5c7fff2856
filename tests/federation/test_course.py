"""Rounds one after the other, and a server that is killed in the middle of one."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cpsgd import Plan
from cpsgd._durable import unseal
from cpsgd.errors import CheckpointError, CpsgdError, ParameterError, PopulationError
from cpsgd.federation import checkpoint
from cpsgd.federation.course import ABSENCES, FAULTS, LOST, REST, Conduct, Course
from cpsgd.federation.extras import AdaptiveClip
from cpsgd.federation.sessions import RoundReport, RoundSession
from cpsgd.federation.terms import Settlement, Terms
from cpsgd.ledger import Budget, Entry, Ledger
from cpsgd.secagg import Stage

from . import stopped
from .correlated import correlated_plan
from .local import DIM, RUN, Client, with_protocol


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Ledger(tmp_path / "ledger") as ledger:
        # Three rounds cost 8 at most, and four would cost more.
        ledger.create(Budget(population="people", epsilon=8.0, delta=1e-5))
    return tmp_path


def run_and_die(folder: Path, plan: Plan, run: str, stage: str) -> None:
    """In a process of its own, which is killed by SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=stopped.go, args=(folder, plan, run, stage))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_a_course_without_a_stop(small_plan: Plan, folder: Path) -> None:
    course = stopped.go(folder, small_plan, "run-1", "never")
    assert [report.released for report in course.reports] == [True] * 3
    again = stopped.open_course(folder, small_plan, "run-2", None)
    assert again.round == 4
    assert again.reports == course.reports
    np.testing.assert_array_equal(again.model, course.model)


@pytest.mark.parametrize("stage", ["advertise", "mask", "confirm"])
def test_a_round_that_has_revealed_nothing_is_run_again_for_its_charge(
    small_plan: Plan, folder: Path, stage: str
) -> None:
    run_and_die(folder, small_plan, "run-1", stage)
    saved = checkpoint.load(folder / "checkpoint", small_plan.protocol.fingerprint.hex(), DIM)
    assert saved is not None
    assert (len(saved.reports), saved.begun, saved.revealing) == (1, 2, False)
    # Killed a second time: the charge is still the first one.
    run_and_die(folder, small_plan, "run-2", stage)
    momentum = stopped.Momentum()
    assert stopped.open_course(folder, small_plan, "run-3", momentum).round == 2
    np.testing.assert_array_equal(momentum.velocity, saved.optimizer["velocity"])
    course = stopped.go(folder, small_plan, "run-3", "never")
    assert [(report.round, report.released) for report in course.reports] == [(1, True), (2, True), (3, True)]
    with Ledger(folder / "ledger") as ledger:
        entries = ledger.events("people")
        assert [(entry.event.run, entry.event.round) for entry in entries] == [
            ("test-run-1", 1),
            ("test-run-1", 2),
            ("test-run-3", 3),
        ]
        assert all(entry.released for entry in entries)
        assert ledger.total("people").epsilon <= 8.0


def test_a_round_whose_sum_may_be_known_counts_and_is_lost(small_plan: Plan, folder: Path) -> None:
    run_and_die(folder, small_plan, "run-1", "unmask")
    course = stopped.go(folder, small_plan, "run-2", "never")
    assert [report.released for report in course.reports] == [True, False, True]
    assert course.reports[1].reason == LOST
    with Ledger(folder / "ledger") as ledger:
        entries = ledger.events("people")
        assert [(entry.event.round, entry.released) for entry in entries] == [(1, True), (2, False), (3, True)]
        assert ledger.total("people").epsilon <= 8.0


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library catches it."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", range(5))
def test_whatever_is_last_on_the_disk_no_sum_is_asked_for_twice_or_without_a_charge(
    small_plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch, write: int, after: bool
) -> None:
    """Stopped before or after each of the writes that a round makes, to the checkpoint or the ledger."""
    writes = iter(range(1000))
    asked: list[int] = []
    armed = True

    def stopping(target: Any, name: str) -> None:
        genuine = getattr(target, name)

        def replaced(*args: Any, **options: Any) -> Any:
            now = armed and next(writes) == 5 + write  # in round 2
            if now and not after:
                raise Killed
            found = genuine(*args, **options)
            if now:
                raise Killed
            return found

        monkeypatch.setattr(target, name, replaced)

    genuine_requests = RoundSession.requests

    def requests(self: RoundSession[str]) -> dict[str, bytes]:
        if self.stage is Stage.UNMASK:
            asked.append(self.report.round)
            entries = Ledger(folder / "ledger").events("people")
            assert [entry.event.round for entry in entries] == list(range(1, self.report.round + 1))
        return genuine_requests(self)

    stopping(checkpoint, "save")
    stopping(Ledger, "reserve")
    stopping(Ledger, "release")
    monkeypatch.setattr(RoundSession, "requests", requests)
    with pytest.raises(Killed):
        stopped.go(folder, small_plan, "run-1", "never")
    armed = False
    course = stopped.go(folder, small_plan, "run-2", "never")
    assert [report.round for report in course.reports] == [1, 2, 3]
    assert all(asked.count(round) <= 1 for round in (1, 2, 3))
    entries = Ledger(folder / "ledger").events("people")
    assert [entry.event.round for entry in entries] == [1, 2, 3]
    released = {entry.event.round for entry in entries if entry.released}
    assert {report.round for report in course.reports if report.released} <= released <= set(asked)


# ---------------------------------------------------------------------- the file


def test_everything_is_in_the_file(small_plan: Plan, tmp_path: Path) -> None:
    report: RoundReport[int] = RoundReport(
        1,
        True,
        "",
        3,
        {7: "gone"},
        {7: Stage.MASK},
        {8: "bad"},
        {"loss": 0.5},
        {"accuracy": 0.9},
        {7: 10, 8: 20},
        {8: [7]},
    )
    fingerprint = small_plan.protocol.fingerprint.hex()
    written: checkpoint.Standing[int] = checkpoint.Standing(
        fingerprint, np.arange(DIM, dtype=np.float32), {"v": np.ones(3)}, 0.7, [report], 2, "run-1", True
    )
    checkpoint.save(tmp_path / "file", written)
    found = checkpoint.load(tmp_path / "file", fingerprint, DIM)
    assert found is not None
    assert found.reports == [report]
    assert (found.begun, found.charged_to, found.revealing, found.clip) == (2, "run-1", True, 0.7)
    np.testing.assert_array_equal(found.model, written.model)
    np.testing.assert_array_equal(found.optimizer["v"], np.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_are_not_this_runs(small_plan: Plan, tmp_path: Path) -> None:
    fingerprint = small_plan.protocol.fingerprint.hex()
    assert checkpoint.load(tmp_path / "none", fingerprint, DIM) is None
    path = tmp_path / "file"
    checkpoint.save(path, checkpoint.Standing(fingerprint, np.zeros(DIM, np.float32)))
    for other in ({"fingerprint": "00" * 16, "dim": DIM}, {"fingerprint": fingerprint, "dim": DIM + 1}):
        with pytest.raises(CheckpointError, match="another plan"):
            checkpoint.load(path, **other)  # type: ignore[arg-type]
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-50], b"x" * 500):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.load(path, fingerprint, DIM)


def damaged(data: bytes, seed: int) -> bytes:
    """One to four bits flipped, a piece cut off, taken out, repeated or zeroed."""
    generator = np.random.default_rng(seed)
    changed = bytearray(data)
    start, length = int(generator.integers(len(data))), int(generator.integers(1, 64))
    match seed % 6:
        case 0 | 1:
            for place in generator.integers(len(data), size=1 + seed % 4):
                changed[place] ^= 1 << int(generator.integers(8))
        case 2:
            del changed[start:]
        case 3:
            del changed[start : start + length]
        case 4:
            changed[start:start] = changed[start : start + length]
        case _:
            changed[start : start + length] = bytes(len(changed[start : start + length]))
    return bytes(changed)


@pytest.mark.parametrize("release", ["0.2.0", "now"])
def test_damaged_checkpoints_are_refused_or_read_as_the_same(small_plan: Plan, tmp_path: Path, release: str) -> None:
    fingerprint, path = small_plan.protocol.fingerprint.hex(), tmp_path / "file"
    report: RoundReport[str] = RoundReport(1, True, survivors=3, dropped={"a": "gone"}, stages={"a": Stage.MASK})
    state = {"momentum": np.ones(DIM, np.float32), "variance": np.zeros(DIM)}
    written: checkpoint.Standing[str] = checkpoint.Standing(
        fingerprint, np.arange(DIM, dtype=np.float32), state, 0.7, [report], 2, "run-1", True, "run-0", ["b"]
    )
    checkpoint.save(path, written)
    whole = path.read_bytes()
    # 0.2.0 had no digest.
    whole = unseal("course", whole) if release == "0.2.0" else whole
    accepted = 0
    for seed in range(1_200):
        path.write_bytes(damaged(whole, seed))
        try:
            found = checkpoint.load(path, fingerprint, DIM)
        except CheckpointError:
            continue
        accepted += damaged(whole, seed) != whole
        assert found is not None
        assert found.optimizer.keys() == state.keys()
        assert all(np.array_equal(found.optimizer[name], state[name]) for name in state)
        assert np.array_equal(found.model, written.model)
        assert all(getattr(found, name) == getattr(written, name) for name in ("clip", "reports", "begun", "asked"))
        assert (found.charged_to, found.revealing, found.course) == ("run-1", True, "run-0")
    if release == "now":
        assert accepted == 0
    path.write_bytes(whole)
    assert checkpoint.load(path, fingerprint, DIM) is not None


def test_apply_must_keep_the_models_size(small_plan: Plan, folder: Path) -> None:
    terms = Terms(plan=small_plan, secure=False)
    course: Course[str] = Course(terms, np.zeros(DIM, np.float32), run="1", apply=lambda model, mean, round: mean[:3])
    session = course.begin(stopped.NODES)
    for node, request in session.requests().items():
        session.receive(node, Client(run="1", secure=False).ask(request))
    session.close()
    with pytest.raises(ParameterError, match="apply to return 40"):
        course.finish(session)


def test_a_plan_that_would_learn_noise_is_warned_about(small_plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run="1")
    assert "a model would learn mostly noise" in caplog.text
    assert "clients, ε = " in caplog.text
    caplog.clear()
    precise: Any = replace(small_plan.error, noise=0.01, rounding=0.01, clipping=0.01)
    Course(Terms(plan=replace(small_plan, error=precise)), np.zeros(DIM, np.float32), run="1")
    assert caplog.text == ""


# ---------------------------------------------------------------------- correlated noise


def test_nodes_of_a_lost_round_have_taken_part(small_plan: Plan, tmp_path: Path) -> None:
    """Its sum may be known, and one round of the run is all that is paid for: for ever, whatever else is stopped."""
    plan = correlated_plan(small_plan)
    terms, nodes = Terms(plan=plan), list("abcdefgh")

    def opened(run: str) -> Course[str]:
        return Course(terms, np.zeros(DIM, np.float32), run=run, path=tmp_path / "checkpoint")

    course = opened("run-1")
    first = frozenset(course.begin(nodes).nodes)
    course._reveal()
    for run in ("run-2", "run-3"):
        course = opened(run)
        assert course.reports[0].reason == LOST
        assert frozenset(course.begin(nodes).nodes) == frozenset(nodes) - first


def test_a_round_that_an_older_file_knows_nothing_of_is_paid_for_by_another_run(
    small_plan: Plan, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.create(Budget(population="people", epsilon=200.0, delta=1e-5))
        plan = correlated_plan(small_plan, separation=1)
        terms = Terms(plan=plan, ledger=ledger, population="people", engine="test")

        def charged(name: str, round: int, charged_to: str | None = None) -> Entry:
            settlement = Settlement(terms, round, name, "run-1")
            settlement.charge(charged_to)
            assert settlement.entry is not None
            return settlement.entry

        def run(name: str, round: int) -> float:
            ledger.release(charged(name, round), plan.surviving)
            return ledger.total("people").epsilon

        once = run("run-1", 1)
        assert [run("run-1", 2), run("run-2", 3), run("run-2", 4)] == [once] * 3
        twice = run("run-3", 3)
        assert twice > once
        assert [run("run-3", 4), run("run-3", 5)] == [twice] * 2
        assert run("run-4", 4) > twice
        # Begun again before anything was revealed: the same entry pays.
        begun = charged("run-4", 6)
        assert charged("run-5", 6, "run-4") == begun


def test_a_round_that_was_given_up_while_its_sum_was_revealed_is_not_begun_again(
    small_plan: Plan, folder: Path
) -> None:
    course = stopped.open_course(folder, small_plan, "run-1", None)
    course.begin(stopped.NODES)
    course._reveal()
    assert course.begin(stopped.NODES).report.round == 2
    assert [report.reason for report in course.reports] == [LOST]
    with Ledger(folder / "ledger") as ledger:
        assert [entry.event.round for entry in ledger.events("people")] == [1, 2]


@pytest.mark.parametrize(
    ("budget", "population", "error", "told"),
    [
        ({"unit": "example"}, "people", ParameterError, "protects one example"),
        ({}, "strangers", PopulationError, "strangers"),
    ],
)
def test_a_ledger_that_no_round_can_be_charged_to_is_refused_before_the_first_round(
    small_plan: Plan,
    tmp_path: Path,
    budget: dict[str, Any],
    population: str,
    error: type[CpsgdError],
    told: str,
) -> None:
    """Every round was withheld, one by one, and the run ended as if it had gone well."""
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5, **budget))
        with pytest.raises(error, match=told):
            Course(Terms(plan=small_plan, ledger=ledger, population=population), np.zeros(DIM, np.float32), run="1")


# ---------------------------------------------------------------------- a course by itself


class Momentum:
    """An `apply` with a state."""

    def __init__(self) -> None:
        self.loaded: list[object] = []

    def __call__(self, model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        return model + round * mean

    def state_dict(self) -> dict[str, np.ndarray]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def ended(course: Course[str], mean: np.ndarray | None, **report: Any) -> RoundSession[str]:
    """The session of a round that is over."""
    course._progress.asked = list("abcd")
    found = SimpleNamespace(
        release=lambda: mean, report=RoundReport(course.round, **report), prepared=None, nodes=tuple("abcd")
    )
    return cast("RoundSession[str]", found)


def test_a_round_moves_the_model_or_leaves_it(small_plan: Plan, tmp_path: Path) -> None:
    course: Course[str] = Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run="r", apply=Momentum())
    moved = course.finish(ended(course, np.ones(DIM, np.float32)))
    assert moved is not None
    assert set(moved) == set(course.model) == {1.0}
    withheld = ended(course, None, dropped={"a": "gone", "z": "never asked"}, stages={"a": Stage.MASK})
    assert course.finish(withheld) is None
    assert set(course.model) == {1.0}
    assert course._fell_out == {"a"}
    assert (course._progress.begun, course._progress.revealing, course._progress.asked) == (0, False, [])
    assert (course.round, course.awaited) == (3, 4)
    moved = course.finish(ended(course, np.ones(DIM, np.float32)))
    assert moved is not None
    assert set(moved) == {4.0}  # the third round's mean, three times


def test_a_state_that_was_not_saved_is_not_loaded(small_plan: Plan, tmp_path: Path) -> None:
    for saved in (True, False):
        path, first, second = tmp_path / str(saved), Momentum(), Momentum()
        if saved:
            first.state_dict = lambda: {"v": np.ones(1)}  # type: ignore[method-assign]
        options: dict[str, Any] = {"run": "r", "path": path}
        course: Course[str] = Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), apply=first, **options)
        course.finish(ended(course, None))
        Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), apply=second, **options)
        assert len(second.loaded) == saved


def test_what_rides_on_updates_has_room_in_the_plan(small_plan: Plan) -> None:
    terms, model = Terms(plan=with_protocol(small_plan, dim=DIM + 1)), np.zeros(DIM, np.float32)
    measures, adaptive = {"loss": (0.0, 1.0)}, AdaptiveClip(initial=0.5)
    assert Course(Terms(plan=small_plan), model, run="r").extras is None
    found = Course(terms, model, run="r", measures=measures).extras
    assert found is not None
    assert (dict(found.measures), found.clip) == (measures, None)
    found = Course(terms, model, run="r", adaptive=adaptive).extras
    assert found is not None
    assert (dict(found.measures), found.clip) == ({}, 0.5)
    for options in ({}, {"measures": measures, "adaptive": adaptive}):
        with pytest.raises(ParameterError, match=f"plan with dim={DIM + len(options)}"):
            Course(terms, model, run="r", **options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="single examples"):
        Course(replace(terms, examples=5), model, run="r", measures=measures)
    stated = with_protocol(small_plan, dim=DIM + 1, replace_one_distance=1.0, distance_reason="rows are one-hot")
    with pytest.raises(ParameterError, match="further apart"):
        Course(Terms(plan=stated), model, run="r", measures=measures)
    with pytest.raises(ParameterError, match=f"plan with dim={DIM}"):
        Course(Terms(plan=stated), model, run="r")


# ---------------------------------------------------------------------- who is invited again


NODES = ["north", "south", "west", "east"]


def conduct_after(*reports: RoundReport[str]) -> Conduct[str]:
    conduct: Conduct[str] = Conduct()
    for report in reports:
        conduct.learn(report, NODES)
    return conduct


def chosen(conduct: Conduct[str], round: int, needed: int = 3) -> set[str]:
    return set(conduct.choose(NODES, round, wanted=4, needed=needed))


def test_repeated_faults_exclude_for_good() -> None:
    bad = [RoundReport(i, dropped={"west": "x"}, faults={"west": "x"}) for i in range(1, FAULTS + 1)]
    assert "west" in chosen(conduct_after(*bad[:-1]), FAULTS)
    conduct = conduct_after(*bad)
    assert conduct.excluded == {"west"}
    assert chosen(conduct, 100) == {"north", "south", "east"}
    # Not even if there are too few without it.
    assert chosen(conduct, 100, needed=4) == {"north", "south", "east"}


def test_absence_is_no_fault_and_costs_a_few_rounds() -> None:
    absent = [RoundReport(i, dropped={"west": "no answer in time"}) for i in range(1, ABSENCES + 1)]
    assert "west" in chosen(conduct_after(*absent[:-1]), ABSENCES)
    conduct = conduct_after(*absent)
    assert conduct.excluded == frozenset()
    assert chosen(conduct, ABSENCES + 1) == {"north", "south", "east"}
    # It is called where the round would have too few without it.
    assert chosen(conduct, ABSENCES + 1, needed=4) == set(NODES)
    assert chosen(conduct, ABSENCES + REST) == {"north", "south", "east"}
    assert chosen(conduct, ABSENCES + REST + 1) == set(NODES)


def test_no_more_resting_nodes_are_called_than_are_missing() -> None:
    absent = [RoundReport(i, dropped=dict.fromkeys(NODES[:2], "no answer in time")) for i in range(1, ABSENCES + 1)]
    found = chosen(conduct_after(*absent), ABSENCES + 1)
    assert len(found) == 3
    assert found > {"west", "east"}


def test_who_spoils_one_other_node_per_round_is_found_out_as_well() -> None:
    """One accuser per round proves nothing about it. But not all of them lie."""
    victims = ["north", "south", "north", "east"]
    rounds = [RoundReport(i, dropped={v: "x"}, accused={"west": [v]}) for i, v in enumerate(victims, start=1)]
    assert conduct_after(*rounds[:-1]).excluded == frozenset()
    assert conduct_after(*rounds).excluded == {"west"}
    # One that accuses again and again is one.
    assert conduct_after(*[rounds[0]] * 10).excluded == frozenset()
    # More that may lie together prove less.
    patient: Conduct[str] = Conduct(2)
    for report in rounds:
        patient.learn(report, NODES)
    assert patient.excluded == frozenset()


def test_one_good_round_makes_up_for_absences() -> None:
    absent = [RoundReport(i, dropped={"west": "no answer in time"}) for i in range(1, ABSENCES)]
    conduct = conduct_after(*absent, RoundReport(ABSENCES), *absent)
    assert "west" in chosen(conduct, 2 * ABSENCES)


def test_no_more_than_wanted_are_chosen() -> None:
    many = [str(i) for i in range(100)]
    first, second = (Conduct[str]().choose(many, 1, wanted=20, needed=10) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 20
    assert set(first) != set(second)  # P < 1e-20


@pytest.mark.parametrize(("apart", "rounds"), [(1, {4, 5, 6}), (2, {5, 6}), (3, {6}), (None, set())])
def test_when_a_node_has_its_next_turn(apart: int | None, rounds: set[int]) -> None:
    found = set()
    for round in (4, 5, 6):
        course: Any = SimpleNamespace(_trained={"a": 3}, _terms=SimpleNamespace(apart=apart), round=round)
        assert Course._has_turn(course, "b")
        if Course._has_turn(course, "a"):
            found.add(round)
    assert found == rounds


def prepared_by(waiting: str, nodes: str, fewest: int) -> Any:
    """A prepared round as a course sees it."""
    return SimpleNamespace(waiting=set(waiting), nodes=set(nodes), fewest=fewest, charge=lambda *options: None)


@pytest.mark.parametrize(
    ("waiting", "fewest", "fell_out", "connected", "goes_on"),
    [
        ("abcd", 4, "", "abcd", True),
        ("abcd", 3, "", "abcdx", True),  # as many as the plan has
        ("abc", 3, "", "abcd", False),  # d may come in, and is the only spare node
        ("abc", 3, "", "abc", True),
        ("abc", 2, "d", "abcd", True),  # d has just dropped out, and there is a node to spare
        ("abc", 2, "", "abcd", False),  # d is new
        ("abc", 2, "", "abcf", True),  # f dropped out while the round was prepared
        ("abc", 3, "", "ab", False),
    ],
)
def test_when_a_prepared_round_is_gone_on_with(
    small_plan: Plan, waiting: str, fewest: int, fell_out: str, connected: str, goes_on: bool
) -> None:
    course: Course[str] = Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run=RUN)
    course._prepared = prepared_by(waiting, waiting + "f", fewest)
    course._fell_out = frozenset(fell_out)
    found = course._take_prepared(list(connected))
    assert (found is not None) == goes_on
    assert course._prepared is None


def test_whoever_prepared_a_round_may_have_trained_in_it(small_plan: Plan) -> None:
    """Where the server is stopped after the sum may be known, it counts for each of them."""
    course: Course[str] = Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run=RUN)
    course._prepared = prepared = prepared_by("abcd", "abcd", 3)
    assert course.begin("abcd") is prepared
    assert sorted(course._progress.asked) == ["a", "b", "c", "d"]


def test_a_run_that_goes_on_knows_how_nodes_behaved(small_plan: Plan, tmp_path: Path) -> None:
    terms, model, path = Terms(plan=small_plan), np.zeros(DIM, np.float32), tmp_path / "run"
    course: Course[str] = Course(terms, model, run=RUN, path=path)
    for round in (1, 2):
        report: RoundReport[str] = RoundReport(round, upload_bytes=dict.fromkeys("abc", 1))
        report.dropped["d"] = report.faults["d"] = "it lied"
        course._end_round(report)
    course._save()
    again: Course[str] = Course(terms, model, run="2", path=path)
    assert again.conduct.excluded == {"d"}
    assert again._trained == dict.fromkeys("abc", 2)
