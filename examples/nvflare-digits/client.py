"""The silo's training script. It sends the sum of its images' clipped gradients; `CpsgdExecutor` does the rest."""

from __future__ import annotations

import nvflare.client as flare
import torch
from digits import Network, images_of, loss

from cpsgd.engines.nvflare import silo_sum


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
        flare.send(silo_sum(received, model, loss, images.features, images.labels))


if __name__ == "__main__":
    main()
