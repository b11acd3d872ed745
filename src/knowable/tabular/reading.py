"""Reading a table from wherever it is: a file, a data frame, arrays.

What is wrong with a file is said in one line: the cause with its line and column, and a way out.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from knowable.errors import InvalidData, InvalidType, MissingExtra
from knowable.tabular.csv_file import read_csv
from knowable.tabular.table import Table, as_table

_PARQUET = b"PAR1"  # the first four bytes of such a file, and the last
_WORKBOOK = b"PK\x03\x04"
_GZIP = b"\x1f\x8b"


def read_table(source: Any) -> Table:
    """A table from whatever holds one.

    Args:
        source: The name of a CSV (also ``.csv.gz``), Excel or Parquet file (``"-"``: standard input), an open file, a
            data frame of pandas or polars, an Arrow table, a two-dimensional array (whose columns are called ``x0``,
            ``x1``, ...), a mapping of names to columns, or a :class:`~knowable.tabular.table.Table`.

    Raises:
        InvalidData: If it cannot be read, saying where and what to do.
        MissingExtra: If it is a Parquet or Excel file and pyarrow or openpyxl is not installed.

    Example:
        >>> read_table({"height": [1.6, 1.8], "name": ["Ada", "Bob"]}).names
        ('height', 'name')
    """
    if isinstance(source, Table):
        return source
    if isinstance(source, str | os.PathLike):
        return _read_file(source)
    if callable(getattr(source, "read", None)):
        content = source.read()
        name = str(getattr(source, "name", "the file"))
        return _read_bytes(content.encode() if isinstance(content, str) else content, name)
    library = type(source).__module__.partition(".")[0]
    if library == "pandas":
        return as_table(_frame(source))
    if library == "polars":
        return _from_polars(source)
    if library == "pyarrow":
        return as_table(source.to_pandas())
    if isinstance(source, Mapping):
        return _from_mapping(source)
    return _from_array(source)


def _read_file(path: str | os.PathLike[str]) -> Table:
    if str(path) == "-":
        return _read_bytes(sys.stdin.buffer.read(), "standard input")
    file = Path(path)
    if file.is_dir():
        raise InvalidData(f"{file} is a folder. Give the name of a CSV, Excel or Parquet file.")
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise InvalidData(f"There is no file {str(file)!r}. Check its name and the folder you are in.") from None
    except OSError as error:
        raise InvalidData(f"{file} cannot be read: {error.strerror}. Check its permissions.") from None
    return _read_bytes(content, file.name)


def _read_bytes(content: bytes, name: str) -> Table:
    if content.startswith(_GZIP):
        try:
            content, name = gzip.decompress(content), name.removesuffix(".gz")
        except (OSError, EOFError, zlib.error):
            raise InvalidData(f"{name} is a damaged gzip file: it was cut short. Write or copy it again.") from None
    if name.lower().endswith((".parquet", ".pq")) or content.startswith(_PARQUET):
        return _read_parquet(content, name)
    if content.startswith(_WORKBOOK):
        return _read_workbook(content, name)
    return read_csv(content, name)


def _read_parquet(content: bytes, name: str) -> Table:
    if not content:
        raise InvalidData(f"{name} is empty. Write it again.")
    if not (content.startswith(_PARQUET) and content.endswith(_PARQUET) and len(content) > 12):
        cut = "ends before its footer: it was cut short" if content.startswith(_PARQUET) else "is not a Parquet file"
        raise InvalidData(f"{name} {cut}. Write or copy it again.")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("Parquet files need pyarrow: pip install 'knowable[data]', or save as CSV.") from None
    try:
        found = pyarrow.parquet.read_table(io.BytesIO(content)).to_pandas()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidData(
            f"{name} is a damaged Parquet file ({str(error).splitlines()[0]}). Write or copy it again."
        ) from None
    return as_table(found, name)


def _read_workbook(content: bytes, name: str) -> Table:
    """The first sheet of an Excel workbook, whose first row has the names."""
    if not name.lower().endswith((".xlsx", ".xlsm")):
        raise InvalidData(f"{name} is a workbook or an archive, not text. Save the sheet as CSV, or name it .xlsx.")
    import pandas as pd

    try:
        import openpyxl
    except ImportError:
        raise MissingExtra("Excel files need openpyxl: pip install 'knowable[excel]', or save as CSV.") from None
    try:
        book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
        sheet, *others = book.worksheets
        cells = [list(row) for row in sheet.iter_rows(values_only=True)]
    except Exception as error:  # whatever a damaged archive makes the library raise
        raise InvalidData(f"{name} is not a readable Excel workbook ({type(error).__name__}). Save it again.") from None
    kept = [number for number, row in enumerate(cells) if any(cell is not None for cell in row)]
    if len(kept) < 2:
        raise InvalidData(f"{name}: its first sheet {sheet.title!r} has no rows below a row with names of columns.")
    header = ["" if cell is None else str(cell).strip() for cell in cells[kept[0]]]
    places = [place for place, heading in enumerate(header) if heading or any(cells[row][place] for row in kept)]
    if any(not header[place] for place in places):
        place = next(place for place in places if not header[place])
        raise InvalidData(f"{name}: column {place + 1} has no name in the header. Give it one.")
    frame = pd.DataFrame([[cells[row][place] for place in places] for row in kept[1:]])
    frame.columns = [header[place] for place in places]
    note = f"only the first sheet {sheet.title!r} is read, of {len(others) + 1}"
    lines = [row + 1 for row in kept[1:]]
    return Table(frame.infer_objects(), name, lines, (note,) if others else ())


def _frame(source: Any) -> Any:
    return source.to_frame() if source.ndim == 1 else source


def _from_polars(source: Any) -> Table:
    import pandas as pd

    if type(source).__name__ == "LazyFrame":
        source = source.collect()
    if type(source).__name__ != "DataFrame":
        source = source.to_frame()
    return as_table(pd.DataFrame({name: _plain(source[name].to_numpy()) for name in source.columns}))


def _plain(values: np.ndarray) -> np.ndarray:
    """Days as pandas counts them: in nanoseconds or seconds."""
    return values.astype("datetime64[s]") if values.dtype == np.dtype("datetime64[D]") else values


def _from_mapping(source: Mapping[Any, Any]) -> Table:
    import pandas as pd

    lengths = {str(name): np.shape(column)[0] if np.ndim(column) == 1 else -1 for name, column in source.items()}
    if not lengths:
        raise InvalidData("The table has no columns.")
    wrong = [name for name, length in lengths.items() if length < 0]
    if wrong:
        raise InvalidData(f"Column {wrong[0]!r} must be a list of values, one for each row.")
    if len(set(lengths.values())) > 1:
        (first, rows), *others = lengths.items()
        name = next(name for name, length in others if length != rows)
        raise InvalidData(f"Column {name!r} has {lengths[name]} values and column {first!r} {rows}: they must agree.")
    return as_table(pd.DataFrame({name: _values(column) for name, column in source.items()}))


def _values(column: Any) -> Any:
    return column.detach().cpu().numpy() if type(column).__module__.partition(".")[0] == "torch" else column


def _from_array(source: Any) -> Table:
    import pandas as pd

    try:
        array = np.asarray(_values(source))
    except ValueError:
        raise InvalidData("The rows of the table have different lengths. Give each a value for every column.") from None
    if array.dtype.names:
        return as_table(pd.DataFrame({name: array[name] for name in array.dtype.names}))
    if array.ndim != 2:
        raise InvalidType(
            f"A table must be a file name, a data frame, a mapping of columns or a two-dimensional array, got "
            f"{type(source).__name__} of shape {array.shape}."
        )
    return as_table(pd.DataFrame(array, columns=[f"x{number}" for number in range(array.shape[1])]))
