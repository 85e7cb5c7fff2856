from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol
from cpsgd.errors import ParameterError, RoundRefusedError, WireError
from cpsgd.federation.course import Course
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.federation.terms import Terms

from .local import DIM, Client

BOTH = Extras(measures={"loss": (0.0, 4.0), "accuracy": (0.0, 1.0)}, clip=0.5)
RNG = np.random.default_rng(11)


@pytest.mark.parametrize("norm", [0.0, 0.1, 0.5, 3.0, 1e30])
@pytest.mark.parametrize(
    "metrics", [{}, {"loss": 1e300, "accuracy": -7}, {"loss": float("nan"), "accuracy": "high"}, {"loss": 10**400}]
)
@pytest.mark.parametrize(
    "extras",
    [
        BOTH,
        *(replace(BOTH, clip=clip) for clip in (None, 1e-30, 1e30)),
        *(replace(BOTH, weight=weight) for weight in (1e-30, 0.408)),
        Extras(measures={str(i): (i, i + 1.0) for i in range(4999)}, weight=0.01),
    ],
)
def test_no_vector_is_longer_than_the_clip_norm(norm: float, metrics: dict[str, Any], extras: Extras) -> None:
    """So the plan's guarantee covers all of it, whatever rides along."""
    update = RNG.normal(size=DIM)
    vector = extras.encode((update * norm / np.linalg.norm(update)).astype(np.float32), metrics, 2.0)
    assert vector.shape == (DIM + extras.size,)
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) <= 2.0 * (1.0 + 1e-5)


def test_means_come_back() -> None:
    updates = RNG.normal(size=(4, DIM)).astype(np.float32)
    updates *= np.array([[0.2], [0.4], [0.45], [5.0]], np.float32) / np.linalg.norm(updates, axis=1, keepdims=True)
    metrics = [{"loss": float(i), "accuracy": 0.2 * i} for i in range(4)]
    vectors = [BOTH.encode(update, each, 2.0) for update, each in zip(updates, metrics, strict=True)]
    mean, unclipped, measures = BOTH.decode(np.mean(vectors, axis=0), 2.0)
    clipped = updates.copy()
    clipped[3] *= 0.1  # from norm 5 to 0.5
    np.testing.assert_allclose(mean, clipped.mean(axis=0), atol=1e-6)
    assert unclipped == pytest.approx(0.75, abs=1e-6)
    assert measures == pytest.approx({"loss": 1.5, "accuracy": 0.3}, abs=1e-5)


def test_there_and_back() -> None:
    assert Extras.from_json(BOTH.to_json()) == BOTH


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 10**5,
        '{"measures": {"a": [1, 0]}}',
        '{"measures": {"a": 1}}',
        f'{{"measures": {{"a": [0, {10**400}]}}}}',
        f'{{"measures": {{}}, "clip": {10**400}}}',
        '{"measures": {}, "clip": -1}',
        '{"measures": {}, "clip": NaN}',
        '{"measures": {}, "weight": 2}',
        '{"measures": {}, "more": 1}',
    ],
)
def test_strange_wishes_are_refused(text: str) -> None:
    with pytest.raises(WireError):
        Extras.from_json(text)


def test_bad_settings() -> None:
    with pytest.raises(ParameterError, match="less than half"):
        Extras(measures={str(i): (0.0, 1.0) for i in range(51)})
    with pytest.raises(ParameterError, match="range of 'loss'"):
        Extras(measures={"loss": (1.0, 1.0)})
    for changes in ({"initial": 0.0}, {"initial": 1.0, "quantile": 1.5}, {"initial": 1.0, "rate": -1.0}):
        with pytest.raises(ParameterError):
            AdaptiveClip(**changes)


def test_the_norm_moves_towards_the_quantile() -> None:
    """Without noise, it comes to where half of the norms are below."""
    norms = np.exp(RNG.normal(size=1000))
    adaptive = AdaptiveClip(initial=50.0, lowest=0.0)
    clip = adaptive.initial
    for _ in range(100):
        clip = adaptive.following(clip, float(np.mean(norms <= clip)))
    assert clip == pytest.approx(float(np.median(norms)), rel=0.1)
    # However wrong an estimate is, the norm moves by a bounded factor.
    assert adaptive.following(1.0, 1e9) == adaptive.following(1.0, 1.0)
    assert adaptive.following(1.0, -1e9) == adaptive.following(1.0, 0.0)


# ---------------------------------------------------------------------- in a run


class Measuring(Client):
    extras: Extras | None = None

    def train(self, protocol: Protocol) -> np.ndarray:
        assert self.extras is not None
        return self.extras.encode(super().train(protocol), {"accuracy": 0.75}, protocol.clip_norm)


def precise(small_plan: Plan, dim: int) -> Plan:
    """With so little noise that the numbers can be checked: nothing private about it."""
    mechanism: Any = small_plan.protocol.mechanism
    quiet = replace(small_plan.protocol, dim=dim, mechanism=replace(mechanism, trials=1), promise=None)
    return replace(small_plan, protocol=quiet)


