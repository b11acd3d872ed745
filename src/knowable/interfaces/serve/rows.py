"""Rows that came over the wire, as JSON, CSV or Arrow, checked against what the model knows of its columns."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowable.errors import InvalidData, KnowableError, MissingExtra
from knowable.tabular.columns import Column
from knowable.tabular.csv_file import read_csv
from knowable.tabular.table import Table, as_table, listed

JSON, CSV = "application/json", "text/csv"
ARROW = "application/vnd.apache.arrow.stream"
_LONGEST = 10_000  # characters of one value
_SHOWN = 60


class Refused(Exception):
    """A request that cannot be answered: a status of HTTP, why in a sentence, and the field and row it is about."""

    def __init__(self, status: int, message: str, field: str | None = None, row: int | None = None):
        super().__init__(status, message, field, row)
        self.status, self.message, self.field, self.row = status, message, field, row


@dataclass(frozen=True)
class Limits:
    """How much one client, and all of them together, may ask.

    Attributes:
        rows: Rows of a request.
        body: Bytes of a request's body. Those of all requests that have no answer yet may be 8 times as many.
        waiting: Rows that may wait in all.
        seconds: Seconds that a request may take, and as many to send its body.
        explained: Rows that are explained in one request.
    """

    rows: int = 10_000
    body: int = 4 * 2**20
    waiting: int = 20_000
    seconds: float = 30.0
    explained: int = 100

    def rows_of(self, kind: str) -> int:
        """The most rows of a request."""
        return min(self.rows, self.explained) if kind == "explain" else self.rows


@dataclass(frozen=True)
class Description:
    """What a client has to know of the model; workers send it when they have loaded it.

    Attributes:
        name: The folder it was loaded from.
        method: What the posterior is.
        task: ``"regression"`` or ``"classification"``.
        columns: The columns of a table; None where rows are tensors.
        ignored: Further columns that rows may have and that are not used.
        targets: What is predicted.
        classes: Names of the classes.
        shape: Shape of a row that is a tensor, where it is known.
        draws: Posterior draws that a prediction takes at most.
        fast: Whether there is a student for quick answers.
        promises: What a certificate promises, as sentences.
        abstain_bound: With which probability, at most, an accepted prediction is wrong or too far off.
        novelty: Scores of the held-out rows of the certificate, of which the alarm takes its reference.
        delta: Probability of a false alarm.
    """

    name: str
    method: str
    task: str
    columns: tuple[Column, ...] | None = None
    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    draws: int = 64
    fast: bool = False
    promises: tuple[str, ...] = ()
    abstain_bound: float | None = None
    novelty: tuple[float, ...] = ()
    delta: float = 0.01


@dataclass(frozen=True)
class Ask:
    """One request for the model.

    Attributes:
        kind: ``"predict"`` or ``"explain"``.
        rows: Lists by column, whose types are checked; a table whose texts are still to be read; or an array of rows.
        count: How many rows.
        level: Probability that an interval holds.
        epsilon: Probability, at most, that a decision is another than with all draws.
        draws: The most draws.
        fast: Whether the student answers.
    """

    kind: str
    rows: dict[str, list[Any]] | Table | np.ndarray
    count: int
    level: float = 0.9
    epsilon: float = 0.001
    draws: int = 64
    fast: bool = False


def read_ask(kind: str, content_type: str, body: bytes, query: Mapping[str, str], about: Description, most: int) -> Ask:
    """The request in a body.

    Args:
        kind: ``"predict"`` or ``"explain"``.
        content_type: As in the header.
        body: The whole of it.
        query: Options in the address; those of JSON stand in the body.
        about: The model.
        most: How many rows there may be.

    Raises:
        Refused: With 400, 413, 415 or 422, naming the field and the row.
    """
    media = content_type.partition(";")[0].strip().lower()
    given: Mapping[str, Any] = _numbers_of(query)
    if media == JSON:
        if query:
            raise Refused(422, "Options of JSON stand in its body, not in the address.", next(iter(query)))
        content = parse_json(body)
        if not isinstance(content, dict):
            raise Refused(422, 'The body must be an object such as {"rows": [...]}.', "rows")
        given = {key: value for key, value in content.items() if key != "rows"}
        rows = content.get("rows")
        if not isinstance(rows, list) or not rows:
            raise Refused(422, "rows must be a list of one or more rows.", "rows")
        if len(rows) > most:
            raise Refused(413, f"rows has {len(rows):,} rows; at most {most:,} are taken at a time.", "rows")
        read: Any = array_of(rows, about.shape) if about.columns is None else columns_of(rows, about)
        count = len(rows)
    elif media in (CSV, ARROW):
        table = _csv(body) if media == CSV else _arrow(body, most)
        count = len(table)
        if count > most:
            raise Refused(413, f"There are {count:,} rows; at most {most:,} are taken at a time.", "rows")
        read = _array_of_table(table, about.shape) if about.columns is None else checked_table(table, about)
    else:
        raise Refused(415, f"Send {JSON}, {CSV} or {ARROW}, not {_short(media) or 'a body without a type'}.")
    return Ask(kind, read, count, **_options(given, about))


def parse_json(body: bytes) -> Any:
    """The content of a body, without NaN and infinity, which JSON does not have."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise Refused(400, "The body is not UTF-8.") from None
    except RecursionError:
        raise Refused(400, "The body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise Refused(400, f"The body is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise Refused(400, f"The body is not JSON: {_short(error)}.") from None


def _no_constant(name: str) -> Any:
    raise Refused(422, f"{name} is no number of JSON. Leave the value out as null if it is not known.", "rows")


def _numbers_of(query: Mapping[str, str]) -> dict[str, Any]:
    """Options of an address as JSON would give them."""
    found: dict[str, Any] = {}
    for name, text in query.items():
        try:
            found[name] = json.loads(text, parse_constant=lambda constant: constant)
        except (ValueError, RecursionError):
            found[name] = text
    return found


def _options(given: Mapping[str, Any], about: Description) -> dict[str, Any]:
    """``level``, ``epsilon``, ``draws`` and ``fast``, checked."""
    unknown = next((name for name in given if name not in ("level", "epsilon", "draws", "fast")), None)
    if unknown is not None:
        raise Refused(422, f"{_short(unknown)} is no option. They are level, epsilon, draws and fast.", _short(unknown))
    found: dict[str, Any] = {"draws": about.draws}
    for name, low, high in (("level", 0.0, 1.0), ("epsilon", -math.ulp(0.0), 1.0)):
        if name in given:
            value = given[name]
            if type(value) not in (int, float) or not low < value < high:
                edge = "between 0 and 1" if name == "level" else "0 or above, and below 1"
                raise Refused(422, f"{name} must be a number {edge}, got {_short(value)}.", name)
            found[name] = float(value)
    if "draws" in given:
        value = given["draws"]
        if type(value) not in (int, float) or not 1 <= value <= about.draws or value != int(value):
            raise Refused(422, f"draws must be a whole number from 1 to {about.draws}, got {_short(value)}.", "draws")
        found["draws"] = int(value)
    if "fast" in given:
        if type(given["fast"]) is not bool:
            raise Refused(422, f"fast must be true or false, got {_short(given['fast'])}.", "fast")
        if given["fast"] and not about.fast:
            raise Refused(422, "fast is for a service that was started with --student.", "fast")
        found["fast"] = given["fast"]
    return found


# --- rows of a table -------------------------------------------------------------------------------------------------

_PLAIN = (str, int, float, bool, type(None))


def columns_of(rows: Sequence[Any], about: Description) -> dict[str, list[Any]]:
    """Rows that are objects as lists by column, each value of a type that its column can have."""
    assert about.columns is not None
    names = {column.name for column in about.columns}
    known = names | set(about.ignored)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Refused(422, f"Row {number} must be an object of columns and values.", "rows", number)
        if row.keys() == names:
            continue
        _refuse_names(row, names, known, number)
        _refuse_ignored(row, names, number)
    found = {column.name: [row[column.name] for row in rows] for column in about.columns}
    for column in about.columns:
        _check_values(column, found[column.name])
    return found


def _refuse_names(row: Any, names: set[str], known: set[str], number: int | None) -> None:
    where = "The table" if number is None else f"Row {number}"
    for name in sorted(names - set(row)):
        raise Refused(422, f"{where} lacks the column {name!r}.", name, number)
    for name in row:
        if name not in known:
            raise Refused(
                422, f"{where} has the column {_short(name)!r}, which the model does not know. Its columns are "
                f"{listed(sorted(names))}.", _short(name), number,
            )  # fmt: skip


def _refuse_ignored(row: Mapping[str, Any], names: set[str], number: int) -> None:
    for name in row:
        if name not in names and type(row[name]) not in _PLAIN:
            raise Refused(422, f"Row {number}, column {name!r} must be one value.", name, number)


_MAY_BE: dict[str, tuple[type, ...]] = {
    "numeric": (int, float),
    "date": (str,),
    "boolean": (bool, str, int, float),
}
_EXPECTED = {"numeric": "a number", "date": "a date such as 2024-02-29", "boolean": "true or false"}


def _check_values(column: Column, values: list[Any]) -> None:
    """Refuse the first value of a type that the column does not have."""
    allowed = {type(None), *_MAY_BE.get(column.kind, (str, int, float, bool))}
    if set(map(type, values)) <= allowed and not _out_of_bounds(values):
        return
    for row, value in enumerate(values):
        where = f"Row {row}, column {column.name!r}"
        if type(value) not in allowed:
            expected = _EXPECTED.get(column.kind, "a text or a number")
            raise Refused(422, f"{where} must be {expected} or null, got {_short(value)}.", column.name, row)
        if _out_of_bounds([value]):
            what = "is too long" if isinstance(value, str) else "is not a finite number"
            raise Refused(422, f"{where} {what}.", column.name, row)


def _out_of_bounds(values: list[Any]) -> bool:
    """Whether there is a number that is not finite in double precision, or a text without end."""
    try:
        return any(
            len(value) > _LONGEST if type(value) is str else not math.isfinite(value)
            for value in values
            if value is not None
        )
    except OverflowError:  # of a whole number that no float can hold
        return True


def checked_table(table: Table, about: Description) -> Table:
    """A table that has the model's columns, and none that it does not know."""
    assert about.columns is not None
    names = {column.name for column in about.columns}
    _refuse_names(list(table.names), names, names | set(about.ignored), None)
    used: Any = table.frame[[column.name for column in about.columns]]
    return Table(used, table.source, table.lines)


def _csv(body: bytes) -> Table:
    try:
        return read_csv(body, "The CSV")
    except InvalidData as error:
        raise Refused(422, str(error), "rows") from None
    except (csv.Error, UnicodeError, ValueError) as error:
        raise Refused(422, f"The body is not CSV: {_short(error)}.", "rows") from None


def _arrow(body: bytes, most: int) -> Table:
    """The table of an Arrow stream or file; not compressed, so that it is as large in memory as it is on the wire."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtra("Arrow needs pyarrow: pip install 'knowable[data]'.") from None
    from knowable.interfaces.serve.arrow import check_plain

    try:
        check_plain(body)
        stream = pa.ipc.open_file(body) if body.startswith(b"ARROW1") else pa.ipc.open_stream(body)
        table = stream.read_all()
        if table.num_rows > most:
            raise Refused(413, f"There are {table.num_rows:,} rows; at most {most:,} are taken at a time.", "rows")
        table.validate(full=True)
        for field in table.schema:
            if pa.types.is_nested(field.type):
                raise Refused(422, f"Column {_short(field.name)!r} must have one value a row.", _short(field.name))
        if not table.num_rows:
            raise Refused(422, "The table has no rows.", "rows")
        return as_table(table.to_pandas())
    except (pa.ArrowException, KnowableError, ValueError, OSError, KeyError, TypeError, OverflowError) as error:
        raise Refused(400, f"The body is not an Arrow stream: {_short(error)}.", "rows") from None


# --- rows that are tensors -------------------------------------------------------------------------------------------


def array_of(rows: Sequence[Any], shape: tuple[int, ...] | None) -> np.ndarray:
    """Nested lists of numbers as an array ``(rows, ...)``."""
    try:
        found = np.array(rows, dtype=object)
        flat = found.ravel().tolist()
        if found.ndim > 16 or any(size == 0 for size in found.shape) or list in set(map(type, flat)):
            raise ValueError
    except (ValueError, RecursionError):
        _refuse_shapes(rows, shape)
        raise Refused(422, "Every row must be a list of numbers, all of the same shape.", "rows") from None
    kinds = set(map(type, flat))
    if not kinds <= {int, float}:
        place = next(number for number, value in enumerate(flat) if type(value) not in (int, float))
        row = place // max(1, found[0].size if found.ndim > 1 else 1)
        raise Refused(422, f"Row {row} must hold numbers, got {_short(flat[place])}.", "rows", row)
    try:
        made = found.astype(np.int64 if kinds == {int} else np.float64)
    except (OverflowError, ValueError):
        try:
            made = found.astype(np.float64)
        except (OverflowError, ValueError):
            raise Refused(422, "rows has a number that is too large.", "rows") from None
    return _finite(made, shape)


def _finite(made: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    if shape is not None and made.shape[1:] != shape:
        raise Refused(422, f"Every row must have the shape {list(shape)}, got {list(made.shape[1:])}.", "rows", 0)
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(made.astype(np.float32))
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        raise Refused(422, f"Row {row} has a number that is not finite in single precision.", "rows", row)
    return made


def _refuse_shapes(rows: Sequence[Any], shape: tuple[int, ...] | None) -> None:
    """Name the first row whose length is not that of the first."""
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise Refused(422, f"Row {number} must be a list of numbers, got {_short(row)}.", "rows", number)
        expected = shape[0] if shape else len(rows[0])
        if len(row) != expected or not row:
            raise Refused(422, f"Row {number} has {len(row)} numbers, expected {expected}.", "rows", number)


def _array_of_table(table: Table, shape: tuple[int, ...] | None) -> np.ndarray:
    for name in table.names:
        values: Any = table.frame[name]
        if values.dtype.kind not in "biuf" or values.isna().any():
            raise Refused(422, f"Column {_short(name)!r} must hold numbers, without gaps.", _short(name))
    return _finite(table.frame.to_numpy(dtype=np.float64), shape)


def _short(value: Any) -> str:
    """A value for a message, not too long and on one line."""
    text = value if isinstance(value, str) else _text(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _text(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    try:
        return str(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number of very many digits"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, for examples."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
