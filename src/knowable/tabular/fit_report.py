"""The report of one fit to a table: what was fitted, how good it is, where it is uncertain, and whether to trust it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knowable._version import __version__
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.errors import DamagedArtifact, InvalidType, KnowableWarning
from knowable.evaluation.evaluate import Scores, evaluate
from knowable.likelihoods.categorical import CategoricalPrediction
from knowable.registry import MethodEntry, find_method
from knowable.report import quality
from knowable.report.glossary import GLOSSARY
from knowable.report.input_panels import Importance, dependence_panel, importance_panel, importances
from knowable.report.panels import Panel
from knowable.report.prediction_panels import coverage_panel, quantile_panel, reliability_panel
from knowable.report.rejection import rejection_listing
from knowable.report.report import Citation, Listing, Notice, Report, Section
from knowable.report.row_panels import certainty_panel, data_listing, extreme_rows, row_listings, truth_panel
from knowable.report.verdict import terms_listing, traces_panel, training_panel, verdict
from knowable.tabular.estimators import BayesianEstimator
from knowable.tabular.reading import read_table
from knowable.tabular.targets import ClassTargets

if TYPE_CHECKING:
    from pandas import DataFrame

INPUTS_SHOWN = 4  # as figures


@dataclass(frozen=True)
class FittedRun:
    """A fitted estimator with the rows it is scored on."""

    estimator: BayesianEstimator
    data: str
    table: DataFrame  # all rows and columns, for the summary of the data
    inputs: DataFrame
    y: Tensor  # their outcomes: numbers in the user's unit, or codes of the classes
    lines: tuple[int, ...]  # where each of these rows is in the file, the header being line 1
    outcomes: Outcomes  # moments of the outcomes of the training rows
    seconds: float
    held_out: bool = True  # whether the rows to score were held out of the fit
    elsewhere: str = ""  # how these rows differ from those in training by design: other groups, later times
    notices: tuple[Notice, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # more ``(name, value)`` pairs for the head of the page
    delivered: BayesianEstimator | None = None  # the same fitted to all rows after the scores, which the run keeps
    all_outcomes: Outcomes | None = None  # moments of the outcomes of all rows, where ``delivered`` has seen them

    @property
    def target(self) -> str:
        """Name of the outcome."""
        return self.estimator.schema_.target[0]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their codes; empty for numbers."""
        return class_names(self.estimator)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of every input used, by name."""
        return {column.name: column.kind for column in self.estimator.schema_.columns}

    @property
    def posterior(self) -> Posterior:
        """The posterior."""
        return self.estimator.posterior_

    @property
    def method(self) -> MethodEntry:
        """Which method made it."""
        return find_method(type(self.estimator.method_).__name__)

    @property
    def why(self) -> str:
        """Why this method, where it was chosen automatically."""
        if self.estimator.method != "auto":
            return ""
        return f"{self.method.cls_name} was chosen automatically: {self.estimator.choice_.why}."

    @property
    def trained_on(self) -> int:
        """Number of training rows."""
        return self.estimator.schema_.rows

    @property
    def what_is_delivered(self) -> str:
        """Which model the run keeps, where rows were held out."""
        if self.delivered is not None:
            found = self.delivered.posterior_.diagnostics
            return (
                f"Scores are of a model fitted to {self.trained_on} rows; the run has the same model fitted to all "
                f"{self.delivered.schema_.rows} rows afterwards."
                + ("" if found.converged else f" Of that fit: {verdict(found).text}")
            )
        return f"The run has the model that was scored, fitted to {self.trained_on} rows." if self.held_out else ""

    def predict(self, frame: DataFrame) -> Prediction:
        """Predict rows of the user's table; what is wrong with them has been reported before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KnowableWarning)
            return self.estimator.predict_dist(read_table(frame))

    def encode(self, frame: DataFrame) -> np.ndarray:
        """Rows of the user's table as the network takes them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KnowableWarning)
            return self.estimator.schema_.encode(read_table(frame))

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction of the rows to score."""
        return self.predict(self.inputs)

    @cached_property
    def scores(self) -> Scores:
        """Its scores."""
        return evaluate(self.prediction, self.y)

    @cached_property
    def baseline(self) -> Scores:
        """Scores of a baseline that ignores the inputs."""
        return evaluate(self.outcomes.guess(self.prediction), self.y)


def class_names(estimator: BayesianEstimator) -> tuple[str, ...]:
    """Names of the classes in the order of their codes; empty for numbers."""
    targets = estimator.schema_.targets
    return tuple(str(label) for label in targets.classes) if isinstance(targets, ClassTargets) else ()


def fit_report(run: FittedRun) -> Report:
    """Everything there is to say about a fit, warnings first."""
    seed = _seed(run)
    rank = importances(run.predict, run.inputs, run.y, tuple(run.kinds), seed=seed)
    return Report(
        title=f"{run.target}, from {run.data}",
        lead=_lead(run),
        facts=_facts(run),
        notices=all_notices(run),
        sections=(
            _fitted_section(run),
            _data_section(run),
            _quality_section(run),
            _inputs_section(run, rank),
            _rows_section(run, [each.name for each in rank]),
            _fit_section(run),
        ),
        reading=GLOSSARY,
        citations=citations(run.method),
    )