def test_a_run_with_a_private_accuracy_and_a_norm_that_adapts(small_plan: Plan) -> None:
    plan = precise(small_plan, DIM + 2)
    vector = np.full(DIM, 0.01, np.float32)
    course: Course[str] = Course(
        Terms(plan=plan, secure=False),
        np.zeros(DIM, np.float32),
        run="1",
        measures={"accuracy": (0.0, 1.0)},
        adaptive=AdaptiveClip(initial=10.0, rate=1.0),
    )
    clients = {name: Measuring(vector, run="1", secure=False) for name in "abcd"}
    norms = []
    for _ in range(3):
        session = course.begin(clients)
        for node, request in session.requests().items():
            clients[node].extras = course.extras
            session.receive(node, clients[node].ask(request))
        session.close()
        assert course.finish(session) is not None
        measures = session.report.measures
        # Half a unit, or half a step of rounding, of each of four clients: a standard deviation of 0.05 in both.
        assert 0.35 < measures["accuracy"] < 1.15
        norms.append(measures["cpsgd-clip-norm"])
        assert 0.6 < measures["cpsgd-unclipped"] < 1.4
    assert norms[0] == 10.0
    assert norms[2] < norms[1] < norms[0]


def test_a_distance_of_updates_is_none_of_what_rides_on_them(small_plan: Plan) -> None:
    """Updates that are √2 D apart, and accuracies of 0 and 1: together they are further apart."""
    one, other = np.eye(DIM, dtype=np.float32)[:2]
    apart = [BOTH.encode(each, {"accuracy": i, "loss": 4.0 * i}, 1.0) for i, each in enumerate((one, other))]
    assert np.linalg.norm(apart[0] - apart[1]) > np.sqrt(2.0)
    near = replace(small_plan.protocol, replace_one_distance=np.sqrt(2.0) * 1.0, distance_reason="one-hot")
    with pytest.raises(ParameterError, match="replace_one_distance"):
        Course(
            Terms(plan=replace(small_plan, protocol=near)),
            np.zeros(DIM - 1, np.float32),
            run="1",
            measures={"l": (0.0, 1.0)},
        )


def test_the_plan_must_have_room_for_them(small_plan: Plan) -> None:
    with pytest.raises(ParameterError, match=f"plan with dim={DIM + 1}"):
        Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run="1", measures={"loss": (0.0, 1.0)})
    with pytest.raises(ParameterError, match="whole clients"):
        Course(Terms(plan=small_plan, examples=5), np.zeros(DIM - 1, np.float32), run="1", measures={"l": (0.0, 1.0)})


@pytest.mark.parametrize(("said", "limits"), [(1e9, (0.5, 0.1, math.exp(-3.0))), (-1e9, (4.0, 10.0, math.exp(3.0)))])
def test_a_liar_moves_the_norm_no_further_than_its_limits(said: float, limits: tuple[float, ...]) -> None:
    """Without them thirty rounds took it from 1 to 0.05 or 20."""
    rules = [
        AdaptiveClip(initial=1.0, lowest=0.5, highest=4.0),
        AdaptiveClip(initial=1.0),
        AdaptiveClip(initial=1.0, lowest=0.0, highest=math.inf),
    ]
    for rule, limit in zip(rules, limits, strict=True):
        clip = 1.0
        for _ in range(30):
            clip = rule.following(clip, said)
        assert clip == pytest.approx(limit)
    with pytest.raises(ParameterError, match="lowest <= initial <= highest"):
        AdaptiveClip(initial=1.0, lowest=2.0)


@pytest.mark.parametrize(("pulled", "found"), [(8.0, 3.0), (-8.0, -1.0), (0.0, 1.0)])
def test_a_liar_moves_a_metric_no_further_than_its_range(pulled: float, found: float) -> None:
    """By the table of the threat model it adds up to eight times an honest client's largest value to the mean."""
    extras = Extras(measures={"loss": (-1.0, 3.0)})
    mean = np.append(np.zeros(DIM), pulled * extras.weight * 2.0).astype(np.float32)
    assert extras.decode(mean, 2.0)[2] == {"loss": pytest.approx(found, abs=1e-6)}


def test_a_metric_comes_back_from_a_range_that_does_not_begin_at_zero() -> None:
    extras = Extras(measures={"loss": (-1.0, 3.0)})
    for told, found in ((2.0, 2.0), (-0.5, -0.5), (9.0, 3.0), (-9.0, -1.0), (float("nan"), 1.0), ("high", 1.0)):
        vector = extras.encode(np.zeros(DIM, np.float32), {"loss": told}, 2.0)
        assert extras.decode(vector, 2.0)[2]["loss"] == pytest.approx(found, abs=1e-6)
    assert extras.decode(extras.encode(np.zeros(DIM, np.float32), {}, 2.0), 2.0)[2] == {"loss": pytest.approx(1.0)}


def test_norms_and_weights_that_nothing_has() -> None:
    for changes in (
        {"clip": 0.0},
        {"clip": -1.0},
        {"clip": math.inf},
        {"weight": 0.0},
        {"weight": -0.1},
        {"weight": 1.0},
    ):
        with pytest.raises(ParameterError, match=next(iter(changes))):
            Extras(**changes)
        with pytest.raises(WireError):
            Extras.from_json(json.dumps({"measures": {}, "clip": 1.0, "weight": 0.1, **changes}))


def test_a_client_whose_accounting_does_not_cover_them_refuses_what_rides_along(small_plan: Plan) -> None:
    near = replace(small_plan.protocol, replace_one_distance=1.0, distance_reason="one-hot", promise=None)
    BOTH.check(small_plan.protocol, None)
    with pytest.raises(RoundRefusedError, match="single examples"):
        BOTH.check(small_plan.protocol, 5)
    with pytest.raises(RoundRefusedError, match="by their distance"):
        BOTH.check(near, None)


def test_an_update_of_just_the_norm_counts_as_within() -> None:
    extras = Extras(clip=0.5)
    for norm, share in ((0.5, 1.0), (0.5000001, 0.0)):
        vector = np.zeros(DIM, np.float32)
        vector[3] = norm
        assert extras.decode(extras.encode(vector, {}, 2.0), 2.0)[1] == pytest.approx(share, abs=1e-6)
