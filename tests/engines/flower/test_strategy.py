from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from cpsgd import Plan, plan
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from cpsgd.engines.flower.records import RECORD, UPLOAD
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.federation.extras import AdaptiveClip
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import keys
from tests.federation.local import with_run

from .local import LocalGrid, Node, adds, model

DIM = 40
VECTORS = np.random.default_rng(3).normal(size=(6, DIM)).astype(np.float32) * 0.1


def nodes(count: int = 4, **options: Any) -> list[Node]:
    return [Node(100 + i, cpsgd_mod(**options), adds(VECTORS[i], loss=float(i))) for i in range(count)]


def run(strategy: CpsgdStrategy, members: Sequence[Node], rounds: int = 1) -> tuple[np.ndarray, LocalGrid]:
    grid = LocalGrid(members)
    result = strategy.start(grid, model(DIM), num_rounds=rounds, timeout=1.0)
    return np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()]), grid


def close(found: np.ndarray, expected: np.ndarray, squared_error: float) -> bool:
    """Whether the error is what noise makes it: sums of 40 coordinates exceed 9 times their mean with P < 1e-60."""
    return bool(0.0 < np.sum((found - expected) ** 2) < 9 * squared_error)


@pytest.mark.parametrize("secure", [True, False])
def test_the_model_moves_by_the_mean_of_the_updates(small_plan: Plan, secure: bool) -> None:
    strategy = CpsgdStrategy(small_plan, secure=secure)
    members = nodes(secure=secure)
    after, _ = run(strategy, members, rounds=3)
    assert [report.released for report in strategy.reports] == [True] * 3
    assert [report.survivors for report in strategy.reports] == [4] * 3
    assert [node.trained for node in members] == [3] * 4
    assert close(after, 3 * VECTORS[:4].mean(axis=0), 3 * small_plan.error.total)


def test_only_one_array_and_allowed_metrics_leave(small_plan: Plan) -> None:
    seen: list[Message] = []

    def watch(reply: Message) -> Message:
        seen.append(reply)
        return reply

    members = nodes(allow_metrics=["loss"])
    for node in members:
        node.tamper = watch
    strategy = CpsgdStrategy(small_plan)
    result = strategy.start(LocalGrid(members), model(DIM), num_rounds=1, timeout=1.0)
    for reply in seen:
        assert {*reply.content} <= {RECORD, "metrics"}
        assert list(reply.content[RECORD]) == [UPLOAD]
        assert set(reply.content.metric_records.get("metrics", {})) <= {"loss"}
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx(1.5)
    assert "num-examples" not in metrics
    assert metrics["cpsgd-survivors"] == 4


def at(stage: int, damage: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    """Damages the reply of one stage."""
    calls = iter(range(100))
    return lambda reply: damage(reply) if next(calls) == stage else reply


def garbage(reply: Message) -> Message:
    noise = np.random.default_rng(0).bytes(200)
    upload = Array(dtype="uint8", shape=(200,), stype="cpsgd.bytes", data=noise)
    return Message(RecordDict({RECORD: ArrayRecord({UPLOAD: upload})}), reply_to=reply)


def strange(reply: Message) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord({"x": Array(np.ones(3))})}), reply_to=reply)


def huge(reply: Message) -> Message:
    upload = Array(dtype="uint8", shape=(10**6,), stype="cpsgd.bytes", data=bytes(10**6))
    return Message(RecordDict({RECORD: ArrayRecord({UPLOAD: upload})}), reply_to=reply)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("damage", [garbage, strange, huge, lambda reply: None])
def test_one_bad_node_does_not_stop_the_others(small_plan: Plan, stage: int, damage: Any) -> None:
    members = nodes()
    members[2].tamper = at(stage, damage)
    strategy = CpsgdStrategy(small_plan)
    after, _ = run(strategy, members)
    (report,) = strategy.reports
    assert report.released
    assert list(report.dropped) == [members[2].number]
    # Who has uploaded is in the sum, whatever it says afterwards.
    kept = [0, 1, 2, 3] if stage == 3 else [0, 1, 3]
    assert report.survivors == len(kept)
    assert close(after, VECTORS[kept].mean(axis=0), small_plan.error.total)


