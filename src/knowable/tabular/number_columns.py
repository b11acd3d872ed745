"""Columns of numbers and of dates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from knowable.errors import InvalidData
from knowable.tabular.columns import Column, as_numbers, find_missing, shown
from knowable.tabular.table import Table

if TYPE_CHECKING:
    import pandas as pd

_HEAVY = 10.0  # kurtosis beyond which tails count as heavy (a normal has 3, an exponential 9)
_SLIP = 1e6  # times the interquartile range from the median, beyond which a value is taken for a slip
_JUMP = 10.0  # times the training range away from it
_RATIO = 8.0  # times as large, or as small, as anything in training: units differ by ten or more
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
        """Measure the column; a value out of all proportion is refused unless the kind was given."""
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

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        found = np.where(missing, self.median, as_numbers(table, self.name))
        moved = signed_log((found - self.median) / self.unit) if self.log else found
        return ((moved - self.centre) / (self.scale or 1.0))[:, None]


@dataclass(frozen=True)
class DateColumn(Column):
    """Dates: a trend, and for each cycle that the training rows went through a sine and a cosine."""

    kind: ClassVar[str] = "date"

    centre: float  # mean of the seconds since 1970
    scale: float
    year: bool  # whether the day of the year is told, where there is more than a year of data
    week: bool  # whether the day of the week is told, where there are more than two weeks
    day: bool  # whether the hour is told, where dates have one

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> DateColumn:
        """Measure the column, and see which cycles it goes through."""
        seconds = as_seconds(table, name)
        present = seconds[~np.isnan(seconds)]
        span = present.max() - present.min()
        whole_days = bool((present % _DAY == 0).all())
        return cls(
            name, bool(np.isnan(seconds).any()), float(present.mean()), float(present.std()), year=bool(span > _YEAR),
            week=bool(span > 14 * _DAY), day=not whole_days,
        )  # fmt: skip

    @property
    def varies(self) -> bool:
        """Whether the training rows had different dates."""
        return self.scale > 0.0

    def check(self, table: Table) -> list[str]:
        """Values must be dates."""
        as_seconds(table, self.name)
        return []

    def _cycles(self) -> dict[str, float]:
        """Names and lengths of the cycles, in seconds."""
        known = {"year": (self.year, _YEAR), "week": (self.week, 7 * _DAY), "day": (self.day, _DAY)}
        return {name: length for name, (told, length) in known.items() if told}

    def _features(self) -> tuple[str, ...]:
        waves = [f"{self.name} {wave} of the {cycle}" for cycle in self._cycles() for wave in ("sine", "cosine")]
        return (self.name, *waves)

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        seconds = np.where(missing, self.centre, as_seconds(table, self.name))
        found = [(seconds - self.centre) / (self.scale or 1.0)]
        for length in self._cycles().values():
            phase = 2 * math.pi * (seconds % length) / length
            found += [np.sin(phase), np.cos(phase)]
        return np.column_stack(found)


def as_seconds(table: Table, name: str) -> np.ndarray:
    """A column of dates as seconds since 1970 in UTC, with NaN for what is missing."""
    import pandas as pd

    values = table.column(name)
    missing = find_missing(values)
    if pd.api.types.is_numeric_dtype(values.dtype) and not missing.all():
        row = int(np.flatnonzero(~missing)[0])
        raise InvalidData(f"{table.where(row, name)}: {shown(values.iloc[row])} is not a date such as 2024-02-29.")
    present: Any = values[~missing]
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
    """Refuse a value that is out of all proportion to the others, naming it."""
    away = np.abs(np.nan_to_num(values, nan=median) - median) / unit
    row = int(away.argmax())
    if away[row] > _SLIP:
        raise InvalidData(
            f"{table.where(row, name)}: {values[row]:g} is {away[row]:.0e} times the usual spread away from the median "
            f"{median:g}. Correct it or remove the row; if it is right, say kinds={{{name!r}: 'numeric'}}."
        )
