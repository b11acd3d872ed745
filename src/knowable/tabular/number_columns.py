"""Columns of numbers and of dates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from knowable.errors import InvalidData
from knowable.tabular.columns import DAY_OR_MONTH_FIRST, Column, as_numbers, find_missing, shown
from knowable.tabular.table import Table

if TYPE_CHECKING:
    import pandas as pd

_HEAVY = 10.0  # kurtosis beyond which tails count as heavy (a normal has 3, an exponential 9)
_SLIP = 1e6  # times the interquartile range from the median, beyond which a value is taken for a slip
_JUMP = 10.0  # times the training range away from it
_RATIO = 8.0  # times as large, or as small, as anything in training: units differ by ten or more
_CODES = (-99999, -9999, -999, -99, -9, -1, 999, 9999, 99999)  # that stand for a missing value in many files
_IDENTIFIER = re.compile(
    r"(^|[_ .-])(id|ids|uid|uuid|key|nr|no|index)$|Id$|ID$|^(row|record)([_ .-]?(id|nr|no|number))?$", re.I
)
_FEWEST_TO_ASK = 10  # rows, below which nothing can be told from values
_DAY, _YEAR = 86_400.0, 365.2425 * 86_400.0


@dataclass(frozen=True)
class NumericColumn(Column):
    r"""Numbers, centred and scaled; where tails are heavy, after a signed logarithm.

    .. math:: x' = \frac{g(x) - m}{s}, \qquad
        g(x) = x \quad \text{or} \quad g(x) = \mathrm{sign}(z)\,\log(1 + |z|), \; z = \frac{x - \tilde x}{r}

    with the median :math:`\tilde x` and the interquartile range :math:`r`, so that units do not matter. What is missing
    becomes the median.
    """

    kind: ClassVar[str] = "numeric"

    median: float
    unit: float  # r: the interquartile range, or the mean distance from the median where that is 0
    log: bool  # whether g is the logarithm
    centre: float  # m
    scale: float  # s
    low: float
    high: float

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> NumericColumn:
        """Measure the column; an outlier beyond a million interquartile ranges is refused unless the kind was given."""
        values = as_numbers(table, name)
        present = values[~np.isnan(values)]
        median, unit = middle_and_unit(present)
        if given is None:
            refuse_slips(table, name, values, median, unit)
        log = kurtosis(present) > _HEAVY
        moved = signed_log((present - median) / unit) if log else present
        centre, scale = float(moved.mean()), float(moved.std())
        varies = scale > 1e-12 * np.abs(moved).max()
        return cls(
            name, bool(np.isnan(values).any()), median, unit, bool(log), centre, scale if varies else 0.0,
            float(present.min()), float(present.max()),
        )  # fmt: skip

    @property
    def varies(self) -> bool:
        """Whether the training rows had different values."""
        return self.scale > 0.0

    def check(self, table: Table) -> list[str]:
        """Values must be numbers; a jump as of other units is told."""
        values = as_numbers(table, self.name)
        present = values[~np.isnan(values)]
        if not len(present):
            return []
        now = float(np.median(present))
        away = max(self.low - now, now - self.high)
        ratio = 1.0
        if self.low > 0 and now > 0:
            ratio = max(now / self.high, self.low / now)
        if away <= _JUMP * (self.high - self.low) and ratio <= _RATIO:
            return []
        return [
            f"column {self.name!r} has a median of {now:.6g}, in training it was {self.median:.6g} (from "
            f"{self.low:.6g} to {self.high:.6g}): is it in other units?"
        ]

    def remarks(self, table: Table) -> list[str]:
        """Codes that may stand for a missing value, and whole numbers that may only name the rows."""
        values = as_numbers(table, self.name)
        present = values[~np.isnan(values)]
        if len(present) < _FEWEST_TO_ASK:
            return []
        asked = [
            f"column {self.name!r} has {code} in {table.where_all(np.flatnonzero(values == code))}: does it stand for "
            f"a missing value? It is used as a number; if so, pass --missing {code}"
            for code in _CODES
            if _looks_like_a_code(present, code)
        ]
        if _looks_like_an_identifier(self.name, present):
            asked.append(
                f"column {self.name!r} has another whole number in every row: does it only name the rows? It is used "
                f"as a number; if so, pass --id {self.name} to carry it into predictions, or --drop {self.name}"
            )
        return asked

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        found = np.where(missing, self.median, as_numbers(table, self.name))
        moved = signed_log((found - self.median) / self.unit) if self.log else found
        return ((moved - self.centre) / (self.scale or 1.0))[:, None]


@dataclass(frozen=True)
class DateColumn(Column):
    """Dates: a trend, and for each cycle that the training rows went through a sine and a cosine.

    Dates such as 03/04/2024 have the day first unless a date of the column says otherwise; all training rows decide.
    """

    kind: ClassVar[str] = "date"

    centre: float  # mean of the seconds since 1970
    scale: float
    year: bool  # whether the day of the year is told, where there is more than a year of data
    week: bool  # whether the day of the week is told, where there are more than two weeks
    day: bool  # whether the hour is told, where dates have one
    day_first: bool | None = None  # whether 03/04/2024 is in April; None where no date is written so

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> DateColumn:
        """Measure the column, and see which cycles it goes through."""
        day_first = _day_first(table, name)[0]
        seconds = as_seconds(table, name, day_first)
        present = seconds[~np.isnan(seconds)]
        span = present.max() - present.min()
        whole_days = bool((present % _DAY == 0).all())
        return cls(
            name, bool(np.isnan(seconds).any()), float(present.mean()), float(present.std()), year=bool(span > _YEAR),
            week=bool(span > 14 * _DAY), day=not whole_days, day_first=day_first,
        )  # fmt: skip

    @property
    def varies(self) -> bool:
        """Whether the training rows had different dates."""
        return self.scale > 0.0

    def check(self, table: Table) -> list[str]:
        """Values must be dates."""
        as_seconds(table, self.name, self.day_first)
        return []

    def remarks(self, table: Table) -> list[str]:
        """Which of day and month is first, where it is written either way."""
        day_first, sure = _day_first(table, self.name)
        if day_first is None:
            return []
        order = "day first" if day_first else "month first"
        if sure:
            return [f"column {self.name!r} has dates with the {order}, told from line {sure}"]
        values = table.column(self.name)
        example = values.iloc[int(np.flatnonzero(~find_missing(values))[0])]
        return [
            f"column {self.name!r} has dates such as {example!r} and none that tells day from month: they are read "
            f"with the {order}. If that is wrong, write them as 2024-02-29"
        ]

    def _cycles(self) -> dict[str, float]:
        """Names and lengths of the cycles, in seconds."""
        known = {"year": (self.year, _YEAR), "week": (self.week, 7 * _DAY), "day": (self.day, _DAY)}
        return {name: length for name, (told, length) in known.items() if told}

    def _features(self) -> tuple[str, ...]:
        waves = [f"{self.name} {wave} of the {cycle}" for cycle in self._cycles() for wave in ("sine", "cosine")]
        return (self.name, *waves)

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        seconds = np.where(missing, self.centre, as_seconds(table, self.name, self.day_first))
        found = [(seconds - self.centre) / (self.scale or 1.0)]
        for length in self._cycles().values():
            phase = 2 * math.pi * (seconds % length) / length
            found += [np.sin(phase), np.cos(phase)]
        return np.column_stack(found)


def _day_first(table: Table, name: str) -> tuple[bool | None, str]:
    """Whether dates such as 03/04/2024 have the day first, and the first line that tells; the whole column decides."""
    values = table.column(name)
    told: dict[bool, int] = {}
    written = False
    for row in np.flatnonzero(~find_missing(values)):
        found = DAY_OR_MONTH_FIRST.fullmatch(str(values.iloc[row]).strip())
        if found is None:
            continue
        written = True
        first, second = int(found[1]), int(found[3])
        if (first > 12) != (second > 12):
            told.setdefault(first > 12, int(row))
    if len(told) == 2:
        raise InvalidData(
            f"{table.where(told[True], name)}: {shown(values.iloc[told[True]])} has the day first, and "
            f"{table.where(told[False])}: {shown(values.iloc[told[False]])} the month. Write all as 2024-02-29, or say "
            f"kinds={{{name!r}: 'categorical'}}."
        )
    if not told:
        return (True if written else None), ""
    ((day_first, row),) = told.items()
    return day_first, str(row if table.lines is None else table.lines[row])


def _looks_like_a_code(values: np.ndarray, code: int) -> bool:
    """Whether ``code`` is apart from all other values: the only negative one, or further off than they are wide."""
    others = values[values != code]
    if len(others) in (0, len(values)) or len(np.unique(others)) < _FEWEST_TO_ASK:
        return False
    low, high = others.min(), others.max()
    if abs(code) < 99:
        return code < 0 <= low and (values == code).sum() > 1
    return max(low - code, code - high) > high - low


def _looks_like_an_identifier(name: str, values: np.ndarray) -> bool:
    """Whether whole numbers, all different, have the name of an identifier, or count the rows one by one."""
    if len(np.unique(values)) < len(values) or (values != np.round(values)).any():
        return False
    counted = bool((np.diff(values) == 1).all())
    return counted or _IDENTIFIER.search(name) is not None


def as_seconds(table: Table, name: str, day_first: bool | None = None) -> np.ndarray:
    """A column of dates as seconds since 1970 in UTC, with NaN for what is missing."""
    import pandas as pd

    values = table.column(name)
    missing = find_missing(values)
    if pd.api.types.is_numeric_dtype(values.dtype) and not missing.all():
        row = int(np.flatnonzero(~missing)[0])
        raise InvalidData(f"{table.where(row, name)}: {shown(values.iloc[row])} is not a date such as 2024-02-29.")
    present: Any = values[~missing]
    if not _typed(present) and day_first is not None:
        present = present.map(lambda value: _as_iso(str(value).strip(), day_first))
    dates: Any = pd.to_datetime(present, errors="coerce", utc=True, format=None if _typed(present) else "ISO8601")
    if dates.isna().any() and not _typed(present):  # not as in the standard: as pandas guesses, one by one
        dates = pd.to_datetime(present, errors="coerce", utc=True, format="mixed")
    wrong = np.flatnonzero(dates.isna().to_numpy())
    if len(wrong):
        row = int(np.flatnonzero(~missing)[wrong[0]])
        raise InvalidData(
            f"{table.where(row, name)}: {shown(values.iloc[row])} is not a date. Write it as 2024-02-29, or correct it."
        )
    seconds = np.full(len(values), np.nan)
    epoch = pd.Timestamp(0, tz="UTC")
    seconds[~missing] = ((dates - epoch) / pd.Timedelta(seconds=1)).to_numpy(dtype=float)
    return seconds


def _as_iso(text: str, day_first: bool) -> str:
    """A date such as 3/4/24 as 2024-04-03; years of two digits are from 1970 to 2069."""
    found = DAY_OR_MONTH_FIRST.fullmatch(text)
    if found is None:
        return text
    day, month = (found[1], found[3]) if day_first else (found[3], found[1])
    year = int(found[4]) if len(found[4]) == 4 else int(found[4]) + (2000 if int(found[4]) < 70 else 1900)
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return "not a date"
    return f"{year:04d}-{int(month):02d}-{int(day):02d}{text[found.end(4) :]}"


def _typed(values: pd.Series) -> bool:
    import pandas as pd

    return bool(pd.api.types.is_datetime64_any_dtype(values.dtype))


def middle_and_unit(values: np.ndarray) -> tuple[float, float]:
    """Median and interquartile range; where that is 0 the mean distance from the median, where that is 0 too, 1."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(median), float((high - low) or np.abs(values - median).mean() or 1.0)


def kurtosis(values: np.ndarray) -> float:
    """Fourth moment over the square of the second; 0 for a constant."""
    away = values - values.mean()
    unit = np.abs(away).max(initial=0.0)
    if unit <= 1e-12 * np.abs(values).max(initial=0.0):
        return 0.0
    away = away / unit  # so that nothing overflows
    return float((away**4).mean() / (away**2).mean() ** 2)


def signed_log(values: np.ndarray) -> np.ndarray:
    """The signed logarithm, sign(z) log(1 + |z|)."""
    return np.sign(values) * np.log1p(np.abs(values))


def refuse_slips(table: Table, name: str, values: np.ndarray, median: float, unit: float) -> None:
    """Refuse an extreme outlier, naming it."""
    away = np.abs(np.nan_to_num(values, nan=median) - median) / unit
    row = int(away.argmax())
    if away[row] > _SLIP:
        raise InvalidData(
            f"{table.where(row, name)}: {values[row]:g} is {away[row]:.0e} times the usual spread away from the median "
            f"{median:g}. Correct it or remove the row; if it is right, say kinds={{{name!r}: 'numeric'}}."
        )
