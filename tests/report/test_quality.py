"""Scores beside a guess, and what they mean in words."""

import math

import pytest
import torch

from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.evaluation.evaluate import evaluate
from knowable.likelihoods import Gaussian
from knowable.likelihoods.poisson import PoissonComponents
from knowable.report import quality
from knowable.report.quality import residual_notices
from knowable.tabular.fit_report import Outcomes
from tests.interfaces.cases import class_prediction, regression_prediction
from tests.report.fitted import class_fit, linear_fit


@pytest.fixture(scope="module")
def judged():
    return linear_fit()


def test_the_table_has_the_fit_above_the_guess_with_standard_errors(judged):
    table = quality.quality_table("Exact", judged.scores, judged.baseline, title="T", note="N")
    assert [name for name, _ in table.rows] == ["Exact", quality.GUESS]
    assert table.cell("Exact", "rmse").value == judged.scores["rmse"]
    assert table.cell("Exact", "nll").mark == "best" and table.cell("Exact", "nll").error_text


def test_the_gain_over_the_guess_is_the_paired_mean_with_its_standard_error(judged):
    gain, error = quality.paired_gain(judged.scores, judged.baseline)
    difference = judged.baseline.per_row["nll"] - judged.scores.per_row["nll"]
    assert gain == pytest.approx(judged.baseline["nll"] - judged.scores["nll"])
    assert error == pytest.approx(difference.numpy().std(ddof=1) / math.sqrt(len(difference)))


def test_a_fit_that_works_is_said_to_help_and_gives_no_warning_of_quality(judged):
    said = quality.findings(judged.scores, judged.baseline)
    assert said[0].startswith("The inputs help")
    explained = 1 - (judged.scores["rmse"] / judged.baseline["rmse"]) ** 2
    assert f"{explained:.0%}" in said[1]
    assert not [n for n in quality.quality_notices(judged.scores, judged.baseline) if n.source == "Quality"]


def test_a_fit_that_is_noise_is_warned_of(generator):
    y = torch.randn(60, generator=generator)
    scores = evaluate(regression_prediction(60, generator=generator), y)
    baseline = evaluate(Outcomes.of(y).guess(regression_prediction(60, generator=generator)), y)
    assert any("not clearly better" in n.text for n in quality.quality_notices(scores, baseline))
    assert not quality.findings(scores, baseline)[0].startswith("The inputs help")


def test_intervals_that_are_too_narrow_are_warned_of():
    fitted = linear_fit()
    mean = fitted.predict(fitted.inputs).mean
    narrow = Gaussian(noise=0.05).predict(mean.unsqueeze(0), {}, torch.zeros(1))
    scores = evaluate(narrow, fitted.y)
    # with a tenth of the noise a 90% interval holds about 13%, more than 3 standard errors of 0.05 below 90%
    assert quality.coverage_miss(scores) < -3
    baseline = evaluate(fitted.outcomes.guess(narrow), fitted.y)
    assert any(n.source == "Coverage" for n in quality.quality_notices(scores, baseline))
    assert "too narrow" in " ".join(quality.findings(scores, baseline))


def test_few_rows_are_warned_of(generator):
    y = torch.randn(8, generator=generator)
    prediction = regression_prediction(8, generator=generator)
    found = quality.quality_notices(evaluate(prediction, y), evaluate(Outcomes.of(y).guess(prediction), y))
    assert any(n.source == "Few rows" for n in found)


def test_the_confusion_matrix_counts_predictions_by_truth(generator):
    prediction = class_prediction(30, generator=generator)
    y = torch.arange(30) % 3
    listing = quality.confusion_matrix(prediction, y, ("a", "b", "c"))
    counts = [[int(text) for text in row[1:]] for row in listing.rows]
    for was in range(3):
        for said in range(3):
            assert counts[was][said] == int(((y == was) & (prediction.labels == said)).sum())
    assert quality.confusion_matrix(prediction, y, tuple("abcdefghijklm")) is None


def test_classes_have_their_own_columns_and_sentences():
    judged = class_fit()
    table = quality.quality_table("L", judged.scores, judged.baseline)
    assert [column.name for column in table.columns][:2] == ["nll", "accuracy"]
    assert f"{judged.scores['accuracy']:.1%}" in quality.findings(judged.scores, judged.baseline)[1]


@pytest.mark.parametrize(
    ("value", "decimals"), [(153.2, 0), (15.3, 1), (0.00123, 5), (0.0, 3), (math.nan, 3), (1e-12, 8)]
)
def test_three_significant_digits_are_shown(value, decimals):
    assert quality._decimals(value) == decimals


# --- residuals -------------------------------------------------------------------------------------------------------


def _normal(rows: int, scale: float = 1.0) -> RegressionPrediction:
    loc = torch.zeros(1, rows, dtype=torch.float64)
    return RegressionPrediction(NormalComponents(loc, torch.full_like(loc, scale)), torch.zeros(1, dtype=torch.float64))


def test_outcomes_drawn_from_the_prediction_are_not_suspicious(seed: int):
    """A false alarm has a probability of about 0.001."""
    generator = torch.Generator().manual_seed(seed)
    normal = _normal(500)
    counts = RegressionPrediction(
        PoissonComponents(torch.full((1, 500), 0.5, dtype=torch.float64)), torch.zeros(1).double()
    )
    for prediction in (normal, counts):
        assert residual_notices(prediction, prediction.draw(generator=generator)[0]) == ()


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (lambda g: torch.randn(500, generator=g).double() ** 3, "outside the 98% intervals"),
        (lambda g: torch.randn(500, generator=g).double() * 0.2, "another shape"),
        (lambda g: 0.3 * torch.randn(500, generator=g).double() + 0.6, "above the predicted median"),
    ],
)
def test_outcomes_of_another_distribution_are_told(y, words: str, seed: int):
    (notice,) = residual_notices(_normal(500), y(torch.Generator().manual_seed(seed)))
    assert "The likelihood does not suit" in notice.text and words in notice.text and "--likelihood" in notice.text


def test_rows_of_other_groups_may_differ_whatever_the_likelihood():
    wide = torch.linspace(-9, 9, 500, dtype=torch.float64)
    (notice,) = residual_notices(_normal(500), wide, elsewhere="of other groups")
    assert "Predictions do not suit rows of other groups" in notice.text and "--likelihood" not in notice.text


def test_few_rows_are_not_judged():
    assert residual_notices(_normal(20), torch.full((20,), 9.0, dtype=torch.float64)) == ()