def all_notices(run: FittedRun) -> tuple[Notice, ...]:
    """All warnings: of the fit, of the data, of the quality; each text once."""
    found = list(run.notices)
    judgement = verdict(run.posterior.diagnostics)
    if judgement.good is False and not any(notice.source == "Fit" for notice in found):
        found.insert(0, Notice("Fit", judgement.text))
    found += [Notice("Fit", note) for note in run.posterior.diagnostics.notes]
    if not run.held_out:
        found.append(
            Notice("Scores", "No rows were held out: scores are on the training rows and too good to be true.")
        )
    found += quality.quality_notices(run.scores, run.baseline)
    found += quality.residual_notices(run.prediction, run.y, elsewhere=run.elsewhere)
    return tuple({notice.text: notice for notice in found}.values())


def citations(method: MethodEntry) -> tuple[Citation, ...]:
    """The papers behind a method, then the library."""
    papers = [
        Citation(f"{method.cls_name}, {key}", text.strip())
        for key, text in zip(method.references, method.bibtex, strict=True)
    ]
    library = f"@software{{knowable,\n  title = {{knowable}},\n  version = {{{__version__}}}\n}}"
    return (*papers, Citation("The library", library))


def _lead(run: FittedRun) -> str:
    what = "which of " + ", ".join(run.classes[:6]) if run.classes else "a number"
    more = ", …" if len(run.classes) > 6 else ""
    return (
        f"{run.method.cls_name} was fitted to {run.trained_on} rows to predict {run.target} ({what}{more}) "
        f"from {len(run.kinds)} inputs, with the uncertainty of every prediction."
    )


def _facts(run: FittedRun) -> tuple[tuple[str, str], ...]:
    held = str(len(run.y)) if run.held_out else "none"
    return (
        ("Method", run.method.cls_name),
        ("Training rows", str(run.trained_on)),
        ("Held-out rows", held),
        ("Inputs", str(len(run.kinds))),
        ("Seed", str(run.estimator.random_state)),
        ("Time of the fit", f"{run.seconds:.1f} s"),
        *((("Model in the run", f"refitted to all {run.delivered.schema_.rows} rows"),) if run.delivered else ()),
        *run.facts,
        ("knowable", __version__),
    )


def _fitted_section(run: FittedRun) -> Section:
    model = run.posterior.model
    count = sum(value.numel() for value in model.params().values())
    rows = (
        ("Network", f"{type(model.net).__name__}, {count:,} parameters"),
        ("Likelihood", repr(model.likelihood)),
        ("Prior", repr(model.prior)),
        ("Method", repr(run.estimator.method_)),
        ("Posterior", repr(run.posterior)),
    )
    judgement = verdict(run.posterior.diagnostics)
    return Section(
        title="What was fitted",
        lead=run.why or f"{run.method.cls_name}: {run.method.summary}.",
        findings=(judgement.text,),
        listings=(Listing("The model", ("Part", "Setting"), rows),),
    )


def _data_section(run: FittedRun) -> Section:
    missing = int(run.table.isna().any(axis=1).sum())
    gaps = f"{missing} rows have missing values, which were imputed and flagged." if missing else "No value is missing."
    split = f"{len(run.y)} of them, not seen in the fit, are for the scores." if run.held_out else "None were held out."
    return Section(
        title="The data",
        lead=f"{len(run.table)} rows and {len(run.kinds)} inputs. {split} {gaps}",
        listings=(data_listing(run.table, run.kinds, run.target),),
    )


def _quality_section(run: FittedRun) -> Section:
    name = run.method.cls_name
    rows = f"{len(run.y)} rows that were not in the fit" if run.held_out else "The rows it was fitted to"
    title = "Scores on held-out rows" if run.held_out else "Scores on the training rows"
    table = quality.quality_table(name, run.scores, run.baseline, title=title, note=f"{rows}.")
    panels: tuple[Panel, ...]
    listings: tuple[Listing, ...] = ()
    if isinstance(run.prediction, RegressionPrediction):
        most, least = extreme_rows(run.prediction)
        panels = (
            coverage_panel(
                "Calibration curve: coverage of intervals", {name: [(run.prediction, run.y)]}, caption=_COVERAGE
            ),
            quantile_panel("Calibration curve: quantiles", {name: (run.prediction, run.y)}, caption=_QUANTILES),
            truth_panel(run.target, run.prediction, run.y, run.lines, always=[*most, *least]),
            certainty_panel({"error": run.prediction}, run.y),
        )
    else:
        assert isinstance(run.prediction, ClassPrediction)
        panels = (
            reliability_panel(
                "Calibration curve: accuracy against confidence", {name: (run.prediction, run.y)}, caption=_RELIABILITY
            ),
            certainty_panel({"error": run.prediction}, run.y),
        )
        confusion = quality.confusion_matrix(run.prediction, run.y, run.classes)
        listings = (confusion,) if confusion else ()
    rejection = rejection_listing(run.prediction, run.y, scale=run.outcomes.std) if run.held_out else None
    return Section(
        title="Scores and calibration",
        lead="Every score has its standard error, beside the score of a baseline that knows the outcomes of the "
        f"training rows but no inputs. {run.what_is_delivered}".rstrip(),
        findings=quality.findings(run.scores, run.baseline),
        tables=(table,),
        panels=panels,
        listings=(*listings, rejection) if rejection else listings,
    )


