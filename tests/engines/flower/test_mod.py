from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from cpsgd import Plan
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from cpsgd.engines.flower._memory import Answered, Memory
from cpsgd.engines.flower._records import RECORD, Request, make_message
from cpsgd.errors import (
    FingerprintError,
    InvitationError,
    ParameterError,
    RoundError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    VectorError,
    VersionError,
    WireError,
)
from cpsgd.secagg import SecureParameters, SecureServer

from .local import RUN, LocalGrid, Node, adds, model, through_the_wire

DIM = 40


def context() -> Context:
    return Context(RUN, 5, {}, RecordDict(), {})


def never(message: Message, context: Context) -> Message:
    raise AssertionError("the train function was called")


def parameters(plan: Plan, **changes: Any) -> SecureParameters:
    found = SecureParameters.for_protocol(plan.protocol, round=1, dropout=0.25, surviving=plan.surviving)
    return replace(found, **changes)


def opening(plan: Plan, *, secure: SecureParameters | None = None, **changes: Any) -> Message:
    """The message that begins round 1, with some of its fields changed."""
    fields: dict[str, Any] = {
        "stage": "advertise",
        "round": 1,
        "rounds": plan.rounds,
        "surviving": plan.surviving,
        "protocol": plan.protocol.to_json(),
        "payload": SecureServer(secure or parameters(plan)).invite()[0],
    }
    return message(Request(**{**fields, **changes}))


def message(request: Request, records: RecordDict | None = None) -> Message:
    made = make_message(request, 5, records)
    made.metadata.__dict__["_message_id"] = "m"
    return through_the_wire(made)


def with_protocol(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, protocol=replace(plan.protocol, **changes))


# ---------------------------------------------------------------------- what a client accepts


def test_an_honest_beginning_is_answered(small_plan: Plan) -> None:
    own = context()
    reply = cpsgd_mod(epsilon=8.0, delta=1e-5, rounds=3)(opening(small_plan), own, never)
    assert list(reply.content) == [RECORD]
    # The keys are in the state, and in no reply.
    assert len(own.state[RECORD]["secrets"]) > 64


def test_a_protocol_without_noise_is_refused_by_default(small_plan: Plan) -> None:
    silent = with_protocol(small_plan, trials=0)
    with pytest.raises(RoundRefusedError, match="no noise"):
        cpsgd_mod()(opening(silent, secure=parameters(silent)), context(), never)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"epsilon": 4.0, "delta": 1e-5, "rounds": 3}, "costs ε = "),
        ({"epsilon": 8.0, "delta": 1e-7, "rounds": 3}, "costs ε = "),
        ({"epsilon": 8.0, "delta": 1e-5, "rounds": 3, "colluding": 1}, "costs ε = |could see more"),
        ({"rounds": 2}, "announces 3 rounds"),
        ({"min_clients": 4}, "at least 4"),
    ],
)
def test_a_client_keeps_its_own_limits(small_plan: Plan, limits: dict[str, Any], message: str) -> None:
    own = context()
    with pytest.raises(RoundRefusedError, match=message):
        cpsgd_mod(**limits)(opening(small_plan), own, never)
    assert RECORD not in own.state


def test_a_protocol_that_cannot_tell_examples_is_refused(small_plan: Plan) -> None:
    narrow = with_protocol(small_plan, coordinate_range=1e-3)
    with pytest.raises(RoundRefusedError, match="single examples"):
        cpsgd_mod(examples=5)(opening(narrow, secure=parameters(narrow), examples=5), context(), never)


@pytest.mark.parametrize(("own", "servers"), [(None, 5), (5, 0), (5, 6), (5, -5)])
def test_client_and_server_must_protect_the_same(small_plan: Plan, own: int | None, servers: int) -> None:
    """A silo that clips to a fifth of the sum's norm is not what a server has planned that counts on a sixth."""
    with pytest.raises(RoundRefusedError, match="what is protected"):
        cpsgd_mod(examples=own)(opening(small_plan, examples=servers), context(), never)


