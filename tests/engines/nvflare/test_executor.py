"""What a client insists on."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from cpsgd.engines.nvflare import CpsgdExecutor, silo_sum
from cpsgd.errors import ParameterError
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.terms import Terms

from .local import Site, Trainer, adds, cached_plan, run
from .test_rounds import DIM, VECTORS, controller, sites

LIMITS = {"epsilon": 8.0, "delta": 1e-5, "colluding": 1}


def reason(reply: Shareable) -> str:
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    return str(reply["cpsgd-reason"])


def opening() -> Shareable:
    """The task that begins a round."""
    best = cached_plan(5, DIM, 8.0, 1e-5, rounds=3, secure=True, dropout=0.2, colluding=1, bits=14)
    requests = begin_round(Terms(plan=best), 1, [f"site-{i}" for i in range(5)], run="a-job").requests()
    task = Shareable()
    task["cpsgd-request"] = requests["site-0"]
    return task


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, "site-0", adds(VECTORS[0]), limits=LIMITS)


def test_tasks_without_a_request_are_refused_whatever_their_name(site: Site) -> None:
    model = FLModelUtils.to_shareable(FLModel(params={"weight": np.zeros(DIM, np.float32)}))
    for name in ("train", "validate", "submit_model", "cpsgd"):
        reply = site.executor.execute(name, model, site.context, Signal())
        assert "StageError: The server's task holds no request of cpsgd" in reason(reply)
    assert not site.trainer.received


@pytest.mark.parametrize("request_bytes", [b"", b"cpsf", np.random.default_rng(1).bytes(300)])
def test_requests_that_are_none_are_refused(site: Site, request_bytes: bytes) -> None:
    task = Shareable()
    task["cpsgd-request"] = request_bytes
    reason(site.answer(task))
    assert not site.trainer.received


def test_the_same_stage_is_not_answered_twice(site: Site) -> None:
    assert site.answer(opening()).get_return_code() == ReturnCode.OK
    assert "RoundError" in reason(site.answer(opening()))


def test_of_tasks_pushed_at_the_same_time_one_is_answered(site: Site) -> None:
    task = opening()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: site.answer(task), range(8)))
    assert sorted(reply.get_return_code() == ReturnCode.OK for reply in replies) == [False] * 7 + [True]


def test_a_site_that_sends_its_logs_to_the_server_is_warned_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        site.answer(opening())
    assert caplog.text.count("allow_log_streaming") == 1


def test_a_stage_that_trains_needs_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = sites(tmp_path)
    execute = members[0].executor.execute

    def without_model(name: str, data: Shareable, *others: Any) -> Shareable:
        bare = Shareable()
        bare["cpsgd-request"] = data["cpsgd-request"]
        return execute(name, bare, *others)

    monkeypatch.setattr(members[0].executor, "execute", without_model)
    server = controller(num_rounds=1)
    run(server, members, tmp_path / "server")
    assert "StageError: Expected a model" in server.reports[0].dropped["site-0"]
    assert not members[0].trainer.received


def test_a_job_cannot_cost_more_than_its_limits(tmp_path: Path) -> None:
    members = sites(tmp_path, limits={"epsilon": 4.0, "delta": 1e-5})
    server = controller(num_rounds=1)
    run(server, members, tmp_path / "server")
    assert not server.reports[0].released
    assert all("RoundRefusedError: The server's protocol costs" in text for text in server.reports[0].dropped.values())
    assert not members[0].trainer.received


def test_a_sites_own_conditions_stand_above_the_jobs(site: Site) -> None:
    local = site.folder / "local" / "cpsgd.json"
    for own, expected in (
        ({"limits": {"epsilon": 4.0, "delta": 1e-5}}, "costs ε"),
        ({"limits": {"epsilon": 4.0}}, "Give epsilon and delta together"),
        ({"limits": {"rounds": 2}}, "announces 3 rounds"),
        ({"limits": {"fingerprint": "00" * 32}}, "FingerprintError"),
        ({"allow_metrics": "loss"}, "Expected allow_metrics to be a list"),
    ):
        local.write_text(json.dumps(own))
        assert expected in reason(site.answer(opening()))
    local.write_text(json.dumps({"limits": {"epsilon": 9.0, "delta": 1e-5}}))
    assert site.answer(opening()).get_return_code() == ReturnCode.OK


def test_a_job_does_not_say_what_a_sites_epsilon_is_of(tmp_path: Path) -> None:
    """The same ε for neighbours that are nearer to each other would be another promise."""
    site = Site(tmp_path, "site-0", adds(VECTORS[0]), limits={**LIMITS, "adjacency": "zero-out"})
    (site.folder / "local" / "cpsgd.json").write_text('{"limits": {"epsilon": 6.0, "delta": 1e-5}}')
    assert "costs ε" in reason(site.answer(opening()))


def test_a_site_refuses_uploads_in_the_servers_sight_though_the_job_allows_them(tmp_path: Path) -> None:
    members = sites(tmp_path, secure=False)
    for site in members:
        (site.folder / "local" / "cpsgd.json").write_text('{"secure": true}')
    server = controller(num_rounds=1, secure=False)
    run(server, members, tmp_path / "server")
    assert all("without secure aggregation" in text for text in server.reports[0].dropped.values())


@pytest.mark.parametrize("text", ["{", "[]", '{"limits": 3}', "\udcff"])
def test_conditions_that_cannot_be_read_refuse_every_round(site: Site, text: str) -> None:
    (site.folder / "local" / "cpsgd.json").write_bytes(text.encode(errors="surrogateescape"))
    assert (
        reason(site.answer(opening())) == "RoundRefusedError: This site cannot read its own conditions in cpsgd.json."
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"cpsgd_memory": "/somewhere"}', "Did its operator mean 'cpsgd-memory'"),
        ('{"limit": {"epsilon": 1.0, "delta": 1e-6}}', "Did its operator mean 'limits'"),
        ('{"limits": {"epsilom": 1.0}}', "Did its operator mean 'epsilon'"),
        ('{"require_memory": true}', "requires a memory"),
        ('{"require_memory": "no"}', "requires a memory"),
        ('{"require_roster": true, "cpsgd-memory": "/somewhere"}', "requires a roster"),
    ],
)
def test_conditions_that_would_protect_less_in_silence_refuse_every_round(site: Site, text: str, told: str) -> None:
    (site.folder / "local" / "cpsgd.json").write_text(text)
    assert told in reason(site.answer(opening()))


def test_a_job_can_require_a_memory(tmp_path: Path) -> None:
    site = Site(tmp_path, "site-0", adds(VECTORS[0]), require_memory=True)
    assert "requires a memory" in reason(site.answer(opening()))


def test_a_memory_counts_rounds_over_jobs(tmp_path: Path) -> None:
    members = sites(tmp_path, limits={"rounds": 3})
    for site in members:
        memory = {"cpsgd-memory": str(site.folder / "memory")}
        (site.folder / "local" / "cpsgd.json").write_text(json.dumps(memory))
    for job, released in (("first", 3), ("second", 0)):
        for site in members:
            site.begin(job)
        server = controller()
        run(server, members, tmp_path / "server", job)
        assert sum(report.released for report in server.reports) == released
    assert [len(site.trainer.received) for site in members] == [3] * 5


def test_options_are_checked_when_the_job_is_made() -> None:
    with pytest.raises(ParameterError, match="epsilon and delta together"):
        CpsgdExecutor(Trainer(adds(VECTORS[0])), limits={"epsilon": 1.0})
    with pytest.raises(ParameterError, match="allow_metrics"):
        CpsgdExecutor(Trainer(adds(VECTORS[0])), allow_metrics="loss")


# ---------------------------------------------------------------------- sums of examples


def test_silos_send_sums_of_clipped_gradients(tmp_path: Path) -> None:
    import torch

    from cpsgd.planner.examples import sum_norm

    features = np.random.default_rng(5).normal(size=(5, 6, 4)).astype(np.float32)
    labels = np.zeros(6, np.int64)
    received: list[FLModel] = []

    class Linear(torch.nn.Module):
        """40 parameters, with the names and shapes of the tests' model."""

        def __init__(self, arrays: dict[str, np.ndarray]) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.from_numpy(arrays["weight"].copy()))
            self.bias = torch.nn.Parameter(torch.from_numpy(arrays["bias"].copy()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.weight.T + self.bias.reshape(5, 4).sum(1)

    def train(silo: int) -> Any:
        def call(model: FLModel) -> FLModel:
            received.append(model)
            loss = torch.nn.functional.cross_entropy
            found = silo_sum(model, Linear(model.params), loss, features[silo], labels)
            found.params = {name: tensor.numpy() for name, tensor in found.params.items()}
            return found

        return call

    limits = {"epsilon": 8.0, "delta": 1e-5, "examples": 6, "colluding": 1}
    members = [Site(tmp_path, f"site-{i}", train(i), limits=limits) for i in range(5)]
    server = controller(num_rounds=1, examples=6)
    after = run(server, members, tmp_path / "server")
    assert server.reports[0].released
    accepted = {"clip-norm": pytest.approx(sum_norm(1.0, 6)), "examples": 6, "rate": 1.0, "round": 1}
    assert received[0].meta["cpsgd"] == accepted
    # At a model of zeros the gradient of the bias is ±1/5 or 4/5, the same for all examples: clipped to norm 1 or less.
    assert 0.0 < np.linalg.norm(after) < 6.0 + 9 * np.sqrt(server.make_plan(DIM).error.total)
    # Clients that are set up for whole clients refuse.
    others = sites(tmp_path / "others")
    run(server, others, tmp_path / "server", "another")
    assert not server.reports[-1].released


def test_silo_sum_needs_an_accepted_protocol() -> None:
    with pytest.raises(ParameterError, match="silo_sum needs"):
        silo_sum(FLModel(params={}), None, None, None, None)


# ---------------------------------------------------------------------- imports


@pytest.mark.parametrize("module", ["cpsgd", "cpsgd.federation.answering", "cpsgd.federation.choreography"])
def test_nothing_else_imports_nvflare(module: str) -> None:
    code = f"import sys, {module}; sys.exit('nvflare' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['nvflare'] = None; import cpsgd.engines.nvflare"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr
    assert "nvflare" in done.stderr
