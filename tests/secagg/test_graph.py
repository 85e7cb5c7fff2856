from __future__ import annotations

import pytest

from cpsgd.secagg import graph


@pytest.mark.parametrize(("clients", "degree"), [(2, 1), (5, 4), (6, 2), (9, 6), (200, 12)])
def test_everybody_has_as_many_neighbours_and_neighbours_know_each_other(clients: int, degree: int) -> None:
    ties = [graph.neighbours(clients, degree, b"session", client) for client in range(clients)]
    for client, near in enumerate(ties):
        assert len(set(near)) == degree
        assert list(near) == sorted(near)
        assert client not in near
        assert all(client in ties[other] for other in near)


def test_another_session_is_another_graph() -> None:
    one, other = ([graph.neighbours(50, 6, session, i) for i in range(50)] for session in (b"a", b"b"))
    assert one != other
    assert one == [graph.neighbours(50, 6, b"a", i) for i in range(50)]


def test_the_construction_is_fixed() -> None:
    """Clients and servers of different releases must see the same graph."""
    assert graph.neighbours(20, 4, bytes(range(16)), 0) == (6, 9, 14, 19)
