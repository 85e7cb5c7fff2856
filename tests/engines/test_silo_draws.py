"""The examples that a silo draws for its sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cpsgd import Protocol, Run, guarantee
from cpsgd.audit.bound import epsilon_lower_bound
from cpsgd.engines import silo
from cpsgd.engines.silo import drawn, example_sum
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import mlp
from cpsgd.neighbours import Participation
from cpsgd.planner.examples import sum_norm
from cpsgd.privacy.one_example import example_norm, most_drawn
from cpsgd.randomness import Keystream

LOSS = torch.nn.functional.cross_entropy
ROWS = 120
FEATURES = np.random.default_rng(1).normal(size=(ROWS + 3, 6)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, 3, ROWS + 3)
RATE = 0.1
MOST = most_drawn(ROWS, Participation.poisson(RATE))


def summed(rate: float = RATE, features: np.ndarray = FEATURES, labels: np.ndarray = LABELS) -> np.ndarray:
    found = example_sum(mlp(6, 3, (), seed=0), LOSS, features, labels, clip_norm=9.0, examples=ROWS, rate=rate)
    return np.concatenate([array.reshape(-1) for array in found.values()])


def by_hand(rows: np.ndarray, most: int) -> np.ndarray:
    total = np.zeros(21)
    for row in rows:
        network = mlp(6, 3, (), seed=0)
        one = LOSS(network(torch.from_numpy(FEATURES[row])[None]), torch.tensor([LABELS[row]]))
        gradient = np.concatenate([s.numpy().reshape(-1) for s in torch.autograd.grad(one, list(network.parameters()))])
        total += gradient * min(1.0, example_norm(9.0, most) / np.linalg.norm(gradient))
    return total


def test_each_is_drawn_by_itself_with_its_probability() -> None:
    rounds = np.zeros((400, 1000), dtype=bool)
    for row in rounds:
        row[drawn(1000, 0.3)] = True
    # 400,000 draws, and 399 or 999 pairs beside each other 400 times: six deviations, a false alarm in 10⁸.
    assert abs(rounds.mean() - 0.3) < 6 * np.sqrt(0.21 / 400_000)
    for pairs in (rounds[1:] & rounds[:-1], rounds[:, 1:] & rounds[:, :-1]):
        assert abs(pairs.mean() - 0.09) < 6 * np.sqrt(0.09 * 0.91 * 1.6 / pairs.size)
    # And no example is drawn in far too many or too few of the rounds: a union bound over 1,000, eight deviations.
    assert abs(rounds.mean(axis=0) - 0.3).max() < 8 * np.sqrt(0.21 / 400)


@pytest.mark.parametrize(("word", "rate", "expected"), [(0, 1e-7, 5), (2**64 - 1, 1.0 - 2.0**-53, 0), (2**63, 0.5, 0)])
def test_the_probability_is_rounded_down(
    word: int, rate: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = np.frombuffer(word.to_bytes(8, "little") * 5, dtype=np.uint8)
    monkeypatch.setattr(Keystream, "take", lambda self, size: stream[:size])
    assert len(drawn(5, rate)) == expected


@pytest.mark.parametrize("rows", [[], [7], [0, 3, 119], range(MOST)])
def test_the_sum_is_that_of_the_drawn_examples(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = np.array(list(rows), dtype=np.int64)
    monkeypatch.setattr(silo, "drawn", lambda count, rate: chosen)
    np.testing.assert_allclose(summed(), by_hand(chosen, MOST), atol=1e-5)


def test_of_too_many_the_first_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo, "drawn", lambda count, rate: np.arange(count))
    np.testing.assert_allclose(summed(), by_hand(np.arange(MOST), MOST), atol=1e-5)


def test_draws_are_among_the_first_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []
    monkeypatch.setattr(silo, "drawn", lambda count, rate: (asked.append((count, rate)), np.arange(1))[1])
    summed()
    summed(features=FEATURES[:5], labels=LABELS[:5])
    assert asked == [(ROWS, RATE), (5, RATE)]


def test_as_many_gradients_are_computed_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer, which everybody sees, would tell how many examples were drawn."""
    computed: list[int] = []
    genuine = ClientUpdates.chunks

    def counting(self: ClientUpdates, batch: Any) -> Any:
        for part in genuine(self, batch):
            computed[-1] += len(part)
            yield part

    monkeypatch.setattr(ClientUpdates, "chunks", counting)
    for count in (0, 1, MOST // 2, MOST, ROWS):
        monkeypatch.setattr(silo, "drawn", lambda rows, rate, count=count: np.arange(count))
        computed.append(0)
        summed()
    assert computed == [MOST] * 5


def test_an_example_moves_the_sum_by_its_clip_norm_whatever_the_servers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that rounding decides about: others' gradients must not depend on whether the example is there."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(200, 10)).astype(np.float32), rng.integers(0, 3, 200)
    most = most_drawn(200, Participation.poisson(0.2))
    others, order = 1 + np.flatnonzero(rng.random(199) < 0.2), rng.permutation(most)
    for seed in range(10):
        model = mlp(10, 3, (), seed=seed)
        rows = np.random.default_rng(seed).normal(size=(1, 10)) * (1.0 + 1e-7 * rng.normal(size=(3, 10))) * 1e9
        with torch.no_grad():
            next(model.parameters()).copy_(torch.from_numpy(rows))
        sums = []
        # Places of the others are those without the example, and it has one that was free.
        for drawn_rows, places in ((others, order), (np.append(0, others), np.roll(order, 1))):
            monkeypatch.setattr(silo, "drawn", lambda count, rate, drawn_rows=drawn_rows: drawn_rows)
            monkeypatch.setattr(silo, "shuffled", lambda count, places=places: places)
            found = example_sum(model, LOSS, features, labels, clip_norm=most * 1.0, examples=200, rate=0.2)
            sums.append(np.concatenate([array.reshape(-1) for array in found.values()]))
        assert np.linalg.norm(sums[1] - sums[0]) <= example_norm(most * 1.0, most) * (1.0 + 1e-5)


def test_places_are_drawn_evenly() -> None:
    found = np.array([silo.shuffled(6) for _ in range(6000)])
    assert (np.sort(found, axis=1) == np.arange(6)).all()
    # 36 counts of 1,000, each with a deviation of 29: seven deviations, a false alarm in 10¹⁰.
    counts = np.array([np.bincount(found[:, place], minlength=6) for place in range(6)])
    assert abs(counts - 1000).max() < 7 * np.sqrt(6000 * 5 / 36)


def test_equal_keys_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(np.array([[5, 5, 1], [9, 2, 4]], dtype="<u8"))
    monkeypatch.setattr(Keystream, "take", lambda self, size: next(words).view(np.uint8))
    assert silo.shuffled(3).tolist() == [1, 2, 0]


def test_a_silo_without_examples_sends_zero() -> None:
    assert not summed(features=FEATURES[:0], labels=LABELS[:0]).any()


# ---------------------------------------------------------------------- an audit of what really runs

DELTA = 1e-3
PROTOCOL = Protocol.binomial(clients=2, dim=1, clip_norm=sum_norm(1.0, 10), levels=201, trials=400)
RUN = Run.of(PROTOCOL, participation="poisson:0.1", adjacency="zero-out", colluding=1, examples=10)


def found_out(rate: float, rounds: int = 40_000) -> float:
    """Returns the ε that an attacker proves who knows all but whether a silo has one example, and its noise."""
    own, right, wrong = np.random.default_rng(3).integers(0, 2, rounds), 0, 0
    for present in own:
        vector = np.full(1, float(bool(present) and 0 in drawn(10, rate)), np.float32)
        # A zero vector's message is 100 levels and 200 coins on average; this is 2.4 deviations of the coins further.
        if PROTOCOL.encode_integers(vector, 1)[0] > 324:
            right, wrong = right + int(present), wrong + 1 - int(present)
    return epsilon_lower_bound(right, wrong, rounds, DELTA, 1e-7)


def test_an_audit_stays_below_the_claim_and_finds_a_silo_that_does_not_draw() -> None:
    """False alarms of either bound have a probability of 1e-7."""
    claimed = guarantee(RUN, DELTA).epsilon
    assert found_out(0.1) <= claimed
    assert found_out(1.0) > claimed
