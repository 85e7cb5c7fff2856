"""Private statistics over NVFlare, in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel

from cpsgd.engines.nvflare import CpsgdController, answer_question, question_controller, read_answers, zero_model
from cpsgd.errors import ConditionError
from cpsgd.statistics import Clusters, Mean
from cpsgd.statistics.questions import Question

from .local import Communicator, Persistor, Site, Workspace, context

QUESTION = Mean({"age": (0, 100), "height": (0, 2.5)})
AGES, HEIGHTS = [20, 30, 40, 50, 60], [1.6, 1.7, 1.8, 1.9, 2.0]
PACE = {"nodes": 0.2, "stage": 0.4, "grace": 0.0}


def controller() -> CpsgdController:
    plan = {"dropout": 0.2, "bits": 14, "mechanism": "binomial"}
    return question_controller(QUESTION, 5, 40.0, 1e-5, plan=plan, pace=PACE)


def run(server: CpsgdController, folder: Path, answers: int = 5, question: Question[Any] = QUESTION) -> Persistor:
    def train(i: int) -> Any:
        def answer(received: FLModel) -> FLModel:
            return answer_question(received, question, {"age": AGES[i], "height": HEIGHTS[i]})

        return answer

    return run_job(server, folder, zero_model(question), [train(i) for i in range(5)], answers)


def run_job(server: CpsgdController, folder: Path, model: Any, scripts: list[Any], answers: int) -> Persistor:
    dim = sum(np.size(array) for array in model.values())
    fingerprint = server.make_plan(dim).protocol.fingerprint.hex()
    limits = {"epsilon": server.epsilon, "delta": 1e-5, "rounds": server.num_rounds, "fingerprint": fingerprint}
    sites = [Site(folder, f"site-{i}", script, limits=limits) for i, script in enumerate(scripts)]
    for site in sites[answers:]:
        site.tamper = lambda reply: None
    persistor = Persistor(model)
    server.persistor, server.abort_signal = persistor, Signal()
    (folder / "server").mkdir()
    server.engine = SimpleNamespace(
        get_clients=lambda: [Client(site.name, "token") for site in sites],
        get_workspace=lambda: Workspace(folder / "server"),
    )
    server.fl_ctx = context(folder / "server", "server")
    server.communicator = Communicator(sites)
    server.run()
    return persistor


def test_means_by_secure_aggregation(tmp_path: Path) -> None:
    server = controller()
    persistor = run(server, tmp_path)
    found = read_answers(QUESTION, server, persistor.saved[-1], confidence=1.0 - 1e-9)
    assert (found.names, found.users) == (("age", "height"), 5)
    assert ((found.low <= [40, 1.8]) & (found.high >= [40, 1.8])).all()
    assert np.abs(found.values - [40, 1.8]).max() < 50
    assert found.epsilon <= 40.0


def test_too_few_answers_release_nothing(tmp_path: Path) -> None:
    server = controller()
    persistor = run(server, tmp_path, answers=3)
    with pytest.raises(ConditionError, match="Nothing was released"):
        read_answers(QUESTION, server, persistor.saved[-1])
    assert not persistor.saved[-1]["answer"].any()


def test_the_servers_model_does_not_round_the_answer() -> None:
    huge = FLModel("FULL", {"answer": np.full(2, 1e8, dtype=np.float32)})
    sent = answer_question(huge, QUESTION, {"age": 25, "height": 2.0})
    np.testing.assert_allclose(sent.params["answer"], [-0.25, 0.3], atol=1e-6)
    assert sent.params_type == "DIFF"


def test_rounds_of_kmeans(tmp_path: Path) -> None:
    """As docs/statistics-between-machines.md has it: the centres travel as the model, one row (centre, 1) each."""
    points = np.repeat([[0.9, 0.1], [-0.9, 0.1]], 6, axis=0)
    question = Clusters(2, 2, radius=1.0, rounds=2, initial=[[0.2, 0.0], [-0.2, 0.0]])
    wishes = {"bits": 14, "mechanism": "binomial", "dropout": 0.3}
    asked = question.plan(12, 450.0, 1e-5, secure=True, colluding=1, **wishes)
    lloyd = asked.start()

    def packed() -> Any:
        rows = np.zeros((question.blocks.clusters, 3), dtype=np.float32)
        rows[: len(lloyd.centres)] = np.column_stack([lloyd.centres, np.ones(len(lloyd.centres))])
        return rows.ravel()

    def apply(model: Any, mean: Any, round: int) -> Any:
        lloyd.update(asked.around(lloyd.centres).result(mean, 12))
        return packed()

    def train(point: Any) -> Any:
        def answer(received: FLModel) -> FLModel:
            rows = received.params["answer"].reshape(-1, 3)
            return answer_question(received, asked.around(rows[rows[:, -1] > 0, :-1]).question, point)

        return answer

    stated = asked.around(lloyd.centres).question.geometry.stated()
    del stated["dim"]
    patient = {**PACE, "stage": 30.0}
    server = CpsgdController(12, 2, 450.0, 1e-5, plan={**wishes, **stated}, apply=apply, pace=patient)
    assert server.make_plan(asked.protocol.dim).protocol == asked.protocol
    run_job(server, tmp_path, {"answer": packed()}, [train(point) for point in points], 12)
    assert [report.released for report in server.reports] == [True, True]
    # Eight standard deviations.
    np.testing.assert_allclose(lloyd.result().centres, [[0.9, 0.1], [-0.9, 0.1]], atol=0.5)
