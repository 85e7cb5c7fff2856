"""Sums over users in parts that merge: rows of a user, a bounded vector, integers, partial sums, one release.

A `Job` says what is summed and which noise comes to it. It is made once and sent to all machines. A machine makes a
`Partial` of the rows that it has; all rows of a user must be in one of them, because a user's vector is bounded there.
Partials are exact integers: they merge in any order to the same sums. There is no noise in them, so they are as secret
as the table. `Job.release` draws the noise, once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from threading import Lock

import numpy as np

from cpsgd._exact import Integers
from cpsgd.errors import ParameterError, TableError
from cpsgd.statistics.questions import Geometry, Matrix
from cpsgd.statistics.results import Reading
from cpsgd.statistics.rows import RowQuestion, interval_width
from cpsgd.statistics.table_noise import SUM_LIMIT, TableNoise
from cpsgd.statistics.users import Sizes, users_of
from cpsgd.tables import Chunk, open_table

# Jobs that this process has released.
_RELEASED: set[bytes] = set()
_RELEASING = Lock()


@dataclass(frozen=True, eq=False)
class CutUsers:
    """Counts users for whom something is cut off, in each way; and all users, if their number is private."""

    question: RowQuestion

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the counts."""
        return (*self.question.cuts, *(("users",) if self.question.private_users else ()))

    @property
    def geometry(self) -> Geometry:
        """Geometry of a user's vector, which has an entry 0 or 1 per way of being cut off."""
        many = len(self.names)
        return Geometry(many, many**0.5, many**0.5, "each count is 0 or 1 for a user", many, many, lattice=1)

    def vectors(self, chunk: Chunk, sizes: Sizes) -> Matrix:
        """Returns a row per user with an entry 1 for each way in which something of theirs is cut off, else 0."""
        found = self.question.cut_users(chunk, sizes)
        return np.hstack([found, np.ones((len(sizes), 1))]) if self.question.private_users else found


@dataclass(frozen=True, eq=False)
class SumTask:
    """One of a job's sums: the question that gives users' vectors, and the noise of their sum.

    Example:
        >>> from cpsgd.promise import Claim
        >>> from cpsgd.statistics import Count
        >>> from cpsgd.statistics.table_noise import noise_for
        >>> smokers = Count(["smokes"]).central("replace-one", None)
        >>> task = SumTask(smokers, noise_for(smokers.geometry, Claim(1.0, 0.0)))
        >>> task.sum({"smokes": np.array([0, 1, 1])}, np.ones(3, dtype=np.int64)).tolist()
        [2]
    """

    summed: RowQuestion | CutUsers
    noise: TableNoise

    def sum(self, chunk: Chunk, sizes: Sizes) -> Integers:
        """Returns the sum of some users' vectors in whole grid units."""
        vectors = self.summed.vectors(chunk, sizes)
        vectors *= float(self.noise.units)
        found: Integers = np.rint(vectors, out=vectors).astype(np.int64).sum(axis=0)
        return found

    def release(self, sums: Integers, users: int) -> Matrix:
        """Returns the sum with noise, which is drawn here."""
        return (sums + self.noise.draw()) / float(self.noise.units)

    def read(self, released: Matrix, users: int, confidence: float) -> Reading:
        """Returns the values behind the released sum of a question."""
        question = self.summed
        assert isinstance(question, RowQuestion)
        many = 1 if question.private_users else users
        mean, variance = released.reshape(question.blocks, -1) / many, self.noise.variance / many**2
        return question.read(mean, variance, many, interval_width(confidence, self.noise.rate))


@dataclass(frozen=True, eq=False)
class Partial:
    """Sums over some of the users. It holds no noise, and must be kept as the table is.

    Attributes:
        job: Identity of the job.
        users: Number of users in it.
        sums: One array of integers per task.

    Example:
        >>> from cpsgd.statistics import Mean
        >>> from cpsgd.statistics.table_noise import noise_for
        >>> from cpsgd.promise import Claim
        >>> question = Mean({"age": (0, 100)})
        >>> job = Job((SumTask(question, noise_for(question.geometry, Claim(1.0, 0.0))),), user="id")
        >>> parts = [job.partial({"id": ids, "age": [20.0, 60.0, 40.0]}) for ids in ([1, 1, 2], [3, 4, 4])]
        >>> parts[0].merge(parts[1]).users
        4
    """

    job: bytes
    users: int
    sums: tuple[Integers, ...]

    def merge(self, other: Partial) -> Partial:
        """Returns the sums over the users of both, who must be different.

        Raises:
            ParameterError: They are of two jobs.
        """
        if self.job != other.job:
            raise ParameterError("These partial sums are of two jobs: they are about different questions or noise.")
        sums = tuple(mine + theirs for mine, theirs in zip(self.sums, other.sums, strict=True))
        return Partial(self.job, self.users + other.users, sums)

    def to_json(self) -> str:
        """Returns one line of JSON, for `from_json`."""
        return json.dumps({"job": self.job.hex(), "users": self.users, "sums": [each.tolist() for each in self.sums]})

    @classmethod
    def from_json(cls, text: str) -> Partial:
        """Returns the sums that `to_json` wrote."""
        try:
            found = json.loads(text)
            sums = tuple(np.array(each, dtype=np.int64) for each in found["sums"])
            return cls(bytes.fromhex(found["job"]), int(found["users"]), sums)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise TableError("These are not partial sums as `to_json` writes them.") from None


