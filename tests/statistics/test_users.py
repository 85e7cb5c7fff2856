"""Rows by user: in order whatever the numbers, and in a random order on clusters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from cpsgd.statistics.users import users_of
from cpsgd.tables import open_table


@pytest.mark.parametrize(
    "ids",
    [
        np.array([127, -128, 127, 0, -128, 0], dtype=np.int8),
        np.array([2**64 - 1, 2**64 - 3, 2**64 - 1, 2**63, 2**64 - 3], dtype=np.uint64),
        np.array([2**64 - 1, 0, 2**64 - 1, 2**63, 0], dtype=np.uint64),
        np.array([2**63 - 1, -(2**63), 0, 2**63 - 1, -(2**63)]),
        np.array([-3, -5, -3, -5, -5]),
        np.array(["7", "b", " 7", "7.0", "b"]),
    ],
    ids=["bytes", "large", "far apart", "all integers", "negative", "texts"],
)
def test_rows_of_a_user_follow_each_other_in_their_order(ids: np.ndarray) -> None:
    places = np.arange(len(ids))
    ((chunk, sizes),) = users_of(open_table({"id": ids, "place": places}), "id", ["place"])
    texts = [str(entry).strip().removesuffix(".0") for entry in ids]
    expected = {text: [i for i, other in enumerate(texts) if other == text] for text in texts}
    found = np.split(chunk["place"], np.cumsum(sizes)[:-1])
    assert sorted(part.tolist() for part in found) == sorted(expected.values())


def test_every_order_of_a_users_rows_is_drawn_equally_often() -> None:
    users = 6000
    table = open_table({"id": np.tile(np.arange(users), 3), "place": np.repeat([0, 1, 2], users)})
    ((chunk, _),) = users_of(table, "id", ["place"], drawn=True)
    counts = Counter(map(tuple, chunk["place"].reshape(users, 3).tolist()))
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6
