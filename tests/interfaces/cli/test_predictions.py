"""Predictions as rows."""

import csv
import io
import math

import pytest
import torch

from knowable.errors import Unsupported
from knowable.interfaces.cli.predict import as_csv, prediction_rows
from knowable.likelihoods import HeteroscedasticGaussian
from tests.interfaces.cases import class_prediction, equal_weights, regression_prediction


def test_numbers_have_mean_interval_and_the_two_spreads_in_the_unit_of_the_outcome(generator):
    prediction = regression_prediction(4, generator=generator)
    rows = prediction_rows(prediction, [2, 3, 5, 8], level=0.8)
    low, high = prediction.interval(0.8)
    assert list(rows[0]) == ["line", "mean", "std", "low", "high", "aleatoric_std", "epistemic_std"]
    assert [row["line"] for row in rows] == [2, 3, 5, 8]
    for place, row in enumerate(rows):
        # nine digits are written of numbers in single precision
        assert row["mean"] == pytest.approx(prediction.mean[place].item(), rel=1e-8)
        assert (row["low"], row["high"]) == pytest.approx((low[place].item(), high[place].item()), rel=1e-8)
        assert row["std"] ** 2 == pytest.approx(row["aleatoric_std"] ** 2 + row["epistemic_std"] ** 2, rel=1e-5)


def test_classes_have_label_probabilities_and_uncertainty_in_nats(generator):
    prediction = class_prediction(6, generator=generator)
    rows = prediction_rows(prediction, range(2, 8), classes=("a", "b", "c"))
    assert list(rows[0])[:6] == ["line", "label", "probability", "p(a)", "p(b)", "p(c)"]
    for place, row in enumerate(rows):
        shares = [row["p(a)"], row["p(b)"], row["p(c)"]]
        assert sum(shares) == pytest.approx(1.0, abs=1e-6)
        assert row["probability"] == max(shares) == row[f"p({row['label']})"]
        assert row["entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-5)
        assert row["epistemic"] == pytest.approx(prediction.epistemic[place].item(), abs=1e-7)


def test_the_text_is_csv_with_a_header_and_reads_back(generator):
    rows = prediction_rows(class_prediction(3, generator=generator), [2, 3, 4], classes=('a "b", c', "d", "e"))
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["line"] for row in read] == ["2", "3", "4"]
    assert [float(row["entropy"]) for row in read] == [row["entropy"] for row in rows]
    assert {row["label"] for row in read} <= {'a "b", c', "d", "e"}


def test_several_outcomes_a_row_are_refused_with_what_can_do_it():
    outputs = torch.zeros(2, 3, 4)  # two outcomes a row: two means, two scales
    prediction = HeteroscedasticGaussian().predict(outputs, {}, equal_weights(2))
    with pytest.raises(Unsupported, match="predict_dist"):
        prediction_rows(prediction, [2, 3, 4])
