"""Comma-separated files, read by hand, so that errors can say on which line they are.

Semicolons, tabs and bars are told from the header. A column whose values are all numbers, plain or with percent signs,
currency signs or thousands separators, becomes numbers; everything else stays text, and what it means is decided later.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any

from knowable.errors import InvalidData
from knowable.tabular.number_texts import NumberTexts, parse_number, read_numbers
from knowable.tabular.table import Table, listed

DELIMITERS = (",", ";", "\t", "|")
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
_LONGEST_FIELD = 1_000_000  # characters; a longer one is a quote that was never closed
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_csv(content: bytes, name: str) -> Table:
    """The table in the bytes of a file called ``name``."""
    import pandas as pd

    text, notes = _decoded(content, name)
    if not text.strip():
        raise InvalidData(f"{name} is empty. It must have a line with the names of the columns, and rows below it.")
    delimiter = find_delimiter(text)
    header, rows, lines = _split(text, delimiter, name)
    if header[0] == "" and not _counts_rows(rows):
        raise InvalidData(f"{name}: column 1 has no name in the header. Give it one.")
    texts = {
        heading: [None if is_missing(row[place]) else row[place].strip() for row in rows]
        for place, heading in enumerate(header)
        if heading  # a first column without a name only counts the rows
    }
    numbers = _numbers(texts, delimiter)
    columns = {heading: _typed(values, numbers[heading]) for heading, values in texts.items()}
    return Table(pd.DataFrame(columns), name, lines, (*notes, *_remarks(texts, numbers)))


def find_delimiter(text: str) -> str:
    """What separates the fields of the first line that is not blank: the most frequent of the four outside quotes."""
    first = next(line for line in text.splitlines() if line.strip())
    bare = re.sub(r'"[^"]*"', "", first)
    return max(DELIMITERS, key=bare.count)  # a comma where there is none of them


def is_missing(text: str) -> bool:
    """Whether a text stands for nothing."""
    return text.strip().lower() in MISSING


def _decoded(content: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """The text, and what to tell the user of how it was read."""
    if content.startswith(_UTF16):
        return content.decode("utf-16", errors="replace"), ()
    if b"\0" in content:
        raise InvalidData(f"{name} is not text: it has zero bytes. Save it as CSV in UTF-8.")
    try:
        return content.decode("utf-8-sig"), ()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = content.decode("cp1252", errors="replace")
        word = next((word for word in re.findall(r"\w+", text.splitlines()[line - 1]) if not word.isascii()), "")
        shown = f" (line {line} has {word!r})" if word else f" (line {line})"
        return text, (f"the file is not in UTF-8 and is read as Latin-1{shown}: check that names look right",)


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


def _numbers(texts: dict[str, list[str | None]], delimiter: str) -> dict[str, NumberTexts | None]:
    """The columns that are numbers. Where one allows both decimal marks, the other columns of the file decide."""
    present = {name: [text for text in values if text is not None] for name, values in texts.items()}
    usual = "," if delimiter == ";" else "."
    found = {name: read_numbers(values, usual=usual) for name, values in present.items()}
    sure = {each.decimal for name, each in found.items() if each and not each.ambiguous and _has_mark(present[name])}
    decided = sure.pop() if len(sure) == 1 else None
    for name, each in found.items():
        if each and each.ambiguous:
            mark = decided or ("." if delimiter == ";" and not any("," in text for text in present[name]) else usual)
            read = read_numbers(present[name], decided, usual=mark)
            found[name] = None if read is None else replace(read, ambiguous=decided is None)
    return found


def _has_mark(texts: list[str]) -> bool:
    return any("," in text or "." in text for text in texts)


def _remarks(texts: dict[str, list[str | None]], numbers: dict[str, NumberTexts | None]) -> list[str]:
    """What to tell the user of how numbers were read."""
    found = []
    for name, each in numbers.items():
        if each and each.numbers and (remark := each.remark(next(text for text in texts[name] if text is not None))):
            found.append(f"column {name!r} {remark}")
    return found


def _typed(texts: list[str | None], found: NumberTexts | None) -> Any:
    """Numbers where all values are, whole ones as such; else text, with None for what is missing."""
    import pandas as pd

    if found is None:
        return pd.Series(texts, dtype=object)
    left = iter(found.numbers)
    series = pd.Series([float("nan") if text is None else next(left) for text in texts], dtype=float)
    whole = len(found.numbers) == len(texts) and all(
        number.is_integer() and abs(number) < 2**53 for number in found.numbers
    )
    return series.astype("int64") if whole else series
