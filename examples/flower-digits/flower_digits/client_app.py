"""The silo's app.

Flower runs this file again for each message of a round, three or five, and only one of them trains. So modules that
are slow to import are imported in functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from cpsgd.engines.flower import accepted_round, cpsgd_mod, silo_sum
from flower_digits import IMAGES, RATE, SHARE

if TYPE_CHECKING:
    import torch

    from cpsgd.learning.datasets import Batch

app = ClientApp()

# The silo's own conditions, whatever the server says: a server that asks for more gets nothing.
all_in_every_round = cpsgd_mod(epsilon=4.0, delta=1e-6, examples=IMAGES, min_clients=9)
drawn_in_every_round = cpsgd_mod(
    epsilon=4.0, delta=1e-6, examples=IMAGES, rate=RATE, adjacency="zero-out", min_clients=9
)
each_in_one_round = cpsgd_mod(epsilon=4.0, delta=1e-6, examples=SHARE, disjoint=True, min_clients=9)


def protected(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Applies one of the three conditions. A silo with a memory counts the cost of all rounds together."""
    if context.run_config["memories"] and "num-partitions" in context.node_config:
        # In a simulation no operator gives silos a memory.
        memory = f"{context.run_config['memories']}/silo-{context.node_config['partition-id']}.memory"
        context.node_config.setdefault("cpsgd-memory", memory)
    conditions = drawn_in_every_round if context.run_config["drawn"] else all_in_every_round
    if context.run_config["correlated"]:
        conditions = each_in_one_round
    return conditions(message, context, call_next)


@app.train(mods=[protected])
def train(message: Message, context: Context) -> Message:
    """Returns the sum of the images' clipped gradients. It leaves the silo rounded, with noise, and masked."""
    from flower_digits import task

    model, images = _prepare(message, context)
    # The images depend on the round's number only, so that no image is in two rounds, whatever the server says.
    end = SHARE * accepted_round(message)
    chosen = slice(end - SHARE, end) if context.run_config["correlated"] else slice(None)
    found = silo_sum(message, model, task.loss, images.features[chosen], images.labels[chosen])
    return Message(RecordDict({"arrays": found}), reply_to=message)


@app.train("baseline")
def baseline(message: Message, context: Context) -> Message:
    """Does one pass of plain SGD without privacy, for comparison. Leave it out if data is private."""
    if "cpsgd-roster" in context.node_config:
        raise PermissionError("A silo with a roster sends nothing without protection.")
    import torch

    from flower_digits import task

    model, images = _prepare(message, context)
    features, labels = torch.from_numpy(images.features), torch.from_numpy(images.labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    round: Any = message.content.config_records["config"]["server-round"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(round))
    for chosen in torch.split(order, 50):
        optimizer.zero_grad()
        task.loss(model(features[chosen]), labels[chosen]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def _prepare(message: Message, context: Context) -> tuple[torch.nn.Module, Batch]:
    """Returns the model with the server's parameters, and the silo's images."""
    import torch

    from flower_digits import task

    torch.set_num_threads(1)
    model = task.network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model, task.images_of(int(context.node_config["partition-id"]))
