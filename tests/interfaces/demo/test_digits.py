"""The digits part of the demonstration scores held-out digits and shows the ones it is unsure of."""

import math
from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from knowable.interfaces.cli.messages import ticking
from knowable.interfaces.demo import digits
from knowable.interfaces.demo.contenders import Watch


@pytest.fixture(scope="module")
def rough():
    """A short run on few rows."""
    watch = Watch("Digits")
    with ticking("", 3, show=False) as ticker:
        return digits.run(watch, ticker, seed=0, epochs=20, rows=300), watch


def test_digits_are_trained_on_the_rows_asked_for_and_scored_on_the_rest(rough):
    result, watch = rough
    assert result.train == 300 and len(result.test) == 539
    assert sum(watch.fits.values()) == digits.number_of_fits()
    assert all(scores["accuracy"] > 0.5 for scores in result.scores.values())


def test_pictures_are_the_least_and_most_uncertain_in_order(rough):
    result, watch = rough
    least, most = digits.section(result, watch).panels[:2]
    total = result.predictions[digits.HERO].total.sort(descending=True).values
    assert [picture.total for picture in least.pictures] == pytest.approx(total[: digits.SHOWN].tolist())
    assert [picture.total for picture in most.pictures] == pytest.approx(total.flip(0)[: digits.SHOWN].tolist())


def test_detection_of_errors_is_the_area_scikit_learn_finds(rough):
    result, _ = rough
    prediction = result.predictions["MAP"]
    wrong = prediction.labels != result.test.y
    expected = roc_auc_score(wrong.numpy(), prediction.total.numpy())
    assert digits.error_auroc(result, "MAP") == pytest.approx(expected, abs=1e-9)


def test_detection_of_errors_is_not_a_number_where_there_are_none(rough):
    result, _ = rough
    perfect = replace(result, test=replace(result.test, y=result.predictions["MAP"].labels))
    assert math.isnan(digits.error_auroc(perfect, "MAP"))


def test_the_findings_count_the_errors(rough):
    result, watch = rough
    wrong = int((result.predictions[digits.HERO].labels != result.test.y).sum())
    assert f"{wrong} are wrong" in digits.section(result, watch).findings[0]
