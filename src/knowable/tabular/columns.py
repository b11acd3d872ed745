"""Kinds of columns: what a column of a table is, and how its values become numbers for a network.

Each kind is a small frozen class that is learned from the training rows, encodes any rows, and goes to JSON and back.
Values that are missing are filled in, and where the training rows had any, one more number says that they were.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from knowable.errors import DamagedArtifact, InvalidArgument, InvalidData, KnowableWarning, UnseenCategory
from knowable.tabular.csv_file import is_missing
from knowable.tabular.number_texts import parse_number, read_numbers
from knowable.tabular.table import Table

if TYPE_CHECKING:
    import pandas as pd

TRUE, FALSE = frozenset({"true", "yes", "y", "t"}), frozenset({"false", "no", "n", "f"})
_TIME = r"([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}:?\d{2})?"
ISO_DATE = re.compile(rf"\d{{4}}[-/]\d{{1,2}}[-/]\d{{1,2}}{_TIME}")
DAY_OR_MONTH_FIRST = re.compile(rf"(\d{{1,2}})([./-])(\d{{1,2}})\2(\d{{4}}|\d{{2}}){_TIME}")
_MOSTLY = 0.8  # of the values that are numbers, beyond which a text among them is taken for a slip


@dataclass(frozen=True)
class Column(ABC):
    """What was learned of one column.

    Attributes:
        name: Its name.
        gaps: Whether training rows had missing values, and so one more number says which rows have.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Column]]] = {}

    name: str
    gaps: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Column.kinds[cls.kind] = cls

    @classmethod
    @abstractmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> Column:
        """Learn from the training rows; ``given`` is what the user said of the column, if anything."""

    def _features(self) -> tuple[str, ...]:
        """Names of the numbers that a value becomes, without the one for gaps."""
        return (self.name,)

    @abstractmethod
    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        """Values as ``(rows, features)``, what is missing filled in."""

    def check(self, table: Table) -> list[str]:
        """Refuse values of the wrong type, naming the place; what is merely suspicious comes back in words."""
        return []

    def remarks(self, table: Table) -> list[str]:
        """What a user should be told or asked about the column of the training rows."""
        return []

    def guesses(self, table: Table, count: int) -> list[np.ndarray]:
        """``count`` encodings with unseen categories as known ones, as often as in training; none where all are known.

        A new category is taken for one more of the same population: the mean over these encodings is its predictive
        distribution, and by the law of total variance it is never narrower than that of the known ones on average.
        """
        return []

    @property
    @abstractmethod
    def varies(self) -> bool:
        """Whether the training rows had different values, apart from gaps."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the numbers that a value becomes."""
        return (*self._features(), *((f"{self.name} is missing",) if self.gaps else ()))

    def encode(self, table: Table) -> np.ndarray:
        """The column of ``table`` as numbers, ``(rows, width)`` in double precision."""
        values = table.column(self.name)
        missing = find_missing(values)
        if missing.any() and not self.gaps:
            count = int(missing.sum())
            warnings.warn(
                f"Column {self.name!r} has {count} missing value{'s' * (count > 1)}, and had none in training: the "
                f"usual value is taken.",
                KnowableWarning, stacklevel=4,
            )  # fmt: skip
        found = self._encode(values, missing, table)
        return np.column_stack([found, missing]) if self.gaps else found

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Column:
        """Back from plain values."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()
        }
        try:
            return Column.kinds[fields.pop("kind")](**fields)
        except (KeyError, TypeError) as error:
            raise DamagedArtifact(f"The schema has a column that cannot be read: {error}. Fit again.") from None


def learn_column(table: Table, name: str, given: Any = None) -> Column | str:
    """Learn one column, of the kind that is ``given`` or else told from its values; or say why it is left out.

    Args:
        table: The training rows.
        name: The column.
        given: ``"numeric"``, ``"categorical"``, ``"boolean"``, ``"date"``, ``"ordinal"``, a list (the levels of an
            ordinal column, lowest first), ``"ignore"``, or None.
    """
    if given == "ignore":
        return "it is to be ignored"
    values = table.column(name)
    if find_missing(values).all():
        return "it has no values"
    kind = _given_kind(name, given) if given is not None else infer_kind(table, name)
    if kind is None:
        return "it has another text in nearly every row (--id carries it into predictions)"
    column = Column.kinds[kind].learn(table, name, given)
    return column if column.varies or column.gaps else "it is the same in every row"


def infer_kind(table: Table, name: str) -> str | None:
    """The kind of a column, told from its values; None for a text that only names the rows."""
    import pandas as pd

    values = table.column(name)
    dtype: Any = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "ordinal" if dtype.ordered else "categorical"
    if pd.api.types.is_bool_dtype(dtype):
        return "boolean"
    if pd.api.types.is_numeric_dtype(dtype):
        return "numeric"
    if pd.api.types.is_datetime64_any_dtype(dtype):
        return "date"
    present = [value for value, gap in zip(values, find_missing(values), strict=True) if not gap]
    if all(isinstance(value, bool | np.bool_) for value in present):
        return "boolean"
    texts = [str(value).strip() for value in present]
    if read_numbers(texts) is not None:
        return "numeric"
    if mostly_numbers(texts):
        share = f"{_share_of_numbers(texts):.0%} of the column are"
        as_numbers(table, name, f"is not a number, and {share}. Correct it, or say kinds={{{name!r}: 'categorical'}}.")
    return _kind_of_texts(texts)


def mostly_numbers(values: Iterable[Any]) -> bool:
    """Whether so many values are numbers that the others look like slips."""
    return _share_of_numbers(values) >= _MOSTLY


def _share_of_numbers(values: Iterable[Any]) -> float:
    found = [read_numbers([str(value)]) is not None for value in values]
    return sum(found) / len(found) if found else 0.0


def _kind_of_texts(texts: Sequence[str]) -> str | None:
    distinct = set(texts)
    if len(distinct) == 2 and all(sum(text.lower() in same for text in distinct) == 1 for same in (TRUE, FALSE)):
        return "boolean"
    if all(ISO_DATE.fullmatch(text) for text in distinct) or all(DAY_OR_MONTH_FIRST.fullmatch(t) for t in distinct):
        return "date"
    return None if len(texts) >= 20 and len(distinct) > 0.9 * len(texts) else "categorical"


def _given_kind(name: str, given: Any) -> str:
    if isinstance(given, str) and given in Column.kinds:
        return given
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 1:
        return "ordinal"
    raise InvalidArgument(
        f"kinds[{name!r}] must be one of {', '.join(map(repr, Column.kinds))}, 'ignore', or a list of levels from the "
        f"lowest to the highest; got {given!r}."
    )


def find_missing(values: pd.Series) -> np.ndarray:
    """Which values are missing: what pandas calls so, and texts that stand for nothing."""
    import pandas as pd

    missing = values.isna().to_numpy(dtype=bool)
    dtype: Any = values.dtype
    texts = pd.api.types.is_object_dtype(dtype) or pd.api.types.is_string_dtype(dtype)
    if isinstance(dtype, pd.CategoricalDtype) or not texts:
        return missing
    return missing | np.fromiter((isinstance(v, str) and is_missing(v) for v in values), dtype=bool, count=len(values))


def parse_column(table: Table, name: str, parse: Callable[[str], float | None], wrong: str) -> np.ndarray:
    """A column parsed value by value, NaN for what is missing; the error ``wrong`` names the first that gives None."""
    values = table.column(name)
    labels, found = labels_of(values), np.full(len(values), np.nan)
    for row in np.flatnonzero(~find_missing(values)):
        parsed = parse(labels[row])
        if parsed is None:
            raise InvalidData(f"{table.where(row, name)}: {shown(values.iloc[row])} {wrong}")
        found[row] = parsed
    return found


def as_numbers(table: Table, name: str, wrong: str = "is not a number. Correct it, or remove the row.") -> np.ndarray:
    """A column as double-precision numbers with NaN for what is missing."""
    import pandas as pd

    values = table.column(name)
    if pd.api.types.is_complex_dtype(values.dtype):
        raise InvalidData(f"Column {name!r} has complex numbers. Give their parts as two columns.")
    if pd.api.types.is_numeric_dtype(values.dtype):
        found = values.to_numpy(dtype=float, na_value=np.nan)
    else:
        found = _numbers_of_texts(table, name, wrong)
    infinite = np.flatnonzero(np.isinf(found))
    if len(infinite):
        raise InvalidData(
            f"{table.where(infinite[0], name)} is infinite. Correct it, or leave it empty if it is not known."
        )
    return found


def _numbers_of_texts(table: Table, name: str, wrong: str) -> np.ndarray:
    """All texts of a column as numbers; the error names the first that is not one."""
    values = table.column(name)
    present = ~find_missing(values)
    texts = [label for label, there in zip(labels_of(values), present, strict=True) if there]
    read = read_numbers(texts)
    if read is None:
        return parse_column(table, name, parse_number, wrong)
    found = np.full(len(values), np.nan)
    found[present] = read.numbers
    return found


def label_of(value: Any) -> str:
    """A value as the name of a category: whole numbers alike whether they were read as such or not."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def shown(value: Any) -> str:
    """A value as a message shows it."""
    return repr(value) if isinstance(value, str) else label_of(value)


def labels_of(values: pd.Series) -> list[str]:
    """All values as names of categories."""
    return [label_of(value) for value in values.astype(object)]


def warn_of_unseen(table: Table, name: str, unseen: np.ndarray, instead: str) -> None:
    """Say which categories were not there in training, and where."""
    rows = np.flatnonzero(unseen)
    labels = sorted({label_of(value) for value in table.column(name).iloc[rows]})
    more = f" and {len(labels) - 5} more" if len(labels) > 5 else ""
    count = f"{len(rows)} row{'s' * (len(rows) > 1)}"
    warnings.warn(
        f"Column {name!r} has categories that were not in the training rows: {', '.join(map(repr, labels[:5]))}{more} "
        f"({count}: {table.where_all(rows)}). {instead}",
        UnseenCategory, stacklevel=5,
    )  # fmt: skip
