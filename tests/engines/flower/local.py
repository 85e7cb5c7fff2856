"""Nodes in this process, for tests of what does not depend on processes: every message is serialized and read again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from cpsgd.engines.flower.records import read_request
from cpsgd.federation.messages import Pair, Request

RUN = 77

Tamper = Callable[[Message], Message | None]
"""What becomes of a node's reply on the way; None for silence."""


def request_of(message: Message) -> Request:
    """What the server asks for in a message, of the round that runs."""
    asked = read_request(message)
    return Request.from_bytes(Pair.from_bytes(asked).first if Pair.begins(asked) else asked)


def through_the_wire(message: Message) -> Message:
    """The message as it arrives."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    arrived: Any = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived  # type: ignore[no-any-return]


class Node:
    """A client app with its mods and its state."""

    def __init__(self, number: int, mod: Mod, train: ClientAppCallable) -> None:
        self.number = number
        self.mod = mod
        self.train = train
        self.tamper: Tamper = lambda reply: reply
        self.context = Context(RUN, number, {"partition-id": number}, RecordDict(), {})
        self.trained = 0

    def answer(self, message: Message) -> Message | None:
        def counted(message: Message, context: Context) -> Message:
            self.trained += 1
            return self.train(message, context)

        try:
            reply = self.mod(through_the_wire(message), self.context, counted)
        except Exception as error:
            # As flwr.supernode.runtime.run_clientapp writes it.
            reply = Message(Error(0, f"{type(error)}:<'{error}'>"), reply_to=message)
        found = self.tamper(reply)
        return None if found is None else through_the_wire(found)


class LocalGrid(Grid):
    """A grid whose nodes answer at once."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.number: node for node in nodes}
        self.sent: list[Message] = []
        self._ids = itertools.count()
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        raise AssertionError("Flower sets the run, never the strategy.")

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN)

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise AssertionError("Deprecated by Flower: the strategy makes messages itself.")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found = []
        for message in messages:
            identifier = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = identifier
            self.sent.append(message)
            reply = self.nodes[message.metadata.dst_node_id].answer(message)
            if reply is not None:
                self._replies[identifier] = reply
            found.append(identifier)
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


@contextmanager
def task() -> Iterator[None]:
    """Lets messages be made outside of a Flower process."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
    yield


def model(dim: int) -> ArrayRecord:
    """Two arrays of `dim` zeros in all."""
    return ArrayRecord({"weight": Array(np.zeros((dim - 1, 1), np.float32)), "bias": Array(np.zeros(1, np.float32))})


def adds(vector: np.ndarray, **metrics: float) -> ClientAppCallable:
    """A train function whose update is the vector."""

    def train(message: Message, context: Context) -> Message:
        start, arrays = 0, ArrayRecord()
        for name, array in message.content.array_records["arrays"].items():
            before = array.numpy()
            arrays[name] = Array(before + vector[start : start + before.size].reshape(before.shape))
            start += before.size
        found = MetricRecord({"num-examples": 7, **metrics})
        return Message(RecordDict({"arrays": arrays, "metrics": found}), reply_to=message)

    return train
