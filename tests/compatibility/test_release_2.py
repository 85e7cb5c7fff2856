"""What release 0.2.0 wrote and computed: read as it was, and the same numbers or better ones. See tests/data/v0_2_0."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpsgd
from cpsgd import errors
from cpsgd.cli.app import app
from cpsgd.ledger import Ledger
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy import guarantee_over_rounds

from .recorded import better, same
from .test_commands import keys_of

DATA = Path(__file__).resolve().parents[1] / "data" / "v0_2_0"
PROVE: dict[str, Callable[..., cpsgd.Guarantee]] = {
    "guarantee": cpsgd.guarantee,
    "guarantee_over_rounds": guarantee_over_rounds,
}


def read(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", read("protocols.json"), ids=lambda row: row["name"])
def test_protocols_messages_and_states_mean_the_same(row: dict[str, Any]) -> None:
    protocol = cpsgd.Protocol.from_json(row["json"])
    assert json.loads(protocol.to_json()) == json.loads(row["json"])
    assert (protocol.fingerprint.hex(), protocol.name) == (row["fingerprint"], row["kind"])
    assert protocol.message_bytes == row["message_bytes"]
    assert len(protocol.encode(np.zeros(protocol.dim), 5)) <= protocol.longest_message_bytes
    fresh = cpsgd.Aggregator(protocol, 5)
    for message in row["messages"]:
        fresh.add(bytes.fromhex(message))
    assert fresh.save().hex() == row["state"]
    restored = cpsgd.Aggregator.restore(protocol, bytes.fromhex(row["state"]))
    for aggregator in (fresh, restored):
        assert aggregator.sums.tobytes().hex() == row["sums"]
        if "mean" in row:
            assert aggregator.mean().tobytes().hex() == row["mean"]
        else:
            with pytest.raises(errors.GuaranteeError):
                aggregator.mean()


def arguments_of(row: dict[str, Any]) -> dict[str, Any]:
    return dict(row["arguments"])


def without_places(citation: str) -> str:
    """Returns a citation without the pages of this repository, which have moved."""
    return re.sub(r"docs/[\w/-]+\.md(, section [\d.]+)?", "docs", citation)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("mechanism", sorted({row["mechanism"] for row in read("epsilon.json")}))
def test_epsilon_is_the_same_number_or_a_smaller_one(mechanism: str, half: int) -> None:
    rows = [row for row in read("epsilon.json") if row["mechanism"] == mechanism]
    # Everything was asked at two δ.
    deltas = sorted({row["arguments"]["delta"] for row in rows})
    for row in rows:
        if deltas.index(row["arguments"]["delta"]) % 2 != half:
            continue
        protocol = cpsgd.Protocol.from_dict(row["protocol"])
        if "error" in row:
            with contextlib.suppress(getattr(errors, row["error"])):
                assert 0.0 < PROVE[row["call"]](protocol, **arguments_of(row)).epsilon < math.inf, row
            continue
        found = PROVE[row["call"]](protocol, **arguments_of(row))
        assert set(row["keys"]) <= found.to_dict().keys()
        assert found.noise_clients == row["noise_clients"]
        assert found.tail < found.delta
        if not better(found.epsilon, row["epsilon"]):
            assert same(found.epsilon, row["epsilon"]), (found.epsilon, row)
            assert found.method == row["method"], row
            assert without_places(found.citation) == without_places(row["citation"]), row


PLANS = read("plans.json")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.thorough] if row["seconds"] > 2.2 else []) for row in PLANS],
    ids=lambda row: "-".join(map(str, row["arguments"].values())),
)
def test_a_plan_is_no_worse(row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(getattr(errors, row["error"])):
            cpsgd.plan(**row["arguments"])
        return
    found = cpsgd.plan(**row["arguments"])
    assert set(row["keys"]) <= found.to_dict().keys()
    assert found.bits <= row["bits"]
    assert found.guarantee.epsilon <= row["arguments"]["epsilon"]
    assert found.error.total <= (1.0 + 1e-6) * float.fromhex(row["squared_error"]["hex"])
    # What was planned then is still what its promise says.
    then = cpsgd.Protocol.from_dict(row["protocol"])
    assert then.promise is not None
    assert then.release(then.promise.conditions.surviving) is not None


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    shutil.copyfile(DATA / "budgets.ledger", tmp_path / "budgets.ledger")
    return Ledger(tmp_path / "budgets.ledger")


def test_a_ledger_holds_and_its_totals_are_the_same_or_smaller(ledger: Ledger) -> None:
    recorded = read("ledger.json")
    found = ledger.verify(recorded["head"])
    assert (str(found.head), found.records) == (recorded["head"], recorded["records"])
    for total, then in zip(found.totals, recorded["totals"], strict=True):
        assert (total.population, total.rounds, total.unreleased) == (
            then["population"],
            then["rounds"],
            then["unreleased"],
        )
        assert set(then["keys"]) <= total.to_dict().keys()
        assert better(total.epsilon, then["epsilon"]) or same(total.epsilon, then["epsilon"]), (total, then)
    for now, then in zip(ledger.budgets(), recorded["budgets"], strict=True):
        assert then.items() <= now.to_dict().items()
    for population, entries in recorded["entries"].items():
        for entry, then in zip(ledger.events(population), entries, strict=True):
            assert then.items() <= entry.to_dict().items()


CASES: list[dict[str, Any]] = read("cli.json")
for case in CASES:
    # All about secure plans takes ten seconds.
    case["group"] += ", secure" if case["args"][0] == "plan" and "--secure" in case["args"] else ""


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[pytest.mark.thorough] if "secure" in group else [])
        for group in dict.fromkeys(case["group"] for case in CASES)
    ],
)
def test_commands_print_the_same_keys_and_end_the_same(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    shutil.copytree(DATA / "cli", tmp_path, dirs_exist_ok=True)
    shutil.copyfile(DATA / "budgets.ledger", tmp_path / "budgets.ledger")
    monkeypatch.setenv("CPSGD_SIMD", "this")  # an audit of other levels starts processes: tests/audit/test_surveys.py
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        if case["group"] != group:
            continue
        done = invoke(app, *case["args"])
        assert done.exit_code == case["exit_code"], (case["args"], done.stderr)
        if case["keys"] is not None:
            assert set(case["keys"]) <= keys_of(json.loads(done.stdout)), case["args"]


@pytest.mark.parametrize("name", ["correlated", "sampled"])
def test_an_interrupted_training_ends_as_it_would_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "trainings" / name, tmp_path / "runs" / name)
    done = invoke(app, "train", "--resume", "--run", name, "--json")
    assert done.exit_code == 0, done.stderr
    recorded = read("trainings.json")[name]
    assert set(keys_of(recorded["summary"])) <= keys_of(json.loads(done.stdout)) | keys_of(
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    )
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    for now, then in zip(map(json.loads, lines), recorded["metrics"], strict=True):
        assert now["epsilon"] <= then["epsilon"] * (1.0 + 1e-12)
        # Another processor may add floats in another order, which may tip the rounding of a few coordinates.
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-3)
        assert now["accuracy"] == pytest.approx(then["accuracy"], abs=3e-3)


@pytest.mark.parametrize("name", ["secure", "correlated"])
def test_clients_remember_the_rounds_they_answered(name: str, tmp_path: Path) -> None:
    """With memories of 0.2.0 clients refuse the two rounds that they answered then; a new run has what is left."""
    pytest.importorskip("flwr")
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

    from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
    from tests.engines.flower.local import LocalGrid, Node, model, task

    recorded = read("flower.json")[name]
    make: Callable[..., cpsgd.Plan] = plan_examples if recorded["call"] == "plan_examples" else cpsgd.plan
    plan = make(**recorded["arguments"])

    def train(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"]
        arrays = ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in sent.items()})
        return Message(RecordDict({"sum" if recorded["options"] else "arrays": arrays}), reply_to=message)

    for file in DATA.glob(f"flower/{name}-*"):
        shutil.copyfile(file, tmp_path / file.name)
        (tmp_path / file.name).chmod(0o600)
    for run, released in ((1, [False, False]), (2, [True, plan.rounds > 3])):
        with task():
            nodes = [Node(100 + i, cpsgd_mod(rounds=plan.rounds, **recorded["options"]), train) for i in range(4)]
            for i, node in enumerate(nodes):
                where = {"cpsgd-memory": str(tmp_path / f"{name}-{i}")}
                node.context = Context(run, node.number, where, RecordDict(), {})
            examples = recorded["options"].get("examples")
            strategy = CpsgdStrategy(plan, examples=examples)
            strategy.start(LocalGrid(nodes), model(40), num_rounds=2, timeout=1.0)
        assert [report.released for report in strategy.reports] == released
