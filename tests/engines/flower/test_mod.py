from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from cpsgd import Plan
from cpsgd.engines.flower import cpsgd_mod
from cpsgd.engines.flower.mod import _check_misplaced
from cpsgd.engines.flower.records import RECORD, REQUEST, STATE, make_message
from cpsgd.errors import (
    MagicError,
    ParameterError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    VectorError,
    VersionError,
    WireError,
)
from cpsgd.federation.answering import SessionState
from cpsgd.federation.extras import Extras
from cpsgd.federation.messages import Request
from cpsgd.federation.terms import Terms
from cpsgd.secagg import SecureServer, Stage

from .local import RUN, adds, model, through_the_wire

DIM = 40


def context() -> Context:
    return Context(RUN, 5, {}, RecordDict(), {})


def never(message: Message, context: Context) -> Message:
    raise AssertionError("the train function was called")


def opening(plan: Plan, **changes: Any) -> Message:
    """The message that begins round 1, with some of its fields changed."""
    fields: dict[str, Any] = {
        "stage": Stage.ADVERTISE,
        "round": 1,
        "rounds": plan.rounds,
        "surviving": plan.surviving,
        "protocol": plan.protocol.to_json(),
        "payload": SecureServer(Terms(plan=plan).parameters(1, 4)).invite()[0],
    }
    return message(Request(**{**fields, **changes}))


def message(request: Request, records: RecordDict | None = None, extras: str | None = None) -> Message:
    made = make_message(request.to_bytes(), 5, request.round, records, extras)
    made.metadata.__dict__["_message_id"] = "m"
    return through_the_wire(made)


def secrets(context: Context) -> bytes:
    state = context.state.config_records[RECORD][STATE]
    assert isinstance(state, bytes)
    return SessionState.from_bytes(state).secrets


# ---------------------------------------------------------------------- a client's state and memory


def test_an_honest_beginning_is_answered(small_plan: Plan) -> None:
    own = context()
    reply = cpsgd_mod(epsilon=8.0, delta=1e-5, rounds=3)(opening(small_plan), own, never)
    assert list(reply.content) == [RECORD]
    # The keys are in the state, and in no reply.
    assert len(secrets(own)) > 64


@pytest.mark.parametrize(
    ("node", "app", "options", "told"),
    [
        ({"cpsgd_roster": "/roster"}, {}, {}, "Did its operator mean 'cpsgd-roster'"),
        ({"cpsgd_memory": "/memory"}, {}, {}, "Did its operator mean 'cpsgd-memory'"),
        ({}, {"cpsgd-memory": "/memory"}, {}, "Only a client's operator"),
        ({"memory": "/memory"}, {}, {"require_memory": True}, "requires a memory"),
        ({"cpsgd-memory": "/memory"}, {}, {"require_roster": True}, "requires a roster"),
    ],
)
def test_protection_does_not_fail_open(
    small_plan: Plan, node: dict[str, Any], app: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    own = Context(RUN, 5, node, RecordDict(), app)
    with pytest.raises(RoundRefusedError, match=told):
        cpsgd_mod(**options)(opening(small_plan), own, never)


def test_what_is_refused_leaves_no_state(small_plan: Plan) -> None:
    own = context()
    with pytest.raises(RoundRefusedError, match="costs ε = "):
        cpsgd_mod(epsilon=4.0, delta=1e-5, rounds=3)(opening(small_plan), own, never)
    assert RECORD not in own.state


# ---------------------------------------------------------------------- messages


def test_training_without_the_strategy_is_refused() -> None:
    record = RecordDict({"arrays": model(DIM), "config": ConfigRecord({"server-round": 1})})
    plain = Message(record, dst_node_id=5, message_type="train")
    with pytest.raises(StageError, match="not protected"):
        cpsgd_mod()(plain, context(), never)


def test_no_upload_in_sight_of_the_server_unless_allowed(small_plan: Plan) -> None:
    with pytest.raises(RoundRefusedError, match="secure=False"):
        cpsgd_mod()(opening(small_plan, stage=Stage.UPLOAD), context(), never)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 0}, VersionError),
        ({"version": 1}, VersionError),
        ({"version": 3}, VersionError),
        ({"version": "2"}, VersionError),
        ({REQUEST: "text"}, WireError),
        ({REQUEST: 3}, WireError),
        ({REQUEST: b""}, MagicError),
        ({REQUEST: b"cpsf\1"}, VersionError),
        ({REQUEST: b"x" * 1000}, MagicError),
    ],
)
def test_malformed_records_are_refused(small_plan: Plan, changes: dict[str, Any], error: type[Exception]) -> None:
    damaged = opening(small_plan)
    damaged.content[RECORD] = ConfigRecord({**damaged.content.config_records[RECORD], **changes})
    own = context()
    with pytest.raises(error):
        cpsgd_mod()(damaged, own, never)
    assert RECORD not in own.state


