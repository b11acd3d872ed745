"""Comma-separated files, read by hand, so that errors can say on which line they are.

Semicolons, tabs and bars are told from the header. A column whose values are all numbers becomes numbers; everything
else stays text, and what it means is decided later.
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from knowable.errors import InvalidData
from knowable.tabular.table import Table, listed

DELIMITERS = (",", ";", "\t", "|")
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE)
_LONGEST_FIELD = 1_000_000  # characters; a longer one is a quote that was never closed
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_csv(content: bytes, name: str) -> Table:
    """The table in the bytes of a file called ``name``."""
    import pandas as pd

    text = _decoded(content, name)
    if not text.strip():
        raise InvalidData(f"{name} is empty. It must have a line with the names of the columns, and rows below it.")
    delimiter = find_delimiter(text)
    header, rows, lines = _split(text, delimiter, name)
    if header[0] == "" and not _counts_rows(rows):
        raise InvalidData(f"{name}: column 1 has no name in the header. Give it one.")
    columns = {
        heading: _typed([row[place] for row in rows], decimal_comma=delimiter == ";")
        for place, heading in enumerate(header)
        if heading  # a first column without a name only counts the rows
    }
    return Table(pd.DataFrame(columns), name, lines)


def find_delimiter(text: str) -> str:
    """What separates the fields of the first line that is not blank: the most frequent of the four outside quotes."""
    first = next(line for line in text.splitlines() if line.strip())
    bare = re.sub(r'"[^"]*"', "", first)
    return max(DELIMITERS, key=bare.count)  # a comma where there is none of them


def parse_number(text: str, *, decimal_comma: bool = False) -> float | None:
    """The number that a text is, or None."""
    text = text.strip()
    if decimal_comma and "," in text and "." not in text:
        text = text.replace(",", ".", 1)
    return float(text) if _NUMBER.fullmatch(text) else None


def is_missing(text: str) -> bool:
    """Whether a text stands for nothing."""
    return text.strip().lower() in MISSING


def _decoded(content: bytes, name: str) -> str:
    if content.startswith(_UTF16):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content:
        raise InvalidData(f"{name} is not text: it has zero bytes. Save it as CSV in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidData(
            f"{name}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8. Save the file in UTF-8 "
            f"(iconv -f latin1 -t utf-8)."
        ) from None


def _split(text: str, delimiter: str, name: str) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows, and the line that each row ends on."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, rows, lines = [], [], []
    try:
        for row in reader:
            if not row or (len(row) == 1 and not row[0].strip() and len(header) != 1):
                continue  # a blank line
            if not header:
                header = _checked_header(row, name, reader.line_num)
                continue
            if len(row) != len(header):
                raise InvalidData(
                    f"{name}, line {reader.line_num} has {len(row)} field{'s' * (len(row) != 1)}, the header has "
                    f"{len(header)}. Put quotes around text with {delimiter!r} in it, or correct the line."
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InvalidData(f"{name}, line {reader.line_num}: {error}. Is a quote never closed?") from None
    finally:
        csv.field_size_limit(before)
    if not rows:
        raise InvalidData(f"{name} has a header ({listed(header)}) and no rows.")
    return header, rows, lines


def _checked_header(row: list[str], name: str, line: int) -> list[str]:
    header = [heading.strip() for heading in row]
    if all(parse_number(heading) is not None for heading in header):
        raise InvalidData(
            f"{name}, line {line} has numbers where the names of the columns should be. Put a line with names on top."
        )
    first: dict[str, int] = {}
    for place, heading in enumerate(header):
        if heading == "" and place > 0:
            raise InvalidData(f"{name}: column {place + 1} has no name in the header. Give it one.")
        if first.setdefault(heading, place) != place:
            raise InvalidData(
                f"{name} has two columns of the name {heading!r} (columns {first[heading] + 1} and {place + 1}). "
                f"Rename or remove one of them."
            )
    return header


def _counts_rows(rows: list[list[str]]) -> bool:
    """Whether the first column, which has no name, only counts the rows, as data frames write it."""
    found = [row[0].strip() for row in rows]
    return len(rows[0]) > 1 and any(
        found == [str(number) for number in range(first, first + len(rows))] for first in (0, 1)
    )


def _typed(texts: list[str], *, decimal_comma: bool) -> Any:
    """Numbers where all values are, whole ones as such; else text, with None for what is missing."""
    import pandas as pd

    kept = [None if is_missing(text) else text for text in texts]
    numbers = _numbers([text for text in kept if text is not None], decimal_comma)
    if numbers is None:
        return pd.Series([None if text is None else text.strip() for text in kept], dtype=object)
    left = iter(numbers)
    found = pd.Series([float("nan") if text is None else next(left) for text in kept], dtype=float)
    whole = len(numbers) == len(kept) and all(number.is_integer() and abs(number) < 2**53 for number in numbers)
    return found.astype("int64") if whole else found


def _numbers(texts: list[str], decimal_comma: bool) -> list[float] | None:
    """All texts as numbers, or None if one of them is not."""
    if not decimal_comma and not any("_" in text for text in texts):  # which Python takes, and we do not
        try:
            return [*map(float, texts)]
        except ValueError:
            return None
    found = [parse_number(text, decimal_comma=decimal_comma) for text in texts]
    return None if None in found else [number for number in found if number is not None]
