"""The digits part of the demonstration scores held-out digits and shows the ones it is unsure of."""

import math
from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from knowable.interfaces.demo import digits


@pytest.fixture(scope="module")
def rough():
    """A short run on few rows."""
    return digits.run(seed=0, epochs=20, rows=300, progress=False)


def test_digits_are_trained_on_the_rows_asked_for_and_scored_on_the_rest(rough):
    assert rough.train == 400 and len(rough.test) == 539 and len(rough.fits.posteriors) == 4
    assert all(scores["accuracy"] > 0.5 for scores in rough.scores.values())


def test_pictures_are_the_least_and_most_uncertain_in_order(rough):
    least, most = digits.section(rough).panels[:2]
    total = rough.predictions[digits.HERO].total.sort(descending=True).values
    assert [picture.total for picture in least.pictures] == pytest.approx(total[: digits.SHOWN].tolist())
    assert [picture.total for picture in most.pictures] == pytest.approx(total.flip(0)[: digits.SHOWN].tolist())


def test_detection_of_errors_is_the_area_scikit_learn_finds(rough):
    prediction = rough.predictions["MAP"]
    wrong = prediction.labels != rough.test.y
    expected = roc_auc_score(wrong.numpy(), prediction.total.numpy())
    assert digits.error_auroc(rough, "MAP") == pytest.approx(expected, abs=1e-9)


def test_detection_of_errors_is_not_a_number_where_there_are_none(rough):
    perfect = replace(rough, test=replace(rough.test, y=rough.predictions["MAP"].labels))
    assert math.isnan(digits.error_auroc(perfect, "MAP"))


def test_the_findings_count_the_errors(rough):
    wrong = int((rough.predictions[digits.HERO].labels != rough.test.y).sum())
    assert f"{wrong} are wrong" in digits.section(rough).findings[0]


def test_the_last_table_says_what_is_wrong_once_the_least_certain_go_to_a_person(rough):
    listing = digits.rejection(rough)
    assert listing.headings[1:] == tuple(rough.predictions)
    size, y = len(rough.test), rough.test.y
    for column, prediction in enumerate(rough.predictions.values(), start=1):
        wrong = (prediction.labels != y)[prediction.total.argsort()]
        for kept, row in zip(digits.KEPT, listing.rows, strict=True):
            assert row[column] == f"{wrong[: round(kept * size)].double().mean().item():.2%}"
