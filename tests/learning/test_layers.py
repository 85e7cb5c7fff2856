# mypy: disable-error-code="no-untyped-call"
"""Norms and weighted sums of single examples' gradients, against gradients computed one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpsgd.errors import ParameterError
from cpsgd.learning.clipped_sums import ClippedSums
from cpsgd.learning.layers import units_of
from cpsgd.learning.units import MARGIN, rounding_share

CLIP, COUNT = 0.7, 7


class Attention(nn.Module):
    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 16, padding_idx=0)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True) if whole else nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.rows(numbers)
        if isinstance(self.mix, nn.MultiheadAttention):
            x = x + self.mix(x, x, x, need_weights=False)[0]
        else:
            x = x + functional.scaled_dot_product_attention(*self.mix(x).chunk(3, -1))
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.rows, self.steps, self.head = nn.Embedding(20, 6), kind(6, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        outputs, state = self.steps(self.rows(numbers))
        return self.head(outputs.mean(1) + (state[0] if isinstance(state, tuple) else state)[-1])


class Twice(nn.Module):
    """Uses a layer several times in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.same(torch.tanh(self.same(x))))


class Own(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.weight))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, str, list[str]]] = {
    "dense": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 5)),
        "vectors",
        ["Linear", "Linear"],
    ),
    "long linear": (lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Linear(2, 5), Mean()), "vectors", ["Linear"]),
    "ghost linear": (
        lambda: nn.Sequential(nn.Embedding(20, 40), nn.Linear(40, 50), nn.Linear(50, 5), Mean()),
        "numbers",
        ["Embedding", "Linear", "Linear"],
    ),
    "small convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5)),
        "images",
        ["Convolution", "Linear"],
    ),
    "wide convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 40, 5), nn.Tanh(), nn.Conv2d(40, 50, 7), nn.Flatten(), nn.Linear(200, 5)),
        "images",
        ["Convolution", "Convolution", "Linear"],
    ),
    "dilated, in one dimension": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 2, dilation=2, padding=1), nn.Flatten(), nn.Linear(24, 5)
        ),
        "vectors",
        ["Convolution", "Linear"],
    ),
    "groups and same padding": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3, padding="same"), nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(), nn.Linear(600, 5)
        ),
        "images",
        ["Whole", "Whole", "Linear"],
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(400, 5)),
        "images",
        ["Convolution", "Grouped", "Linear"],
    ),
    "root mean square norm": (lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 5)), "vectors", ["Affine", "Linear"]),
    "attention": (Attention, "numbers", ["Embedding", "Linear", "Affine", "Linear"]),
    "attention of PyTorch": (lambda: Attention(whole=True), "numbers", ["Embedding", "Whole", "Affine", "Linear"]),
    "gated": (lambda: Recurrent(nn.GRU), "numbers", ["Embedding", "Whole", "Linear"]),
    "long short-term": (lambda: Recurrent(nn.LSTM), "numbers", ["Embedding", "Whole", "Linear"]),
    "used twice": (Twice, "vectors", ["Linear", "Linear"]),
    "a parameter of its own": (Own, "vectors", ["Whole"]),
    "not used": (Unused, "vectors", ["Linear", "Linear"]),
    "frozen": (frozen, "vectors", ["Linear", "Linear"]),
}


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def examples(kind: str, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    made = {
        "vectors": lambda: torch.randn(count, 8),
        "images": lambda: torch.randn(count, 1, 12, 12),
        "numbers": lambda: torch.randint(0, 20, (count, 9)),
    }
    return made[kind](), torch.randint(0, 5, (count,))


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norms of all gradients, and the sum of clipped ones."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        loss = functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        rows.append(torch.cat([part.double().flatten() for part in found]))
    gradients = torch.stack(rows)
    norms = gradients.norm(dim=1)
    return norms, (gradients * (CLIP * (1.0 - MARGIN) / norms).clamp(max=1.0)[:, None]).sum(0)


@pytest.mark.parametrize("name", ["gated", "long short-term"])
def test_recurrent_layers_keep_their_own_weights(name: str) -> None:
    make, kind, _ = MODELS[name]
    model, (x, y) = make(), examples(kind)
    sums = ClippedSums(model)
    functional.cross_entropy(model(x), y).backward()
    sums.fold(CLIP, scale=COUNT)
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    assert layers
    for layer in layers:
        own = [getattr(layer, name) for name in layer._flat_weights_names]
        assert all(used is parameter for used, parameter in zip(layer._flat_weights, own, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_of_single_gradients(name: str) -> None:
    torch.manual_seed(3)
    make, kind, units = MODELS[name]
    model, (x, y) = make(), examples(kind)
    norms, total = one_by_one(model, x, y)
    sums = ClippedSums(model)
    assert [type(unit).__name__ for unit in units_of(model)] == units
    for _ in range(2):  # the second pass finds nothing of the first
        sums.forget()
        functional.cross_entropy(model(x), y).backward()
        found = sums.fold(CLIP, scale=COUNT) * COUNT
        assert (found >= norms * (1.0 - 1e-5)).all()
        torch.testing.assert_close(found, norms, rtol=2e-3, atol=1e-7)
        torch.testing.assert_close(sums.total, total, rtol=0.0, atol=2e-3 * CLIP)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_what_one_example_adds_is_never_longer_than_the_clip_norm(name: str) -> None:
    torch.manual_seed(4)
    make, kind, _ = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # long gradients
    x, y = examples(kind)
    sums = ClippedSums(model)
    functional.cross_entropy(model(x), y).backward()
    sums.fold(CLIP, scale=COUNT)
    everybody = sums.total.clone()
    for i in range(COUNT):
        sums.forget()
        functional.cross_entropy(model(x), y).backward()
        sums.fold(CLIP, scale=COUNT, count=i)
        first = sums.total.clone()
        sums.forget()
        functional.cross_entropy(model(x), y).backward()
        sums.fold(CLIP, scale=COUNT, count=i + 1)
        assert float((sums.total - first).norm()) <= CLIP
    assert float(everybody.norm()) <= COUNT * CLIP


@pytest.mark.parametrize("name", MODELS)
def test_one_more_example_hardly_moves_the_gradients_of_the_others(name: str) -> None:
    # Kernels may round otherwise in a batch of another size; half of the margin is for that.
    torch.manual_seed(4)
    make, kind, _ = MODELS[name]
    model, (x, y) = make(), examples(kind)
    sums = ClippedSums(model)

    def total(rows: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        sums.forget()
        functional.cross_entropy(model(rows), labels, reduction="none")[counted].sum().backward()
        sums.fold(CLIP, scale=1.0)
        return sums.total.clone()

    for place in (0, COUNT // 2):
        others = torch.arange(COUNT) != place
        alone, beside = total(x[others], y[others], others[others]), total(x, y, others)
        assert float((alone - beside).norm()) <= 0.5 * MARGIN * CLIP


def test_a_shared_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ParameterError, match="share the parameter weight"):
        ClippedSums(model)


def test_dropout_inside_a_layer_that_is_run_twice_is_refused() -> None:
    with pytest.raises(ParameterError, match="set it to 0 there"):
        ClippedSums(nn.Sequential(nn.LSTM(3, 3, num_layers=2, dropout=0.5, batch_first=True)))
    with pytest.raises(ParameterError, match="batch_first"):
        ClippedSums(nn.Sequential(nn.GRU(3, 3)))
    with pytest.raises(ParameterError, match="max_norm"):
        ClippedSums(nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)))


def test_too_many_terms_for_one_sum_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounding_share(1024, 1024) < MARGIN < rounding_share(1 << 17, 4096)
    model, (x, y) = Attention(), examples("numbers")
    sums = ClippedSums(model)
    monkeypatch.setattr("cpsgd.learning.clipped_sums.rounding_share", lambda count, positions: positions * MARGIN / 24)
    functional.cross_entropy(model(x), y).backward()
    sums.fold(1.0, scale=COUNT)  # nine positions and one more
    functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ParameterError, match="micro_batch"):
        sums.fold(1.0, scale=COUNT)


@pytest.mark.parametrize("tiny", ["inputs", "gradients"])
def test_products_too_small_for_float32_do_not_hide_an_example(tiny: str) -> None:
    # <a, a> of the tiny ones is zero in float32, and their gradient is long all the same.
    model = nn.Linear(64, 64, bias=False)
    sums = ClippedSums(model)
    small, large = torch.full((1, 16, 64), 2.5e-23), torch.full((1, 16, 64), 2e18)
    inputs, gradients = (small, large) if tiny == "inputs" else (large, small)
    model(inputs).backward(gradients)
    (norm,) = sums.fold(1.0, scale=256.0)
    exact = 16 * 64 * 2.5e-23 * 2e18
    assert 256.0 * exact > 10.0
    assert exact <= float(norm) <= exact * 1.001
    assert float(sums.total.norm()) <= 1.0


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_norms_are_in_full_precision_whatever_the_program_has_set(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products of bfloat16 numbers would be off by far more than what is added for rounding.
    backends: Any = torch.backends
    seen = []
    honest = torch.bmm

    def watched(*matrices: torch.Tensor) -> torch.Tensor:
        if matrices[0].dtype == torch.float32:
            seen.append((backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision))
        return honest(*matrices)

    torch.set_float32_matmul_precision(precision)
    try:
        model, (x, y) = MODELS["ghost linear"][0](), examples("numbers")
        sums = ClippedSums(model)
        functional.cross_entropy(model(x), y).backward()
        monkeypatch.setattr(torch, "bmm", watched)
        sums.fold(1.0, scale=COUNT)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen
    assert set(seen) == {("ieee", "ieee")}
