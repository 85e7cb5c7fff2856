"""Groups that nobody can list: a group is shown only if enough users are in it, decided privately.

A group with n users is kept with probability π(n): π(0) = 0 and

    π(n + 1) = min(e^ε π(n) + δ, 1 - e^-ε (1 - π(n) - δ), 1).

No (ε, δ)-private choice between neighbours that differ by one user keeps a group with a larger probability
(Desfontaines, Voss, Gipson and Mandayam, "Differentially private partition selection", PoPETs 2022, Theorem 1). A user
is counted in their first k groups. Replacing a user changes 2k groups by one user each, adding or removing one k of
them: each gets that part of ε and δ. docs/proofs/statistics.md, section 4.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._exact import below
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.promise import Claim
from cpsgd.randomness import Keystream
from cpsgd.statistics.rows import Sizes, combinations
from cpsgd.statistics.table_noise import Neighbours
from cpsgd.tables import Chunk

CITATION = (
    "groups selected privately (docs/proofs/statistics.md, section 4): Desfontaines, Voss, Gipson and Mandayam 2022, "
    "Theorem 1"
)
# Rounding of π is far below this part of ε and δ.
_MARGIN = 1e-9
_MOST_USERS = 1 << 20
_WORD = 1 << 61

Tally = Counter[tuple[str, ...]]
"""Numbers of users by group. It merges by addition, and must be kept as the table is."""


@dataclass(frozen=True)
class Selection:
    """A private choice of groups.

    Attributes:
        columns: The columns whose values, together, are the groups.
        claim: ε and δ of the choice.
        neighbours: Which tables are neighbours.
        groups_per_user: k, the most groups that a user is counted in.
    """

    columns: tuple[str, ...]
    claim: Claim
    neighbours: Neighbours
    groups_per_user: int = 1

    def __post_init__(self) -> None:
        _validate.integer("groups_per_user", self.groups_per_user, low=1)
        if not self.claim.delta:
            raise ParameterError(
                "Groups that are not listed are found privately, which needs a δ: give delta, or list the groups, as "
                "group_by={'sex': ['f', 'm']}."
            )

    @property
    def _each(self) -> tuple[float, float]:
        """ε and δ of one user in one group."""
        changes = self.groups_per_user * (2 if self.neighbours == "replace-one" else 1)
        return self.claim.epsilon / changes * (1.0 - _MARGIN), self.claim.delta / changes * (1.0 - _MARGIN)

    @property
    def threshold(self) -> int:
        """The fewest users with which a group is kept with probability one half."""
        return int(np.searchsorted(keep_probabilities(*self._each), 0.5))

    def tally(self, chunk: Chunk, sizes: Sizes, *, missing: bool = False) -> Tally:
        """Counts some users in their first groups. Rows follow each other by user."""
        groups, number = combinations(self.columns, chunk, missing=missing)
        owner = np.repeat(np.arange(len(sizes)), sizes)[number >= 0]
        number = number[number >= 0]
        # The first row of each user in each group, in the order of rows.
        _, first = np.unique(owner * max(1, len(groups)) + number, return_index=True)
        first = np.sort(first)
        users = owner[first]
        rank = np.arange(len(users)) - np.searchsorted(users, users)
        counted = np.bincount(number[first][rank < self.groups_per_user], minlength=len(groups))
        return Tally({group: int(count) for group, count in zip(groups, counted, strict=True) if count})

    def select(self, tally: Tally) -> list[tuple[str, ...]]:
        """Returns the groups that are kept, sorted. Each is decided by itself, and once."""
        names = sorted(tally)
        counts = np.array([tally[name] for name in names], dtype=np.int64)
        odds = keep_probabilities(*self._each)
        chance = odds[np.minimum(counts, len(odds) - 1)]
        words = below(np.full(len(names), _WORD, dtype=np.int64), Keystream())
        kept = words < np.floor(chance * float(_WORD)).astype(np.int64)
        return [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]


@lru_cache(maxsize=16)
def keep_probabilities(epsilon: float, delta: float) -> NDArray[np.float64]:
    """Returns π(0), π(1), ... up to the first 1.

    Example:
        >>> odds = keep_probabilities(1.0, 1e-5)
        >>> len(odds), f"{odds[1]:.0e}", f"{odds[12]:.2f}"
        (24, '1e-05', '0.76')
    """
    grow, found = math.exp(epsilon), [0.0]
    while found[-1] < 1.0:
        last = found[-1]
        found.append(min(grow * last + delta, 1.0 - (1.0 - last - delta) / grow, 1.0))
        if len(found) > _MOST_USERS:
            raise InfeasibleError(
                f"ε = {rounded_up(epsilon)} per user and group is too small to find groups privately."
            )
    odds = np.array(found)
    odds.flags.writeable = False
    return odds
