"""Dropouts at every stage: the sum over the survivors is exact, or the round ends with an error and without a sum."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from cpsgd.errors import StageError, ThresholdError
from cpsgd.secagg import SecureParameters, Stage, risk

from .rounds import FINGERPRINT, Round, new_round, parameters, play


def subsets(members: frozenset[int]) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(sorted(members), size) for size in range(len(members) + 1))


def try_all(current: Round) -> tuple[int, int]:
    """Goes on with every set of dropouts in every stage from here; counts rounds with a sum, and stages without."""
    if current.server.stage is Stage.DONE:
        found = current.server.result()
        np.testing.assert_array_equal(found.sums, current.expected(found.survivors))
        return 1, 0
    sums = failures = 0
    uploading = current.server.stage is Stage.MASK
    # What a client answers does not depend on who else will be silent.
    answers = {client: current.answer(client) for client in current.waiting}
    for speaking in subsets(frozenset(current.waiting)):
        branch = current.copied()
        for client in speaking:
            branch.server.receive(client, answers[client])
        try:
            branch.waiting = branch.server.advance()
        except ThresholdError:
            # Nothing later can follow from here: all rounds that begin like this have no sum.
            with pytest.raises(StageError, match="no sum"):
                branch.server.result()
            failures += 1
            continue
        if uploading:
            assert tuple(sorted(branch.server._survivors)) == speaking
        deeper = try_all(branch)
        sums, failures = sums + deeper[0], failures + deeper[1]
    return sums, failures


def chains(clients: int, needed: int, stages: int) -> int:
    """Ways to drop out at one of `stages` stages or never, with at least `needed` clients who never do."""
    total = 0
    for lost in range(clients - needed + 1):
        ways = 1
        for i in range(lost):
            ways = ways * (clients - i) // (i + 1)
        total += ways * stages**lost
    return total


@pytest.mark.parametrize("clients", [2, 3, 4, 5, pytest.param(6, marks=pytest.mark.thorough)])
def test_every_dropout_on_a_complete_graph(clients: int) -> None:
    agreed = parameters(clients)
    sums, failures = try_all(new_round(agreed))
    # There is a sum if and only if t clients are left at the end.
    assert sums == chains(clients, agreed.threshold, stages=5)
    assert failures > 0


@pytest.mark.parametrize(("neighbours", "threshold"), [(2, 3), (4, 4)])
def test_every_dropout_on_a_sparse_graph(neighbours: int, threshold: int) -> None:
    sums, failures = try_all(new_round(parameters(6, neighbours=neighbours, threshold=threshold)))
    assert sums >= (25 if neighbours == 4 else 1)
    assert failures > 50


@pytest.mark.parametrize("clients", [3, 4])
def test_every_dropout_with_a_roster(clients: int) -> None:
    agreed = parameters(clients)
    sums, _ = try_all(new_round(agreed, signed=True))
    assert sums == chains(clients, agreed.threshold, stages=5)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_random_dropouts_of_a_hundred_clients(seed: int) -> None:
    agreed = SecureParameters.choose(100, 20, 13, fingerprint=FINGERPRINT, round=1, dropout=0.2)
    assert agreed.neighbours < 99
    assert risk(agreed, dropout=0.2).failure <= 1e-9
    random = np.random.default_rng(seed)
    lost = random.permutation(100)[:20].reshape(5, 4)
    stages = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)
    started = new_round(agreed, seed=seed, session=None)
    found = play(started, {stage: frozenset(row.tolist()) for stage, row in zip(stages, lost, strict=True)})
    # Who falls silent after the upload has contributed.
    assert set(found.survivors) == set(range(100)) - set(lost[:3].ravel().tolist())
    np.testing.assert_array_equal(found.sums, started.expected(found.survivors))


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK])
def test_below_the_threshold_late_answers_may_still_save_the_round(stage: Stage) -> None:
    current = new_round(parameters(4)).until(stage)
    current.collect(frozenset({1, 2}))
    with pytest.raises(ThresholdError):
        current.server.advance()
    assert current.server.stage is stage
    assert current.server.missing == {1, 2}
    current.server.receive(2, current.answer(2))
    current.waiting = current.server.advance()
    found = current.finish()
    assert found.survivors == ((0, 1, 2, 3) if stage in (Stage.CONFIRM, Stage.UNMASK) else (0, 2, 3))
    np.testing.assert_array_equal(found.sums, current.expected(found.survivors))


def test_fewer_contributions_than_agreed_are_never_summed() -> None:
    current = new_round(parameters(5, surviving=5)).until(Stage.MASK)
    current.collect(frozenset({3}))
    with pytest.raises(ThresholdError, match="fewer than 5 stays hidden"):
        current.server.advance()


@pytest.mark.parametrize("bits", range(1, 33))
def test_sums_are_exact_at_every_number_of_bits(bits: int) -> None:
    started = new_round(parameters(4, bits=bits, dim=37), seed=bits)
    started.values[0, :2] = 2**bits - 1
    found = play(started, {Stage.MASK: frozenset({2})})
    assert found.survivors == (0, 1, 3)
    assert found.sums.dtype == np.uint32
    np.testing.assert_array_equal(found.sums, started.expected(found.survivors))


@pytest.mark.parametrize("modulus", [3, 5, 90, 127, 129, 2999, 2**15 + 1, 2**16 + 1, 10**6, 2**31 + 1, 2**32 - 1])
@pytest.mark.parametrize("signed", [False, True])
def test_sums_are_exact_modulo_any_number(modulus: int, signed: bool) -> None:
    clients = 8 if signed else 5
    started = new_round(parameters(clients, modulus=modulus, dim=37), signed=signed, seed=modulus)
    started.values[0, :2] = modulus - 1
    found = play(
        started,
        {Stage.SHARE: frozenset({1}), Stage.MASK: frozenset({2}), Stage.UNMASK: frozenset({3} if signed else ())},
    )
    assert set(found.survivors) == set(range(clients)) - {1, 2}
    assert found.sums.dtype == np.uint32
    np.testing.assert_array_equal(found.sums, started.expected(found.survivors))


@pytest.mark.parametrize("modulus", [2**16, 1000, 2**31 + 1])
def test_masks_of_many_blocks_cancel(modulus: int) -> None:
    started = new_round(parameters(3, modulus=modulus, dim=200_001))
    found = play(started, {Stage.MASK: frozenset({0})})
    np.testing.assert_array_equal(found.sums, started.expected((1, 2)))


def test_nobody_is_asked_to_confirm_what_too_few_can_confirm_or_unmask() -> None:
    """Clients sign once: a list of survivors that leads to no sum is not sent."""
    few = new_round(parameters(5, surviving=2, threshold=3, quorum=4)).until(Stage.MASK)
    with pytest.raises(ThresholdError, match="confirmed by 4"):
        few.step(frozenset({0, 1}))
    sparse = new_round(parameters(6, neighbours=4, threshold=4)).until(Stage.MASK)
    near = sparse.server._neighbours[0]
    with pytest.raises(ThresholdError, match="neighbourhood"):
        sparse.step(frozenset(near[:2]))
