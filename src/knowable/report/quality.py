"""How good predictions are: scores beside those of a baseline that ignores the inputs, and what they mean in words."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.evaluation.evaluate import Scores
from knowable.evaluation.pit import pit_values
from knowable.report.report import Listing, Notice
from knowable.report.scores import SCORES, ScoreColumn, ScoreTable, score_table

GUESS = "Baseline without inputs"
_FEWEST_RESIDUALS = 30  # rows, for a check of their distribution
_SUSPICIOUS = 1e-3  # p-value below which the residuals do not fit
_MOST_CLASSES = 12  # of a confusion matrix


def quality_table(
    name: str, scores: Scores, baseline: Scores, *, title: str = "Scores on rows the fit has not seen", note: str = ""
) -> ScoreTable:
    """The scores of a fit above those of the baseline."""
    return score_table(
        title,
        {name: scores, GUESS: baseline},
        _columns(scores),
        note=note,
        standard_errors={name: scores.standard_errors, GUESS: baseline.standard_errors},
    )


def findings(scores: Scores, baseline: Scores) -> tuple[str, ...]:
    """What the scores mean, in sentences."""
    gain, error = paired_gain(scores, baseline)
    much = f"{_with_error(abs(gain), error)} nats"
    if gain > 2 * error:
        sentences = [f"The inputs help: NLL is {much} per row below that of a baseline without inputs."]
    elif gain < -2 * error:
        sentences = [f"Worse than the baseline: NLL is {much} per row above that of a baseline without inputs."]
    else:
        sentences = [f"No clear gain: NLL differs by {much} per row from that of a baseline without inputs."]
    if "rmse" in scores:
        explained = 1 - (scores["rmse"] / baseline["rmse"]) ** 2 if baseline["rmse"] > 0 else math.nan
        sentences.append(f"{explained:.0%} of the variance of the outcome is explained.")
        sentences.append(_coverage_sentence(scores))
    else:
        sentences.append(f"Accuracy {scores['accuracy']:.1%}; the baseline has {baseline['accuracy']:.1%}.")
        sentences.append(f"The expected calibration error is {scores['ece']:.1%}.")
    return tuple(sentences)


def paired_gain(scores: Scores, baseline: Scores) -> tuple[float, float]:
    """Mean reduction of NLL per row against the baseline, and its standard error (NaN with a single row)."""
    difference = baseline.per_row["nll"] - scores.per_row["nll"]
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return difference.mean().item(), error


def coverage_miss(scores: Scores) -> float:
    r"""How far the coverage of the 90% interval is from 90%, in standard errors :math:`\sqrt{0.9 \cdot 0.1 / n}`."""
    rows = len(scores.per_row["nll"])
    return (scores["coverage_90"] - 0.9) / math.sqrt(0.09 / rows)


def _coverage_sentence(scores: Scores) -> str:
    miss, coverage = coverage_miss(scores), scores["coverage_90"]
    if abs(miss) <= 2:
        return f"The 90% intervals hold {coverage:.1%} of the outcomes, which is calibrated within chance."
    return f"The 90% intervals hold {coverage:.1%} of the outcomes: {'too wide' if miss > 0 else 'too narrow'}."


def quality_notices(scores: Scores, baseline: Scores) -> tuple[Notice, ...]:
    """What a reader must know before trusting the predictions."""
    found, rows = [], len(scores.per_row["nll"])
    gain, error = paired_gain(scores, baseline)
    if not gain > 2 * error:
        text = f"On {rows} rows the fit is not clearly better than a baseline that ignores the inputs"
        found.append(Notice("Quality", f"{text} ({_with_error(gain, error)} nats per row)."))
    if "coverage_90" in scores and coverage_miss(scores) < -3:
        text = f"The 90% intervals held only {scores['coverage_90']:.1%} of {rows} outcomes: they are too narrow."
        found.append(Notice("Coverage", text))
    if rows < 30:
        found.append(Notice("Few rows", f"Scores rest on {rows} rows: their standard errors are rough."))
    return tuple(found)


def residual_notices(prediction: Prediction, y: Tensor, *, elsewhere: str = "") -> tuple[Notice, ...]:
    """Whether the outcomes are spread as the likelihood says, by the Kolmogorov-Smirnov test of their PIT values.

    The probability integral transform of an outcome is the predicted probability of a smaller one; they are uniform
    where the predictive distribution is right (Dawid, 1984). Of counts a random point of the jump is taken.

    Args:
        prediction: Of the rows held out.
        y: Their outcomes.
        elsewhere: How these rows differ from those in training by design (``"of other groups"``): then that may be the
            reason, and not the likelihood.
    """
    if not isinstance(prediction, RegressionPrediction) or len(prediction) < _FEWEST_RESIDUALS:
        return ()
    from scipy.stats import kstest

    levels = pit_values(prediction, y)
    outside = (levels - 0.5).abs() > 0.49  # of the central 98% interval
    test = kstest(levels.numpy(), "uniform")
    far = outside.double().mean().item()
    too_far = outside.sum().item() > 0.02 * len(levels) + 4 * math.sqrt(0.02 * 0.98 * len(levels))
    if test.pvalue >= _SUSPICIOUS and not too_far:
        return ()
    middle = levels.median().item()
    how = f"{far:.0%} of the outcomes are outside the 98% intervals" if too_far else (
        f"outcomes are too often {'above' if middle > 0.5 else 'below'} the predicted median ({middle:.2f} of the "
        f"probability is below the median outcome)"
        if abs(middle - 0.5) > 0.1
        else "the spread of the residuals has another shape than predicted"
    )  # fmt: skip
    if elsewhere:
        text = (
            f"Predictions do not suit rows {elsewhere}: {how}. These differ from the training rows in ways that the "
            f"inputs do not tell; expect the same of new ones."
        )
        return (Notice("Residuals", text),)
    text = f"The likelihood does not suit the target: {how}. Try another one with likelihood= (--likelihood)"
    names = "student_t for outliers, log_normal for positive targets, negative_binomial or zero_inflated for counts"
    return (Notice("Residuals", f"{text}: {names}."),)


def confusion_matrix(prediction: ClassPrediction, y: Tensor, classes: tuple[str, ...]) -> Listing | None:
    """The confusion matrix; None where there are too many classes for a table."""
    if len(classes) > _MOST_CLASSES:
        return None
    predicted, truth = prediction.labels.flatten().long(), y.flatten().long()
    counts = torch.zeros(len(classes), len(classes), dtype=torch.long)
    counts.index_put_((truth, predicted), torch.ones_like(truth), accumulate=True)
    rows = tuple((name, *(str(int(n)) for n in counts[i])) for i, name in enumerate(classes))
    title = "Confusion matrix (rows: truth, columns: prediction)"
    return Listing(title, ("Truth", *(f"predicted {name}" for name in classes)), rows, "Counts of held-out rows.")


def _columns(scores: Scores) -> list[ScoreColumn]:
    """Columns of the scores; those in the outcome's unit with as many decimals as the unit asks for."""
    if "rmse" not in scores:
        names = ("nll", "accuracy", "brier", "ece", "mean_entropy", "mean_mutual_information")
        return [SCORES[name] for name in names]
    in_unit = ("rmse", "crps", "interval_width_90")
    names = ("nll", "rmse", "crps", "coverage_90", "interval_width_90", "ece")
    columns = [replace(SCORES[name], decimals=_decimals(scores[name])) if name in in_unit else SCORES[name]
               for name in names]  # fmt: skip
    return [replace(column, better="none") if column.name == "interval_width_90" else column for column in columns]


def _with_error(value: float, error: float) -> str:
    return f"{value:.3g} ± {error:.2g}" if math.isfinite(error) else f"{value:.3g}"


def _decimals(value: float) -> int:
    """Digits after the point that show three significant ones."""
    if not math.isfinite(value) or value == 0:
        return 3
    return max(0, min(8, 2 - math.floor(math.log10(abs(value)))))
