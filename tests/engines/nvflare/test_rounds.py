"""Whole jobs of a controller with executors, in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from cpsgd.engines.nvflare import CpsgdController
from cpsgd.engines.nvflare.controller import REPORTS_FILE
from cpsgd.engines.nvflare.shareables import make_task
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.federation.extras import Extras
from cpsgd.federation.messages import Request
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import Stage, create_identity, public_line

from .local import JOB, Site, adds, failure, run

DIM = 40
VECTORS = np.random.default_rng(3).normal(size=(6, DIM)).astype(np.float32) * 0.1


def controller(**changes: Any) -> CpsgdController:
    """Five clients of whom one may drop out, and one may tell its noise."""
    fields: dict[str, Any] = {
        "num_clients": 5,
        "num_rounds": 3,
        "epsilon": 8.0,
        "delta": 1e-5,
        "plan": {"dropout": 0.2, "bits": 14},
        "pace": {"nodes": 0.2, "stage": 0.4, "grace": 0.0},
    }
    return CpsgdController(**{**fields, **changes})


def sites(folder: Path, count: int = 5, **options: Any) -> list[Site]:
    return [
        Site(folder, f"site-{i}", adds(VECTORS[i], loss=float(i)), **{"limits": {"rounds": 3}, **options})
        for i in range(count)
    ]


def squared_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sum((found - expected) ** 2))


@pytest.mark.parametrize("task", ["train", "cpsgd"])
def test_answers_to_no_task_change_nothing(tmp_path: Path, task: str) -> None:
    server, ours, theirs = controller(), FLContext(), FLContext()
    server.fl_ctx = ours
    server.process_result_of_unknown_task(Client("site-0", "token"), task, "x", make_reply(ReturnCode.OK), theirs)
    assert server.fl_ctx is ours


@pytest.mark.parametrize("secure", [True, False])
def test_the_model_moves_by_the_mean_of_the_updates(tmp_path: Path, secure: bool) -> None:
    server, members = controller(secure=secure), sites(tmp_path, secure=secure)
    after = run(server, members, tmp_path / "server")
    assert [(report.round, report.released, report.survivors) for report in server.reports] == [
        (1, True, 5),
        (2, True, 5),
        (3, True, 5),
    ]
    assert [len(site.trainer.received) for site in members] == [3] * 5
    expected = server.make_plan(DIM).error.total
    # Sums of 40 coordinates' squared noise exceed 9 times their mean with P < 1e-60.
    assert 0.0 < squared_error(after, 3 * VECTORS[:5].mean(axis=0)) < 9 * 3 * expected
    written = json.loads((tmp_path / "server" / REPORTS_FILE).read_text())
    assert [report["survivors"] for report in written] == [5, 5, 5]


def test_a_difference_counts_as_it_is(tmp_path: Path) -> None:
    def difference(model: FLModel) -> FLModel:
        shapes = {name: np.full(array.shape, 0.05, np.float32) for name, array in model.params.items()}
        return FLModel(ParamsType.DIFF, shapes)

    server, members = controller(), [Site(tmp_path, f"site-{i}", difference, limits={"rounds": 3}) for i in range(5)]
    after = run(server, members, tmp_path / "server")
    assert squared_error(after, np.full(DIM, 0.15, np.float32)) < 9 * 3 * server.make_plan(DIM).error.total


def test_the_train_script_sees_what_the_client_has_accepted(tmp_path: Path) -> None:
    members = sites(tmp_path)
    run(controller(), members, tmp_path / "server")
    received = members[0].trainer.received[1]
    assert (received.current_round, received.total_rounds) == (1, 3)
    assert received.meta == {"cpsgd": {"clip-norm": 1.0, "examples": 0, "rate": 1.0, "round": 2}}


def test_only_bytes_and_allowed_metrics_leave(tmp_path: Path) -> None:
    seen: list[Shareable] = []

    def watch(reply: Shareable) -> Shareable:
        seen.append(reply)
        return reply

    members = sites(tmp_path, allow_metrics=["accuracy"])
    for site in members:
        site.trainer.train = adds(VECTORS[0], accuracy=0.5, secret=0.471108154711)
        site.tamper = watch
    server = controller(num_rounds=1)
    run(server, members, tmp_path / "server")
    for reply in seen:
        assert {name for name in reply if not name.startswith("__")} <= {"cpsgd-answer", "cpsgd-metrics"}
        assert "471108154711" not in repr(reply)
    assert server.reports[0].metrics == {"accuracy": 0.5}


def garbage(reply: Shareable) -> Shareable:
    reply["cpsgd-answer"] = np.random.default_rng(0).bytes(len(reply["cpsgd-answer"]))
    return reply


def not_bytes(reply: Shareable) -> Shareable:
    reply["cpsgd-answer"] = {"a": 1}
    return reply


def another_code(reply: Shareable) -> Shareable:
    reply.set_return_code(ReturnCode.TASK_ABORTED)
    return reply


def no_metrics(reply: Shareable) -> Shareable:
    reply["cpsgd-metrics"] = "accuracy"
    return reply


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda reply: None, "no answer in time"),
        (garbage, ""),
        (not_bytes, "does not hold one answer"),
        (no_metrics, "does not hold one answer"),
        (another_code, "TASK_ABORTED"),
        (lambda reply: {"a": 1}, "not a Shareable"),
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_client_that_fails_is_out_and_the_others_go_on(tmp_path: Path, tamper: Any, reason: str, stage: int) -> None:
    server, members = controller(num_rounds=1), sites(tmp_path)
    calls = iter(range(100))
    members[1].tamper = lambda reply: tamper(reply) if next(calls) == stage else reply
    after = run(server, members, tmp_path / "server")
    (report,) = server.reports
    assert (report.released, report.survivors) == (True, 4)
    assert list(report.dropped) == ["site-1"]
    assert reason in report.dropped["site-1"]
    others = VECTORS[[0, 2, 3, 4]].mean(axis=0)
    assert squared_error(after, others) < 9 * server.make_plan(DIM).error.total


def test_tasks_that_are_not_answered_are_taken_back(tmp_path: Path) -> None:
    server, members = controller(num_rounds=1), sites(tmp_path)
    members[1].tamper = lambda reply: None
    run(server, members, tmp_path / "server")
    assert len(server.communicator.cancelled) == 1


def test_too_few_clients_withhold_the_round(tmp_path: Path) -> None:
    server = controller(num_rounds=1)
    after = run(server, sites(tmp_path, 3), tmp_path / "server")
    assert not server.reports[0].released
    assert "3 nodes are connected" in server.reports[0].reason
    assert not after.any()


def test_an_error_of_the_train_script_is_told_without_its_text(tmp_path: Path) -> None:
    def fails(model: FLModel) -> FLModel:
        raise KeyError("patient 471108154711")

    server, members = controller(num_rounds=1), sites(tmp_path)
    members[0].trainer.train, members[0].tamper = fails, lambda reply: reply
    run(server, members, tmp_path / "server")
    assert server.reports[0].released
    assert "TrainFunctionError" in server.reports[0].dropped["site-0"]
    assert "471108154711" not in repr(vars(server.reports[0]))


@pytest.mark.parametrize(
    "train",
    [
        failure,
        lambda model: FLModel(params={"other": np.zeros(DIM, np.float32)}),
        lambda model: FLModel(metrics={"accuracy": 1.0}),
        lambda model: DXO(DataKind.COLLECTION, {"a": 1}).to_shareable(),
        lambda model: None,
    ],
)
def test_a_result_that_is_no_model_puts_the_client_out(tmp_path: Path, train: Any) -> None:
    server, members = controller(num_rounds=1), sites(tmp_path)
    members[0].trainer.train = train
    run(server, members, tmp_path / "server")
    assert server.reports[0].released
    assert list(server.reports[0].dropped) == ["site-0"]


def test_private_metrics_ride_on_the_updates_and_the_norm_adapts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no answer of their own, and their means in the reports; what is left is the mean update."""
    seen: list[Shareable] = []

    def watch(reply: Shareable) -> Shareable:
        seen.append(reply)
        return reply

    members = sites(tmp_path)
    for site in members:
        site.tamper = watch
    server = controller(
        measures={"loss": [0.0, 4.0]},
        adaptive={"initial": 2.0, "rate": 0.5},
        plan={"dropout": 0.2, "bits": 14, "mechanism": "binomial"},
    )
    planned = server.make_plan(DIM)
    assert planned.protocol.dim == DIM + 2
    # With so little noise that the numbers can be checked: nothing private about it.
    mechanism: Any = planned.protocol.mechanism
    quiet = replace(planned.protocol, mechanism=replace(mechanism, trials=1), promise=None)
    precise = replace(planned, protocol=quiet)
    monkeypatch.setattr(server, "make_plan", lambda dim: precise)
    after = run(server, members, tmp_path / "server")

    assert not any("cpsgd-metrics" in reply for reply in seen)
    assert [report.metrics for report in server.reports] == [{}] * 3
    written = json.loads((tmp_path / "server" / REPORTS_FILE).read_text())
    measures = [report["measures"] for report in written]
    # Half a unit of noise, and of rounding, of each of five clients; over the weight of what rides along.
    spread = mechanism.scale * np.sqrt(0.5 / 5) / 0.1
    for found in measures:
        # Eight standard deviations: P < 1e-13 for each of the six.
        assert abs(found["loss"] - 2.0) < 2.0 * 8 * spread < 1.0
        assert abs(found["cpsgd-unclipped"] - 1.0) < 0.5 * 8 * spread < 0.25
    norms = [found["cpsgd-clip-norm"] for found in measures]
    assert norms[0] == 2.0
    assert norms[2] < norms[1] < norms[0]
    moved = 3 * VECTORS[:5].mean(axis=0)
    assert squared_error(after, moved) < 9 * 3 * DIM * (2.0 * 0.1 * spread) ** 2 < squared_error(moved, 0.0 * moved)


