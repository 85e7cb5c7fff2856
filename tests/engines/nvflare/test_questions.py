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
from cpsgd.statistics import Components, Mean
from cpsgd.statistics.questions import Question

from .local import Communicator, Persistor, Site, Workspace, context

QUESTION = Mean({"age": (0, 100), "height": (0, 2.5)})
AGES, HEIGHTS = [20, 30, 40, 50, 60], [1.6, 1.7, 1.8, 1.9, 2.0]
PACE = {"nodes": 0.2, "stage": 0.4, "grace": 0.0}


def controller() -> CpsgdController:
    plan = {"dropout": 0.2, "bits": 14, "mechanism": "binomial"}
    return question_controller(QUESTION, 5, 40.0, 1e-5, plan=plan, pace=PACE)


def run(server: CpsgdController, folder: Path, answers: int = 5, question: Question[Any] = QUESTION) -> Persistor:
    fingerprint = server.make_plan(question.geometry.dim).protocol.fingerprint.hex()
    limits = {"epsilon": 40.0, "delta": 1e-5, "rounds": 1, "fingerprint": fingerprint}

    def train(i: int) -> Any:
        def answer(received: FLModel) -> FLModel:
            return answer_question(received, question, {"age": AGES[i], "height": HEIGHTS[i]})

        return answer

    sites = [Site(folder, f"site-{i}", train(i), limits=limits) for i in range(5)]
    for site in sites[answers:]:
        site.tamper = lambda reply: None
    persistor = Persistor(zero_model(question))
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


def test_principal_components_are_a_question_like_others(tmp_path: Path) -> None:
    question = Components(["age", "height"], 1, radius=100.0)
    plan = {"dropout": 0.2, "bits": 14, "mechanism": "binomial"}
    server = question_controller(question, 5, 40.0, 1e-5, plan=plan, pace=PACE)
    persistor = run(server, tmp_path, question=question)
    found = read_answers(question, server, persistor.saved[-1])
    assert found.components.shape == (1, 2)
    assert found.guarantee.epsilon <= 40.0
    assert found.guarantee.assumption is not None
    assert "the products x" in found.guarantee.assumption
    assert abs(found.mean[0] - 40) < 100
