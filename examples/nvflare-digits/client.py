"""The silo's training script. It sends the sum of its images' clipped gradients; `CpsgdExecutor` does the rest.

With the argument `--disjoint` every image is in one round only, as correlated noise wants it.
"""

from __future__ import annotations

import sys

import nvflare.client as flare
import torch
from digits import SHARE, Network, images_of, loss

from cpsgd.engines.nvflare import accepted_round, silo_sum


def main() -> None:
    """Answers the server's tasks until the job ends."""
    torch.set_num_threads(1)
    flare.init()
    images = images_of(int(flare.get_site_name().removeprefix("site-")) - 1)
    model = Network()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        # The images depend on the round's number only, so that no image is in two rounds, whatever the server says.
        end = SHARE * accepted_round(received)
        chosen = slice(end - SHARE, end) if "--disjoint" in sys.argv else slice(None)
        flare.send(silo_sum(received, model, loss, images.features[chosen], images.labels[chosen]))


if __name__ == "__main__":
    main()