def test_more_rounds_than_the_limit_allows_cost_too_much(small_plan: Plan) -> None:
    with pytest.raises(RoundRefusedError, match=r"costs ε = .* in 6 rounds"):
        cpsgd_mod(epsilon=8.0, delta=1e-5)(opening(small_plan, rounds=6), context(), never)
    with pytest.raises(RoundRefusedError, match="announces 0 rounds"):
        cpsgd_mod(epsilon=8.0, delta=1e-5)(opening(small_plan, rounds=0), context(), never)


def test_the_protocol_may_be_pinned(small_plan: Plan) -> None:
    pinned = cpsgd_mod(fingerprint=small_plan.protocol.fingerprint)
    pinned(opening(small_plan), context(), never)
    other = with_protocol(small_plan, rotation_seed=1)
    with pytest.raises(FingerprintError, match="not the one"):
        pinned(opening(other, secure=parameters(other)), context(), never)


@pytest.mark.parametrize(
    "changes", [{"dim": 41}, {"bits": 9}, {"fingerprint": bytes(16)}, {"surviving": 2}, {"round": 2}]
)
def test_an_invitation_that_contradicts_the_protocol_is_refused(small_plan: Plan, changes: dict[str, Any]) -> None:
    with pytest.raises((InvitationError, RoundRefusedError)):
        cpsgd_mod()(opening(small_plan, secure=parameters(small_plan, **changes)), context(), never)


def test_a_threshold_that_colluding_clients_could_use_is_refused(small_plan: Plan) -> None:
    cpsgd_mod()(opening(small_plan, secure=parameters(small_plan, threshold=3)), context(), never)
    with pytest.raises(RoundRefusedError, match="could see more than the sum"):
        cpsgd_mod(colluding=2)(opening(small_plan, secure=parameters(small_plan, threshold=3)), context(), never)


def test_after_the_first_round_a_limit_belongs_to_one_protocol(small_plan: Plan) -> None:
    node = Node(100, cpsgd_mod(epsilon=8.0, delta=1e-5, rounds=3), adds(np.zeros(DIM, np.float32)))
    others = [Node(101 + i, cpsgd_mod(), adds(np.zeros(DIM, np.float32))) for i in range(3)]
    strategy = CpsgdStrategy(small_plan)
    strategy.start(LocalGrid([node, *others]), model(DIM), num_rounds=1, timeout=1.0)
    assert strategy.reports[0].survivors == 4
    # Less costly, even; but the sum of both is accounted for nowhere.
    quieter = with_protocol(small_plan, coordinate_range=2 * small_plan.protocol.coordinate_range)
    with pytest.raises(RoundRefusedError, match="another protocol"):
        node.mod(opening(quieter, round=2, secure=parameters(quieter, round=2)), node.context, never)


@pytest.mark.parametrize("limits", [{"rounds": 3}, {"epsilon": 8.0, "delta": 1e-5}])
def test_rounds_are_counted_over_runs(small_plan: Plan, limits: dict[str, Any]) -> None:
    members = [Node(100 + i, cpsgd_mod(**limits), adds(np.zeros(DIM, np.float32))) for i in range(4)]
    for run, survivors in ((1, [4, 4]), (2, [4, 0])):
        for node in members:
            node.context = Context(run, node.number, {}, node.context.state, {})
        strategy = CpsgdStrategy(small_plan)
        strategy.start(LocalGrid(members), model(DIM), num_rounds=2, timeout=1.0)
        assert [report.survivors for report in strategy.reports if report.released] == [n for n in survivors if n]
    assert [node.trained for node in members] == [3] * 4


def remembering(path: Path, run: int = RUN) -> Context:
    """A context as Flower makes it for a new run: with nothing in it but what the node's operator says."""
    return Context(run, 5, {"cpsgd-memory": str(path)}, RecordDict(), {})


