"""Classification from few examples: a hundred handwritten digits, and which of the others to show to a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.method import Method
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.progress import progress_bar
from knowable.datasets import Dataset, digits
from knowable.interfaces.demo.fits import Fits, stopping_note
from knowable.report.prediction_panels import curves_panel, pictures_panel, reliability_panel
from knowable.report.rejection import DELTA, certified_rule
from knowable.report.report import Listing, Section
from knowable.report.row_panels import certainty_panel
from knowable.report.scores import SCORES, ScoreColumn, ScoreTable, score_table, with_error

HERO = "Deep ensemble"
PLAIN = "Maximum likelihood"  # ordinary training
POINT = "MAP"  # the same prior as the hero, one network
TRAINING_ROWS = 100
SHOWN = 6  # digits of each kind in the report
SURE = 0.9  # probability from which a label counts as confident
KEPT = (1.0, 0.95, 0.9, 0.8, 0.7)  # shares of the digits that are labelled without a person
RISKS = (0.05, 0.03, 0.02, 0.01)  # shares of wrong labels that might be tolerated, in the order of their tests

COLUMNS = (
    *(SCORES[name] for name in ("accuracy", "nll", "brier")),
    ScoreColumn(
        "auroc_of_errors", "AUROC of errors", better="higher",
        help="Probability that a wrongly labelled digit has a higher entropy than a correctly labelled one.",
    ),
    replace(
        SCORES["auroc_outside"], label="AUROC of turned digits",
        help="Probability that a digit lying on its side has a higher entropy than an upright one.",
    ),
    replace(SCORES["seconds"], better="none"),
)  # fmt: skip


def network_model() -> kn.Model:
    """A small convolutional network."""
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return kn.Model(net, kn.Categorical(), kn.Normal(1.0))


def methods(epochs: int | None) -> dict[str, Method]:
    """The methods; ``epochs`` None lets each stop by itself."""
    return {
        PLAIN: kn.MaximumLikelihood(epochs=epochs),
        POINT: kn.MAP(epochs=epochs),
        "MC dropout": kn.MCDropout(epochs=epochs),
        HERO: kn.DeepEnsemble(10, epochs=epochs),
    }


@dataclass(frozen=True)
class DigitsResult:
    """What was fitted and scored."""

    test: Dataset  # held-out digits, pixels as published
    predictions: Mapping[str, ClassPrediction]  # of the held-out digits
    turned: Mapping[str, ClassPrediction]  # of the same digits lying on their side
    scores: Mapping[str, kn.Scores]
    fits: Fits
    epochs: int | None  # passes over the data in each fit, or None if each stopped by itself

    def wrong(self, name: str) -> Tensor:
        """Which of the held-out digits a method labels wrongly, ``(rows,)``."""
        return self.predictions[name].labels != self.test.y


def run(*, seed: int, epochs: int | None, progress: bool | None = None) -> DigitsResult:
    """Fit every method to the same few rows and predict the same held-out rows, upright and turned."""
    train, test = digits().split(seed, test=0.6)
    train = train.rows(torch.arange(TRAINING_ROWS))
    mean, std = train.x.mean(), train.x.std()
    scaled = replace(train, x=(train.x - mean) / std)
    upright, on_side = (test.x - mean) / std, (turned(test.x) - mean) / std
    fits, wanted = Fits("Digits"), methods(epochs)
    inside: dict[str, ClassPrediction] = {}
    outside: dict[str, ClassPrediction] = {}
    with progress_bar("digits", progress) as bar:
        for done, (name, method) in enumerate(wanted.items()):
            bar.update(done, len(wanted), name)
            posterior = fits.fit(name, method, network_model, scaled, seed=seed)
            inside[name] = cast(ClassPrediction, posterior.predict(upright))
            outside[name] = cast(ClassPrediction, posterior.predict(on_side))
    scores = {name: kn.evaluate(each, test.y) for name, each in inside.items()}
    return DigitsResult(test, inside, outside, scores, fits, epochs)


def turned(x: Tensor) -> Tensor:
    """Pictures ``(rows, 64)`` turned by a quarter: nothing like them was in training."""
    return torch.rot90(x.view(-1, 8, 8), 1, (1, 2)).reshape(-1, 64)


def section(result: DigitsResult) -> Section:
    """The part of the report on this problem."""
    hero, y, classes = result.predictions[HERO], result.test.y, result.test.classes
    order = hero.total.argsort(descending=True).tolist()
    least = pictures_panel(
        f"Least certain digits, {HERO}", hero, order[:SHOWN], images=result.test.x.view(-1, 8, 8), y=y,
        classes=classes, caption="The held-out digits with the largest entropy: the ones to show to a person.",
    )  # fmt: skip
    on_side = [
        pictures_panel(
            f"Digits on their side, {name}", result.turned[name], range(SHOWN), y=y,
            images=turned(result.test.x).view(-1, 8, 8), classes=classes,
            caption=f"The first {SHOWN} held-out digits, turned by a quarter.",
        )
        for name in (PLAIN, HERO)
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
        title=f"Digits: {TRAINING_ROWS} examples, and inputs unlike any of them",
        lead=f"{result.test.description} One convolutional network, fitted by {len(result.predictions)} methods to "
        f"{TRAINING_ROWS} digits and scored on {len(result.test):,} others; and the same {len(result.test):,} turned "
        "by a quarter, which no method has seen.",
        findings=findings(result),
        tables=(table(result),),
        panels=(least, *on_side, reliability, training),
        listings=(result.fits.listing(),),
        notes=stopping_note(result.epochs),
    )


def table(result: DigitsResult) -> ScoreTable:
    """Scores of each method on the held-out digits."""
    seconds = {name: each.diagnostics.seconds for name, each in result.fits.posteriors.items()}
    return score_table(
        f"Digits, {TRAINING_ROWS} to learn from, {len(result.test):,} held out",
        {
            name: {
                **each,
                "auroc_of_errors": error_auroc(result, name),
                "auroc_outside": kn.metrics.auroc(result.predictions[name], result.turned[name]),
                "seconds": seconds[name],
            }
            for name, each in result.scores.items()
        },
        COLUMNS,
        note="One random split.",
        standard_errors={name: each.standard_errors for name, each in result.scores.items()},
    )


def error_auroc(result: DigitsResult, name: str) -> float:
    """Chance that a wrongly labelled digit has the larger entropy; NaN if all or none are wrong."""
    total, wrong = result.predictions[name].total, result.wrong(name)
    if wrong.all() or not wrong.any():
        return float("nan")
    return kn.metrics.auroc(total[~wrong], total[wrong])


def findings(result: DigitsResult) -> tuple[str, ...]:
    """The results in sentences."""
    sure = {name: (each.probs.amax(1) > SURE).double().mean().item() for name, each in result.turned.items()}
    gain = result.scores[HERO].per_row["nll"].double() - result.scores[POINT].per_row["nll"].double()
    error = gain.std().item() / len(gain) ** 0.5
    return (
        f"{HERO} labels {result.scores[HERO]['accuracy']:.1%} of the held-out digits correctly, {POINT} "
        f"{result.scores[POINT]['accuracy']:.1%}, {PLAIN.lower()} {result.scores[PLAIN]['accuracy']:.1%}.",
        f"NLL of {HERO} less that of {POINT}, in pairs over the digits: {with_error(gain.mean().item(), error)}.",
        f"Of the digits on their side, {PLAIN.lower()} gives {sure[PLAIN]:.0%} a label with more than {SURE:.0%} "
        f"probability, {POINT} {sure[POINT]:.0%}, {HERO} {sure[HERO]:.0%}.",
    )


# --- What to do with it: which digits to accept, and which to show to a person ----------------------------------------


@dataclass(frozen=True)
class Rule:
    """Accept digits up to a threshold of the entropy, certified on half of the held-out digits, seen on the others."""

    risk: float  # tolerated share of wrong labels
    threshold: float | None  # in nats; None if no threshold keeps the risk
    accepted: float  # share of the other half
    wrong: float  # share of those accepted; NaN where none are


def rule(result: DigitsResult, risk: float) -> Rule:
    """The rule that accepts most digits of the first half within the risk, with probability 95%."""
    total, wrong = result.predictions[HERO].total.double(), result.wrong(HERO)
    half = len(total) // 2
    found = certified_rule(total[:half], wrong[:half], risk)
    threshold = found.threshold if found is not None and found.certified else None
    kept = total[half:] <= (-1.0 if threshold is None else threshold)
    return Rule(risk, threshold, kept.double().mean().item(), wrong[half:][kept].double().mean().item())


def advised(result: DigitsResult) -> Rule | None:
    """The rule of the smallest risk that can be kept; risks are tried from large to small, until one cannot."""
    last = None
    for risk in RISKS:
        found = rule(result, risk)
        if found.threshold is None or found.accepted == 0:
            break
        last = found
    return last


def advice(result: DigitsResult) -> str:
    """One sentence to act on."""
    found, everything = advised(result), result.wrong(HERO)[len(result.test) // 2 :].double().mean().item()
    if found is None:
        limit = f"{RISKS[0]:.0%}"
        return f"No threshold of the entropy is sure to keep the error within {limit}: show every digit to a person."
    return (
        f"Accept a label when the entropy is at most {found.threshold:.2f} nats and show the other digits to a person: "
        f"with probability {1 - DELTA:.0%} at most {found.risk:.0%} of those are wrong. On digits not used to choose "
        f"the threshold that labels {found.accepted:.0%} by machine with {found.wrong:.1%} wrong, instead of all with "
        f"{everything:.1%} wrong ({HERO.lower()})."
    )


def action(result: DigitsResult, next_step: str) -> Section:
    """The last part of the report: what to reject at which risk, and what to run next."""
    size = len(result.test)
    return Section(
        title="What to do now",
        lead="A prediction that says how certain it is can be refused. Show the least certain digits to a person, and "
        "fewer of the others are wrong.",
        findings=(advice(result), next_step),
        panels=(certainty_panel(result.predictions, result.test.y),),
        listings=(rejection(result), thresholds(result)),
        notes=(
            f"Each threshold is certified on {size // 2} held-out digits: with probability {1 - DELTA:.0%} at most the "
            f"tolerated share of new labels below it is wrong. The last two columns are for the other "
            f"{size - size // 2}.",
        ),
    )


def rejection(result: DigitsResult) -> Listing:
    """How many digits are wrong once the least certain ones go to a person."""
    curves = {name: kn.metrics.risk_coverage(each, result.test.y).risk for name, each in result.predictions.items()}
    size = len(result.test)
    rows = [
        (
            f"{1 - kept:.0%} ({size - round(kept * size)})",
            *(f"{risk[round(kept * size) - 1]:.2%}" for risk in curves.values()),
        )
        for kept in KEPT
    ]
    return Listing("Wrong among the rest, if the least certain go to a person", ("To a person", *curves), tuple(rows))


def thresholds(result: DigitsResult) -> Listing:
    """From which uncertainty on to reject, for each risk that might be tolerated."""
    rows = []
    for found in (rule(result, risk) for risk in RISKS):
        limit = "reject all" if found.threshold is None else f"{found.threshold:.3f} nats"
        wrong = f"{found.wrong:.2%}" if found.accepted else "–"
        rows.append((f"{found.risk:.0%}", limit, f"{found.accepted:.0%}", wrong))
    headings = ("Tolerated error", "Accept up to an entropy of", "Accepted", "Wrong among those")
    return Listing(f"What to reject at which risk, {HERO}", headings, tuple(rows))
