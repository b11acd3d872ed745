"""The report of one fit to a table: what was fitted, how good it is, where it is unsure, and whether to trust it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.evaluation.evaluate import Scores, evaluate
from knowable.registry import MethodEntry
from knowable.report import quality, run_words
from knowable.report.input_panels import Importance, Predict, dependence_panel, importance_panel, importances
from knowable.report.panels import Panel
from knowable.report.prediction_panels import coverage_panel, quantile_panel, reliability_panel
from knowable.report.quality import Outcomes
from knowable.report.report import Citation, Listing, Notice, Report, Section
from knowable.report.row_panels import certainty_panel, extreme_rows, row_listings, truth_panel
from knowable.report.verdict import terms_listing, traces_panel, training_panel, verdict

if TYPE_CHECKING:
    from pandas import DataFrame, Series


INPUTS_SHOWN = 4  # as figures


@dataclass(frozen=True)
class Rows:
    """Some rows of the user's table.

    Attributes:
        frame: Their inputs, as the user gave them.
        y: Outcomes: numbers in the user's unit, or codes of the classes.
        lines: Where each row is in the file, the header being line 1.
    """

    frame: DataFrame
    y: Tensor
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True)
class FittedTable:
    """A fit to a table, and what its report needs to know.

    Attributes:
        name: What the data is called.
        target: Name of the outcome.
        classes: Names of the classes in the order of their codes; empty for numbers.
        kinds: The kind of every input used, by name.
        predict: Rows of the user's table to a prediction in the user's units.
        encode: Rows of the user's table to what the network takes.
        posterior: The posterior.
        method: Which method made it.
        settings: The method with its settings, as text.
        why: Why this method, where it was chosen for the user.
        seed: Seed of the fit.
        seconds: Time the fit took.
        trained_on: How many rows it was fitted to.
        outcomes: What their outcomes were.
        table: All rows and columns there are, for the summary of the data.
        held_out: Rows to score, which it has not seen; the training rows where ``seen`` is set.
        seen: Whether scores are on the training rows, because none were held out.
        notices: What was warned about.
        facts: More ``(name, value)`` pairs for the head of the page.
    """

    name: str
    target: str
    classes: tuple[str, ...]
    kinds: Mapping[str, str]
    predict: Predict
    encode: Callable[[DataFrame], Any]
    posterior: Posterior
    method: MethodEntry
    settings: str
    why: str
    seed: int
    seconds: float
    trained_on: int
    outcomes: Outcomes
    table: DataFrame
    held_out: Rows
    seen: bool = False
    notices: tuple[Notice, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(self.kinds)


@dataclass(frozen=True)
class Judged:
    """A prediction of the held-out rows with its scores, and those of a guess without inputs."""

    prediction: Prediction
    scores: Scores
    baseline: Scores

    @classmethod
    def of(cls, fitted: FittedTable) -> Judged:
        """Predict and score the held-out rows."""
        prediction = fitted.predict(fitted.held_out.frame)
        plain = fitted.outcomes.guess(prediction)
        scored = (evaluate(each, fitted.held_out.y) for each in (prediction, plain))
        return cls(prediction, *scored)


def run_report(fitted: FittedTable, judged: Judged | None = None) -> Report:
    """Everything there is to say about a fit, warnings first.

    Args:
        fitted: The fit.
        judged: Its held-out prediction and scores, if they are there already.
    """
    judged = judged or Judged.of(fitted)
    rank = importances(fitted.predict, fitted.held_out.frame, fitted.held_out.y, fitted.inputs, seed=fitted.seed)
    return Report(
        title=f"{fitted.target}, from {fitted.name}",
        lead=_lead(fitted),
        facts=_facts(fitted),
        notices=all_notices(fitted, judged),
        sections=(
            _fitted_section(fitted),
            _data_section(fitted),
            _quality_section(fitted, judged),
            _inputs_section(fitted, rank),
            _rows_section(fitted, judged, [each.name for each in rank]),
            _fit_section(fitted, judged),
        ),
        reading=run_words.READING,
        citations=citations(fitted.method),
    )


def all_notices(fitted: FittedTable, judged: Judged) -> tuple[Notice, ...]:
    """All warnings: of the fit, of the data, of the quality; each text once."""
    found = list(fitted.notices)
    judgement = verdict(fitted.posterior.diagnostics)
    if judgement.good is False and not any(notice.source == "Fit" for notice in found):
        found.insert(0, Notice("Fit", judgement.text))
    found += [Notice("Fit", note) for note in fitted.posterior.diagnostics.notes]
    if fitted.seen:
        found.append(
            Notice("Scores", "No rows were held out: scores are on the training rows and too good to be true.")
        )
    found += quality.quality_notices(judged.scores, judged.baseline)
    return tuple({notice.text: notice for notice in found}.values())


def citations(method: MethodEntry) -> tuple[Citation, ...]:
    """The papers behind a method, then the library."""
    from knowable._version import __version__

    papers = [
        Citation(f"{method.cls_name}, {key}", text.strip())
        for key, text in zip(method.references, method.bibtex, strict=True)
    ]
    library = f"@software{{knowable,\n  title = {{knowable}},\n  version = {{{__version__}}}\n}}"
    return (*papers, Citation("The library", library))


def _lead(fitted: FittedTable) -> str:
    what = "which of " + ", ".join(fitted.classes[:6]) if fitted.classes else "a number"
    more = ", …" if len(fitted.classes) > 6 else ""
    return (
        f"{fitted.method.cls_name} was fitted to {fitted.trained_on} rows to predict {fitted.target} ({what}{more}) "
        f"from {len(fitted.kinds)} inputs, and says for every row how sure it is."
    )


def _facts(fitted: FittedTable) -> tuple[tuple[str, str], ...]:
    from knowable._version import __version__

    held = "none" if fitted.seen else str(len(fitted.held_out))
    return (
        ("Method", fitted.method.cls_name),
        ("Training rows", str(fitted.trained_on)),
        ("Held-out rows", held),
        ("Inputs", str(len(fitted.kinds))),
        ("Seed", str(fitted.seed)),
        ("Time of the fit", f"{fitted.seconds:.1f} s"),
        *fitted.facts,
        ("knowable", __version__),
    )


def _fitted_section(fitted: FittedTable) -> Section:
    model = fitted.posterior.model
    count = sum(value.numel() for value in model.params().values())
    rows = (
        ("Network", f"{type(model.net).__name__}, {count:,} parameters"),
        ("Likelihood", repr(model.likelihood)),
        ("Prior", repr(model.prior)),
        ("Method", fitted.settings),
        ("Posterior", repr(fitted.posterior)),
    )
    judgement = verdict(fitted.posterior.diagnostics)
    return Section(
        title="What was fitted",
        lead=fitted.why or f"{fitted.method.cls_name}: {fitted.method.summary}.",
        findings=(judgement.text,),
        listings=(Listing("The model", ("Part", "Setting"), rows),),
    )


def _data_section(fitted: FittedTable) -> Section:
    missing = int(fitted.table.isna().any(axis=1).sum())
    gaps = f" {missing} rows have gaps, which were filled in and marked." if missing else " No value is missing."
    return Section(
        title="The data",
        lead=f"{len(fitted.table)} rows and {len(fitted.kinds)} inputs. {_split_words(fitted)}{gaps}",
        listings=(data_listing(fitted.table, fitted.kinds, fitted.target),),
    )


def _split_words(fitted: FittedTable) -> str:
    if fitted.seen:
        return "None were held out."
    return f"{len(fitted.held_out)} of them, not seen in the fit, are for the scores."


def _quality_section(fitted: FittedTable, judged: Judged) -> Section:
    held, name = fitted.held_out, fitted.method.cls_name
    rows = "The rows it was fitted to" if fitted.seen else f"{len(held)} rows that were not in the fit"
    title = "Scores on the training rows" if fitted.seen else "Scores on rows the fit has not seen"
    table = quality.quality_table(name, judged.scores, judged.baseline, title=title, note=f"{rows}.")
    panels: tuple[Panel, ...]
    listings: tuple[Listing, ...] = ()
    if isinstance(judged.prediction, RegressionPrediction):
        most, least = extreme_rows(judged.prediction)
        panels = (
            coverage_panel("Are the intervals honest?", {name: (judged.prediction, held.y)}, caption=_COVERAGE),
            quantile_panel("Too high or too low?", {name: (judged.prediction, held.y)}, caption=_QUANTILES),
            truth_panel(fitted.target, judged.prediction, held.y, held.lines, always=[*most, *least]),
            certainty_panel(judged.prediction, held.y),
        )
    else:
        assert isinstance(judged.prediction, ClassPrediction)
        panels = (
            reliability_panel("Is the confidence honest?", {name: (judged.prediction, held.y)}, caption=_RELIABILITY),
            certainty_panel(judged.prediction, held.y),
        )
        table_of_confusions = quality.confusions(judged.prediction, held.y, fitted.classes)
        listings = (table_of_confusions,) if table_of_confusions else ()
    return Section(
        title="How good are the predictions?",
        lead="Every score comes with its standard error, beside that of a guess that knows the outcomes of the "
        "training rows but no inputs.",
        findings=quality.findings(judged.scores, judged.baseline),
        tables=(table,),
        panels=panels,
        listings=listings,
    )


def _inputs_section(fitted: FittedTable, rank: Sequence[Importance]) -> Section:
    bars = importance_panel(rank)
    curves = [
        dependence_panel(
            fitted.predict,
            fitted.held_out.frame,
            each.name,
            kind=fitted.kinds[each.name],
            target=fitted.target,
            classes=fitted.classes,
            seed=fitted.seed,
        )
        for each in rank[:INPUTS_SHOWN]
    ]
    panels = tuple(panel for panel in (bars, *curves) if panel is not None)
    return Section(title="Where is it unsure? Input by input", lead=run_words.INPUTS_LEAD, panels=panels)


def _rows_section(fitted: FittedTable, judged: Judged, inputs: Sequence[str]) -> Section:
    held = fitted.held_out
    listings = row_listings(judged.prediction, held.y, held.frame, held.lines, inputs=inputs, classes=fitted.classes)
    return Section(title="The most and least certain rows", lead=run_words.ROWS_LEAD, listings=listings)


def _fit_section(fitted: FittedTable, judged: Judged) -> Section:
    diagnostics = fitted.posterior.diagnostics
    most, least = extreme_rows(judged.prediction, 1)
    places = sorted({*most, *least})
    held = fitted.held_out
    panels = (
        training_panel(fitted.method.cls_name, diagnostics),
        traces_panel(fitted.posterior, fitted.encode(held.frame.iloc[places]), [held.lines[place] for place in places])
        if places
        else None,
    )
    terms = terms_listing(diagnostics)
    evidence = fitted.posterior.log_evidence
    return Section(
        title="Did the fit succeed?",
        lead=verdict(diagnostics).text,
        findings=() if evidence is None else (f"Log evidence: {evidence!r}.",),
        panels=tuple(panel for panel in panels if panel is not None),
        listings=(terms,) if terms else (),
    )


_COVERAGE = (
    "How often intervals of a promised level held the outcome. Below the diagonal: overconfident. The grey band is "
    "what chance alone allows."
)
_QUANTILES = (
    "How often the outcome was below a predicted quantile. Above the diagonal: predictions are too high. Steeper than "
    "it in the middle: the spread is too wide; flatter: too narrow."
)
_RELIABILITY = (
    "Among rows with a given confidence, the share that was right. Below the diagonal: overconfident. The grey band is "
    "what chance alone allows."
)


# --- The columns of a table in words ---------------------------------------------------------------------------------

_MOST = 60  # columns of the table


def data_listing(frame: DataFrame, kinds: Mapping[str, str], target: str) -> Listing:
    """One row for each column: its kind, what is missing, and what it holds; the outcome first.

    Args:
        frame: All rows, as the user gave them.
        kinds: The kind of every input that is used.
        target: Name of the outcome.
    """
    others = [name for name in frame.columns if name != target]
    shown = [target, *others][: _MOST + 1]
    columns: dict[Any, Any] = {name: frame[name] for name in shown}
    rows = tuple(_row(str(name), column, _kind(name, kinds, target)) for name, column in columns.items())
    left = len(others) + 1 - len(shown)
    note = f"{left} more columns are not listed." if left else ""
    return Listing("Columns", ("Column", "Kind", "Missing", "Distinct", "Holds"), rows, note)


def _kind(name: Any, kinds: Mapping[str, str], target: str) -> str:
    if name == target:
        return "outcome"
    return kinds.get(str(name), "not used")


def _row(name: str, values: Series, kind: str) -> tuple[str, ...]:
    missing = int(values.isna().sum())
    share = f"{missing} ({missing / max(1, len(values)):.0%})" if missing else "none"
    return name, kind, share, str(values.nunique()), _holds(values.dropna())


def _holds(values: Series) -> str:
    """A range with the middle for numbers and dates; the most frequent values for everything else."""
    import pandas

    if not len(values):
        return "nothing"
    types = pandas.api.types
    if types.is_bool_dtype(values):
        return f"true in {values.astype(bool).mean():.0%}"
    if types.is_numeric_dtype(values):
        return f"{values.min():.5g} to {values.max():.5g}, median {values.median():.5g}"
    if types.is_datetime64_any_dtype(values):
        return f"{values.min():%Y-%m-%d} to {values.max():%Y-%m-%d}"
    counts = values.astype(str).value_counts()
    named = ", ".join(f"{_cut(str(value))} ({count})" for value, count in counts.head(3).items())
    return f"{named}{', …' if len(counts) > 3 else ''}"


def _cut(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"
