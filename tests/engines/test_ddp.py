"""Real processes that train together: what they compute, what they send, and what they refuse."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import plan
from cpsgd.engines.pair.running import free_port
from cpsgd.errors import ParameterError
from cpsgd.planner import plan_examples
from cpsgd.privacy import guarantee_over_rounds

torch = pytest.importorskip("torch", reason="the workers need PyTorch")
from . import ddp_workers  # noqa: E402

pytestmark = pytest.mark.slow
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.thorough)])

SCENARIOS = {
    2: [
        *("mean", "modular", "workers", "optimizer", "not_finite", "not_finite_gradient", "too_many_examples"),
        *("other_types", "other_protocol", "other_budget", "other_round", "budget", "wrong_model", "slow_release"),
        *("charged", "unpaid", "taken_up", "wrong_ledger"),
    ],
    4: ["mean", "modular", "workers", "not_finite", "other_protocol", "other_round", "charged", "wrapped"],
}

Results = list[dict[str, Any]]
Run = Callable[[str, int], Results]


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def launch(folder: Path, count: int, names: list[str], expected: int) -> list[dict[str, Any]]:
    """Runs scenarios on `count` workers; returns what each of the `expected` ones that finish saw."""
    torch.set_num_threads(1)  # threads do not survive a fork
    assert ddp_workers.start(folder, count, names) == 0
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pickle"))]
    assert len(found) == expected
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """From a scenario and a number of workers to what each of them saw."""

    @cache
    def everything(count: int) -> list[dict[str, Any]]:
        return launch(tmp_path_factory.mktemp("workers"), count, SCENARIOS[count], count)

    return lambda name, count: [worker[name] for worker in everything(count)]


@COUNTS
def test_every_worker_decodes_the_protocols_mean(run: Run, count: int) -> None:
    found = run("mean", count)
    protocol = found[0]["protocol"]
    for number in range(3):
        integers = [worker["seen"]["integers"][number] for worker in found]
        assert not np.array_equal(integers[0], integers[1])
        total = np.sum(integers, axis=0, dtype=np.uint64)
        expected = protocol.decode_sum(total, count, round=number)
        for worker in found:
            assert worker["means"][number].tobytes() == expected.tobytes()


@COUNTS
def test_a_modulus_that_is_no_power_of_two_changes_no_mean(run: Run, count: int) -> None:
    found = run("modular", count)
    protocol = found[0]["protocol"]
    assert protocol.modulus.bit_count() > 1
    plain = replace(protocol, modulus=None)
    for number in range(3):
        total = np.sum([worker["seen"]["integers"][number] for worker in found], axis=0, dtype=np.uint64)
        assert total.max() >= protocol.modulus or count == 2
        wrapped = protocol.decode_sum(total % np.uint64(protocol.modulus), count, round=number)
        for worker in found:
            assert worker["means"][number].tobytes() == wrapped.tobytes()
            np.testing.assert_allclose(worker["means"][number], plain.decode_sum(total, count, number), atol=1e-5)


def test_a_wrapped_optimizer_steps_along_the_private_mean(run: Run) -> None:
    found = run("optimizer", 2)
    for worker in found:
        # Gradients are clipped: the same steps by hand, from the sum of the workers' integers, give the same weights.
        assert min(worker["norms"]) > 10.0
        assert worker["alike"] == [True, True]
        assert worker["sent"] == []
        assert worker["weights"].tobytes() == found[0]["weights"].tobytes()
        # Of two workers one is curious, and each takes part in every step: the noise of one counts, for all steps.
        expected = guarantee_over_rounds(
            worker["protocol"], 1e-5, rounds=2, participation="every", surviving=2, colluding=1
        )
        assert (worker["spent"].epsilon, worker["spent"].noise_clients) == (expected.epsilon, 1)
        assert worker["resumed"] == (2, expected.epsilon, 0.05)
        # The budget is for three steps; the fourth changes nothing.
        assert worker["error"][0] == "InfeasibleError"
        assert worker["kept"]
        assert "at most 3 steps" in worker["too many"][1]
        assert "make it with model.parameters()" in worker["other parameters"][1]
        assert "LBFGS" in worker["several gradients"][1]


@COUNTS
def test_what_is_sent_is_what_is_reported(run: Run, count: int) -> None:
    for worker in run("mean", count):
        assert worker["seen"]["sent"] == [("torch.int64", worker["payload_bytes"])] * 3
        # 20 coordinates whose sums stay below 2^16 or 2^17: four or three a lane.
        assert worker["payload_bytes"] == (40 if count == 2 else 56)


@COUNTS
def test_the_guarantee_is_that_of_the_others_noise(run: Run, count: int) -> None:
    for worker in run("mean", count):
        expected = guarantee_over_rounds(worker["protocol"], 1e-5, rounds=3, surviving=count, colluding=1)
        assert worker["guarantee"] == expected
        assert worker["epsilon"] == expected.epsilon
        assert expected.noise_clients == count - 1


@COUNTS
def test_replicas_stay_identical(run: Run, count: int) -> None:
    found = run("workers", count)
    for step in range(5):
        for name in ("shared", "weights"):
            assert len({worker[name][step].tobytes() for worker in found}) == 1
    assert not np.array_equal(found[0]["weights"][0], found[0]["weights"][4])


@COUNTS
def test_gradients_stay_on_their_worker_until_they_are_protected(run: Run, count: int) -> None:
    found = run("workers", count)
    for worker in found:
        for with_ddp, alone in worker["local"]:
            np.testing.assert_allclose(with_ddp, alone, rtol=1e-6, atol=1e-7)
    assert not np.array_equal(found[0]["local"][0][0], found[1]["local"][0][0])


@COUNTS
def test_one_vector_that_is_not_finite_stops_everybody(run: Run, count: int) -> None:
    found = run("not_finite", count)
    assert [worker["error"][0] for worker in found] == ["WorkerError"] * (count - 1) + ["NonFiniteError"]
    assert f"Worker {count - 1} refused" in found[0]["error"][1]
    for worker in found:
        assert worker["sent"] == []
        assert worker["spent"] == 0
        # The next round works as if nothing had happened.
        assert worker["again"].tobytes() == found[0]["again"].tobytes()


def test_a_gradient_that_is_not_finite_changes_nothing(run: Run) -> None:
    found = run("not_finite_gradient", 2)
    assert [worker["error"][0] for worker in found] == ["NonFiniteError", "WorkerError"]
    for worker in found:
        np.testing.assert_array_equal(worker["before"], worker["after"])


def test_other_types_and_missing_gradients(run: Run) -> None:
    found = run("other_types", 2)
    assert found[0]["types"] == found[1]["types"] == ["torch.bfloat16"] * 2
    assert found[0]["gradient"] == found[1]["gradient"]


def test_too_many_examples_stop_everybody(run: Run) -> None:
    found = run("too_many_examples", 2)
    assert [worker["error"][0] for worker in found] == ["ParameterError", "WorkerError"]
    assert [worker["spent"] for worker in found] == [0, 0]


@COUNTS
@pytest.mark.parametrize("difference", ["other_protocol", "other_round"])
def test_workers_that_do_not_agree_all_stop(run: Run, count: int, difference: str) -> None:
    reason = {"other_protocol": "another protocol", "other_round": "is in round"}[difference]
    for worker in run(difference, count):
        assert worker["error"][0] == "WorkerError"
        assert reason in worker["error"][1]
        assert worker["sent"] == []


def test_another_budget_is_a_disagreement(run: Run) -> None:
    assert [(worker["error"][0], worker["spent"]) for worker in run("other_budget", 2)] == [("WorkerError", 0)] * 2


def test_the_budget_ends_before_anything_is_sent(run: Run) -> None:
    for worker in run("budget", 2):
        assert worker["error"][0] == "InfeasibleError"
        assert "All 3 rounds" in worker["error"][1]
        assert worker["sent"] == []
        assert worker["spent"] == 3


@COUNTS
def test_one_worker_charges_every_round_once(run: Run, count: int) -> None:
    first, *others = run("charged", count)
    assert [entry.event.round for entry in first["entries"]] == [0, 1]
    for entry in first["entries"]:
        event = entry.event
        assert event.protocol == first["protocol"]
        assert (event.survivors, event.colluding, event.taking_part.scheme) == (count, 1, "every")
        assert entry.released
    assert first["spent"] == first["epsilon"] > 0.0
    # The second round was charged before its last worker refused it, and its repetition was not.
    assert first["counts"] == (1, 2)
    assert [worker["refused"][0] for worker in (first, *others)] == ["WorkerError"] * (count - 1) + ["NonFiniteError"]
    assert all(worker["files"] == [] for worker in others)


def test_what_the_ledger_does_not_pay_for_is_sent_by_nobody(run: Run) -> None:
    first, second = run("unpaid", 2)
    assert [error[0] for error in first["errors"]] == ["BudgetExceededError"] * 2
    assert [error[0] for error in second["errors"]] == ["WorkerError"] * 2
    assert all("the privacy ledger does not pay" in error[1] for error in second["errors"])
    for worker in (first, second):
        assert worker["sent"] == []
        assert worker["spent"] == (0, 1)
    assert first["entries"] == (0, 3)  # of the second: one round, and what somebody else reserved


def test_a_run_that_is_taken_up_is_charged_as_one(run: Run) -> None:
    first, second = run("taken_up", 2)
    assert [entry.event.round for entry in first["entries"]] == [0, 1, 2]
    assert first["total"] == first["cost"]
    # Whether integers of a round that is on the ledger were seen is not known: it is not run again.
    assert (first["error"][0], second["error"][0]) == ("EntryError", "WorkerError")
    assert first["sent"] == second["sent"] == []
    # Examples of another run are others' or the same: the budget pays for the same.
    assert (first["other"][0], second["other"][0]) == ("BudgetExceededError", "WorkerError")


def test_a_ledger_that_does_not_fit_stops_everybody(run: Run) -> None:
    first, second = run("wrong_ledger", 2)
    expected = {"adjacency": "ParameterError", "unit": "ParameterError", "unknown": "PopulationError"}
    for name, error in expected.items():
        assert (first["found"][name][0][0], second["found"][name][0][0]) == (error, "WorkerError")
    assert [worker["found"]["disagreement"][0][0] for worker in (first, second)] == ["WorkerError"] * 2
    for worker in (first, second):
        assert all(sent == [] and spent == 0 for _, sent, spent in worker["found"].values())
        assert [error[0] for error in worker["halves"]] == ["ParameterError"] * 2
    assert first["spent"] == 0


def test_what_cannot_be_promised_is_refused_at_the_start(run: Run) -> None:
    for worker in run("budget", 2):
        assert worker["too small"][0] == "InfeasibleError"
        assert worker["alone"][0] == "ConditionError"
        assert worker["wrong size"][0] == "ParameterError"
    for worker in run("wrapped", 4):
        # An all-reduce adds up without reducing, and then less is proved than for sums modulo M.
        assert worker["refused"][0] == "ParameterError"
        assert "colluding=3" in worker["refused"][1]
        assert worker["allowed"] == 1
    for worker in run("wrong_model", 2):
        assert {name: error[0] for name, error in worker.items()} == dict.fromkeys(worker, "ParameterError")
        words = {"statistics": "statistics", "buffers": "broadcast", "unused": "find_unused", "static": "static_graph"}
        for name, word in words.items():
            assert word in worker[name][1]


def test_without_workers_it_says_what_to_do() -> None:
    from cpsgd import PrivateMean

    best = plan(clients=4, dim=3, epsilon=8.0, delta=1e-5, rounds=5, colluding=1, bits=8, mechanism="binomial")
    limits: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "rounds": 5}
    with pytest.raises(ParameterError, match="init_process_group"):
        PrivateMean(best.protocol, **limits)
    given: Any = best
    with pytest.raises(ParameterError, match="its `protocol`"):
        PrivateMean(given, **limits)
    run = plan(clients=4, dim=3, epsilon=8.0, delta=1e-5, rounds=5, participation="once", correlated=2, bits=12)
    # It would be private, and nothing would cancel.
    with pytest.raises(ParameterError, match="Plan without `correlated`"):
        PrivateMean(run.protocol, **limits)


def test_a_round_ends_when_the_transport_has_let_go(run: Run) -> None:
    # Otherwise a program that ends after its last round is aborted, while gloo's thread still frees the tensor.
    for worker in run("slow_release", 2):
        (released,) = worker["released"]
        assert worker["returned"] >= released


def test_a_worker_that_ends_is_noticed(tmp_path: Path) -> None:
    found = launch(tmp_path, 3, ["lost_worker"], expected=2)
    for worker in found:
        assert worker["lost_worker"]["error"][0] == "TransportError"
        assert worker["lost_worker"]["spent"] == 1
    # The second round was charged before its worker was missed, and stays so.
    assert [worker["lost_worker"]["charged"] for worker in found] == [2, 0]


@COUNTS
def test_it_learns_the_digits(tmp_path: Path, count: int) -> None:
    found = [worker["digits"] for worker in launch(tmp_path, count, ["digits"], count)]
    assert len({worker["weights"].tobytes() for worker in found}) == 1
    assert found[0]["accuracy"] > 0.85
    assert found[0]["epsilon"] < 4.0
    assert found[0]["bits"] == pytest.approx(12.8)


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "ddp_digits.py"
    plan_examples(2, 650, 2.0, 1e-6, rounds=40, examples=256, colluding=1)  # once: workers inherit what is remembered
    (tmp_path / "ports").write_text(str(free_port()))
    assert ddp_workers.start(tmp_path, 2, [str(example)], ddp_workers.script) == 0
    first, second = ((tmp_path / f"{example.name}.{rank}").read_text() for rank in range(2))
    assert "at ε = 2.00" in first
    assert "9.2 bits per coordinate" in first
    assert second == ""


def test_examples_print_what_they_show(tmp_path: Path) -> None:
    """The docstrings skip them, since one process is too few.

    False alarms: `PrivateMean` and `ExampleGradients` show means of sums with noise of standard deviation below 4,
    divided by 1,000 and rounded to 0.1. Another digit is more than 12 standard deviations away: below 1e-30.
    """
    names = ["PrivateMean", "ExampleGradients", "WorkerGradients", "PrivateOptimizer"]
    # Once: workers inherit what is remembered.
    plan(2, 3, 8.0, 1e-6, rounds=10, colluding=1)
    plan_examples(2, 2, 2.0, 1e-6, rounds=1, examples=1000, colluding=1)
    (tmp_path / "ports").write_text(" ".join(map(str, free_ports(len(names)))))
    torch.set_num_threads(1)
    assert ddp_workers.start(tmp_path, 2, names, ddp_workers.show) == 0
    found = [(tmp_path / f"{name}.{rank}").read_text() for name in names for rank in range(2)]
    assert [text for text in found if ", 0 failed\n" not in text] == []
