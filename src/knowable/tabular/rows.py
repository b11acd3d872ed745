"""The rows of a fit: what their weights mean, and an order that does not depend on the order they came in."""

from __future__ import annotations

from typing import Any

import numpy as np

from knowable.errors import InvalidArgument
from knowable.tabular.columns import find_missing, labels_of
from knowable.tabular.table import Table

_MOST_REPEATED = 1_000_000  # rows, up to which whole weights are rows repeated
_PRIME = np.uint64(1_099_511_628_211)


def checked_weights(weights: Any, rows: int) -> np.ndarray | None:
    """Weights of rows ``(rows,)``, or an error; None where there are none."""
    if weights is None:
        return None
    try:
        found = np.asarray(weights, dtype=float)
    except (TypeError, ValueError):
        raise InvalidArgument("sample_weight must be numbers, one for each row.") from None
    if found.shape != (rows,):
        raise InvalidArgument(f"sample_weight must have one number for each of {rows} rows, got shape {found.shape}.")
    if not np.isfinite(found).all() or (found < 0).any():
        raise InvalidArgument("sample_weight must be finite numbers, 0 or above.")
    if not (found > 0).any():
        raise InvalidArgument("sample_weight must have at least one weight that is not zero.")
    return found


def weighed(table: Table, y: np.ndarray, weights: np.ndarray | None) -> tuple[Table, np.ndarray, np.ndarray | None]:
    """Rows as often as they count: those of weight 0 left out, those of weight 2 twice.

    Weights that are not whole stay weights.
    """
    if weights is None:
        return table, y, None
    if (weights == weights.round()).all() and weights.sum() <= _MOST_REPEATED:
        repeated = np.repeat(np.arange(len(y)), weights.astype(int))
        return table.rows(repeated), y[repeated], None
    kept = np.flatnonzero(weights > 0)
    return table.rows(kept), y[kept], weights[kept]


def canonical_order(table: Table, y: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Positions of the rows in an order that depends on what they hold alone.

    The same rows in another order then give the same fit to the last bit, for sums depend on their order.
    """
    key = np.zeros(len(y), dtype=np.uint64)
    columns = [_hashes(table, name) for name in table.names]
    numbers = [y.reshape(len(y), -1)[:, k] for k in range(y.size // max(1, len(y)))]
    columns += [_hash_numbers(column) for column in (*numbers, *(() if weights is None else (weights,)))]
    for column in columns:
        key = (key ^ column) * _PRIME  # wraps around, as hashes do
    return np.argsort(key, kind="stable")


def _hashes(table: Table, name: str) -> np.ndarray:
    import pandas as pd

    values = table.column(name)
    if pd.api.types.is_numeric_dtype(values.dtype) and not isinstance(values.dtype, pd.CategoricalDtype):
        return _hash_numbers(values.to_numpy(dtype=float, na_value=np.nan))
    missing = find_missing(values)
    labels = ["" if gap else label for label, gap in zip(labels_of(values), missing, strict=True)]
    return _hash_array(np.array(labels, dtype=object))


def _hash_numbers(values: np.ndarray) -> np.ndarray:
    return _hash_array(np.asarray(values, dtype=float) + 0.0)  # so that -0 and 0 are the same


def _hash_array(values: np.ndarray) -> np.ndarray:
    from pandas import util

    hash_array: Any = util.hash_array
    return hash_array(values)
