"""A train script that draws its examples, where single ones are protected, and writes down what was drawn and sent.

In the second round, which NVFlare calls 1, site-2 falls asleep while it trains (the test kills it then).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import nvflare.client as flare
import torch
from torch.nn.functional import cross_entropy

from cpsgd import Protocol
from cpsgd.engines import silo
from cpsgd.engines.nvflare import silo_sum


class Linear(torch.nn.Module):
    """A linear model with the name and shape of the server's array."""

    def __init__(self, name: str, array: Any) -> None:
        super().__init__()
        self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(np.array(array, dtype=np.float32))))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns one number per column."""
        return inputs @ next(self.parameters())


def main() -> None:
    """Answers the server's tasks; runs in the executor's process."""
    folder = Path(sys.argv[1])
    flare.init()
    site = flare.get_site_name()
    original = Protocol.encode_integers

    def recorded(self: Protocol, vector: Any, round: int) -> Any:
        """Writes the integers to a file before anybody masks them."""
        values = original(self, vector, round)
        np.save(folder / f"sent-{round}-{site}.npy", values)
        return values

    Protocol.encode_integers = recorded  # type: ignore[method-assign, assignment]
    draw = silo.drawn

    def counted(count: int, rate: float) -> Any:
        """Notes each draw, and which examples were drawn."""
        chosen = draw(count, rate)
        with (folder / f"drawn-{site}").open("a") as file:
            file.write(f"{count} {rate} {' '.join(map(str, chosen))}\n")
        return chosen

    silo.drawn = counted
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        with (folder / f"trained-{received.current_round}-{site}").open("x") as mark:
            mark.write("once")
        if (site, received.current_round) == ("site-2", 1):
            time.sleep(600.0)
        ((name, array),) = received.params.items()
        generator = np.random.default_rng(int(site[-1]))
        if received.meta["cpsgd"]["examples"]:
            features = generator.normal(size=(100, array.shape[0])).astype(np.float32)
            found = silo_sum(received, Linear(name, array), cross_entropy, features, np.arange(100) % array.shape[1])
            found.params = {name: tensor.numpy() for name, tensor in found.params.items()}
        else:
            moved = (array + 0.01 * generator.normal(size=array.shape)).astype(np.float32)
            found = flare.FLModel(params={name: moved})
        found.metrics = {"secret": 0.471108154711}
        flare.send(found)


if __name__ == "__main__":
    main()
