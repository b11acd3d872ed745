"""A comparison as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from knowable.comparison.statistics import FIRST, RankedMethod
from knowable.report.scores import SCORES, ScoreColumn, shown, with_error

if TYPE_CHECKING:
    from knowable.comparison.comparison import Comparison


_NOT_SHOWN = ("predict_seconds",)
_NOTE = """± is one standard error over folds. Methods are ranked by nll, the negative log predictive density; the
difference from the best is paired, row by row, and one below two standard errors is a tie (=)."""


def as_text(comparison: Comparison) -> str:
    """The ranking with all scores, then why folds are missing."""
    kinds = [kind for kind in comparison.scores if kind.name != FIRST and kind.name not in _NOT_SHOWN]
    header = ["", "method", FIRST, "from the best", *(kind.name for kind in kinds)]
    rows = [_cells(comparison, place, kinds) for place in comparison.ranking()]
    lines = [title(comparison), "", *aligned([header, *rows]), "", _NOTE, *comparison.notices]
    more = [*unsettled(comparison), *lacking(comparison)]
    return "\n".join([*lines, *(f"{source}: {why}" for source, why in more)])


def _cells(comparison: Comparison, place: RankedMethod, kinds: Sequence[ScoreColumn]) -> list[str]:
    first = with_error(place.score.mean, place.score.standard_error)
    if place.score.folds < comparison.folds:
        first += f" ({place.score.folds} of {comparison.folds} folds)"
    away = place.difference
    apart = "best" if place.verdict == "best" else with_error(away.mean, away.standard_error, sign=True)
    others = [_score(comparison, place.method, kind) for kind in kinds]
    return [f"{place.rank}{'=' if place.verdict == 'tied' else ''}", place.method, first, apart, *others]


def _score(comparison: Comparison, method: str, kind: ScoreColumn) -> str:
    found = comparison.mean(method, kind.name)
    return shown(found.mean, found.standard_error)


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (1,)) -> list[str]:
    """Columns of equal width: those numbered ``left`` to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


VERDICTS = {
    "best": "best",
    "tied": "tied with the best",
    "worse": "worse than the best",
    "unclear": "too few folds to tell",
}

READING = (
    ("Held-out rows", "k-fold cross-validation: every method is fitted to all folds but one and scored on that one, in "
     "turn, so each row is scored by a fit that has not seen it."),
    ("Standard error", "The standard error of a mean over folds. Training rows of different folds overlap, so it is "
     "slightly too small; treat differences below two standard errors as noise."),
    ("Paired difference", "Some rows are harder than others for all methods alike. The difference of two methods on "
     "the same row removes that, so its standard error is usually smaller than those of the means. Scores that are no "
     "mean over rows (RMSE, calibration error, seconds) are paired fold by fold."),
    ("Negative log predictive density (NLL)", "Judges the whole predictive distribution, spread included: the lower, "
     "the more probability a method gave to what happened. Confident mistakes cost most."),
    ("Coverage and width", "A 90% interval should contain the outcome nine times in ten. Among methods with that "
     "coverage, narrower intervals are more informative."),
    ("What a comparison cannot say", "Which method is best elsewhere. It is about this data, this model and the "
     "time that the fits were given."),
)  # fmt: skip
"""How to read a comparison, as pairs of a term and its explanation."""


def title(comparison: Comparison) -> str:
    """What was compared, in one line."""
    rows = comparison.facts.get("Rows")
    where = f" on {rows} rows" if rows else ""
    return f"Comparison of {_count(len(comparison.methods), 'method')}{where}, {_count(comparison.folds, 'fold')}"


def findings(comparison: Comparison) -> list[str]:
    """The best method, those tied with it, those that are worse."""
    places = comparison.ranking()
    best = places[0]
    label = SCORES[FIRST].label
    said = [f"{best.method} has the lowest {label}: {with_error(best.score.mean, best.score.standard_error)}."]
    tied = [place.method for place in places if place.verdict == "tied"]
    if tied:
        said.append(f"Within two standard errors of it: {listed(tied)}.")
    worse = [
        f"{place.method} by {with_error(place.difference.mean, place.difference.standard_error)}"
        for place in places
        if place.verdict == "worse"
    ]
    if worse:
        said.append(f"Worse: {listed(worse)}.")
    unclear = [place.method for place in places if place.verdict == "unclear"]
    if unclear:
        said.append(f"Too few folds to tell it apart from {listed(unclear)}.")
    return said


def troubles(comparison: Comparison) -> list[tuple[str, str]]:
    """Notices, unconverged fits, why folds are missing, and warnings, as pairs of a source and a sentence."""
    return (
        [("", text) for text in comparison.notices]
        + unsettled(comparison)
        + lacking(comparison)
        + [
            (method, text if count == 1 else f"{text} (in {count} of {comparison.folds} fits)")
            for method in comparison.methods
            for text, count in comparison.warnings(method).items()
        ]
    )


def unsettled(comparison: Comparison) -> list[tuple[str, str]]:
    """Which methods did not converge, as pairs of the method and in how many fits, with how the first of them ended."""
    found = []
    for method in comparison.methods:
        ended = comparison.not_converged(method)
        if ended:
            fits = sum(record.method == method and record.error is None for record in comparison.records)
            how = next((f" ({text})" for text in ended.values() if text), "")
            found.append((method, f"did not converge in {len(ended)} of {_count(fits, 'fit')}{how}"))
    return found


def lacking(comparison: Comparison) -> list[tuple[str, str]]:
    """Why folds are missing, as pairs of the method with its folds and the reason."""
    found = []
    for method in comparison.methods:
        folds: dict[str, list[int]] = {}
        for fold, why in comparison.failures(method).items():
            folds.setdefault(why, []).append(fold)
        found += [(f"{method}, {_folds(where)}", why) for why, where in folds.items()]
    return found


def _folds(numbers: Sequence[int]) -> str:
    return f"fold{'s' if len(numbers) > 1 else ''} {', '.join(str(number + 1) for number in sorted(numbers))}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
