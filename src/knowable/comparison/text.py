"""A comparison as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from knowable.comparison.kinds import FIRST, ScoreKind, shown, with_error
from knowable.comparison.statistics import Place
from knowable.comparison.words import lacking, title

if TYPE_CHECKING:
    from knowable.comparison.comparison import Comparison

_NOT_SHOWN = ("predict_seconds",)
_NOTE = """± is one standard error over folds. Methods are ranked by nll; the difference from the best is taken fold by
fold, and one of less than two standard errors is a tie (=)."""


def as_text(comparison: Comparison) -> str:
    """The ranking with all scores, then why methods lack folds."""
    kinds = [kind for kind in comparison.scores if kind.name != FIRST and kind.name not in _NOT_SHOWN]
    header = ["", "method", FIRST, "from the best", *(kind.name for kind in kinds)]
    rows = [_cells(comparison, place, kinds) for place in comparison.ranking()]
    lines = [title(comparison), "", *_aligned([header, *rows]), "", _NOTE, *comparison.notices]
    return "\n".join([*lines, *(f"{source}: {why}" for source, why in lacking(comparison))])


def _cells(comparison: Comparison, place: Place, kinds: Sequence[ScoreKind]) -> list[str]:
    first = with_error(place.score.mean, place.score.standard_error)
    if place.score.folds < comparison.folds:
        first += f" ({place.score.folds} of {comparison.folds} folds)"
    away = place.difference
    apart = "best" if place.verdict == "best" else with_error(away.mean, away.standard_error, sign=True)
    others = [_score(comparison, place.method, kind) for kind in kinds]
    return [f"{place.rank}{'=' if place.verdict == 'tied' else ''}", place.method, first, apart, *others]


def _score(comparison: Comparison, method: str, kind: ScoreKind) -> str:
    found = comparison.mean(method, kind.name)
    return shown(found.mean, found.standard_error)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: names to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
