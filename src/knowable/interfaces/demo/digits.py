"""Classification: handwritten digits, and which of them the model is unsure of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

import knowable as kn
from knowable.core.method import Method
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.progress import progress_bar
from knowable.datasets import Dataset, digits
from knowable.interfaces.demo.fits import Fits, stopping_note
from knowable.report.prediction_panels import curves_panel, pictures_panel, reliability_panel
from knowable.report.report import Listing, Section
from knowable.report.scores import SCORES, ScoreColumn, ScoreTable, score_table

HERO = "Deep ensemble"
HIDDEN = 64
SHOWN = 6  # digits of each kind in the report
KEPT = (1.0, 0.98, 0.95, 0.9, 0.8)  # shares of the digits that are labelled without a person

COLUMNS = (
    *(SCORES[name] for name in ("accuracy", "nll", "brier", "ece")),
    ScoreColumn(
        "auroc_of_errors", "AUROC of errors", better="higher",
        help="Probability that a wrongly labelled digit has a higher entropy than a correctly labelled one.",
    ),
    replace(SCORES["seconds"], better="none"),
)  # fmt: skip


def network_model() -> kn.Model:
    """A network with one hidden layer."""
    net = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    return kn.Model(net, kn.Categorical(), kn.Normal(1.0))


def methods(epochs: int | None) -> dict[str, Method]:
    """The methods; ``epochs`` None lets each stop by itself."""
    return {
        "Maximum likelihood": kn.MaximumLikelihood(epochs=epochs),
        "MAP": kn.MAP(epochs=epochs),
        "Laplace": kn.Laplace(epochs=epochs),
        HERO: kn.DeepEnsemble(10, epochs=epochs),
    }


@dataclass(frozen=True)
class DigitsResult:
    """What was fitted and scored."""

    train: int
    test: Dataset
    predictions: Mapping[str, ClassPrediction]
    scores: Mapping[str, kn.Scores]
    fits: Fits
    epochs: int | None  # passes over the data in each fit, or None if each stopped by itself


def run(*, seed: int, epochs: int | None, rows: int | None = None, progress: bool | None = None) -> DigitsResult:
    """Fit every method to the same training rows and predict the same held-out rows."""
    train, test = digits().split(seed, test=0.3)
    train = train if rows is None else train.rows(torch.arange(rows))
    fits, wanted = Fits("Digits"), methods(epochs)
    predictions: dict[str, ClassPrediction] = {}
    with progress_bar("digits", progress) as bar:
        for done, (name, method) in enumerate(wanted.items()):
            bar.update(done, len(wanted), name)
            posterior = fits.fit(name, method, network_model, train, seed=seed)
            predictions[name] = cast(ClassPrediction, posterior.predict(test.x))
    scores = {name: kn.evaluate(each, test.y) for name, each in predictions.items()}
    return DigitsResult(len(train), test, predictions, scores, fits, epochs)


def section(result: DigitsResult) -> Section:
    """The part of the report on this problem."""
    hero = result.predictions[HERO]
    order = hero.total.argsort(descending=True).tolist()
    images, y, classes = result.test.x.view(-1, 8, 8), result.test.y, result.test.classes
    chosen = (
        ("Least", order[:SHOWN], "largest entropy. These are the ones to show to a person."),
        ("Most", order[: -SHOWN - 1 : -1], "smallest entropy."),
    )
    pictures = [
        pictures_panel(f"{which} certain digits, {HERO}", hero, rows, images=images, y=y, classes=classes,
                       caption=f"The held-out digits with the {caption}")
        for which, rows, caption in chosen
    ]  # fmt: skip
    reliability = reliability_panel(
        "Calibration curve: accuracy against confidence",
        {name: (each, y) for name, each in result.predictions.items()},
        bins=5,
        caption="Accuracy against confidence, in five bins of confidence with bars of one standard error. Below "
        "the diagonal: overconfident.",
    )
    training = curves_panel(
        "Training",
        {name: each.diagnostics.history for name, each in result.fits.posteriors.items()},
        caption="Terms of each objective on the scale of the whole data set.",
    )
    return Section(
        title="Digits: which pictures are unclear",
        lead=f"{result.test.description} One network of {HIDDEN} hidden units, fitted by four methods to "
        f"{result.train:,} digits and scored on {len(result.test)} others.",
        findings=findings(result),
        tables=(table(result),),
        panels=(*pictures, reliability, training),
        listings=(result.fits.listing(), rejection(result)),
        notes=stopping_note(result.epochs),
    )


def rejection(result: DigitsResult) -> Listing:
    """What to do with it: how many digits are wrong once the least certain ones go to a person."""
    curves = {name: kn.metrics.risk_coverage(each, result.test.y).risk for name, each in result.predictions.items()}
    size = len(result.test)
    rows = [
        (
            f"{1 - kept:.0%} ({size - round(kept * size)})",
            *(f"{risk[round(kept * size) - 1]:.2%}" for risk in curves.values()),
        )
        for kept in KEPT
    ]
    return Listing("What to act on: show the least certain digits to a person", ("To a person", *curves), tuple(rows))


def table(result: DigitsResult) -> ScoreTable:
    """Scores of each method on the held-out digits."""
    seconds = {name: each.diagnostics.seconds for name, each in result.fits.posteriors.items()}
    return score_table(
        f"Digits, {len(result.test)} held out",
        {
            name: {**each, "auroc_of_errors": error_auroc(result, name), "seconds": seconds[name]}
            for name, each in result.scores.items()
        },
        COLUMNS,
        note=f"One random split: fitted to {result.train:,} digits, scored on {len(result.test)} others.",
        standard_errors={name: each.standard_errors for name, each in result.scores.items()},
    )


def error_auroc(result: DigitsResult, name: str) -> float:
    """Chance that a wrongly labelled digit has the larger entropy; NaN if all or none are wrong."""
    prediction = result.predictions[name]
    wrong = prediction.labels != result.test.y
    if wrong.all() or not wrong.any():
        return float("nan")
    return kn.metrics.auroc(prediction.total[~wrong], prediction.total[wrong])


def findings(result: DigitsResult) -> tuple[str, ...]:
    """The results in sentences."""
    hero = result.predictions[HERO]
    wrong = hero.labels != result.test.y
    tenth = hero.total.argsort(descending=True)[: max(1, len(result.test) // 10)]
    best = min(result.scores, key=lambda name: result.scores[name]["nll"])
    return (
        f"{HERO} labels {result.scores[HERO]['accuracy']:.1%} of the held-out digits correctly; {int(wrong.sum())} are "
        f"wrong, and {int(wrong[tenth].sum())} of these are among the tenth it is least certain of.",
        f"Lowest held-out NLL: {best} ({result.scores[best]['nll']:.3f}).",
        f"To act on: show the tenth that {HERO} is least certain of to a person, and of the other "
        f"{len(result.test) - len(tenth)} digits {int(wrong.sum()) - int(wrong[tenth].sum())} are wrong.",
    )
