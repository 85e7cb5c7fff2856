"""ε, plans and accounting protocols are the numbers that release 0.1.0 computed, or better ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest

import cpsgd
from cpsgd import errors
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.privacy.one_example import example_protocol

from .recorded import better, no_larger, read, same

CHUNKS = 8
# The scale is searched for to a thousandth, around an optimum that is flat. Where certificates became tighter, the
# search starts elsewhere and ends a little off.
SEARCHED = 1e-6
PROVE: dict[str, Callable[..., cpsgd.Guarantee]] = {
    "guarantee": cpsgd.guarantee,
    "guarantee_over_rounds": guarantee_over_rounds,
}
PLAN: dict[str, Callable[..., cpsgd.Plan]] = {"plan": cpsgd.plan, "plan_examples": plan_examples}


def refused(row: dict[str, Any], call: Callable[[], object]) -> bool:
    """Whether the row is about an error; then the call must raise that very class."""
    if "error" not in row:
        return False
    with pytest.raises(errors.CpsgdError) as caught:
        call()
    assert type(caught.value) is getattr(errors, row["error"]), row
    return True


def kind(row: dict[str, Any]) -> tuple[object, ...]:
    """What is asked, with which options, and what the answer rests on."""
    asked = row["arguments"]
    scheme = str(asked.get("participation")).partition(":")[0]
    rotate = row.get("protocol", {}).get("rotate")
    return row["call"], row.get("error"), row.get("method"), *sorted(asked), scheme, asked.get("adjacency"), rotate


def rows_of(name: str, chunk: int | str) -> list[dict[str, Any]]:
    """One row of each kind, a chunk of all rows, or all slow rows."""
    rows: list[dict[str, Any]] = read(name)
    quick, slow = [row for row in rows if not row["slow"]], [row for row in rows if row["slow"]]
    if chunk == "kinds":
        return list({kind(row): row for row in reversed(quick + slow)}.values())
    return slow if chunk == "slow" else quick[int(chunk) :: CHUNKS]


IN_CHUNKS = pytest.mark.parametrize(
    "chunk", ["kinds", *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in (*range(CHUNKS), "slow"))]
)


@IN_CHUNKS
def test_epsilon_is_the_same_number_or_a_smaller_one(chunk: int | str) -> None:
    for row in rows_of("epsilon.json", chunk):
        protocol = cpsgd.Protocol.from_dict(row["protocol"])
        prove = PROVE[row["call"]]
        if row.get("error") == "ConditionError":
            # Nothing was proved then; if something is now, it is a number.
            with contextlib.suppress(errors.ConditionError):
                assert 0.0 < prove(protocol, **row["arguments"]).epsilon < math.inf, row
            continue
        if refused(row, lambda: prove(protocol, **row["arguments"])):  # noqa: B023  # called at once
            continue
        found = prove(protocol, **row["arguments"])
        assert found.noise_clients == row["noise_clients"], row
        if better(found.epsilon, row["epsilon"]):  # tighter certificates since: another method, or another share of δ
            assert found.tail < found.delta, row
            continue
        assert same(found.epsilon, row["epsilon"]), (found.epsilon, row)
        assert no_larger(found.tail, row["tail"]), (found.tail, row)
        assert found.method == row["method"], row


@IN_CHUNKS
def test_a_plan_is_the_same_plan_or_one_with_less_error(chunk: int | str) -> None:
    rows = rows_of("plans.json", chunk)
    if chunk == "kinds":
        # Secure sums and an error that cannot be reached take seconds: of these all but one are in the other chunks.
        slow = [row for row in rows if row["arguments"].get("secure")]
        slow += [row for row in rows if row.get("error") == "InfeasibleError" and "max_error" in row["arguments"]]
        rows = [row for row in rows if row not in slow[1:]]
    for row in rows:
        make = PLAN[row["call"]]
        drawn = row["call"] == "plan_examples" and "poisson" in row["arguments"].get("participation", "")
        if row.get("error") == "InfeasibleError" or drawn:
            # There was none then, nor for examples that silos draw; if there is one now, it keeps what was asked for.
            with contextlib.suppress(errors.InfeasibleError):
                assert make(**row["arguments"]).guarantee.epsilon <= row["arguments"]["epsilon"], row
            continue
        if refused(row, lambda: make(**row["arguments"])):  # noqa: B023  # called at once
            continue
        found = make(**row["arguments"])
        if row["arguments"].get("secure"):
            check_no_worse(found, row)
            continue
        expected = cpsgd.Protocol.from_dict(row["protocol"])
        assert expected.fingerprint.hex() == row["fingerprint"], row
        assert found.surviving == row["surviving"], row
        if found.error.total < (1.0 - SEARCHED) * float.fromhex(
            row["squared_error"]["hex"]
        ):  # tighter certificates since
            assert found.bits <= row["bits"], row
            assert found.guarantee.epsilon <= row["arguments"]["epsilon"], row
            continue
        if found.protocol.mechanism.name != expected.mechanism.name:
            # Where no bits are asked for, the fewest near the Gaussian are taken; at the same bits it is no worse.
            assert found.bits <= row["bits"], row
            assert found.guarantee.epsilon <= row["arguments"]["epsilon"], row
            if found.bits < row["bits"]:
                # Or the fewest whose error is allowed.
                most = row["arguments"].get("max_error", 1.1 * found.gaussian_squared_error)
                assert found.error.total <= most, row
                found = make(**{**row["arguments"], "max_error": None, "bits": row["bits"]})
            assert found.error.total <= (1.0 + SEARCHED) * float.fromhex(row["squared_error"]["hex"]), row
            continue
        for name in ("clients", "dim", "clip_norm", "levels", "trials", "p", "rotate", "modulus", "rotation_seed"):
            assert found.protocol.to_dict()[name] == expected.to_dict()[name], (name, row)
        assert same(found.protocol.to_dict()["coordinate_range"], row["coordinate_range"], SEARCHED), row
        epsilon = found.guarantee.epsilon
        assert same(epsilon, row["epsilon"], SEARCHED) or better(epsilon, row["epsilon"]), row
        assert same(found.ratio, row["ratio"], SEARCHED), row
        assert same(found.error.total, row["squared_error"], SEARCHED), row
        assert same(found.gaussian_squared_error, row["gaussian_squared_error"]), row
        # The bound now also counts what the sampler's resolution may do, some 1e-24.
        recorded = float.fromhex(row["overflow_probability"]["hex"])
        assert found.overflow_probability == pytest.approx(recorded, rel=1e-12, abs=1e-20), row
        assert (found.guarantee.method, found.bits) == (row["method"], row["bits"])
        # Tighter certificates may choose other levels and noise; what errors they had is not on record.
        # And there may be some for fewer bits than there were.
        assert {point.bits for point in found.frontier} >= {point[0] for point in row["frontier"]}, row


def check_no_worse(found: cpsgd.Plan, row: dict[str, Any]) -> None:
    """With a modulus that need not be a power of two: as few bits or fewer, and as little error at the same bits."""
    number = {name: float.fromhex(row[name]["hex"]) for name in ("ratio", "gaussian_squared_error")}
    assert found.protocol.modulus is not None
    assert found.bits <= row["bits"], row
    assert found.protocol.modulus <= row["protocol"]["modulus"], row
    assert found.protocol.message_bytes <= cpsgd.Protocol.from_dict(row["protocol"]).message_bytes, row
    if found.bits == row["bits"]:
        assert found.ratio <= number["ratio"] * (1.0 + 1e-9), row
    assert same(found.gaussian_squared_error, row["gaussian_squared_error"]), row
    assert found.guarantee.epsilon <= row["arguments"]["epsilon"], row
    assert found.overflow_probability <= row["arguments"].get("overflow", 1e-9), row
    assert found.surviving == row["surviving"], row
    assert found.frontier[0].bits <= row["frontier"][0][0], row


def test_the_protocol_of_an_example_is_the_same() -> None:
    for row in read("example_protocols.json"):
        protocol = cpsgd.Protocol.from_dict(row["protocol"])
        if not refused(row, lambda: example_protocol(protocol, row["examples"])):  # noqa: B023  # called at once
            assert example_protocol(protocol, row["examples"]).to_dict() == row["result"], row
