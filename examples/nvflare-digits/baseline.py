"""The silo's training script without privacy, for comparison: one pass of plain SGD."""

from __future__ import annotations

import nvflare.client as flare
import torch
from digits import Network, images_of, loss


def main() -> None:
    """Answers the server's tasks until the job ends."""
    torch.set_num_threads(1)
    flare.init()
    images = images_of(int(flare.get_site_name().removeprefix("site-")) - 1)
    features, labels = torch.from_numpy(images.features), torch.from_numpy(images.labels)
    model = Network()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(received.current_round + 1))
        for chosen in torch.split(order, 50):
            optimizer.zero_grad()
            loss(model(features[chosen]), labels[chosen]).backward()
            optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict()))


if __name__ == "__main__":
    main()
