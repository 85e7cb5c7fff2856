"""Noise that is correlated over rounds, with Flower: seeds that stay, lineages handed on, disjoint examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from cpsgd import Plan
from cpsgd.correlated.batons import Place
from cpsgd.correlated.handover import Handover, HandoverStep
from cpsgd.correlated.seeds import SeedFile
from cpsgd.engines.flower import CpsgdStrategy, accepted_round, cpsgd_mod
from cpsgd.engines.flower.records import read_request
from cpsgd.errors import ParameterError
from tests.federation.correlated import correlated_plan

from .local import RUN, LocalGrid, Node, adds, model

DIM = 40
ROUNDS = 3
Seeds = tuple[bytes | None, ...]


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Seeds]]:
    """Rounds and the seeds that clients use in them."""
    found: list[tuple[int, Seeds]] = []
    draw = SeedFile.draw

    def recorded(self: SeedFile, place: Place, **options: Any) -> Seeds:
        found.append((place.round, draw(self, place, **options)))
        return found[-1][1]

    monkeypatch.setattr(SeedFile, "draw", recorded)
    return found


def nodes(folder: Path | None, count: int, train: Any = None, **limits: Any) -> list[Node]:
    members = [Node(100 + i, cpsgd_mod(**limits), train or adds(np.zeros(DIM, np.float32))) for i in range(count)]
    for member in members:
        if folder is not None:
            member.context.node_config["cpsgd-memory"] = str(folder / f"memory-{member.number}")
    return members


def shares(seen: list[tuple[int, int, int]]) -> Any:
    """A train function that notes which of the silo's nine examples a round has: three of them, each once."""

    def train(message: Message, context: Context) -> Message:
        round = accepted_round(message)
        examples = range(3 * (round - 1), min(3 * round, 9))
        seen.extend((int(context.node_config["partition-id"]), round, example) for example in examples)
        sent = message.content.array_records["arrays"]
        arrays = ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in sent.items()})
        return Message(RecordDict({"sum": arrays}), reply_to=message)

    return train


def start(strategy: CpsgdStrategy, grid: LocalGrid, rounds: int) -> None:
    strategy.start(grid, model(DIM), num_rounds=rounds, timeout=5.0)


def test_silos_that_stay_keep_their_seeds_and_take_other_examples_in_every_round(
    small_plan: Plan, drawn: list[tuple[int, Seeds]], tmp_path: Path
) -> None:
    plan = correlated_plan(small_plan, rounds=ROUNDS, bands=2)
    seen: list[tuple[int, int, int]] = []
    members = nodes(tmp_path, 4, shares(seen), examples=3, disjoint=True)
    strategy, grid = CpsgdStrategy(plan, examples=3), LocalGrid(members)
    start(strategy, grid, ROUNDS)
    assert [report.released for report in strategy.reports] == [True] * ROUNDS
    for round in range(1, ROUNDS + 1):
        used = [sum(seed is not None for seed in seeds) for at, seeds in drawn if at == round]
        assert used == [min(round, 2)] * 4
    assert sorted((silo, example) for silo, _, example in seen) == [(100 + i, e) for i in range(4) for e in range(9)]
    assert not any(Handover.begins(read_request(message)) for message in grid.sent)