def _inputs_section(run: FittedRun, rank: Sequence[Importance]) -> Section:
    bars = importance_panel(rank)
    curves = [
        dependence_panel(
            run.predict,
            run.inputs,
            each.name,
            kind=run.kinds[each.name],
            target=run.target,
            classes=run.classes,
            seed=_seed(run),
        )
        for each in rank[:INPUTS_SHOWN]
    ]
    panels = tuple(panel for panel in (bars, *curves) if panel is not None)
    return Section(title="Feature importance and partial dependence", lead=_INPUTS_LEAD, panels=panels)


def _rows_section(run: FittedRun, inputs: Sequence[str]) -> Section:
    listings = row_listings(run.prediction, run.y, run.inputs, run.lines, inputs=inputs, classes=run.classes)
    return Section(title="The most and least certain rows", lead=_ROWS_LEAD, listings=listings)


def _fit_section(run: FittedRun) -> Section:
    diagnostics = run.posterior.diagnostics
    most, least = extreme_rows(run.prediction, 1)
    places = sorted({*most, *least})
    panels = (
        training_panel(run.method.cls_name, diagnostics),
        traces_panel(run.posterior, run.encode(run.inputs.iloc[places]), [run.lines[place] for place in places])
        if places
        else None,
    )
    terms = terms_listing(diagnostics)
    evidence = run.posterior.log_evidence
    return Section(
        title="Convergence",
        lead=verdict(diagnostics).text,
        findings=() if evidence is None else (f"Log evidence: {evidence!r}.",),
        panels=tuple(panel for panel in panels if panel is not None),
        listings=(terms,) if terms else (),
    )


_COVERAGE = (
    "Observed against nominal coverage of central intervals. Below the diagonal: overconfident. The grey band is what "
    "chance alone allows."
)
_QUANTILES = (
    "How often the outcome was below a predicted quantile. Above the diagonal: predictions are too high. Steeper than "
    "it in the middle: the spread is too wide; flatter: too narrow."
)
_RELIABILITY = (
    "Accuracy among rows of similar confidence. Below the diagonal: overconfident. The grey band is what chance alone "
    "allows."
)
_ROWS_LEAD = (
    "Look here first when you decide what to trust. The most certain rows should be right; what the least certain ones "
    "have in common says which data would help."
)
_INPUTS_LEAD = (
    "Permutation importance of every input, then partial dependence: one input is changed at a time while the others "
    "stay as they are, for the inputs that matter most. Where the epistemic uncertainty rises there were few training "
    "rows like these. Combinations that never occur are averaged over too, so read the curves with care where inputs "
    "are correlated."
)


def _seed(run: FittedRun) -> int:
    seed: Any = run.estimator.random_state
    return seed if isinstance(seed, int) else 0


# --- The outcomes of the training rows: enough for a baseline without inputs ------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """Moments of numbers, or counts of classes."""

    mean: float = 0.0
    std: float = 1.0  # their standard deviation (divided by n)
    counts: tuple[int, ...] = ()  # rows of each class; empty for numbers

    @classmethod
    def of(cls, y: Tensor, classes: int = 0) -> Outcomes:
        """Of numbers ``(rows,)``, or of codes where there are ``classes``."""
        if classes:
            return cls(counts=tuple(torch.bincount(y.flatten().long(), minlength=classes).tolist()))
        known = y.double().flatten()
        return cls(known.mean().item(), known.std(correction=0).item())

    def guess(self, prediction: Prediction) -> Prediction:
        """The prediction for the rows of ``prediction`` that knows only these outcomes.

        Numbers: the normal distribution with their mean and standard deviation. Classes: their shares, with one more
        of each, so that none is held impossible.
        """
        rows, weight = len(prediction), torch.zeros(1, dtype=torch.float64)
        if isinstance(prediction, RegressionPrediction):
            mean = torch.tensor(self.mean, dtype=torch.float64).expand(1, rows, *prediction.mean.shape[1:])
            scale = torch.tensor(max(self.std, 1e-300), dtype=torch.float64)
            return RegressionPrediction(NormalComponents(mean, scale), weight)
        if isinstance(prediction, ClassPrediction):
            shares = torch.tensor(self.counts, dtype=torch.float64) + 1.0
            return CategoricalPrediction((shares / shares.sum()).log().expand(1, rows, len(shares)), weight)
        raise InvalidType(f"prediction must be over numbers or classes, got a {type(prediction).__name__}.")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Outcomes:
        """Back from plain values."""
        try:
            return cls(float(saved["mean"]), float(saved["std"]), tuple(int(count) for count in saved["counts"]))
        except (KeyError, TypeError, ValueError):
            raise DamagedArtifact("The run does not say what its training outcomes were. Fit again.") from None
