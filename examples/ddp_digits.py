"""Workers train a model of digits together, with privacy for each example also against the other workers.

    torchrun --standalone --nproc-per-node 4 examples/ddp_digits.py

A ring all-reduce adds the sums. Workers pass on partial sums with less noise than the result: they are trusted to look
at the result only, and the connections between them must be private (docs/ddp.md).

Every worker sees 256 fresh examples per round and never the same again. Gradients are clipped to norm 1. Needs
`pip install '.[torch,learn]'` in a clone of the repository.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpsgd import PrivateMean
from cpsgd.engines.ddp import ExampleGradients
from cpsgd.learning import mlp
from cpsgd.learning.datasets import infinite_digits
from cpsgd.planner import plan_examples

ROUNDS = 40
EXAMPLES = 256

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
data = infinite_digits(1_000_000)
model = DistributedDataParallel(mlp(data.feature_dim, data.classes, hidden=(), seed=0))

# A worker sends the sum of its examples' gradients, and the noise of all workers but one must hide one example in it.
dim = sum(p.numel() for p in model.parameters())
plan = plan_examples(workers, dim, epsilon=2.0, delta=1e-6, rounds=ROUNDS, examples=EXAMPLES, colluding=1)
mean = PrivateMean(plan.protocol, epsilon=2.0, delta=1e-6, rounds=ROUNDS, examples=EXAMPLES, participation="once")
private = ExampleGradients(model, torch.nn.functional.cross_entropy, mean)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

for number in range(ROUNDS):
    first = (number * workers + rank) * EXAMPLES
    batch = data.batch(np.arange(first, first + EXAMPLES))
    private.synchronise(torch.from_numpy(batch.features), torch.from_numpy(batch.labels))
    optimizer.step()

test = data.test_set()
with torch.no_grad():
    right = model(torch.from_numpy(test.features)).argmax(1).numpy() == test.labels
if rank == 0:
    print(f"accuracy {right.mean():.1%} at ε = {mean.epsilon:.2f}, δ = {mean.delta:g}, for each example")
    print(f"{mean.payload_bytes:,} bytes per worker and round, {mean.bits_per_coordinate:.1f} bits per coordinate")
dist.destroy_process_group()
