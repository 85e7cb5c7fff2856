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
from fractions import Fraction
from functools import lru_cache

import numpy as np

from cpsgd import _validate
from cpsgd._exact import Integers, below
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.promise import Claim
from cpsgd.randomness import Keystream
from cpsgd.statistics.categories import combinations
from cpsgd.statistics.table_noise import Neighbours
from cpsgd.statistics.users import Sizes
from cpsgd.tables import Chunk

CITATION = (
    "groups selected privately (docs/proofs/statistics.md, section 4): Desfontaines, Voss, Gipson and Mandayam 2022, "
    "Theorem 1"
)
# Left of ε and δ for the rounding of their parts.
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
        """ε and δ that one user spends in one group."""
        changes = self.groups_per_user * (2 if self.neighbours == "replace-one" else 1)
        return self.claim.epsilon / changes * (1.0 - _MARGIN), self.claim.delta / changes * (1.0 - _MARGIN)

    @property
    def threshold(self) -> int:
        """The fewest users with which a group is kept with probability one half."""
        return int(np.searchsorted(keep_words(*self._each), _WORD // 2))

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
        """Returns the kept groups, sorted. Each group is decided independently, and once."""
        names = sorted(tally)
        counts = np.array([tally[name] for name in names], dtype=np.int64)
        odds = keep_words(*self._each)
        words = below(np.full(len(names), _WORD, dtype=np.int64), Keystream())
        kept = words < odds[np.minimum(counts, len(odds) - 1)]
        return [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]


@lru_cache(maxsize=16)
def keep_words(epsilon: float, delta: float) -> Integers:
    """Returns π(0), π(1), ... up to the first 1, as multiples of 2^-61.

    They are computed as integers, each rounded so that all inequalities of (ε, δ)-privacy hold exactly.

    Raises:
        InfeasibleError: ε or δ is too small.

    Example:
        >>> odds = keep_words(1.0, 1e-5) / 2**61
        >>> len(odds), f"{odds[1]:.0e}", f"{odds[12]:.2f}"
        (24, '1e-05', '0.76')
    """
    # e^ε, rounded down.
    above, under = (math.exp(epsilon) * (1.0 - 2.0**-50)).as_integer_ratio()
    least = math.floor(Fraction(delta) * _WORD)
    if least < 1:
        raise InfeasibleError(f"δ = {delta:g} per user and group is too small to find groups privately.")
    found = [0]
    while found[-1] < _WORD:
        last = found[-1]
        missing = -(-max(0, _WORD - last - least) * under // above)
        found.append(min(above * last // under + least, _WORD - missing))
        if len(found) > _MOST_USERS:
            raise InfeasibleError(
                f"ε = {rounded_up(epsilon)} per user and group is too small to find groups privately."
            )
    odds = np.array(found, dtype=np.int64)
    odds.flags.writeable = False
    return odds
