"""The report of a comparison: the ranking with standard errors, all scores, agreement with the reference, failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from knowable.comparison.statistics import FIRST, TOLD_APART, Estimate, RankedMethod
from knowable.comparison.text import READING, VERDICTS, findings, title, troubles
from knowable.core.support.figure import new_figure
from knowable.report.figures import draw_forest
from knowable.report.panels import Axes, ForestPanel
from knowable.report.report import Citation, Listing, Notice, Report, Section
from knowable.report.scores import SCORES, Cell, ScoreColumn, ScoreTable, shown, with_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from knowable.comparison.comparison import Comparison

_ERRORS = "± is one standard error over folds."


def comparison_report(comparison: Comparison) -> Report:
    """Everything there is to say about a comparison, warnings first."""
    sections = [_ranking(comparison), Section(title="All scores", lead="", tables=(scores_table(comparison),))]
    if comparison.reference is not None:
        sections.append(_agreement(comparison))
    return Report(
        title="Comparison of inference methods",
        lead=f"{title(comparison)}.",
        facts=tuple(comparison.facts.items()),
        notices=tuple(Notice(source or "Comparison", text) for source, text in troubles(comparison)),
        sections=(*sections, _folds(comparison)),
        reading=READING,
        citations=_citations(comparison),
    )


def ranking_listing(comparison: Comparison) -> Listing:
    """The ranking by negative log predictive density, one row per method."""
    ranked = comparison.ranking()
    rows = tuple(
        (
            place.method,
            str(place.rank),
            _text(place.score),
            "–" if place.verdict == "best" else _text(place.difference, sign=True),
            VERDICTS[place.verdict],
            f"{place.score.folds} of {comparison.folds}",
            _converged(comparison, place),
        )
        for place in ranked
    )
    return Listing(
        "Ranking by negative log predictive density (NLL)",
        (
            "Method",
            "Rank",
            f"NLL ({SCORES[FIRST].direction})",
            "Difference from the best",
            "Verdict",
            "Folds",
            "Converged",
        ),
        rows,
        f"{_ERRORS} Differences are paired, row by row; methods within {TOLD_APART:g} standard errors are tied.",
        marks=tuple(place.verdict if place.verdict in ("best", "tied") else "" for place in ranked),
    )


def forest_panels(comparison: Comparison, score: str = FIRST) -> tuple[ForestPanel, ForestPanel]:
    """Means with one standard error, and paired differences from the best with two."""
    ranked, column = comparison.ranking(score), SCORES[score]
    means = _forest(
        ranked, [place.score for place in ranked], 1.0,
        title=f"{column.label} of each method", axis=f"{column.label} ({column.direction})",
        caption="Mean over folds ± one standard error.",
    )  # fmt: skip
    differences = _forest(
        ranked, [place.difference for place in ranked], TOLD_APART, difference=True,
        title="Paired difference from the best", axis=f"{column.label} minus that of {ranked[0].method}",
        caption=f"Row by row, ± {TOLD_APART:g} standard errors: an error bar that reaches zero is a tie.",
    )  # fmt: skip
    return means, differences


def plot_ranking(comparison: Comparison, score: str = FIRST) -> Figure:
    """Both forest plots side by side; see :meth:`Comparison.plot`."""
    panels = forest_panels(comparison, score)

    def draw(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            draw_forest(axes, panel)
            axes.set_title(panel.title, loc="left")

    return new_figure(8.8, 1.3 + 0.36 * len(panels[0].names), draw)


def _forest(
    ranked: Sequence[RankedMethod],
    values: Sequence[Estimate],
    errors: float,
    *,
    title: str,
    axis: str,
    caption: str,
    difference: bool = False,
) -> ForestPanel:
    """Marks with error bars of so many standard errors."""
    texts = tuple(
        "best" if difference and place.verdict == "best" else _text(value, sign=difference)
        for place, value in zip(ranked, values, strict=True)
    )
    halves = (errors * value.standard_error for value in values)
    names = tuple(place.method for place in ranked)
    return ForestPanel(
        title=title,
        caption=caption,
        alt=f"{title}: " + "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True)) + ".",
        axes=Axes(axis, "method"),
        names=names,
        values=tuple(value.mean for value in values),
        half_widths=tuple(half if math.isfinite(half) else 0.0 for half in halves),
        verdicts=tuple(place.verdict for place in ranked),
        texts=texts,
        zero=difference,
    )


def _ranking(comparison: Comparison) -> Section:
    return Section(
        title="Ranking",
        lead="Every method was fitted to the same folds and scored on rows it has not seen.",
        findings=tuple(findings(comparison)),
        panels=forest_panels(comparison),
        listings=(ranking_listing(comparison),),
    )


def scores_table(
    comparison: Comparison, title: str = "Means over folds", *, names: Sequence[str] | None = None
) -> ScoreTable:
    """Scores of every ranked method, each with the standard error over folds; ``names`` chooses some of the scores."""
    columns = tuple(column for column in comparison.scores if names is None or column.name in names)
    marks = {column.name: _marks(comparison, column) for column in columns}
    rows = tuple(
        (
            method,
            tuple(
                _cell(column, comparison.mean(method, column.name), marks[column.name].get(method, ""))
                for column in columns
            ),
        )
        for method in (place.method for place in comparison.ranking())
    )
    legend = "★ marks the best of a column, a light tint those tied with it in paired differences."
    return ScoreTable(title, _ERRORS, columns, rows, legend)


def _marks(comparison: Comparison, column: ScoreColumn) -> dict[str, str]:
    judged = column.ranks and column.name != "interval_width_90"  # narrow is good only where coverage is right
    ranked = comparison.ranking(column.name) if judged else ()
    return {place.method: place.verdict for place in ranked if place.verdict in ("best", "tied")}


def _cell(column: ScoreColumn, found: Estimate, mark: str) -> Cell:
    scale, unit = (100, "%") if column.percent and math.isfinite(found.mean) else (1, "")
    text, _, error = with_error(scale * found.mean, scale * found.standard_error).partition(" ± ")
    return Cell(found.mean, found.standard_error, f"{text}{unit}", f"± {error}{unit}" if error else "", mark)


def _agreement(comparison: Comparison) -> Section:
    heading = f"Agreement with {comparison.reference}"
    found = {place.method: comparison.agreement(place.method) for place in comparison.ranking()}
    names = tuple(dict.fromkeys(name for figures in found.values() for name in figures))
    if not names:
        return Section(title=heading, lead="The reference was not fitted on any fold: nothing can be compared with it.")
    rows = tuple((method, *(_text(figures[name]) for name in names)) for method, figures in found.items() if figures)
    return Section(
        title=heading,
        lead=f"Distance between the predictive functions of each method and those of {comparison.reference}, on "
        "held-out rows. A method that agrees has distances near 0 and ratios near 1; the reference is only as good as "
        "its own convergence.",
        listings=(Listing("Means over folds", ("Method", *(name.replace("_", " ") for name in names)), rows, _ERRORS),),
    )


def _folds(comparison: Comparison) -> Section:
    numbers = range(comparison.folds)
    rows = []
    for place in comparison.ranking():
        values = comparison.by_fold(place.method, FIRST)
        rows.append((place.method, *(shown(values[number]) if number in values else "–" for number in numbers)))
    headings = ("Method", *(f"Fold {number + 1}" for number in numbers))
    return Section(title="Fold by fold", lead="", listings=(Listing("NLL on each fold", headings, tuple(rows)),))


def _citations(comparison: Comparison) -> tuple[Citation, ...]:
    """Each paper once, under the methods it stands for."""
    papers: dict[str, list[str]] = {}
    for method, entries in comparison.citations.items():
        for entry in entries:
            papers.setdefault(entry.strip(), []).append(method)
    return tuple(Citation(", ".join(methods), bibtex) for bibtex, methods in papers.items())


def _converged(comparison: Comparison, place: RankedMethod) -> str:
    missed = len(comparison.not_converged(place.method))
    return f"not in {missed} of {place.score.folds}" if missed else "yes"


def _text(found: Estimate, *, sign: bool = False) -> str:
    return with_error(found.mean, found.standard_error, sign=sign)
