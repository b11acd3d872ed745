"""The digits part of the demonstration scores held-out digits and says which of them to show to a person."""

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score

import knowable as kn
from knowable.interfaces.demo import digits
from knowable.report.rejection import certified_rule


@pytest.fixture(scope="module")
def rough():
    """A short run."""
    return digits.run(seed=0, epochs=20, progress=False)


def test_digits_are_scored_on_rows_that_were_not_in_the_fit(rough):
    assert len(rough.test) == 1078 and len(rough.fits.posteriors) == 4
    assert all(scores["accuracy"] > 0.5 for scores in rough.scores.values())


def test_a_turned_picture_is_the_picture_turned():
    corner = torch.zeros(1, 64)
    corner[0, 7] = 1.0  # top right
    assert digits.turned(corner).nonzero().tolist() == [[0, 0]]  # top left
    assert torch.equal(digits.turned(digits.turned(digits.turned(digits.turned(corner)))), corner)


def test_pictures_are_the_least_certain_in_order(rough):
    least = digits.section(rough).panels[0]
    total = rough.predictions[digits.HERO].total.sort(descending=True).values
    assert [picture.total for picture in least.pictures] == pytest.approx(total[: digits.SHOWN].tolist())


def test_areas_are_those_scikit_learn_finds(rough):
    prediction, turned = rough.predictions["MAP"], rough.turned["MAP"]
    wrong = prediction.labels != rough.test.y
    expected = roc_auc_score(wrong.numpy(), prediction.total.numpy())
    assert digits.error_auroc(rough, "MAP") == pytest.approx(expected, abs=1e-9)
    both = torch.cat([prediction.total, turned.total]).double().numpy()
    expected = roc_auc_score([0] * len(prediction) + [1] * len(turned), both)
    assert digits.table(rough).cell("MAP", "auroc_outside").value == pytest.approx(expected, abs=1e-9)


def test_detection_of_errors_is_not_a_number_where_there_are_none(rough):
    perfect = replace(rough, test=replace(rough.test, y=rough.predictions["MAP"].labels))
    assert math.isnan(digits.error_auroc(perfect, "MAP"))


def test_the_findings_give_accuracy_paired_difference_and_confident_labels_of_turned_digits(rough):
    accuracy, difference, confident = digits.section(rough).findings
    wrong = rough.predictions[digits.HERO].labels != rough.test.y
    assert f"{1 - wrong.double().mean().item():.1%}" in accuracy
    gain = rough.scores[digits.HERO]["nll"] - rough.scores[digits.POINT]["nll"]
    assert float(difference.split(": ")[1].split(" ±")[0]) == pytest.approx(gain, abs=1e-3)
    sure = (rough.turned[digits.HERO].probs.max(1).values > 0.9).double().mean().item()
    assert f"{digits.HERO} {sure:.0%}" in confident


def test_a_table_says_what_is_wrong_once_the_least_certain_go_to_a_person(rough):
    listing = digits.rejection(rough)
    assert listing.headings[1:] == tuple(rough.predictions)
    size, y = len(rough.test), rough.test.y
    for column, prediction in enumerate(rough.predictions.values(), start=1):
        wrong = (prediction.labels != y)[prediction.total.argsort()]
        for kept, row in zip(digits.KEPT, listing.rows, strict=True):
            assert row[column] == f"{wrong[: round(kept * size)].double().mean().item():.2%}"


def test_a_rule_is_certified_on_one_half_and_checked_on_the_other(rough):
    rule, half = digits.rule(rough, 0.05), len(rough.test) // 2
    total, wrong = rough.predictions[digits.HERO].total, rough.predictions[digits.HERO].labels != rough.test.y
    tested = certified_rule(total[:half].double(), wrong[:half], 0.05)
    assert rule.threshold == (tested.threshold if tested.certified else None)
    assert not tested.certified or tested.bound <= 0.05
    kept = total[half:] <= (rule.threshold or -1.0)
    assert rule.accepted == pytest.approx(kept.double().mean().item())
    assert rule.wrong == pytest.approx(wrong[half:][kept].double().mean().item(), nan_ok=True)
    assert digits.thresholds(rough).rows[0][0] == "5%"


def test_the_advice_is_to_reject_everything_where_nothing_can_be_accepted(rough):
    labels = rough.predictions[digits.HERO].labels
    hopeless = replace(rough, test=replace(rough.test, y=(labels + 1) % 10))
    assert "show every digit to a person" in digits.advice(hopeless)
    assert {row[1] for row in digits.thresholds(hopeless).rows} == {"reject all"}


@pytest.mark.slow
def test_the_ensemble_beats_ordinary_training_and_its_own_members(monkeypatch, seed):
    """One network with the same prior may be luckier than the ensemble; on average it is not: it could be a member."""
    every = digits.methods
    chosen = {digits.PLAIN, digits.HERO}
    monkeypatch.setattr(digits, "methods", lambda e: {name: m for name, m in every(e).items() if name in chosen})
    result = digits.run(seed=seed, epochs=300, progress=False)
    inside, outside, y = result.predictions[digits.HERO], result.turned[digits.HERO], result.test.y
    own = -inside.samples[:, torch.arange(len(y)), y].log().mean(1)
    assert result.scores[digits.HERO]["nll"] < min(own.mean().item(), result.scores[digits.PLAIN]["nll"])
    entropies = [torch.special.entr(each.samples).sum(2) for each in (inside, outside)]
    alone = [kn.metrics.auroc(*scores) for scores in zip(*entropies, strict=True)]
    assert kn.metrics.auroc(inside, outside) > sum(alone) / len(alone)