def test_a_job_goes_on_with_the_norm_it_had(tmp_path: Path) -> None:
    options = {"adaptive": {"initial": 10.0}, "checkpoint": str(tmp_path / "checkpoint")}

    def stop(model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        first.abort_signal.trigger("stop")
        return model + mean

    first, second, members = controller(apply=stop, **options), controller(**options), sites(tmp_path)
    for server, job in ((first, "first"), (second, "second")):
        for site in members:
            site.begin(job)
        run(server, members, tmp_path / "server", job)
    assert [len(server.reports) for server in (first, second)] == [1, 3]
    before, after, _ = (report.measures for report in second.reports)
    unclipped = min(max(before["cpsgd-unclipped"], 0.0), 1.0)
    assert after["cpsgd-clip-norm"] == pytest.approx(10.0 * np.exp(-0.2 * (unclipped - 0.5)))


def test_what_cannot_be_measured_is_refused_when_the_job_is_made() -> None:
    for wrong in ({"measures": {"loss": [1.0, 0.0]}}, {"adaptive": {"initial": 0.0}}):
        with pytest.raises(ParameterError):
            controller(**wrong)


def test_nothing_rides_on_sums_of_single_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the server nor, whatever the server says, for a client."""
    server = controller(examples=2, measures={"loss": [0.0, 1.0]})
    monkeypatch.setattr(server, "make_plan", controller().make_plan)
    with pytest.raises(ParameterError, match="single examples are protected"):
        run(server, sites(tmp_path), tmp_path / "server")
    site = Site(tmp_path, "alone", adds(VECTORS[0]), limits={"examples": 2}, secure=False)
    planned = controller(secure=False).make_plan(DIM)
    request = Request(Stage.UPLOAD, 1, 3, planned.surviving, planned.protocol.to_json(), examples=2).to_bytes()
    sent = FLModel(params={"weight": np.zeros(DIM - 1, np.float32)})
    for extras, reason in ((Extras(clip=1.0), "single examples"), (None, "coordinates")):
        reply = site.answer(make_task(request, sent, extras))
        assert reason in reply["cpsgd-reason"]
        site.begin(JOB)
    assert not site.trainer.received


def test_what_is_to_be_measured_must_be_readable(tmp_path: Path) -> None:
    site = Site(tmp_path, "alone", adds(VECTORS[0]), secure=False)
    planned = controller(secure=False).make_plan(DIM)
    request = Request(Stage.UPLOAD, 1, 3, planned.surviving, planned.protocol.to_json()).to_bytes()
    task = make_task(request, FLModel(params={"weight": np.zeros(DIM, np.float32)}))
    task["cpsgd-extras"] = "{"
    assert "WireError" in site.answer(task)["cpsgd-reason"]
    assert not site.trainer.received


def test_the_mean_is_applied_by_a_component(tmp_path: Path) -> None:
    rounds: list[int] = []

    def apply(model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        rounds.append(round)
        return np.full(DIM, 7.0)

    assert (run(controller(apply=apply), sites(tmp_path), tmp_path / "server") == 7.0).all()
    assert rounds == [1, 2, 3]
    with pytest.raises(ParameterError, match="Expected apply to return 40 numbers"):
        run(controller(apply=lambda *values: np.zeros(3)), sites(tmp_path / "again"), tmp_path / "server")


def test_one_client_may_tell_its_noise_unless_the_plan_says_otherwise() -> None:
    assert controller().make_plan(DIM).colluding == 1
    assert controller(plan={"dropout": 0.2, "bits": 14, "colluding": 2}).make_plan(DIM).colluding == 2


def test_a_plan_that_cannot_be_kept_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError):
        run(controller(num_clients=3, plan={"dropout": 0.4, "bits": 14}), sites(tmp_path), tmp_path / "server")


def test_rounds_are_charged_to_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger(path) as ledger:
        ledger.create(Budget(population="sites", epsilon=8.0, delta=1e-5))
    for job, released in (("first", 3), ("second", 0)):
        server = controller(ledger=str(path), population="sites")
        run(server, sites(tmp_path / job), tmp_path / "server", job)
        assert sum(report.released for report in server.reports) == released


def test_a_job_goes_on_where_another_was_stopped(tmp_path: Path) -> None:
    counted: list[int] = []

    def apply(model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        counted.append(round)
        if counted == [1, 2]:
            server.abort_signal.trigger(True)
        return model + 1.0

    for job in ("first", "second", "third"):
        server = controller(apply=apply, checkpoint=str(tmp_path / "checkpoint"))
        after = run(server, sites(tmp_path / job), tmp_path / "server", job)
        assert (after == (2.0 if job == "first" else 3.0)).all()
    assert counted == [1, 2, 3]
    assert [report.round for report in server.reports] == [1, 2, 3]


@pytest.mark.parametrize("lost", [0, 1])
def test_rounds_with_identities_and_a_roster(tmp_path: Path, lost: int) -> None:
    members, roster = sites(tmp_path), tmp_path / "roster"
    lines = [public_line(create_identity(site.folder / "identity"), site.name) for site in members]
    roster.write_text("\n".join(lines) + "\n")
    for site in members:
        files = {"cpsgd-roster": roster, "cpsgd-identity": site.folder / "identity", "cpsgd-memory": site.folder / "m"}
        (site.folder / "local" / "cpsgd.json").write_text(json.dumps({name: str(path) for name, path in files.items()}))
    for site in members[:lost]:
        site.tamper = lambda reply: None
    server = controller(num_rounds=2, roster=str(roster))
    run(server, members, tmp_path / "server")
    assert [(report.released, report.survivors) for report in server.reports] == [(True, 5 - lost)] * 2


def test_a_ledger_of_another_unit_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5, unit="example"))
    members = sites(tmp_path)
    with pytest.raises(ParameterError, match="protects one example"):
        run(controller(ledger=str(tmp_path / "budget"), population="people"), members, tmp_path / "server")
    assert not any(site.trainer.received for site in members)
