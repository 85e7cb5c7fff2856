"""Processes that share a run's clients: the result is that of one process, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.run import get_args_parser

from cpsgd.errors import ParameterError
from cpsgd.learning import NoPrivacy, Trainer, devices, mlp
from cpsgd.learning.datasets import from_arrays
from cpsgd.learning.parallel import Processes, own_device
from cpsgd.mechanisms import Binomial, Coins, Mechanism
from cpsgd.protocol import Protocol
from tests.learning.training import make_trainer

PROCESSES = 2
MECHANISMS: dict[str, Mechanism] = {
    "binomial": Binomial(levels=4, trials=30, coordinate_range=0.5),
    "coins": Coins(coins=1, theta=0.2, coordinate_range=0.5),
}


def trainer(mechanism: Any, run_dir: Path | None = None, **options: Any) -> Trainer:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 6)), rng.integers(0, 3, 400)
    data = from_arrays(x, y, test_features=x[:20], test_labels=y[:20])
    settings = {"cohort": 101, "lr": 1.0, "optimizer": "momentum", "seed": 5, "run_dir": run_dir}
    settings |= {"delta": None if isinstance(mechanism, NoPrivacy) else 1e-5}
    model = mlp(6, 3, (), seed=options.pop("weights", 0))
    return make_trainer(data, mechanism, model, **{**settings, **options})


def protocol(kind: str) -> Protocol:
    return Protocol(clients=101, dim=21, clip_norm=1.0, mechanism=MECHANISMS[kind])


def weights_of(found: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in found.model.parameters()])


def scores_of(found: Trainer) -> list[float]:
    return [] if found._canaries is None else found._canaries.canaries.scores.tolist()


def _work(rank: int, port: int, scenario: str, arguments: dict[str, Any], folder: Path) -> None:
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES), "RANK": str(rank)}
    os.environ.update(addresses)
    torch.set_num_threads(1)
    if arguments.pop("gpu", False):
        devices.is_gpu = lambda device: True
    if scenario == "resume":
        # Only the first process is given the folder's state; the others' weights are not even the same.
        first = trainer(run_dir=folder / "run", **arguments, weights=rank)
        for _ in range(2):
            first.step()
        del first
        found = trainer(run_dir=folder / "run", resume=True, **arguments, weights=rank)
        assert found.round == 2
    else:
        found = trainer(**arguments)
    history = list(found.run())
    spent = found.guarantee()
    torch.save((weights_of(found), history[-1].loss, spent and spent.epsilon, scores_of(found)), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def in_parallel(folder: Path, scenario: str = "run", **arguments: Any) -> list[Any]:
    """What each of the processes came to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked, so that nothing is imported again.
    context = multiprocessing.get_context("fork")
    tasks = [(rank, port, scenario, dict(arguments), folder) for rank in range(PROCESSES)]
    started = [context.Process(target=_work, args=task) for task in tasks]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in started] == [0] * PROCESSES
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def alone(gpu: bool, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(devices, "is_gpu", lambda device: gpu)
        found = trainer(**arguments)
        history = list(found.run())
        spent = found.guarantee()
    return weights_of(found), history[-1].loss, spent and spent.epsilon, scores_of(found)


def check_same(several: list[Any], expected: tuple[Any, ...]) -> None:
    for found in several:
        assert torch.equal(found[0], expected[0])
        assert found[1:3] == expected[1:3]
        # What canaries' scores leave out is added in another order.
        assert found[3] == pytest.approx(expected[3], rel=1e-4, abs=1e-6)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads do not survive a fork."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "as on a GPU"])
def test_the_same_as_one_process(kind: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"mechanism": protocol(kind), "canaries": 20 if kind == "coins" else None}
    check_same(in_parallel(tmp_path, **arguments, gpu=gpu), alone(gpu, monkeypatch, **arguments))


def test_poisson_rounds_without_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats are added in another order; the zero vectors that fill rounds up are added once."""
    arguments = {"mechanism": NoPrivacy(1.0), "participation": "poisson"}
    expected = alone(False, monkeypatch, **arguments)
    for found in in_parallel(tmp_path, **arguments):
        torch.testing.assert_close(found[0], expected[0])


def test_without_a_seed_all_have_the_same_model(tmp_path: Path) -> None:
    first, second = in_parallel(tmp_path, mechanism=protocol("coins"), seed=None)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"mechanism": protocol("binomial"), "canaries": 20}
    check_same(in_parallel(tmp_path, "resume", **arguments), alone(False, monkeypatch, **arguments))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_every_client_is_somebodys(size: int, count: int) -> None:
    shares = [Processes(rank, size).share(count) for rank in range(size)]
    assert [client for share in shares for client in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert own_device("cuda", Processes(6, 8)) == "cuda:2"
    assert own_device("cuda:1", Processes(6, 8)) == "cuda:1"
    assert own_device("cpu", Processes(6, 8)) == "cpu"
    assert own_device("cuda", None) == "cuda"


def test_without_gpus_it_is_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match="no CUDA device"):
        devices.resolve(own_device("cuda", Processes(0, 2)))


def test_torchrun_leaves_the_options_that_the_page_gives_to_the_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    lines = [line.partition("#")[0].split()[2:] for line in page.splitlines() if line.startswith("$ torchrun ")]
    assert lines
    for words in lines:
        # Without "--" torchrun refuses --run, as one of two options of its own.
        found = get_args_parser().parse_args([*words, "--run", "mine", "--resume"])
        assert found.training_script == "cpsgd"
        assert found.training_script_args[0] == "train"
        assert found.training_script_args[-3:] == ["--run", "mine", "--resume"]