def test_a_server_of_release_0_1_0_is_told_apart(small_plan: Plan) -> None:
    old = ConfigRecord({"version": 1, "stage": "advertise", "round": 1, "rounds": 3, "surviving": 3})
    asked = Message(RecordDict({RECORD: old}), dst_node_id=5, message_type="train")
    with pytest.raises(VersionError, match="install the same release on both"):
        cpsgd_mod()(asked, context(), never)


# ---------------------------------------------------------------------- train functions


def plain_round(plan: Plan, train: Any, extras: str | None = None, **options: Any) -> Message:
    """One round without secure aggregation, on this node alone."""
    request = Request(Stage.UPLOAD, 1, plan.rounds, plan.surviving, protocol=plan.protocol.to_json())
    records = RecordDict({"arrays": model(DIM), "config": ConfigRecord({"lr": 0.5})})
    return cpsgd_mod(secure=False, **options)(message(request, records, extras), context(), train)


def test_the_train_function_sees_model_settings_and_what_was_accepted(small_plan: Plan) -> None:
    def train(message: Message, context: Context) -> Message:
        assert set(message.content) == {"arrays", "config", RECORD}
        assert message.content["config"]["lr"] == 0.5
        assert message.content[RECORD]["clip-norm"] == small_plan.protocol.clip_norm
        context.state.clear()
        return adds(np.ones(DIM, np.float32))(message, context)

    plain_round(small_plan, train)


def test_nothing_rides_on_updates_that_are_accounted_for_otherwise(small_plan: Plan) -> None:
    extras = Extras(measures={"loss": (0.0, 1.0)}).to_json()
    near = replace(small_plan.protocol, replace_one_distance=1.5, distance_reason="the server says so")
    with pytest.raises(RoundRefusedError, match="by their distance"):
        plain_round(replace(small_plan, protocol=near), never, extras)
    protocol = small_plan.protocol.to_json()
    request = Request(Stage.UPLOAD, 1, small_plan.rounds, small_plan.surviving, protocol, examples=2)
    asked = message(request, RecordDict({"arrays": model(DIM)}), extras)
    with pytest.raises(RoundRefusedError, match="sums of single examples"):
        cpsgd_mod(secure=False, examples=2)(asked, context(), never)


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


def test_unknown_limits_are_refused() -> None:
    with pytest.raises(TypeError, match="epsilom"):
        cpsgd_mod(epsilom=1.0, delta=1e-6)


def test_a_client_does_not_wait_for_what_it_does_not_need() -> None:
    """Flower starts a process for every message, and only one of a round's trains."""
    heavy = ("torch", "scipy", "cpsgd.ledger", "cpsgd.privacy", "cpsgd.planner", "cpsgd.engines.flower.strategy")
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, cpsgd.engines.flower; print([m for m in {heavy} if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == "[]"


def test_whose_settings_name_a_clients_files() -> None:
    _check_misplaced({"lr": 0.1, "memory": "x"})
    for name in ("cpsgd-memory", "CPSGD_Memory", "cpsgd-roster", "cpsgd-identity"):
        with pytest.raises(RoundRefusedError, match="Only a client's operator"):
            _check_misplaced({"lr": 0.1, name: "/file"})
