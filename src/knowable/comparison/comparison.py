"""The result of a comparison: scores with standard errors, paired differences, and the ranking."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from knowable.comparison.journal import Record
from knowable.comparison.report import comparison_report, plot_ranking, ranking_listing
from knowable.comparison.statistics import (
    FIRST,
    Estimate,
    RankedMethod,
    columns_in,
    estimate,
    paired,
    paired_rows,
    ranking,
    ranking_column,
)
from knowable.comparison.text import as_text
from knowable.core.support.checks import check_choice
from knowable.core.support.files import write_atomically
from knowable.errors import MissingExtra
from knowable.report.html import render, render_listing
from knowable.report.scores import ScoreColumn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods side by side on the same folds; prints as a table.

    Attributes:
        records: One for each method and fold that was tried, by fold and in the order of the methods.
        not_run: ``(method, fold)`` pairs that there was no time for.
        methods: All methods by name, in the order they were given.
        folds: Number of folds.
        reference: The method that the others were compared with, or None.
        facts: How it was made, for people.
        notices: What there is to know before reading on.
        citations: BibTeX of the papers behind each method.
    """

    records: tuple[Record, ...]
    not_run: tuple[tuple[str, int], ...]
    methods: tuple[str, ...]
    folds: int
    reference: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    citations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def scores(self) -> tuple[ScoreColumn, ...]:
        """The scores that there are, in the order of tables."""
        return columns_in(name for record in self.records for name in record.scores)

    @property
    def best(self) -> str:
        """The method with the lowest negative log predictive density."""
        return self.ranking()[0].method

    def ranking(self, score: str = FIRST) -> tuple[RankedMethod, ...]:
        """Places by one score, the best first, each with its paired difference from the best.

        Args:
            score: Name of a score that is better low or better high.

        Returns:
            A place for every method that finished a fold. A method whose difference from the best, paired row by row,
            is within two standard errors is tied with it.
        """
        kind = ranking_column(score, (each.name for each in self.scores))
        values = {method: self.by_fold(method, kind.name) for method in self.methods}
        rows = {method: self.by_row(method, kind.name) for method in self.methods}
        return ranking(values, rows=rows, higher=kind.better == "higher")

    def by_fold(self, method: str, score: str) -> dict[int, float]:
        """A score of one method on the folds it finished."""
        check_choice("method", method, self.methods)
        check_choice("score", score, [kind.name for kind in self.scores])
        return {
            record.fold: record.scores[score]
            for record in self.records
            if record.method == method and score in record.scores
        }

    def by_row(self, method: str, score: str = FIRST) -> dict[int, list[float]]:
        """The values behind a score of one method, one for each held-out row, on the folds it finished.

        Empty lists where a score is no mean over rows, such as ``rmse``.
        """
        folds = self.by_fold(method, score)
        return {
            record.fold: record.rows.get(score, [])
            for record in self.records
            if record.method == method and record.fold in folds
        }

    def mean(self, method: str, score: str = FIRST) -> Estimate:
        """A score's mean over folds, with its standard error."""
        return estimate(self.by_fold(method, score).values())

    def difference(self, method: str, other: str, score: str = FIRST) -> Estimate:
        """A score of one method less that of another, in pairs over the rows (else the folds) that both finished."""
        by_row = paired_rows(self.by_row(method, score), self.by_row(other, score))
        return by_row or paired(self.by_fold(method, score), self.by_fold(other, score))

    def not_converged(self, method: str) -> dict[int, str]:
        """How a method's fits ended that did not converge, by fold."""
        check_choice("method", method, self.methods)
        return {
            record.fold: record.message
            for record in self.records
            if record.method == method and record.error is None and record.converged is False
        }

    def agreement(self, method: str) -> dict[str, Estimate]:
        """How far a method is from the reference, by the figures of ``compare_to_reference``; empty for none."""
        check_choice("method", method, self.methods)
        found: dict[str, dict[int, float]] = {}
        for record in self.records:
            if record.method == method:
                for name, value in record.agreement.items():
                    found.setdefault(name, {})[record.fold] = value
        return {name: estimate(values.values()) for name, values in found.items()}

    def failures(self, method: str) -> dict[int, str]:
        """Why a method has no score on a fold, by fold: what went wrong, or that there was no time."""
        check_choice("method", method, self.methods)
        late = {fold: "not run: the budget was spent" for name, fold in self.not_run if name == method}
        return late | {
            record.fold: record.error for record in self.records if record.method == method and record.error is not None
        }

    def warnings(self, method: str) -> dict[str, int]:
        """What a method's fits warned of, and in how many of them; texts that differ in numbers alone are one."""
        found: dict[str, dict[int, str]] = {}  # by kind and fold
        for record in self.records:
            if record.method == method:
                for text in record.warnings:
                    found.setdefault(_NUMBER.sub("#", text), {}).setdefault(record.fold, text)
        return {next(iter(texts.values())): len(texts) for texts in found.values()}

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row for each method, ranked ones first, as plain values; ``pandas.DataFrame(comparison.table)``.

        ``rank``, ``method``, ``folds`` finished, ``verdict``, number of fits ``not_converged``; then each score, its
        standard error (``nll_se``), and where it ranks the paired difference from the best by ``nll`` with its standard
        error (``nll_difference``, ``nll_difference_se``). What is not known is NaN.
        """
        places = self.ranking()
        rows = [self._row(place.method, place, places[0].method) for place in places]
        ranked = {place.method for place in places}
        return rows + [self._row(method, None, places[0].method) for method in self.methods if method not in ranked]

    def _row(self, method: str, place: RankedMethod | None, best: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rank": None if place is None else place.rank,
            "method": method,
            "folds": 0 if place is None else place.score.folds,
            "verdict": "no result" if place is None else place.verdict,
            "not_converged": len(self.not_converged(method)),
        }
        for kind in self.scores:
            found = self.mean(method, kind.name)
            row |= {kind.name: found.mean, f"{kind.name}_se": found.standard_error}
            if kind.ranks:
                from_best = self.difference(method, best, kind.name)
                row |= {
                    f"{kind.name}_difference": from_best.mean,
                    f"{kind.name}_difference_se": from_best.standard_error,
                }
        return row

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str | None:
        try:
            return render_listing(ranking_listing(self))
        except MissingExtra:  # the notebook shows the text instead
            return None

    def plot(self, score: str = FIRST) -> Figure:
        """Draw the ranking by one score: means with standard errors, and paired differences from the best.

        Returns:
            A matplotlib figure; ``figure.savefig("comparison.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        return plot_ranking(self, score)

    def to_csv(self, path: str | os.PathLike[str] | None = None, *, folds: bool = False) -> str:
        """The table as CSV.

        Args:
            path: A file to write it to, atomically.
            folds: Every single fold instead of the means.

        Returns:
            The text.
        """
        rows = self._fold_rows() if folds else self.table
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([{name: _blank(value) for name, value in row.items()} for row in rows])
        return _out(path, stream.getvalue())

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON: the table, every fold, agreement with the reference, what failed. NaN becomes null.

        Args:
            path: A file to write it to, atomically.

        Returns:
            The text.
        """
        content = {
            "best": self.best,
            "ranked_by": FIRST,
            "facts": dict(self.facts),
            "notices": list(self.notices),
            "reference": self.reference,
            "table": self.table,
            "agreement": {
                method: {name: [each.mean, each.standard_error] for name, each in self.agreement(method).items()}
                for method in self.methods
            },
            "folds": [{k: v for k, v in record.to_json().items() if k != "rows"} for record in self.records],
            "not_run": [{"method": method, "fold": fold} for method, fold in self.not_run],
        }
        return _out(path, json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One self-contained page: the ranking with standard errors, paired differences, all scores, failures.

        Args:
            path: A file to write it to, atomically.

        Returns:
            The page.

        Raises:
            MissingExtra: If jinja2 or matplotlib is not installed.
        """
        return _out(path, render(comparison_report(self)))

    def _fold_rows(self) -> list[dict[str, Any]]:
        names = [kind.name for kind in self.scores]
        return [
            {"method": record.method, "fold": record.fold}
            | {name: record.scores.get(name, math.nan) for name in names}
            | {"converged": record.converged, "error": record.error}
            for record in self.records
        ]


def _out(path: str | os.PathLike[str] | None, text: str) -> str:
    if path is not None:
        write_atomically(path, text)
    return text


def _blank(value: Any) -> Any:
    """An empty cell for what is not known."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _finite(value: Any) -> Any:
    """Null for numbers that JSON does not have; infinity as text."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