@dataclass(frozen=True, eq=False)
class Job:
    """Sums over all users of a table, wherever its rows are.

    Attributes:
        tasks: The sums, each with its noise.
        user: The column with the user of each row; None where every row is another person's.
        missing: Whether rows without a user are left out; otherwise they are refused.
        identity: Random, and the same in all copies.

    Example:
        >>> from cpsgd.promise import Claim
        >>> from cpsgd.statistics import Count
        >>> from cpsgd.statistics.table_noise import noise_for
        >>> smokers = Count(["smokes"]).central("replace-one", None)
        >>> job = Job((SumTask(smokers, noise_for(smokers.geometry, Claim(1.0, 0.0))),))
        >>> parts = [job.partial({"smokes": np.repeat([0, 1], [3000, smoking])}) for smoking in (400, 600)]
        >>> ((count,),) = job.release(job.merged(parts))  # 1,000 with noise of standard deviation 1.4
        >>> round(float(count), -2)
        1000.0
    """

    tasks: tuple[SumTask, ...]
    user: str | None = None
    missing: bool = False
    identity: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, the user's among them."""
        return tuple(dict.fromkeys((*self._needed, *(() if self.user is None else (self.user,)))))

    @property
    def _needed(self) -> list[str]:
        asked = (task.summed for task in self.tasks)
        return [name for each in asked for name in (each.question if isinstance(each, CutUsers) else each).needed]

    def empty(self) -> Partial:
        """Returns the sums over nobody."""
        sums = tuple(np.zeros(task.noise.dim, dtype=np.int64) for task in self.tasks)
        return Partial(self.identity, 0, sums)

    def partial(
        self,
        table: object,
        *,
        advance: Callable[[int], object] | None = None,
        check: Callable[[Chunk, Sizes], object] | None = None,
        columns: Sequence[str] = (),
        drawn: bool = False,
    ) -> Partial:
        """Returns the sums over the users of these rows.

        Args:
            table: Anything `cpsgd.tables.open_table` takes, with all rows of each of its users.
            advance: Called with the number of rows that were just read.
            check: Called with all rows, for instance to refuse them.
            columns: Further columns that `check` needs.
            drawn: Whether a user's rows that count are drawn at random, instead of the first ones; see `users_of`.

        Raises:
            TableError: The table is empty or cannot be read.
            ColumnError: A column is missing, or its values cannot be used.
        """
        source = open_table(table)
        found = self.empty()
        names = tuple(dict.fromkeys([*self._needed, *columns]))
        if self.user is None and not names:
            names = source.names[:1]
        for chunk, sizes in users_of(source, self.user, names, missing=self.missing, drawn=drawn, advance=advance):
            if check is not None:
                check(chunk, sizes)
            sums = tuple(task.sum(chunk, sizes) for task in self.tasks)
            found = found.merge(Partial(self.identity, len(sizes), sums))
        self._check(found)
        return found

    def merged(self, parts: Sequence[Partial]) -> Partial:
        """Returns the sums over the users of all parts."""
        return reduce(Partial.merge, parts, self.empty())

    def _check(self, partial: Partial) -> None:
        if partial.job != self.identity:
            raise ParameterError("These partial sums are of another job.")
        if any(partial.users * max(task.noise.norm, 1.0) >= SUM_LIMIT for task in self.tasks):
            raise TableError(f"{partial.users:,} users are too many for one sum of 62 bits.")

    def release(self, partial: Partial) -> list[Matrix]:
        """Returns the private sums: adds the noise, which is drawn here and nowhere else.

        A ledger is charged before that, by whoever calls it.

        Raises:
            ParameterError: The sums are of another job, or the job was released in this process before. The average of
                two releases would have less noise than was accounted for.
        """
        self._check(partial)
        with _RELEASING:
            if self.identity in _RELEASED:
                raise ParameterError("This job was released already. Make another one, and charge it.")
            _RELEASED.add(self.identity)
        pairs = zip(self.tasks, partial.sums, strict=True)
        return [task.release(sums, partial.users) for task, sums in pairs]

    def noises(self) -> list[TableNoise]:
        """Returns the noise of each sum, for accounting."""
        return [task.noise for task in self.tasks]
