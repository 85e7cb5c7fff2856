"""Clients whose update is known, who write down the integers that the protocol makes of it, and their seeds or rows.

In round 1 node 2 uploads garbage. In round 3 node 1 falls asleep while it trains; the test kills it then.
"""

from __future__ import annotations

import json
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from cpsgd import Protocol
from cpsgd.correlated.shaped import SiloState
from cpsgd.engines.flower import cpsgd_mod
from cpsgd.engines.flower.records import read_request
from cpsgd.federation.messages import Pair, Request
from cpsgd.secagg import Stage

app = ClientApp()


def asked_for(message: Message) -> Request:
    """What is asked for of the round that runs."""
    asked = read_request(message)
    return Request.from_bytes(Pair.from_bytes(asked).first if Pair.begins(asked) else asked)


def record(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Writes the integers to a file before anybody masks them, and what their noise is made of."""
    original = Protocol.encode_integers

    def recorded(self: Protocol, vector: Any, round: int, *, seeds: Any = None) -> Any:
        silo = seeds if isinstance(seeds, SiloState) else None
        before = None if silo is None else silo.rows.get(round - 1)
        values = original(self, vector, round, seeds=seeds)
        folder, node = Path(str(context.run_config["folder"])), context.node_config["partition-id"]
        np.save(folder / f"round-{round + 1}-node-{node}.npy", values)
        if silo is None:
            named = [seed and seed.hex() for seed in seeds or ()]
        else:
            named = [None if row is None else sha256(row.tobytes()).hexdigest() for row in (silo.rows[round], before)]
        (folder / f"seeds-{round + 1}-{node}.json").write_text(json.dumps(named))
        return values

    Protocol.encode_integers = recorded  # type: ignore[method-assign, assignment]
    return call_next(message, context)


def mark_confirmations(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Notes that the node has signed the survivors of a round."""
    asked = asked_for(message)
    reply = call_next(message, context)
    if asked.stage is Stage.CONFIRM:
        name = f"confirmed-{message.metadata.group_id}-{context.node_config['partition-id']}"
        (Path(str(context.run_config["folder"])) / name).touch()
    return reply


def garble(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Node 2 replaces its upload of round 1 by random bytes."""
    asked = asked_for(message)
    wrong = context.node_config["partition-id"] == 2 and asked.round == 1 and asked.stage in (Stage.MASK, Stage.UPLOAD)
    reply = call_next(message, context)
    if wrong:
        upload = reply.content.array_records["cpsgd"]["upload"]
        noise = Array(dtype="uint8", shape=upload.shape, stype=upload.stype, data=os.urandom(len(upload.data)))
        reply.content["cpsgd"] = ArrayRecord({"upload": noise})
    return reply


@app.train(mods=[garble, mark_confirmations, record, cpsgd_mod(epsilon=8.0, delta=1e-5, rounds=3, min_clients=3)])
def train(message: Message, context: Context) -> Message:
    """Adds a known vector to the model; its metrics must not leave."""
    node: Any = context.node_config["partition-id"]
    round: Any = message.content.config_records["config"]["server-round"]
    folder = Path(str(context.run_config["folder"]))
    with (folder / f"trained-{round}-{node}").open("x") as mark:
        mark.write("once")
    if (node, round) == (1, 3):
        time.sleep(600.0)
    before = message.content.array_records["arrays"]["weight"].numpy()
    update = np.random.default_rng(node).normal(size=before.shape).astype(np.float32) * np.float32(0.01)
    arrays = ArrayRecord({"weight": Array(before + update)})
    metrics = MetricRecord({"num-examples": 471108154711, "secret": 0.471108154711})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
