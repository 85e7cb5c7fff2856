"""Private statistics of Spark's data frames; install `cpsgd[spark]`.

Rows are brought together by user, executors sum bounded contributions as integers, and the driver charges the ledger
and draws the noise, once. Spark keeps one result per task, so that a task that fails and runs again counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from cpsgd import errors
from cpsgd.errors import ColumnError, DataError, TableError
from cpsgd.statistics import Job, Partial, Statistic, prepare
from cpsgd.statistics.rows import RowQuestion
from cpsgd.statistics.table_options import StatisticOptions
from cpsgd.tables import text_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Column with the number of the partition that a user's rows belong to.
_PART = "cpsgd part of users"
# Blanks as Python knows them.
_BLANKS = r"[\s\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


def ask(frame: DataFrame, question: RowQuestion, **options: Unpack[StatisticOptions]) -> Statistic:
    """Returns a private statistic of a data frame. `to_frame` makes one row per group of it.

    Where a user has more rows than count, they are drawn at random: in Spark's order, other users' rows have a part.

    Args:
        frame: The data frame, evaluated once.
        question: `Mean`, `Sum`, `Count`, `Histogram` or `Quantiles`, with bounds and groups.
        options: Of `StatisticOptions`: epsilon, delta, user, neighbours, confidence, ledger and population.

    Raises:
        ColumnError: A column is missing. Nothing was charged.
        BudgetExceededError: The ledger does not allow it. Nothing was released.

    Example:
        >>> from pyspark.sql import SparkSession  # doctest: +SKIP
        >>> from cpsgd.engines import spark  # doctest: +SKIP
        >>> from cpsgd.statistics import Mean  # doctest: +SKIP
        >>> session = SparkSession.builder.getOrCreate()  # doctest: +SKIP
        >>> frame = session.range(100_000).selectExpr("id", "40D age")  # doctest: +SKIP
        >>> found = spark.ask(frame, Mean({"age": (0, 100)}), user="id", epsilon=1.0)  # doctest: +SKIP
        >>> round(float(found.values[0]), 1)  # doctest: +SKIP
        40.0
    """
    ledger, population = options.pop("ledger", None), options.pop("population", None)
    ready = prepare(question, **options)
    ready.charge(ledger, population)  # refuses before there is work to do
    return ready.finish(sums(frame, ready.job), ledger=ledger, population=population)


def sums(frame: DataFrame, job: Job) -> Partial:
    """Returns the exact sums over all users of a data frame. They hold no noise, and are as secret as the table.

    Example:
        >>> from pyspark.sql import SparkSession  # doctest: +SKIP
        >>> from cpsgd.engines import spark  # doctest: +SKIP
        >>> from cpsgd.statistics import Mean, prepare  # doctest: +SKIP
        >>> session = SparkSession.builder.getOrCreate()  # doctest: +SKIP
        >>> frame = session.range(100_000).selectExpr("id", "40D age")  # doctest: +SKIP
        >>> ready = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0)  # doctest: +SKIP
        >>> spark.sums(frame, ready.job).users  # doctest: +SKIP
        100000
    """
    from pyspark.sql import DataFrame, functions, types

    if not isinstance(frame, DataFrame):
        raise TableError(f"Expected a data frame of Spark, got {type(frame).__name__}.")
    names = job.columns or tuple(frame.columns[:1])
    if missing := [name for name in names if name not in frame.columns]:
        raise ColumnError(f"The frame has no column {missing[0]!r}; it has {', '.join(frame.columns[:20])}.")
    # Spark does not pass on names with dots or quotes.
    chosen = frame.select(*(_column(name).alias(f"c{place}") for place, name in enumerate(names)))
    if job.user is not None:
        nested = (types.ArrayType, types.MapType, types.StructType, types.VariantType)
        if isinstance(frame.schema[job.user].dataType, nested):
            raise ColumnError(f"The frame: column {job.user!r} is not of single values of one type.")
        # Spark changes no partitions whose number is given. Were it otherwise, a part would come twice.
        partitions, key = _partitions(frame), _key(chosen, f"c{names.index(job.user)}")
        chosen = chosen.repartition(partitions, key).withColumn(_PART, functions.pmod(functions.hash(key), partitions))
    found = "sums string, parts array<int>, error string, refusal string"
    rows = chosen.mapInArrow(lambda batches: _summed(job, names, batches), found).collect()
    for row in rows:
        if row["error"] is not None:
            raise getattr(errors, row["error"])(row["refusal"])
    seen = [part for row in rows for part in row["parts"]]
    if len(set(seen)) < len(seen):
        raise TableError("Spark gave rows of one user to two tasks. Nothing was released.")
    return job.merged([Partial.from_json(row["sums"]) for row in rows])


def to_frame(found: Statistic, frame: DataFrame) -> DataFrame:
    """Returns a statistic in the Spark session of a frame, with one row per group and one column per value.

    Example:
        >>> from pyspark.sql import SparkSession  # doctest: +SKIP
        >>> from cpsgd.engines import spark  # doctest: +SKIP
        >>> from cpsgd.statistics import Mean  # doctest: +SKIP
        >>> session = SparkSession.builder.getOrCreate()  # doctest: +SKIP
        >>> frame = session.range(100_000).selectExpr("id", "if(id % 2 = 0, 'f', 'm') sex", "40D age")  # doctest: +SKIP
        >>> question = Mean({"age": (0, 100)}, group_by={"sex": ["f", "m"]})  # doctest: +SKIP
        >>> found = spark.ask(frame, question, user="id", epsilon=1.0)  # doctest: +SKIP
        >>> spark.to_frame(found, frame).selectExpr("group", "round(age) age").show()  # doctest: +SKIP
        +-----+----+
        |group| age|
        +-----+----+
        |    f|40.0|
        |    m|40.0|
        +-----+----+
        <BLANKLINE>
    """
    groups = (None,) if found.groups is None else found.groups
    rows = [(group, *map(float, values)) for group, values in zip(groups, found.reading.values, strict=True)]
    columns = ", ".join(f"{_quoted(name)} double" for name in found.names)
    return frame.sparkSession.createDataFrame(rows, f"{_quoted('group')} string, {columns}")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _column(name: str) -> Column:
    from pyspark.sql import functions

    return functions.col(_quoted(name))


def _partitions(frame: DataFrame) -> int:
    """Returns the number of partitions that rows are divided into by user."""
    partitions = str(frame.sparkSession.conf.get("spark.sql.shuffle.partitions"))
    return int(partitions) if partitions.isdecimal() else 200


def _key(frame: DataFrame, user: str) -> Column:
    """Returns a column that is the same wherever `text_of` a user is: "7", " 7" and "7.0" are one user.

    It may be the same for several users: it only says which rows are brought together.
    """
    from pyspark.sql import functions, types

    key, kind = _column(user), frame.schema[user].dataType
    if isinstance(kind, types.BinaryType):
        return functions.udf(_text, "string", useArrow=False)(key)
    if isinstance(kind, types.StringType):
        # Equal numbers are equal doubles, and other texts are equal but for blanks.
        bare = functions.regexp_replace(key, _BLANKS, "")
        number = bare.try_cast("double") + functions.lit(0.0)
        return functions.coalesce(number.cast("string"), bare)
    if isinstance(kind, types.FractionalType):
        return key.cast("double") + functions.lit(0.0)  # -0 is 0
    return key


def _text(user: bytearray | None) -> str:
    # Spark gives bytes that can be changed, which would keep their blanks.
    return text_of(None if user is None else bytes(user))


def _summed(job: Job, names: Sequence[str], batches: Iterator[Any]) -> Iterator[Any]:
    """Yields one row: the sums over a task's rows as text and the numbers of the users' partitions, or a refusal.

    An error that is raised here would be tried again, and hidden in Spark's own.
    """
    import pyarrow
    from pyarrow import compute

    def table_of(batches: Sequence[Any]) -> Any:
        return pyarrow.Table.from_batches(batches).select(range(len(names))).rename_columns(list(names))

    found, parts, error, refusal = job.empty(), [], None, None
    try:
        if job.user is None:
            for batch in batches:
                if batch.num_rows:
                    found = found.merge(job.partial(table_of([batch])))
        elif held := [batch for batch in batches if batch.num_rows]:
            parts = compute.unique(pyarrow.Table.from_batches(held)[_PART]).to_pylist()
            found = job.partial(table_of(held), drawn=True)
    except DataError as refused:
        error, refusal = type(refused).__name__, str(refused)
    columns = {
        "sums": pyarrow.array([found.to_json()]),
        "parts": pyarrow.array([parts], pyarrow.list_(pyarrow.int32())),
        "error": pyarrow.array([error], pyarrow.string()),
        "refusal": pyarrow.array([refusal], pyarrow.string()),
    }
    yield pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))
