"""A comparison as one self-contained HTML page: no network, no scripts, readable on a phone and on paper.

Every word that comes from outside is escaped. The drawings have text alternatives, and every number in them is in a
table too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from knowable.comparison.comparison import TOLD_APART, Estimate, Place
from knowable.comparison.forest import Mark, forest
from knowable.comparison.scores import BY_NAME, FIRST, ScoreKind, shown, with_error
from knowable.comparison.text import READING, VERDICTS, findings, title, troubles

if TYPE_CHECKING:
    from knowable.comparison.comparison import Comparison

GENERATOR = '<meta name="generator" content="knowable">'
"""The mark by which a page says who made it."""


def page(comparison: Comparison) -> str:
    """The whole page."""
    heading = "Which method to trust"
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        GENERATOR,
        f"<title>{escape(heading)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
        f'<header><h1>{escape(heading)}</h1>\n<p class="lead">{escape(title(comparison))}.</p></header>\n<main>',
        _notices(comparison),
        _facts(comparison),
        _section("Ranking", _ranking(comparison)),
        _section("All scores", _scores(comparison)),
        _section(f"Agreement with {comparison.reference}", _agreement(comparison)) if comparison.reference else "",
        _section("Fold by fold", _folds(comparison)),
        _section("How to read this", _definitions(READING, "help")),
        _section("How to cite", _citations(comparison)) if comparison.citations else "",
        "</main>\n<footer>Made by knowable. This page loads nothing from the network.</footer>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def fragment(comparison: Comparison) -> str:
    """The ranking alone, for notebooks."""
    return f"<p>{escape(title(comparison))}.</p>{_ranking_table(comparison)}"


# --- parts -----------------------------------------------------------------------------------------------------------


def _section(heading: str, body: str) -> str:
    key = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
    return f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(heading)}</h2>\n{body}\n</section>'


def _notices(comparison: Comparison) -> str:
    found = [*(("", text) for text in comparison.notices), *troubles(comparison)]
    if not found:
        return (
            '<section class="notices clear" aria-labelledby="notices"><h2 id="notices">No warnings</h2>'
            "<p>Every fit was finished, and none reported a problem.</p></section>"
        )
    items = "".join(
        f"<li>{f'<strong>{escape(source)}:</strong> ' if source else ''}{escape(text)}</li>\n" for source, text in found
    )
    return (
        '<section class="notices" aria-labelledby="notices"><h2 id="notices">Warnings</h2>\n'
        f"<ul>\n{items}</ul></section>"
    )


def _facts(comparison: Comparison) -> str:
    return _definitions(comparison.facts.items(), "facts")


def _definitions(pairs: Iterable[tuple[str, str]], name: str) -> str:
    rows = "\n".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in pairs)
    return f'<dl class="{name}">\n{rows}\n</dl>'


def _ranking(comparison: Comparison) -> str:
    kind = BY_NAME[FIRST]
    places = comparison.ranking()
    said = "\n".join(f"<li>{escape(text)}</li>" for text in findings(comparison))
    means = [_mark(place, place.score, 1.0) for place in places]
    apart = [_mark(place, place.difference, TOLD_APART, sign=True) for place in places]
    left = _figure(
        f"{kind.label} of each method",
        forest(means, axis=f"{kind.label}, {kind.direction}", alt=_alt(f"Mean {kind.label}", means)),
        "Mean over folds, with a bar of one standard error to each side.",
    )
    right = _figure(
        "Paired difference from the best",
        forest(
            apart, axis=f"{kind.label} less that of {places[0].method}", alt=_alt("Differences from the best", apart),
            zero=True,
        ),
        f"Fold by fold, with a bar of {TOLD_APART:g} standard errors to each side: a bar that reaches zero is a tie.",
    )  # fmt: skip
    return f'<ul>\n{said}\n</ul>\n{_ranking_table(comparison)}\n<div class="panels">\n{left}\n{right}\n</div>'


def _ranking_table(comparison: Comparison) -> str:
    kind = BY_NAME[FIRST]
    headings = ["Method", "Rank", _heading(kind), "Difference from the best", "Verdict", "Folds"]
    rows = [
        (
            place.verdict,
            [
                escape(place.method),
                str(place.rank),
                _value(place.score),
                "–" if place.verdict == "best" else _value(place.difference, sign=True),
                escape(VERDICTS[place.verdict]),
                f"{place.score.folds} of {comparison.folds}",
            ],
        )
        for place in comparison.ranking()
    ]
    note = (
        "± is one standard error over folds. Differences are taken fold by fold, since all methods met the same folds; "
        f"within {TOLD_APART:g} standard errors two methods are tied."
    )
    return (
        _table("Ranking by negative log predictive density", headings, rows, words=(4,)) + f'<p class="note">{note}</p>'
    )


def _scores(comparison: Comparison) -> str:
    kinds = comparison.scores
    rows = [
        (
            place.verdict if place.verdict == "best" else "",
            [escape(place.method), *(_value(comparison.mean(place.method, kind.name)) for kind in kinds)],
        )
        for place in comparison.ranking()
    ]
    table = _table("Means over folds ± one standard error", ["Method", *map(_heading, kinds)], rows)
    return table + _definitions([(kind.label, kind.help) for kind in kinds], "help")


def _agreement(comparison: Comparison) -> str:
    found = {method: comparison.agreement(method) for method in comparison.methods}
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    if not names:
        return "<p>The reference was not fitted on any fold, so that nothing could be held against it.</p>"
    rows = [
        ("", [escape(place.method), *(_value(found[place.method][name]) for name in names)])
        for place in comparison.ranking()
        if found[place.method]
    ]
    lead = (
        f"How far the functions of each method are from those of {comparison.reference}, at rows held out. A method "
        "that agrees has distances near 0 and ratios near 1; the reference is only as good as its mixing."
    )
    table = _table(
        "Means over folds ± one standard error", ["Method", *(escape(name.replace("_", " ")) for name in names)], rows
    )
    return f"<p>{escape(lead)}</p>{table}"


def _folds(comparison: Comparison) -> str:
    numbers = range(comparison.folds)
    rows = []
    for place in comparison.ranking():
        values = comparison.by_fold(place.method, FIRST)
        rows.append(("", [escape(place.method), *(escape(shown(values[n])) if n in values else "–" for n in numbers)]))
    headings = ["Method", *(f"Fold {number + 1}" for number in numbers)]
    table = _table(f"{BY_NAME[FIRST].label} on each fold", headings, rows)
    return f"<details><summary>{escape(BY_NAME[FIRST].label)} of every method on every fold</summary>{table}</details>"


def _citations(comparison: Comparison) -> str:
    """Each paper once, under the methods it stands for."""
    papers: dict[str, list[str]] = {}
    for method, entries in comparison.citations.items():
        for entry in entries:
            papers.setdefault(entry.strip(), []).append(method)
    blocks = [f"<h3>{escape(', '.join(names))}</h3>\n<pre>{escape(text)}</pre>" for text, names in papers.items()]
    return f"<details><summary>BibTeX of {len(papers)} papers</summary>\n" + "\n".join(blocks) + "\n</details>"


# --- elements --------------------------------------------------------------------------------------------------------


def _table(
    caption: str, headings: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, words: Sequence[int] = ()
) -> str:
    """A table of cells that are markup already; the first of a row names it. Rows have a class or none."""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = []
    for kind, (first, *cells) in rows:
        opening = f'<tr class="{kind}">' if kind else "<tr>"
        others = (
            f'<td class="words">{cell}</td>' if number in words else f"<td>{cell}</td>"
            for number, cell in enumerate(cells, 1)
        )
        body.append(f'{opening}<th scope="row">{first}</th>{"".join(others)}</tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody>"
        "\n</table>\n</div>\n"
    )


def _heading(kind: ScoreKind) -> str:
    direction = f' <span class="direction">{escape(kind.direction)}</span>' if kind.direction else ""
    return f"{escape(kind.label)}{direction}"


def _value(found: Estimate, *, sign: bool = False) -> str:
    """A mean with its error below it."""
    text, _, error = with_error(found.mean, found.standard_error, sign=sign).partition(" ± ")
    return f"<span>{escape(text)}</span>" + (f' <span class="error">± {escape(error)}</span>' if error else "")


def _mark(place: Place, found: Estimate, errors: float, *, sign: bool = False) -> Mark:
    half = errors * found.standard_error
    text = "the best" if sign and place.verdict == "best" else with_error(found.mean, found.standard_error, sign=sign)
    return Mark(place.method, found.mean, half if half == half else 0.0, text, place.verdict)


def _alt(what: str, marks: Sequence[Mark]) -> str:
    return f"{what}: " + "; ".join(f"{mark.name} {mark.text}" for mark in marks) + "."


def _figure(heading: str, drawing: str, caption: str) -> str:
    return f"<figure>\n<h3>{escape(heading)}</h3>\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
