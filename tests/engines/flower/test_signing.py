"""Signed rounds over Flower: who is in them, and who is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from cpsgd import Plan
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from cpsgd.errors import InvitationError, ParameterError
from cpsgd.secagg import create_identity, public_line
from cpsgd.secagg.keys import public_bytes

from .local import RUN, LocalGrid, Node, adds, model, request_of

DIM, CLIENTS = 40, 4
VECTORS = np.random.default_rng(5).normal(size=(CLIENTS + 1, DIM)).astype(np.float32) * 0.1


class Silos:
    """Identities of four silos and of a stranger, with a roster of the four, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = [create_identity(folder / f"silo-{i}") for i in range(CLIENTS + 1)]
        self.public = [public_bytes(key) for key in self.keys]
        self.roster = frozenset(self.public[:CLIENTS])
        self.write_roster("roster", range(CLIENTS))

    def write_roster(self, name: str, members: Any) -> None:
        lines = [public_line(self.keys[i], f"silo-{i}") for i in members]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def config(self, silo: int, roster: str = "roster") -> dict[str, Any]:
        return {
            "cpsgd-identity": str(self.folder / f"silo-{silo}"),
            "cpsgd-roster": str(self.folder / roster),
            "cpsgd-memory": str(self.folder / f"memory-{silo}"),
        }

    def context(self, silo: int, roster: str = "roster", run: int = RUN) -> Context:
        return Context(run, 100 + silo, self.config(silo, roster), RecordDict(), {})

    def node(self, silo: int, roster: str = "roster", **options: Any) -> Node:
        node = Node(100 + silo, cpsgd_mod(**options), adds(VECTORS[silo]))
        node.context = self.context(silo, roster)
        return node


@pytest.fixture
def silos(tmp_path: Path) -> Silos:
    return Silos(tmp_path)


def run(strategy: CpsgdStrategy, members: list[Node], rounds: int = 1) -> tuple[np.ndarray, LocalGrid]:
    grid = LocalGrid(members)
    result = strategy.start(grid, model(DIM), num_rounds=rounds, timeout=1.0)
    return np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()]), grid


# ---------------------------------------------------------------------- honest rounds


def test_signed_rounds_give_the_mean_and_each_prepares_the_next(small_plan: Plan, silos: Silos) -> None:
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    # Numbers go to nodes at random, so that the roster's order cannot matter.
    after, grid = run(strategy, [silos.node(i) for i in (2, 0, 3, 1)], rounds=3)
    assert [(report.survivors, report.dropped) for report in strategy.reports] == [(4, {})] * 3
    # 40 coordinates: nine times the expected squared error has a probability below 1e-60.
    assert 0.0 < np.sum((after - 3 * VECTORS[:4].mean(axis=0)) ** 2) < 9 * 3 * small_plan.error.total
    asked = [request_of(m).stage for m in grid.sent if m.metadata.dst_node_id == 100]
    assert asked == ["advertise", "share", *["mask", "confirm", "unmask"] * 3]


# ---------------------------------------------------------------------- who is not one of them


def test_a_node_that_is_not_on_the_roster_is_dropped(small_plan: Plan, silos: Silos) -> None:
    silos.write_roster("with-stranger", [0, 1, 2, 4])
    members = [*(silos.node(i) for i in range(3)), silos.node(4, "with-stranger")]
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, members)
    (report,) = strategy.reports
    assert (report.released, report.survivors) == (True, 3)
    assert list(report.dropped) == [104]
    assert "SignatureError: Client" in report.dropped[104]


def test_a_client_whose_roster_differs_is_dropped_although_it_is_on_both(small_plan: Plan, silos: Silos) -> None:
    silos.write_roster("other", [0, 1, 3, 4])
    members = [*(silos.node(i) for i in range(3)), silos.node(3, "other")]
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, members)
    assert list(strategy.reports[0].dropped) == [103]
    assert "roster is not the same" in strategy.reports[0].dropped[103]


def test_one_identity_on_two_nodes_counts_once(small_plan: Plan, silos: Silos) -> None:
    twin = silos.node(2)
    twin.number = 103
    twin.context.node_config["cpsgd-memory"] = str(silos.folder / "memory of the twin")
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, [*(silos.node(i) for i in range(3)), twin])
    (report,) = strategy.reports
    assert (report.released, report.survivors, len(report.dropped)) == (True, 3, 1)
    assert "repeats a public key" in next(iter(report.dropped.values()))


def test_both_sides_or_neither(small_plan: Plan, silos: Silos) -> None:
    unsigned = CpsgdStrategy(small_plan)
    run(unsigned, [silos.node(i) for i in range(CLIENTS)])
    assert not unsigned.reports[0].released
    assert all("without signatures" in reason for reason in unsigned.reports[0].dropped.values())
    signed = CpsgdStrategy(small_plan, roster=silos.roster)
    run(signed, [Node(100 + i, cpsgd_mod(), adds(VECTORS[i])) for i in range(CLIENTS)])
    assert not signed.reports[0].released
    assert all(InvitationError.__name__ in reason for reason in signed.reports[0].dropped.values())


def test_the_strategy_takes_a_roster_of_the_plans_clients_only(small_plan: Plan, silos: Silos) -> None:
    with pytest.raises(ParameterError, match="3 are"):
        CpsgdStrategy(small_plan, roster=silos.public[:3])
    with pytest.raises(ParameterError, match="5 are"):
        CpsgdStrategy(small_plan, roster=silos.public)
    with pytest.raises(ParameterError, match="secure=False"):
        CpsgdStrategy(small_plan, roster=silos.roster, secure=False)
    with pytest.raises(ParameterError, match="32 bytes"):
        CpsgdStrategy(small_plan, roster=[b"short"] * 4)
