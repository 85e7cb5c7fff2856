"""Real processes on 127.0.0.1: killed at any moment, every report that was acknowledged is in exactly one sum."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import httpx
import numpy as np
import pytest

from cpsgd import Protocol, plan
from cpsgd.engines.pair.parties import Collector, Sender
from cpsgd.secagg.pair.upload import make_upload

from .local import DIM
from .processes import Servers, servers

pytestmark = pytest.mark.slow
CLIENTS, REPORTS = 200, 144


@lru_cache(maxsize=1)
def many() -> Protocol:
    """One coin per coordinate for 200 clients, of whom 100 are enough."""
    return plan(
        clients=CLIENTS, dim=DIM, epsilon=8.0, delta=1e-5, bits=9, mechanism="coins", dropout=0.5, pair=True
    ).protocol


def uploads(running: Servers, values: np.ndarray, round: int = 0) -> list[bytes]:
    task = running.task
    keys = {"leader_key": task.key("leader", round), "helper_key": task.key("helper", round)}
    return [make_upload(task.shape(round), round, each, **keys).to_bytes() for each in values]


def deliver(running: Servers, upload: bytes) -> str:
    with Sender(running.task) as sender:
        return sender.deliver(upload)


def vanish(running: Servers, upload: bytes, patience: float = 0.03) -> None:
    """Sends and is gone, whatever becomes of it."""
    with suppress(httpx.HTTPError), httpx.Client(base_url=running.task.leader.url, trust_env=False) as client:
        client.post("/reports", content=upload, timeout=patience)


@pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.thorough)])
def test_kills_lose_nothing_and_count_nothing_twice(kills: int, tmp_path: Path) -> None:
    size = REPORTS // kills
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    print(f"seed {seed}")  # shown where it fails
    values = np.random.default_rng(seed).integers(0, 2, (REPORTS, DIM)).astype(np.uint32)
    with servers(tmp_path, planned=many(), rounds=1) as running, ThreadPoolExecutor(8) as phones:
        sent, gone = uploads(running, values), uploads(running, np.ones((3 * kills, DIM), dtype=np.uint32))
        verdicts = []
        for kill in range(kills):
            batch = sent[kill * size : (kill + 1) * size]
            # Each twice, and some of before once more, in any order.
            batch = batch * 2 + chance.sample(sent[: (kill + 1) * size], 4)
            chance.shuffle(batch)
            vanished = [phones.submit(vanish, running, upload) for upload in gone[3 * kill : 3 * kill + 3]]
            answers = [phones.submit(deliver, running, upload) for upload in batch]
            time.sleep(chance.random() * 0.08)
            role = chance.choice(["leader", "helper"])
            running.stop(role)
            time.sleep(chance.random() * 0.05)
            running.start(role)
            for each in vanished:
                each.result(timeout=120)
            verdicts += [answer.result(timeout=120) for answer in answers]
        assert set(verdicts) == {"accepted"}
        with Collector(running.task, running.secrets["collector"]) as collector:
            mean, count = collector.collect(0)
            for role in ("leader", "helper"):
                running.stop(role)
                running.start(role)
            again, _ = collector.collect(0)
        # Of those who vanished, any number is in the sum, but the same at both servers, and each once.
        more = count - REPORTS
        assert 0 <= more <= len(gone)
        expected = running.task.protocol.decode_sum(values.sum(axis=0) + more, count, 0)
        assert np.array_equal(mean, expected)
        assert np.array_equal(again, mean)
        # The round is over, for those who come late and for those who come again.
        with httpx.Client(base_url=running.task.leader.url, trust_env=False) as client:
            late = client.post("/reports", content=uploads(running, values[:1])[0])
            assert (late.status_code, late.json()["verdict"]) == (409, "round-closed")
            assert client.post("/reports", content=sent[0]).json() == {"verdict": "accepted"}


def test_a_leader_without_its_helper_says_busy_and_counts_later(tmp_path: Path) -> None:
    values = np.ones((100, DIM), dtype=np.uint32)
    with servers(tmp_path, planned=many(), rounds=1) as running, ThreadPoolExecutor(8) as phones:
        sent = uploads(running, values)
        running.stop("helper")
        # What the leader has on disk counts, also of those who are gone when the helper comes back.
        for upload in uploads(running, values[:1]):
            vanish(running, upload, patience=2.0)
        answers = [phones.submit(deliver, running, upload) for upload in sent]
        time.sleep(0.5)
        running.stop("leader")  # with reports on their way
        running.start("leader")
        running.start("helper")
        assert {answer.result(timeout=120) for answer in answers} == {"accepted"}
        with Collector(running.task, running.secrets["collector"]) as collector:
            assert collector.collect(0)[1] == 101