def test_too_few_nodes(small_plan: Plan) -> None:
    strategy = CpsgdStrategy(small_plan, node_timeout=0.1)
    after, grid = run(strategy, nodes(2))
    assert not strategy.reports[0].released
    assert "2 nodes" in strategy.reports[0].reason
    assert not grid.sent
    assert not after.any()


def test_the_result_of_withheld_rounds_is_the_first_model(small_plan: Plan) -> None:
    result = CpsgdStrategy(small_plan, node_timeout=0.1).start(
        LocalGrid(nodes(2)), model(DIM), num_rounds=2, timeout=1.0
    )
    assert result.arrays == model(DIM)


def test_no_more_nodes_than_planned_and_three_are_enough(small_plan: Plan) -> None:
    strategy = CpsgdStrategy(small_plan, node_timeout=0.1)
    run(strategy, nodes(6))
    assert strategy.reports[0].survivors == 4
    strategy = CpsgdStrategy(small_plan, node_timeout=0.1)
    run(strategy, nodes(3))
    assert strategy.reports[0].survivors == 3
    assert strategy.reports[0].released


def test_a_train_function_may_fail_and_its_text_stays_home(small_plan: Plan) -> None:
    members = nodes()

    def fails(message: Message, context: Any) -> Message:
        raise RuntimeError("patient 4711 has no label")

    members[1].train = fails
    strategy = CpsgdStrategy(small_plan)
    run(strategy, members)
    (report,) = strategy.reports
    assert report.released
    assert report.survivors == 3
    assert "RuntimeError" in report.dropped[101]
    assert "4711" not in report.dropped[101]


def test_a_ledger_of_another_unit_is_refused_before_the_first_round(small_plan: Plan, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5, unit="example"))
        members = nodes()
        with pytest.raises(ParameterError, match="protects one example"):
            run(CpsgdStrategy(small_plan, ledger=ledger, population="people"), members)
        assert [node.trained for node in members] == [0] * 4


def test_the_ledger_is_charged_before_and_the_run_ends_when_it_is_spent(small_plan: Plan, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=0.75 * small_plan.guarantee.epsilon, delta=1e-5))
        strategy = CpsgdStrategy(small_plan, ledger=ledger, population="people")
        charged = []

        def apply(before: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
            entries = ledger.events("people")
            charged.append((len(entries), entries[-1].released))
            return before + mean

        strategy = CpsgdStrategy(small_plan, ledger=ledger, population="people", apply=apply)
        members = nodes()
        members[0].tamper = at(2, lambda reply: None)
        run(strategy, members, rounds=3)
        released = [report.released for report in strategy.reports]
        assert released[0]
        assert not released[2]
        assert "budget" in strategy.reports[2].reason
        assert charged == [(i + 1, True) for i in range(sum(released))]
        assert ledger.events("people")[0].released_survivors == 3
        assert [node.trained for node in members] == [sum(released)] * 4
        ledger.verify()


def test_bad_settings(small_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="weighted averages are refused"):
        CpsgdStrategy(small_plan, weighted_by_key="num-examples")
    with pytest.raises(ParameterError, match="together"):
        CpsgdStrategy(small_plan, population="people")
    with pytest.raises(ParameterError, match="with a modulus, got none"):
        CpsgdStrategy(replace(small_plan, protocol=replace(small_plan.protocol, modulus=None)))
    with pytest.raises(ParameterError, match="participation"):
        CpsgdStrategy(plan(4, DIM, 8.0, 1e-5, rounds=3, secure=True, participation="once", colluding=1, bits=14))
    with pytest.raises(InfeasibleError, match="may drop out"):
        CpsgdStrategy(with_run(small_plan, surviving=2))
    short = CpsgdStrategy(small_plan, apply=lambda model, mean, round: mean[:3])
    with pytest.raises(ParameterError, match="apply to return 40"):
        short.start(LocalGrid(nodes()), model(DIM), num_rounds=1, timeout=1.0)
    strategy = CpsgdStrategy(small_plan)
    with pytest.raises(ParameterError, match="plan with rounds=4"):
        strategy.start(LocalGrid([]), model(DIM), num_rounds=4)
    with pytest.raises(ParameterError, match="dim=41"):
        strategy.start(LocalGrid([]), model(DIM + 1), num_rounds=1)
    with pytest.raises(ParameterError, match="int64"):
        strategy.start(LocalGrid([]), ArrayRecord({"n": Array(np.arange(DIM))}), num_rounds=1)
    with pytest.raises(ParameterError, match="outside the guarantee"):
        strategy.start(LocalGrid([]), model(DIM), num_rounds=1, evaluate_config=ConfigRecord())


def test_an_unreadable_reply_costs_only_its_sender(small_plan: Plan) -> None:
    members = nodes()

    class Broken(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            found = list(super().pull_messages(message_ids))
            if found and found[0].metadata.src_node_id == members[0].number:
                raise KeyError("no such object")
            return found

    strategy = CpsgdStrategy(small_plan)
    strategy.start(Broken(members), model(DIM), num_rounds=1, timeout=1.0)
    assert strategy.reports[0].released
    assert strategy.reports[0].dropped == {100: "its reply cannot be read"}


def test_a_run_goes_on_from_its_checkpoint(small_plan: Plan, tmp_path: Path) -> None:
    members, seen = nodes(), []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(round)
        return MetricRecord({"round": round})

    def start(rounds: int) -> tuple[CpsgdStrategy, Any]:
        strategy = CpsgdStrategy(small_plan, checkpoint=tmp_path / "checkpoint")
        grid = LocalGrid(members)
        for node in members:  # another run, for which Flower has no state
            node.context.state.clear()
        return strategy, strategy.start(grid, model(DIM), num_rounds=rounds, timeout=1.0, evaluate_fn=evaluate)

    start(1)
    strategy, result = start(3)
    assert seen == [0, 1, 1, 2, 3]
    assert [(report.round, report.released) for report in strategy.reports] == [(1, True), (2, True), (3, True)]
    assert [node.trained for node in members] == [3] * 4
    assert list(result.train_metrics_clientapp) == [2, 3]
    assert list(result.evaluate_metrics_serverapp) == [1, 2, 3]
    after = np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()])
    assert close(after, 3 * VECTORS[:4].mean(axis=0), 3 * small_plan.error.total)
    # Nothing is left to do, and the model is there.
    _, result = start(3)
    np.testing.assert_array_equal(
        np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()]), after
    )


