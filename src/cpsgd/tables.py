"""Tables from arrays, mappings, frames, Arrow tables, files and folders, read a chunk of rows at a time.

narwhals reads frames of pandas and polars. pyarrow reads Arrow tables, text files, Parquet and Feather, and folders of
them; install it with `pip install cpsgd[tables]`. Files are never in memory whole. No error quotes a value. Errors are
for the holder of the table, and no guarantee covers them: a refusal says something about the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cpsgd._table_files import FILES as FILES
from cpsgd._table_files import of_arrow, open_path
from cpsgd._table_memory import CHUNK_ROWS as CHUNK_ROWS
from cpsgd._table_memory import DataTable as DataTable
from cpsgd._table_memory import as_array, of_array, of_columns, of_frame, of_rows, unmasked
from cpsgd._table_values import Chunk as Chunk
from cpsgd._table_values import Column as Column
from cpsgd._table_values import is_none as is_none
from cpsgd._table_values import labels as labels
from cpsgd._table_values import maybe_numbers as maybe_numbers
from cpsgd._table_values import numbers as numbers
from cpsgd._table_values import text_of as text_of
from cpsgd.errors import TableError


def open_table(source: object) -> DataTable:
    """Opens a table.

    Args:
        source: An array of two dimensions (its columns are named "0", "1", ...), a structured array, a mapping of names
            to columns, a list of mappings (one per row), a frame of pandas or polars, a pyarrow table or data set, or
            the path of a file or a folder, or a pattern of paths such as "visits/part-*.parquet".

    Raises:
        TableError: It is not a table, or the file cannot be read as one.
        ParameterError: The file's suffix is unknown.

    Example:
        >>> table = open_table({"age": [41, 17], "sex": ["f", "m"]})
        >>> table.names, table.rows
        (('age', 'sex'), 2)
    """
    if isinstance(source, DataTable):
        return source
    if isinstance(source, str | Path):
        return open_path(Path(source))
    if isinstance(source, Mapping):
        return of_columns("The table", {str(name): as_array(str(name), column) for name, column in source.items()})
    if isinstance(source, list | tuple):
        if not source:
            raise TableError("The table is empty.")
        rows = [row for row in source if isinstance(row, Mapping)]
        if len(rows) == len(source):
            return of_rows(rows)
        if rows:
            raise TableError("Expected a list of mappings, one per row: some entries are something else.")
    if isinstance(source, np.ndarray | list | tuple):
        return of_array("The array", unmasked("The array", source))
    if type(source).__module__.partition(".")[0] == "pyarrow" and hasattr(source, "to_batches"):
        return of_arrow("The table", source)
    return of_frame(source)
