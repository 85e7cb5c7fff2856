# mypy: disable-error-code="no-untyped-call"
"""Private loops on a GPU: norms and sums as on the CPU, the noise's law, micro-batches, canaries and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from cpsgd.errors import ParameterError
from cpsgd.learning.clipped_sums import ClippedSums
from cpsgd.learning.private_loop import make_private
from tests.learning.test_layers import CLIP, COUNT, MODELS, examples, one_by_one

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_single_gradients(name: str) -> None:
    torch.manual_seed(3)
    make, kind, _ = MODELS[name]
    model, (x, y) = make(), examples(kind)
    norms, total = one_by_one(model, x, y)
    model.to("cuda")
    sums = ClippedSums(model)
    functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    found = sums.fold(CLIP, scale=COUNT).cpu() * COUNT
    torch.testing.assert_close(found, norms, rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(sums.total.cpu(), total, rtol=0.0, atol=5e-3 * CLIP)
    assert float(sums.total.norm()) <= COUNT * CLIP


@pytest.mark.parametrize("micro_batch", [None, 40])
def test_a_loop_trains_and_its_noise_has_the_deviation_that_is_accounted_for(micro_batch: int | None) -> None:
    # Features are zero: gradients by the weights are noise alone, 2 · 0.5 / 100 each; false alarms below 1e-9.
    data = TensorDataset(torch.zeros(1000, 300).cuda(), torch.zeros(1000, dtype=torch.int64).cuda())
    model = nn.Linear(300, 200).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        model,
        optimizer,
        DataLoader(data, batch_size=100),
        delta=1e-5,
        epochs=1,
        noise_multiplier=2.0,
        clip_norm=0.5,
        micro_batch=micro_batch,
        canaries=50,
    )
    drawn = []
    for features, labels in private:
        assert features.is_cuda
        optimizer.zero_grad()
        functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        if model.weight.grad is not None:
            drawn.append(model.weight.grad.double().flatten())
    assert private.steps == len(drawn) == 10
    noise = torch.stack(drawn)
    assert abs(float(noise.std()) / 0.01 - 1.0) < 0.01
    assert abs(float((noise[0] * noise[1]).mean())) < 6.2 * 1e-4 / math.sqrt(noise.shape[1])
    assert private.audit().canaries == 50


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_inside_a_cuda_graph_is_refused() -> None:
    data = TensorDataset(torch.randn(64, 8).cuda(), torch.zeros(64, dtype=torch.int64).cuda())
    model = nn.Linear(8, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(
        model, optimizer, DataLoader(data, batch_size=64), delta=1e-5, epochs=3, noise_multiplier=1.0
    )
    batches = (batch for _ in range(3) for batch in private)
    for step in range(2):
        features, labels = next(batches)
        functional.cross_entropy(model(features), labels).backward()
        if step == 0:
            optimizer.step()
            continue
        before = model.weight.detach().clone()
        torch.cuda.synchronize()
        with pytest.raises((ParameterError, RuntimeError)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        torch.cuda.synchronize()
        assert torch.equal(model.weight, before)