@pytest.mark.parametrize("limits", [{"rounds": 3}, {"epsilon": 8.0, "delta": 1e-5}])
def test_a_memory_counts_rounds_though_every_run_begins_with_an_empty_state(
    small_plan: Plan, limits: dict[str, Any], tmp_path: Path
) -> None:
    members = [Node(100 + i, cpsgd_mod(**limits), adds(np.zeros(DIM, np.float32))) for i in range(4)]
    for run, released in ((1, [True, True]), (2, [True, False]), (3, [False, False])):
        for i, node in enumerate(members):
            node.context = remembering(tmp_path / str(i), run)
        strategy = CpsgdStrategy(small_plan)
        strategy.start(LocalGrid(members), model(DIM), num_rounds=2, timeout=1.0)
        assert [report.released for report in strategy.reports] == released
    assert [node.trained for node in members] == [3] * 4


def plain(plan: Plan, round: int = 1) -> Message:
    return message(
        Request("upload", round, plan.rounds, plan.surviving, plan.protocol.to_json()),
        RecordDict({"arrays": model(DIM)}),
    )


def test_with_a_memory_a_limit_belongs_to_one_protocol_over_all_runs(small_plan: Plan, tmp_path: Path) -> None:
    mod = cpsgd_mod(epsilon=8.0, delta=1e-5, secure=False)
    train = adds(np.zeros(DIM, np.float32))
    mod(plain(small_plan), remembering(tmp_path / "memory", 1), train)
    quieter = with_protocol(small_plan, coordinate_range=2 * small_plan.protocol.coordinate_range)
    with pytest.raises(RoundRefusedError, match="another protocol"):
        mod(plain(quieter), remembering(tmp_path / "memory", 2), never)
    mod(plain(small_plan), remembering(tmp_path / "memory", 2), train)


def test_two_runs_that_begin_together_cannot_both_have_their_protocol(small_plan: Plan, tmp_path: Path) -> None:
    quieter = with_protocol(small_plan, coordinate_range=2 * small_plan.protocol.coordinate_range)
    mod = cpsgd_mod(epsilon=8.0, delta=1e-5, secure=False)
    kept = adds(np.zeros(DIM, np.float32))

    def slow(message: Message, context: Context) -> Message:
        # While this round trains, which is after it was counted, another run asks.
        with pytest.raises(RoundRefusedError, match="another protocol"):
            mod(plain(quieter), remembering(tmp_path / "memory", 2), never)
        return kept(message, context)

    mod(plain(small_plan), remembering(tmp_path / "memory", 1), slow)


def test_with_a_memory_a_lost_state_does_not_answer_a_round_twice(small_plan: Plan, tmp_path: Path) -> None:
    mod, train = cpsgd_mod(secure=False), adds(np.zeros(DIM, np.float32))
    mod(plain(small_plan), remembering(tmp_path / "memory"), train)
    with pytest.raises(RoundError, match="already"):
        mod(plain(small_plan), remembering(tmp_path / "memory"), never)


