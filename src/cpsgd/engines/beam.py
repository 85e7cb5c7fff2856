"""Private statistics in pipelines of Apache Beam; install `cpsgd[beam]`.

A pipeline makes exact sums. The noise is drawn after it, by `TableQuestion.finish`: in the pipeline, a bundle that runs
again would draw it twice. Runners keep the results of one attempt per bundle, so that no user counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems

from cpsgd import _validate
from cpsgd.errors import ParameterError, TableError
from cpsgd.statistics import Job, Partial
from cpsgd.tables import text_of

Row = Mapping[str, object]
# Sums, and rows of whole users that are not in them yet: summing many users at a time is faster.
_Accumulator = tuple[Partial, list[Row]]
_ROWS = 1 << 14


class UserSums(beam.PTransform[Any, Any]):
    """Makes one `Partial` of a collection of rows: mappings of columns to values, `beam.Row` or named tuples.

    Rows are brought together by user before contributions are bounded. Where a user has more rows than count, they are
    drawn at random: in a runner's order, other users' rows may have a part. The collection must be in the global
    window.

    Example:
        >>> import apache_beam as beam
        >>> from cpsgd.statistics import Mean, prepare
        >>> ready = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0)
        >>> rows = [{"id": user, "age": 40.0} for user in (1, 1, 2)]
        >>> with beam.Pipeline() as pipeline:
        ...     _ = pipeline | beam.Create(rows) | UserSums(ready.job) | beam.Map(lambda found: print(found.users))
        2
    """

    def __init__(self, job: Job) -> None:
        """Takes the job of a prepared question; see `cpsgd.statistics.prepare`."""
        super().__init__()
        _validate.instance("job", job, Job)
        self.job = job

    def expand(self, rows: Any) -> Any:
        """Returns a collection with one element, the `Partial` of all rows."""
        job = self.job
        if not rows.windowing.is_default():
            raise ParameterError(
                "Expected a collection in the global window with its default trigger: a user with rows in two windows "
                "or panes would count twice."
            )
        if job.user is None:
            whole = rows | "OneRowEach" >> beam.Map(lambda row: [_mapping(row)])
        else:
            keyed = beam.Map(lambda row: (text_of(row.get(job.user)), _chosen(row, job)))
            together = (
                "Mappings" >> beam.Map(_mapping)
                | "KeyByUser" >> keyed.with_output_types(tuple[str, Any])
                | "BringTogether" >> beam.GroupByKey()
            )
            whole = rows | together | "Rows" >> beam.Values()
        return whole | "Sum" >> beam.CombineGlobally(SumUsers(job))


def _mapping(row: Any) -> Row:
    """Returns a row as a mapping of columns to values."""
    if isinstance(row, Mapping):
        return row
    for convert in ("_asdict", "as_dict"):
        if hasattr(row, convert):
            found: Row = getattr(row, convert)()
            return found
    raise TableError(
        f"Expected rows as mappings of columns to values, beam.Row or named tuples, got {type(row).__name__}."
    )


def _chosen(row: Row, job: Job) -> dict[str, object]:
    """Returns the part of a row with the columns that the job needs."""
    return {name: row[name] for name in job.columns if name in row}


class SumUsers(beam.CombineFn):
    """Sums the rows of whole users; each input is all rows of one user.

    Example:
        >>> from cpsgd.statistics import Mean, prepare
        >>> combine = SumUsers(prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job)
        >>> held = combine.add_input(combine.create_accumulator(), [{"id": 1, "age": 40.0}, {"id": 1, "age": 50.0}])
        >>> combine.extract_output(held).users
        1
    """

    def __init__(self, job: Job) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.job = job

    def create_accumulator(self) -> _Accumulator:
        """Returns empty sums, and no held rows."""
        return self.job.empty(), []

    def add_input(self, accumulator: _Accumulator, rows: Iterable[Row]) -> _Accumulator:
        """Holds all rows of one user; sums all held rows once there are `_ROWS` of them."""
        found, held = accumulator
        held.extend(rows)
        return (found, held) if len(held) < _ROWS else self.compact((found, held))

    def merge_accumulators(self, accumulators: Iterable[_Accumulator]) -> _Accumulator:
        """Adds accumulators of different users."""
        return self.job.merged([self.extract_output(each) for each in accumulators]), []

    def compact(self, accumulator: _Accumulator) -> _Accumulator:
        """Adds the held rows to the sums, so that a runner sends sums only."""
        return self.extract_output(accumulator), []

    def extract_output(self, accumulator: _Accumulator) -> Partial:
        """Returns the sums over all users, those whose rows are held included."""
        found, held = accumulator
        return found.merge(self.job.partial(held, drawn=True)) if held else found


def write_sums(path: str) -> Any:
    """Returns the transform that writes a `Partial` to one file, which is as secret as the table.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import apache_beam as beam
        >>> from cpsgd.statistics import Mean, prepare
        >>> job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
        >>> with TemporaryDirectory() as folder:
        ...     path = str(Path(folder) / "sums")
        ...     with beam.Pipeline() as pipeline:
        ...         _ = pipeline | beam.Create([{"id": 1, "age": 40.0}]) | UserSums(job) | write_sums(path)
        ...     read_sums(path).users
        1
    """
    write = beam.io.WriteToText(path, num_shards=1, shard_name_template="")
    return "ToJson" >> beam.Map(Partial.to_json) | "WriteSums" >> write


def read_sums(path: str) -> Partial:
    """Returns the `Partial` that a finished pipeline wrote, on any of Beam's file systems.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from cpsgd.statistics import Mean, prepare
        >>> job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
        >>> with TemporaryDirectory() as folder:
        ...     path = str(Path(folder) / "sums")
        ...     _ = Path(path).write_text(job.partial([{"id": 1, "age": 40.0}, {"id": 2, "age": 50.0}]).to_json())
        ...     read_sums(path).users
        2
    """
    with FileSystems.open(path) as file:
        return Partial.from_json(file.read().decode())
