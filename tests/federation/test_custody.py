"""The lemma of docs/accounting.md, section 15, against exact covariances: who holds which seed, in random patterns.

The sums of the rounds' messages are S = X + Wz, with independent standard normal z, one per seed that only honest
clients have held. What they say about one client's part of X at most is Δᵀ(WWᵀ)⁻¹Δ, which is computed here.
"""

from __future__ import annotations

import numpy as np
import pytest

ROUNDS, BANDS = 7, 4
WEIGHTS = np.array([1.0, -0.5, -0.125, -0.0625])


def coefficients(rounds: int) -> np.ndarray:
    """C, the inverse of the Toeplitz matrix of the weights."""
    inverse = np.zeros((rounds, rounds))
    for age in range(min(BANDS, rounds)):
        inverse += np.diag(np.full(rounds - age, WEIGHTS[age]), -age)
    return np.linalg.inv(inverse)


def information(uses: np.ndarray, moved: np.ndarray) -> float:
    """What sums with these uses of seeds (rounds by seeds) say about a client that moves them so."""
    return float(moved @ np.linalg.solve(uses @ uses.T, moved))


def pattern(rng: np.random.Generator, messages: np.ndarray, told: float = 0.0) -> np.ndarray:
    """Uses of seeds where batons go from hand to hand at random, are lost, or are read by colluding clients."""
    batons: list[dict[int, int]] = []  # seeds by round
    columns: list[np.ndarray] = []
    for round, count in enumerate(messages):
        rng.shuffle(batons)
        kept = [baton for baton in batons if rng.random() < 0.8]
        following: list[dict[int, int]] = []
        for message in range(count + 2):  # two messages do not arrive: their noise is nowhere but in later rounds
            baton = kept[message] if message < len(kept) else {}
            if rng.random() < told:
                # A colluding client has it: whoever goes on uses seeds that are known, if any.
                for seed in baton.values():
                    columns[seed][:] = 0.0
                following.append({})
                continue
            if message >= 2:
                for made, seed in baton.items():
                    if round - made < BANDS:
                        columns[seed][round] += WEIGHTS[round - made]
            own = np.zeros(len(messages))
            own[round] = 1.0 if message >= 2 else 0.0
            columns.append(own)
            following.append({**baton, round: len(columns) - 1})
        batons = following + kept[count + 2 :]
    return np.array(columns).T


@pytest.mark.parametrize("several", [False, True])
def test_however_batons_go_nobody_learns_more_than_of_unbroken_lineages(several: bool) -> None:
    rng = np.random.default_rng(3)
    closest = 0.0
    for _ in range(400):
        messages = rng.integers(1, 5, size=ROUNDS)
        moved = np.zeros(ROUNDS)
        moved[rng.integers(ROUNDS)] = 1.0
        if several:
            moved = rng.uniform(-1.0, 1.0, size=ROUNDS) * (rng.random(ROUNDS) < 0.5)
        bound = np.sum((coefficients(ROUNDS) @ abs(moved)) ** 2) / messages.min()
        found = information(pattern(rng, messages), moved)
        assert found <= bound * (1.0 + 1e-9)
        closest = max(closest, found / bound if bound else 0.0)
    assert closest > 0.9


def test_what_colluding_clients_hold_does_not_count_and_the_rest_does() -> None:
    rng = np.random.default_rng(4)
    looked_at = 0
    for _ in range(600):
        uses = pattern(rng, rng.integers(3, 6, size=ROUNDS), told=0.1)
        counted = min(np.count_nonzero(uses[round] == 1.0) for round in range(ROUNDS))
        if not counted:
            continue
        looked_at += 1
        moved = np.eye(ROUNDS)[rng.integers(ROUNDS)]
        bound = np.sum((coefficients(ROUNDS) @ moved) ** 2) / counted
        assert information(uses, moved) <= bound * (1.0 + 1e-9)
    assert looked_at > 100


def test_with_c_colluding_clients_in_each_round_n_minus_b_c_lineages_count() -> None:
    """The worst they can do: a lineage each, another one in every round."""
    clients, colluding, rounds = 12, 2, 20
    holder_is_bad = np.zeros((rounds, clients), dtype=bool)
    for round in range(rounds):
        holder_is_bad[round, [(round * colluding + i) % clients for i in range(colluding)]] = True
    for round in range(rounds - BANDS + 1):
        known = holder_is_bad[round : round + BANDS].any(axis=0)
        assert clients - known.sum() >= clients - BANDS * colluding
    assert any(
        clients - holder_is_bad[round : round + BANDS].any(axis=0).sum() == clients - BANDS * colluding
        for round in range(rounds - BANDS + 1)
    )


def test_a_seed_that_two_successors_use_tells_more() -> None:
    """Why the rule is there: few messages in one round, and many in the next that all take the same noise away."""
    few, many = 2, 50
    uses = np.zeros((2, few + many))
    uses[0, :few] = 1.0
    uses[1, :few] = WEIGHTS[1] * many / few
    uses[1, few:] = 1.0
    bound = np.sum(coefficients(2)[:, 0] ** 2) / few
    assert information(uses, np.array([1.0, 0.0])) > 5.0 * bound
    # Each seed once: as promised.
    uses[1, :few] = WEIGHTS[1]
    assert information(uses, np.array([1.0, 0.0])) <= bound
