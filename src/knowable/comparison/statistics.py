"""Means over folds, paired differences and the order of methods.

Rows differ in difficulty, and all methods predict the same ones: the difference of two methods is taken row by row, and
its standard error is that of these differences, most often much smaller than the errors of the two means. Scores that
are no mean over rows (RMSE, calibration error, time) are paired fold by fold.

Training sets of different folds overlap, so their scores are not independent: standard errors over folds are slightly
too small (Bengio and Grandvalet, 2004). Treat differences below two standard errors as noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from knowable.errors import InvalidArgument
from knowable.report.scores import SCORES, ScoreColumn

FIRST = "nll"
"""What methods are ranked by unless asked otherwise."""

ByFold = Mapping[int, float]
"""A score of one method, by the number of the fold."""

ByRow = Mapping[int, Sequence[float]]
"""The values behind a score of one method, one for each held-out row, by the number of the fold."""

TOLD_APART = 2.0
"""How many standard errors a paired difference has to be from zero to count."""


@dataclass(frozen=True)
class Estimate:
    r"""A mean over folds, :math:`\bar s = \frac1k \sum_f s_f`, with its standard error.

    .. math:: \mathrm{se} = \sqrt{\frac{1}{k (k - 1)} \sum_f (s_f - \bar s)^2}

    Attributes:
        mean: The mean; NaN without folds.
        standard_error: Its error; NaN with fewer than two folds, or where a score is infinite.
        folds: Over how many folds.
    """

    mean: float
    standard_error: float
    folds: int


@dataclass(frozen=True)
class RankedMethod:
    """A method with its rank.

    Attributes:
        rank: From 1.
        method: Its name.
        score: Its mean score over the folds it finished.
        difference: Its score less the best method's, over the folds that both finished, paired row by row where the
            score is a mean over rows.
        verdict: ``"best"``, ``"tied"`` (the difference is within two standard errors), ``"worse"``, or ``"unclear"``
            where there are too few folds for a standard error.
    """

    rank: int
    method: str
    score: Estimate
    difference: Estimate
    verdict: str


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and standard error."""
    numbers = [float(value) for value in values]
    count = len(numbers)
    if count == 0:
        return Estimate(math.nan, math.nan, 0)
    if any(math.isnan(value) for value in numbers):
        return Estimate(math.nan, math.nan, count)
    if not all(map(math.isfinite, numbers)):
        return Estimate(sum(numbers) / count, math.nan, count)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(mean, math.nan, count)
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count)


def paired(first: ByFold, second: ByFold) -> Estimate:
    """The first less the second, over the folds that both have."""
    return estimate(first[fold] - second[fold] for fold in first if fold in second)


def paired_rows(first: ByRow, second: ByRow) -> Estimate | None:
    r"""The first less the second, row by row over the folds that both have; None where a fold has no rows.

    .. math:: \bar d = \frac1n \sum_i d_i, \qquad \mathrm{se} = \sqrt{\frac{1}{n (n - 1)} \sum_i (d_i - \bar d)^2}
    """
    common = [fold for fold in first if fold in second]
    if not common or any(len(first[fold]) != len(second[fold]) or not first[fold] for fold in common):
        return None
    pairs = (zip(first[fold], second[fold], strict=True) for fold in common)
    found = estimate(one - other for fold in pairs for one, other in fold)
    return Estimate(found.mean, found.standard_error, len(common))


def order(losses: Mapping[str, ByFold]) -> list[str]:
    """Methods from the smallest loss to the largest; those without a fold are left out.

    Where all have the same folds, by their means. Where some lack a fold, by their paired differences from one that has
    the most folds, so that nobody gains by having missed a hard one.
    """
    known = {method: folds for method, folds in losses.items() if folds}
    if not known:
        return []
    means = {method: _or_infinite(estimate(folds.values()).mean) for method, folds in known.items()}
    most = max(map(len, known.values()))
    pivot = min((method for method in known if len(known[method]) == most), key=means.__getitem__)
    shifts = {method: _or_infinite(paired(folds, known[pivot]).mean) for method, folds in known.items()}
    return sorted(known, key=lambda method: (shifts[method], means[method]))


def ranking(
    scores: Mapping[str, ByFold], *, rows: Mapping[str, ByRow] | None = None, higher: bool = False
) -> tuple[RankedMethod, ...]:
    """The places of all methods that finished a fold, the best first; ``rows`` are the values behind the scores."""
    sign = -1.0 if higher else 1.0
    losses = {method: {fold: sign * value for fold, value in folds.items()} for method, folds in scores.items()}
    found = order(losses)
    return tuple(_place(number, method, scores, rows or {}, found[0]) for number, method in enumerate(found, 1))


def _place(rank: int, method: str, scores: Mapping[str, ByFold], rows: Mapping[str, ByRow], best: str) -> RankedMethod:
    by_row = paired_rows(rows.get(method, {}), rows.get(best, {}))
    difference = by_row or paired(scores[method], scores[best])
    return RankedMethod(rank, method, estimate(scores[method].values()), difference, _verdict(method, best, difference))


def _verdict(method: str, best: str, difference: Estimate) -> str:
    if method == best:
        return "best"
    if math.isinf(difference.mean):
        return "worse"
    if not math.isfinite(difference.standard_error):
        return "unclear"
    return "tied" if abs(difference.mean) <= TOLD_APART * difference.standard_error else "worse"


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def columns_in(names: Iterable[str]) -> tuple[ScoreColumn, ...]:
    """The columns of the scores named, in the order of tables; one that has none there is shown under its own name."""
    there = dict.fromkeys(names)
    known = tuple(column for column in SCORES.values() if column.name in there)
    return known + tuple(ScoreColumn(name, name, "none") for name in there if name not in SCORES)


def ranking_column(name: str, there: Iterable[str]) -> ScoreColumn:
    """The column of a score that methods can be ranked by; the error names the valid ones."""
    able = [column.name for column in columns_in(there) if column.ranks]
    if name not in able:
        raise InvalidArgument(
            f"score must be one that ranks methods: {', '.join(able) or 'there is none'}; got {name!r}."
        )
    return SCORES[name]
