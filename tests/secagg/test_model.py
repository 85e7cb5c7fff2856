"""Every round that a server can lead a few clients into: nobody's secrets are both open, and no sum is too small."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest

from cpsgd.secagg import SecureParameters, participant

from .explorer import Explorer, Path
from .rounds import parameters


def agreed(clients: int, **changes: int) -> SecureParameters:
    return parameters(clients, dim=1, bits=1, **changes)


CASES = [
    (agreed(2), 0),
    (agreed(3), 0),
    (agreed(3, threshold=3, quorum=3), 1),
    (agreed(4, surviving=3), 0),
    (agreed(4, surviving=4), 0),
    (agreed(4, threshold=3, quorum=3, surviving=3), 1),
    (agreed(5, surviving=4, threshold=4), 0),
    (agreed(5, neighbours=2, surviving=4), 0),
]
LARGER = [(agreed(4), 0), (agreed(5, surviving=4), 0), (agreed(5, surviving=4, threshold=4, quorum=4), 1)]


@pytest.mark.parametrize(
    ("parameters", "colluding"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGER)]
)
def test_whatever_a_server_does_it_gets_one_sum_of_enough_clients(parameters: SecureParameters, colluding: int) -> None:
    explorer = Explorer(parameters, colluding)
    total, released = explorer.rounds()
    assert released > 0
    assert total >= released
    assert all(machine.refused > 0 for machine in explorer.machines)


@pytest.mark.parametrize("parameters", [agreed(3), agreed(4, surviving=3), agreed(5, neighbours=2, surviving=4)])
def test_clients_unmask_what_a_quorum_signed_and_nothing_else(parameters: SecureParameters) -> None:
    accepted, refused = Explorer(parameters).try_requests()
    assert accepted > 0
    assert refused > accepted


def test_without_a_quorum_the_search_finds_the_attack() -> None:
    """Everybody reveals what it signed itself: what clients without a roster once did."""
    explorer = Explorer(agreed(5, surviving=3))
    everybody = explorer.everybody

    def paths(number: int) -> list[Path]:
        """Of all ways, those in which everybody takes part, and client 0 alone gets no shares but those of 1 and 2."""
        delivered = 0b00110 if number == 0 else everybody & ~(1 << number)
        states = explorer.machines[number].states
        return [path for path in states if path[:2] == (everybody, delivered) and path.survivors is not None]

    found: set[str] = set()
    for chosen in product(*(paths(number) for number in range(5))):
        try:
            explorer.check(dict(enumerate(chosen)), frozenset(range(5)))
        except AssertionError as error:
            found.add(str(error).split(":")[0])
        if "the sum of clients [0] is open" in found:
            return
    raise AssertionError(f"the attack was not found, only {sorted(found)}")


def test_with_a_threshold_of_half_the_neighbours_the_search_finds_two_sums() -> None:
    with mock.patch("cpsgd.secagg.parameters.smallest_threshold", return_value=2):
        explorer = Explorer(agreed(6, neighbours=2, threshold=2, surviving=4))
        with pytest.raises(AssertionError, match="the sum of clients"):
            explorer.rounds()


def test_if_clients_uploaded_without_masks_the_search_finds_one_that_signed_nothing() -> None:
    """The others sign that it has survived, and reveal its seed; nothing else covers its message."""
    with mock.patch.object(participant, "_check_left"):
        explorer = Explorer(agreed(3))
    with pytest.raises(AssertionError, match=r"the sum of clients \[\d\] is open"):
        explorer.rounds()


def test_with_a_quorum_for_fewer_accomplices_the_search_finds_two_sets_of_survivors() -> None:
    """Two honest clients of three sign what they are told, the accomplice signs both."""
    explorer = Explorer(agreed(3, quorum=2), colluding=1)
    with pytest.raises(AssertionError):
        explorer.rounds()
