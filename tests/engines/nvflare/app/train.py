"""A train script whose update is known, and which writes down the integers that the protocol makes of it.

In the second round, which NVFlare calls 1, site-2 falls asleep while it trains (the test kills it then).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import nvflare.client as flare

from cpsgd import Protocol


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
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        with (folder / f"trained-{received.current_round}-{site}").open("x") as mark:
            mark.write("once")
        if (site, received.current_round) == ("site-2", 1):
            time.sleep(600.0)
        draw = np.random.default_rng(int(site[-1]))
        moved = {
            name: (array + 0.01 * draw.normal(size=array.shape)).astype(np.float32)
            for name, array in received.params.items()
        }
        flare.send(flare.FLModel(params=moved, metrics={"secret": 0.471108154711}))


if __name__ == "__main__":
    main()