def test_of_many_who_ask_at_once_a_memory_lets_one(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_text(f"1 1 {'ab' * 16}\n1 1 advertise\n")
    together = threading.Barrier(8)

    def ask() -> bool:
        together.wait()
        try:
            Memory(path).once("1", 1, "confirm")
        except StageError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(asked.result() for asked in [pool.submit(ask) for _ in range(8)]) == 1
    Memory(path).once("1", 2, "confirm")
    Memory(path).once("2", 1, "confirm")
    # Other stages are no rounds.
    assert Memory(path).rounds() == [Answered("1", 1, "ab" * 16)]


@pytest.mark.parametrize("content", [b"1 2", b"1 2 ab\n3 4", b"1 two ab\n", b"\xff\n", b"1 2 xy\n"])
def test_a_damaged_memory_refuses(small_plan: Plan, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    with pytest.raises(RoundRefusedError, match="cannot read or write its memory") as caught:
        cpsgd_mod(secure=False)(plain(small_plan), remembering(path), never)
    assert str(tmp_path) not in str(caught.value)
    assert path.read_bytes() == content


def test_a_memory_that_cannot_be_opened_refuses(small_plan: Plan, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "memory"):
        with pytest.raises(RoundRefusedError, match="memory"):
            cpsgd_mod()(opening(small_plan), remembering(path), never)
    with pytest.raises(RoundRefusedError, match="not the name of a file"):
        cpsgd_mod()(opening(small_plan), Context(RUN, 5, {"cpsgd-memory": 7}, RecordDict(), {}), never)


# ---------------------------------------------------------------------- messages


def test_training_without_the_strategy_is_refused() -> None:
    record = RecordDict({"arrays": model(DIM), "config": ConfigRecord({"server-round": 1})})
    plain = Message(record, dst_node_id=5, message_type="train")
    with pytest.raises(StageError, match="not protected"):
        cpsgd_mod()(plain, context(), never)


def test_no_upload_in_sight_of_the_server_unless_allowed(small_plan: Plan) -> None:
    with pytest.raises(RoundRefusedError, match="secure=False"):
        cpsgd_mod()(opening(small_plan, stage="upload"), context(), never)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 0}, VersionError),
        ({"version": 2}, VersionError),
        ({"stage": "dance"}, StageError),
        ({"stage": 3}, WireError),
        ({"round": -1}, RoundError),
        ({"round": "one"}, WireError),
        ({"rounds": 2.5}, WireError),
        ({"surviving": True}, WireError),
        ({"protocol": "{}"}, ParameterError),
        ({"protocol": b""}, WireError),
        ({"payload": "text"}, WireError),
        ({"payload": b""}, WireError),
        ({"payload": b"x" * 1000}, WireError),
    ],
)
def test_malformed_records_are_refused(small_plan: Plan, changes: dict[str, Any], error: type[Exception]) -> None:
    damaged = opening(small_plan)
    damaged.content[RECORD] = ConfigRecord({**damaged.content.config_records[RECORD], **changes})
    own = context()
    with pytest.raises(error):
        cpsgd_mod()(damaged, own, never)


def test_every_field_is_needed(small_plan: Plan) -> None:
    for name in opening(small_plan).content[RECORD]:
        damaged = opening(small_plan)
        del damaged.content[RECORD][name]
        with pytest.raises(WireError):
            cpsgd_mod()(damaged, context(), never)


def test_a_round_begins_once_and_stages_belong_to_it(small_plan: Plan) -> None:
    own, mod = context(), cpsgd_mod()
    mod(opening(small_plan), own, never)
    with pytest.raises(RoundError, match="again or too late"):
        mod(opening(small_plan), own, never)
    share = Request("share", 2, 3, small_plan.surviving)
    with pytest.raises(RoundError, match="is for round 2"):
        mod(message(share), own, never)
    with pytest.raises(StageError, match="no part"):
        mod(message(replace(share, round=0)), _in_round(0), never)


def _in_round(round: int) -> Context:
    own = context()
    own.state[RECORD] = ConfigRecord(
        {"run": str(RUN), "round": round, "rounds": 3, "answered": 0, "accepted": b"", "protocol": "", "secrets": b""}
    )
    return own


def test_what_fails_once_cannot_be_asked_again(small_plan: Plan) -> None:
    own, mod = context(), cpsgd_mod()
    mod(opening(small_plan), own, never)
    with pytest.raises(WireError):
        mod(message(Request("share", 1, 3, small_plan.surviving, payload=b"nonsense")), own, never)
    assert own.state[RECORD]["secrets"] == b""
    with pytest.raises(StageError, match="no part"):
        mod(message(Request("share", 1, 3, small_plan.surviving, payload=b"nonsense")), own, never)


