"""Which rows are learned from and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from knowable.core.support.checks import check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, InvalidData, InvalidType

_MOST_STRATA = 20  # distinct outcomes that are shared out evenly


@dataclass(frozen=True, eq=False)
class Split:
    """Positions of the rows to learn from, and of those held out."""

    train: np.ndarray
    test: np.ndarray


@runtime_checkable
class Splitter(Protocol):
    """What scikit-learn's cross-validators do."""

    def split(self, X: Any, y: Any = None) -> Iterable[tuple[Any, Any]]:
        """Pairs of positions."""
        ...


def as_splits(cv: Any, rows: int, y: Any, *, seed: int) -> tuple[Split, ...]:
    """Folds from their number, a cross-validator, or pairs of positions or masks.

    A number deals the rows at random into folds whose sizes differ by one row at the most. Labels, and numbers of few
    values, are shared out evenly.
    """
    if isinstance(cv, bool) or not isinstance(cv, int | np.integer):
        return _given(cv, rows, y)
    count = check_count("cv", cv, at_least=2)
    if count > rows:
        raise InvalidArgument(f"cv must be at most the number of rows, {rows}; got {count}.")
    order = torch.randperm(rows, generator=generator_for(seed, "folds")).numpy()
    strata = _strata(np.asarray(y), count)
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]
    fold_of = np.empty(rows, dtype=np.int64)
    fold_of[order] = np.arange(rows) % count
    return tuple(Split(np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)) for fold in range(count))


def splits_fingerprint(splits: Iterable[Split]) -> str:
    """A hash of who is where."""
    digest = hashlib.sha256()
    for split in splits:
        for part in (split.train, split.test):
            digest.update(f"{len(part)} ".encode() + part.astype(np.int64).tobytes())
    return digest.hexdigest()


def _given(cv: Any, rows: int, y: Any) -> tuple[Split, ...]:
    if isinstance(cv, Splitter) and not isinstance(cv, str):  # text has a split() too
        cv = cv.split(np.zeros((rows, 1)), np.asarray(y))
    if not isinstance(cv, Iterable) or isinstance(cv, str):
        raise InvalidType(
            f"cv must be a number of folds, a cross-validator with split(), or pairs (train, test) of positions; got "
            f"{type(cv).__name__}."
        )
    found = []
    for number, pair in enumerate(cv):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidType(f"cv must hold pairs (train, test), its number {number} is a {type(pair).__name__}.")
        train, test = (_positions(part, rows, number) for part in pair)
        if np.intersect1d(train, test).size:
            raise InvalidArgument(f"cv number {number} has rows that are both learned from and held out.")
        found.append(Split(train, test))
    if not found:
        raise InvalidArgument("cv has no folds in it.")
    return tuple(found)


def _positions(part: Any, rows: int, number: int) -> np.ndarray:
    """Positions, from positions or a mask."""
    index = np.asarray(part)
    if index.dtype == bool:
        if index.shape != (rows,):
            raise InvalidArgument(f"cv number {number} has a mask of shape {index.shape} for {rows} rows.")
        index = np.flatnonzero(index)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise InvalidType(f"cv number {number} must hold whole numbers or a mask, got {index.dtype}.")
    if index.size == 0:
        raise InvalidData(
            f"cv number {number} has an empty part: every fold needs rows to learn from and rows to score."
        )
    if index.min() < 0 or index.max() >= rows:
        raise InvalidArgument(f"cv number {number} names row {index.max()}; there are {rows}, counted from 0.")
    return index.astype(np.int64)


def _strata(y: np.ndarray, folds: int) -> np.ndarray | None:
    """A number for each distinct outcome, if they are few and each is frequent enough to be in every fold."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        return None
    try:
        _, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
    except TypeError:  # values that have no order among each other
        return None
    return codes if len(counts) <= _MOST_STRATA and counts.min() >= folds else None