def test_the_round_is_the_one_that_was_accepted_and_not_what_the_server_writes_beside_it(
    small_plan: Plan, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, int]] = []

    class Lying(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            changed = list(messages)
            for message in changed:
                if "config" in message.content:
                    message.content["config"] = ConfigRecord({"server-round": 1})
                    message.content["cpsgd"]["round"] = 1
            return super().push_messages(changed)

    strategy = CpsgdStrategy(correlated_plan(small_plan, rounds=2, bands=2), examples=3)
    start(strategy, Lying(nodes(tmp_path, 4, shares(seen), examples=3, disjoint=True)), 2)
    assert [report.released for report in strategy.reports] == [True] * 2
    assert {round for _, round, _ in seen} == {1, 2}


def test_accepted_rounds_are_for_functions_under_the_mod() -> None:
    for content in ({}, {"cpsgd": ConfigRecord({"round": "1"})}):
        with pytest.raises(ParameterError, match="needs a train function"):
            accepted_round(Message(RecordDict(content), dst_node_id=1, message_type="train"))


def test_without_a_memory_or_a_share_for_each_round_silos_refuse(small_plan: Plan, tmp_path: Path) -> None:
    plan = correlated_plan(small_plan, rounds=2, bands=2)
    for folder, disjoint, said in ((None, True, "cpsgd-memory"), (tmp_path, False, "disjoint=True")):
        members = nodes(folder, 4, examples=3, disjoint=disjoint)
        strategy = CpsgdStrategy(plan, examples=3)
        start(strategy, LocalGrid(members), 1)
        assert not strategy.reports[0].released
        assert all(said in reason for reason in strategy.reports[0].dropped.values())
        assert [node.trained for node in members] == [0] * 4


class Joining(LocalGrid):
    """Five nodes, and after the first round ten."""

    def get_node_ids(self) -> list[int]:
        everybody = sorted(self.nodes)
        return everybody if any(self.nodes[number].trained for number in everybody) else everybody[:5]


def passing(small_plan: Plan) -> Plan:
    return correlated_plan(small_plan, clients=5, surviving=4, bands=2, untrusted_holders=1, rounds=2)


def test_nodes_that_leave_hand_their_seeds_to_those_that_come(
    small_plan: Plan, drawn: list[tuple[int, Seeds]], tmp_path: Path
) -> None:
    strategy, grid = (
        CpsgdStrategy(passing(small_plan), checkpoint=tmp_path / "checkpoint"),
        Joining(nodes(tmp_path, 10)),
    )
    start(strategy, grid, 2)
    first, second = strategy.reports
    assert first.released
    assert second.released
    assert {seeds[0] for round, seeds in drawn if round == 1} == {seeds[1] for round, seeds in drawn if round == 2}
    assert [node.trained for node in grid.nodes.values()] == [1] * 10
    asked = [read_request(message) for message in grid.sent]
    steps = [Handover.from_bytes(data, str(RUN)).step for data in asked if Handover.begins(data)]
    assert steps == [HandoverStep.KEY] * 5 + [HandoverStep.GIVE] * 5 + [HandoverStep.TAKE] * 5
    assert not first.relay_bytes
    assert second.relay_bytes.keys() == set(range(100, 110))
    # Who only hands on is in no round for it, also to a server that goes on from the checkpoint.
    assert second.upload_bytes.keys() == set(range(105, 110))
    again = CpsgdStrategy(passing(small_plan), checkpoint=tmp_path / "checkpoint")
    start(again, grid, 2)
    assert [vars(report) for report in again.reports] == [vars(report) for report in strategy.reports]


def test_a_node_that_hands_nothing_on_costs_its_lineage_and_not_the_round(
    small_plan: Plan, drawn: list[tuple[int, Seeds]], tmp_path: Path
) -> None:
    members = nodes(tmp_path, 10)
    asked = members[0].answer

    def silent(message: Message) -> Message | None:
        return None if Handover.begins(read_request(message)) else asked(message)

    members[0].answer = silent  # type: ignore[method-assign]
    strategy = CpsgdStrategy(passing(small_plan), grace=0.2)
    start(strategy, Joining(members), 2)
    assert [report.released for report in strategy.reports] == [True, True]
    assert sorted(seeds[1] is None for round, seeds in drawn if round == 2) == [False] * 4 + [True]
    assert not strategy.reports[1].dropped


def test_silos_that_stay_send_no_more_bytes_than_with_independent_noise(small_plan: Plan, tmp_path: Path) -> None:
    sent = []
    for bands in (1, 8):
        folder = tmp_path / str(bands)
        folder.mkdir()
        strategy = CpsgdStrategy(correlated_plan(small_plan, rounds=8, bands=bands, separation=1))
        start(strategy, LocalGrid(nodes(folder, 4)), 2)
        sent.append([sorted(report.upload_bytes.values()) for report in strategy.reports])
    assert sent[0] == sent[1]