def test_an_unmasked_client_has_forgotten_its_secrets(small_plan: Plan) -> None:
    members = [Node(100 + i, cpsgd_mod(), adds(np.zeros(DIM, np.float32))) for i in range(4)]
    grid = LocalGrid(members)
    CpsgdStrategy(small_plan).start(grid, model(DIM), num_rounds=1, timeout=1.0)
    for node in members:
        assert node.context.state[RECORD]["secrets"] == b""
        last = [sent for sent in grid.sent if sent.metadata.dst_node_id == node.number][-1]
        with pytest.raises(StageError, match="no part"):
            node.mod(through_the_wire(last), node.context, never)


# ---------------------------------------------------------------------- train functions


def plain_round(plan: Plan, train: Any, **options: Any) -> Message:
    """One round without secure aggregation, on this node alone."""
    request = Request("upload", 1, plan.rounds, plan.surviving, protocol=plan.protocol.to_json())
    records = RecordDict({"arrays": model(DIM), "config": ConfigRecord({"lr": 0.5})})
    return cpsgd_mod(secure=False, **options)(message(request, records), context(), train)


def test_the_train_function_sees_model_settings_and_what_was_accepted(small_plan: Plan) -> None:
    def train(message: Message, context: Context) -> Message:
        assert set(message.content) == {"arrays", "config", RECORD}
        assert message.content["config"]["lr"] == 0.5
        assert message.content[RECORD]["clip-norm"] == small_plan.protocol.clip_norm
        context.state.clear()
        return adds(np.ones(DIM, np.float32))(message, context)

    plain_round(small_plan, train)


def returns(content: RecordDict) -> Any:
    return lambda message, context: Message(content, reply_to=message)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"a": model(DIM), "b": model(DIM)}),
        RecordDict({"arrays": ArrayRecord({"weight": Array(np.zeros(DIM, np.float32))})}),
        RecordDict({"arrays": model(DIM + 1)}),
    ],
)
def test_what_does_not_fit_the_model_is_refused(small_plan: Plan, content: RecordDict) -> None:
    with pytest.raises(VectorError):
        plain_round(small_plan, returns(content))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_counts_as_zero(
    small_plan: Plan, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    original = type(small_plan.protocol).encode

    def recorded(self: Any, vector: Any, round: int) -> bytes:
        encoded.append(vector)
        return original(self, vector, round)

    monkeypatch.setattr(type(small_plan.protocol), "encode", recorded)
    vector = np.ones(DIM, np.float32)
    vector[3] = wrong
    plain_round(small_plan, adds(vector))
    assert len(encoded) == 1
    assert not encoded[0].any()


@pytest.mark.parametrize("error", [KeyError("patient 4711"), ParameterError("got 4711 patients")])
def test_errors_of_the_train_function_keep_their_text(small_plan: Plan, error: Exception) -> None:
    def fails(message: Message, context: Context) -> Message:
        raise error

    with pytest.raises(TrainFunctionError) as caught:
        plain_round(small_plan, fails)
    assert "4711" not in str(caught.value)
    assert type(error).__name__ in str(caught.value)


def test_evaluation_and_queries_let_only_allowed_metrics_out() -> None:
    content = RecordDict({"arrays": model(3), "m": MetricRecord({"accuracy": 0.5, "num-examples": 12})})
    for kind in ("evaluate", "query", "evaluate.special"):
        asked = Message(RecordDict({"arrays": model(3)}), dst_node_id=5, message_type=kind)
        reply = cpsgd_mod(allow_metrics=("accuracy",))(asked, context(), returns(content))
        assert list(reply.content) == ["metrics"]
        assert dict(reply.content["metrics"]) == {"accuracy": 0.5}
        assert not cpsgd_mod()(asked, context(), returns(content)).content


def test_bad_settings() -> None:
    with pytest.raises(ParameterError, match="together"):
        cpsgd_mod(epsilon=1.0)
    with pytest.raises(ParameterError, match="together"):
        cpsgd_mod(delta=1e-6)
    with pytest.raises(ParameterError, match="list of names"):
        cpsgd_mod(allow_metrics="loss")
    with pytest.raises(ParameterError):
        cpsgd_mod(min_clients=1)
