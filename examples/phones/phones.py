"""Thousands of phones, each online for a moment, train a classifier of digits through two servers.

Every phone has one image of scikit-learn's digits, takes part in one round, sends one message over HTTP, and is gone.
30 % vanish before they send. One in a hundred lies: it sends integers a hundred levels too large, and is refused.
`python examples/phones/phones.py` prints each round's counts, the error of its mean beside the planned one, and the
accuracy beside that of the same rounds without noise and liars.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from cpsgd import Plan, plan
from cpsgd.codec import pack
from cpsgd.engines.pair import Collector, Sender
from cpsgd.engines.pair.running import free_port, start_server, stop_server, write_task
from cpsgd.engines.pair.task import PairTask, create_task
from cpsgd.errors import RoundRefusedError
from cpsgd.secagg.pair.proof import make_report
from cpsgd.secagg.pair.sealing import seal
from cpsgd.secagg.pair.upload import NOBODY, Upload

Array = NDArray[np.float32]
FEATURES, CLASSES = 64, 10
VANISHING, LYING = 0.3, 0.01
LEARNING_RATE = 16.0
AT_ONCE = 16


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    plan: Plan
    accepted: int
    refused: int
    liars: int
    squared_error: float
    accuracy: float
    without_noise: float


def digits(generator: np.random.Generator) -> tuple[Array, NDArray[np.int64], Array, NDArray[np.int64]]:
    """Returns training and test images, of norm 1, with their classes."""
    images, classes = load_digits(return_X_y=True)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    order = generator.permutation(len(images))
    test, train = order[:360], order[360:]
    return images[train], classes[train], images[test], classes[test]


def gradients(model: Array, images: Array, classes: NDArray[np.int64]) -> Array:
    """Returns each phone's own gradient of the logistic loss, as one row."""
    scores = images @ model
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(classes)), classes] -= 1.0
    rows: Array = (images[:, :, None] * chances[:, None, :]).reshape(len(images), -1).astype(np.float32)
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))


def accuracy(model: Array, images: Array, classes: NDArray[np.int64]) -> float:
    """Returns the share of images that are recognised."""
    return float(np.mean(np.argmax(images @ model, axis=1) == classes))


def lie(task: PairTask, round: int) -> bytes:
    """Returns the upload of a phone that adds a hundred levels to every coordinate."""
    shape = task.shape(round)
    report = make_report(shape, np.ones(shape.dim, dtype=np.uint32))
    end = 32 + shape.packed_bytes(shape.dim)
    share = pack.backward(report.leader[32:end], shape.dim, shape.field.prime)
    changed = pack.forward((share + np.uint32(100)) % np.uint32(shape.field.prime), shape.field.prime)
    leader = report.leader[:32] + changed + report.leader[end:]
    return Upload(
        report.id,
        round,
        NOBODY,
        bytes(64),
        seal(task.key("helper", round), report.helper, shape, report.id, "helper"),
        seal(task.key("leader", round), leader, shape, report.id, "leader"),
    ).to_bytes()


def phone(task: PairTask, round: int, vector: Array | None) -> bool:
    """Lives for a moment: connects, sends one message, and is gone. Returns whether it was accepted; None lies."""
    with Sender(task) as sender:
        try:
            if vector is None:
                sender.deliver(lie(task, round))
            else:
                sender.send(vector, round)
        except RoundRefusedError:
            return False
    return True


def train(task: PairTask, collector: Collector, best: Plan, seed: int) -> Outcome:
    """Trains over HTTP, with both servers running."""
    generator = np.random.default_rng(seed)
    images, classes, test_images, test_classes = digits(generator)
    model = np.zeros((FEATURES, CLASSES), dtype=np.float32)
    plain = model.copy()
    accepted = refused = liars = 0
    errors = []
    for round in range(task.rounds):
        start = time.perf_counter()
        invited = generator.integers(0, len(images), task.protocol.clients)
        coming = invited[generator.random(len(invited)) >= VANISHING]
        lying = generator.random(len(coming)) < LYING
        vectors = gradients(model, images[coming], classes[coming])
        with ThreadPoolExecutor(AT_ONCE) as phones:
            sent = [None if lies else vector for vector, lies in zip(vectors, lying, strict=True)]
            verdicts = list(phones.map(lambda vector, round=round: phone(task, round, vector), sent))
        mean, count = collector.collect(round)
        honest = vectors[~lying]
        errors.append(float(np.sum((mean - honest.mean(axis=0)) ** 2)))
        model = model - LEARNING_RATE * mean.reshape(model.shape)
        step = gradients(plain, images[coming[~lying]], classes[coming[~lying]]).mean(axis=0)
        plain = plain - LEARNING_RATE * step.reshape(plain.shape)
        accepted, refused, liars = accepted + count, refused + verdicts.count(False), liars + int(lying.sum())
        print(
            f"round {round + 1:2}: {count} of {len(invited)} phones counted, {verdicts.count(False)} refused, "
            f"accuracy {accuracy(model, test_images, test_classes):.1%}, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
    return Outcome(
        best,
        accepted,
        refused,
        liars,
        float(np.mean(errors)),
        accuracy(model, test_images, test_classes),
        accuracy(plain, test_images, test_classes),
    )


def run(rounds: int, clients: int, seed: int) -> Outcome:
    """Plans, starts both servers as processes on 127.0.0.1, trains, and ends them."""
    best = plan(
        clients=clients,
        dim=FEATURES * CLASSES,
        epsilon=4.0,
        delta=1e-5,
        bits=10,
        mechanism="coins",
        rounds=rounds,
        participation="once",
        dropout=0.4,
        pair=True,
    )
    print(f"{best.protocol.mechanism.describe()}, modulus {best.protocol.modulus}; {best.protocol.promise}")
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    task, secrets = create_task(
        best.protocol, leader=addresses[0], helper=addresses[1], rounds=rounds, admission="open"
    )
    print(f"leader {addresses[0]}, helper {addresses[1]}, {task.shape(0).upload_bytes:,} bytes per upload")
    with tempfile.TemporaryDirectory() as name:
        write_task(Path(name), task, secrets)
        servers = [start_server(role, Path(name)) for role in ("helper", "leader")]
        try:
            with Collector(task, secrets["collector"]) as collector:
                return train(task, collector, best, seed)
        finally:
            for server in servers:
                stop_server(server)


def main(arguments: list[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of training")
    parser.add_argument("--clients", type=int, default=800, help="phones invited to a round")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"), help="of phones and images")
    chosen = parser.parse_args(arguments)
    found = run(chosen.rounds, chosen.clients, chosen.seed)
    print(
        f"{found.accepted} reports counted, {found.refused} refused, {found.liars} phones lied\n"
        f"squared error of a round's mean {found.squared_error:.3g}, planned {found.plan.error.total:.3g}\n"
        f"accuracy {found.accuracy:.1%}, without noise {found.without_noise:.1%}"
    )
    if found.refused != found.liars:
        sys.exit("Liars and refused reports differ.")


if __name__ == "__main__":
    main()