def test_a_node_that_deals_garbage_is_not_invited_again(small_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the others see it, and Flower carries what they say in its own words."""
    genuine, members = keys.seal, nodes()
    honest = members[2].answer

    def answer(message: Message) -> Message | None:
        with monkeypatch.context() as patch:
            patch.setattr(keys, "seal", lambda *parts: bytes(len(genuine(*parts))))
            return honest(message)

    monkeypatch.setattr(members[2], "answer", answer)
    strategy = CpsgdStrategy(small_plan)
    run(strategy, members, rounds=3)
    assert [list(report.faults) for report in strategy.reports] == [[102], [], []]
    assert [report.released for report in strategy.reports] == [False, True, True]


def test_a_silent_node_costs_the_grace_period_and_not_the_deadline(small_plan: Plan) -> None:
    members = nodes()
    members[2].tamper = lambda reply: None
    strategy = CpsgdStrategy(small_plan, grace=0.3)
    began = time.monotonic()
    strategy.start(LocalGrid(members), model(DIM), num_rounds=1, timeout=600.0)
    assert time.monotonic() - began < 60.0
    assert strategy.reports[0].released
    assert strategy.reports[0].dropped == {102: "no answer in time"}


def test_private_metrics_ride_on_the_updates(small_plan: Plan) -> None:
    """They are in no record of their own, and their means in the figures of the round."""
    wider = replace(small_plan, protocol=replace(small_plan.protocol, dim=DIM + 2))
    seen: list[Message] = []

    def watch(reply: Message) -> Message:
        seen.append(reply)
        return reply

    members = nodes()
    for node in members:
        node.tamper = watch
    strategy = CpsgdStrategy(wider, measures={"loss": (0.0, 3.0)}, adaptive=AdaptiveClip(initial=0.5))
    result = strategy.start(LocalGrid(members), model(DIM), num_rounds=1, timeout=1.0)
    assert strategy.reports[0].released
    assert {"loss", "cpsgd-clip-norm", "cpsgd-unclipped"} <= set(result.train_metrics_clientapp[1])
    assert not any(reply.content.metric_records for reply in seen)
    with pytest.raises(ParameterError, match="plan with dim=41"):
        CpsgdStrategy(small_plan, measures={"loss": (0.0, 3.0)}).start(LocalGrid(nodes()), model(DIM), num_rounds=1)
