from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.evaluation.detection import aupr, auroc, risk_coverage, tpr_at_fpr

from .cases import DTYPE, binary, classes, normals

# few distinct values, so that ties abound
SCORES = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=30)


def _joined(inside: list[float], outside: list[float]) -> tuple[list[int], list[float]]:
    return [0] * len(inside) + [1] * len(outside), inside + outside


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES)
def test_auroc_is_that_of_scikit_learn_with_ties(inside: list[float], outside: list[float]):
    assert auroc(inside, outside) == pytest.approx(sk.roc_auc_score(*_joined(inside, outside)), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES)
def test_auroc_is_the_share_of_pairs_and_swapping_gives_the_rest(inside: list[float], outside: list[float]):
    wins = sum((high > low) + 0.5 * (high == low) for low in inside for high in outside)
    assert auroc(inside, outside) == wins / (len(inside) * len(outside))
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1.0, abs=1e-15)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES)
def test_aupr_is_the_average_precision_of_scikit_learn_with_ties(inside: list[float], outside: list[float]):
    assert aupr(inside, outside) == pytest.approx(sk.average_precision_score(*_joined(inside, outside)), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES, st.sampled_from([0.0, 0.05, 0.1, 0.29, 0.5, 1.0]))
def test_tpr_at_fpr_is_the_best_of_all_thresholds_that_keep_the_promise(
    inside: list[float], outside: list[float], fpr: float
):
    low, high = np.array(inside), np.array(outside)
    candidates = [-math.inf, *inside, *outside]
    best = max((high > t).mean() for t in candidates if (low > t).mean() <= fpr)
    assert tpr_at_fpr(inside, outside, fpr=fpr) == pytest.approx(best, abs=1e-15)


@pytest.mark.parametrize(("fpr", "count"), [(0.05, 100), (0.29, 100), (0.07, 100), (0.1, 30), (1 / 3, 3)])
def test_tpr_at_fpr_uses_the_whole_share_allowed_despite_rounding(fpr: float, count: int):
    # inside 0, ..., n-1: with m = fpr · n alarms the threshold is n-1-m, so n-1-m+½ is found and n-1-m is not
    threshold = count - 1 - round(fpr * count)
    assert tpr_at_fpr(range(count), [threshold + 0.5], fpr=fpr) == 1.0
    assert tpr_at_fpr(range(count), [float(threshold)], fpr=fpr) == 0.0


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES, st.randoms())
def test_detection_does_not_depend_on_order(inside: list[float], outside: list[float], random):
    shuffled = random.sample(inside, len(inside)), random.sample(outside, len(outside))
    for score in (auroc, aupr, tpr_at_fpr):
        assert score(inside, outside) == score(*shuffled)


def test_infinite_scores_are_ranked():
    assert auroc([0.0, 1.0], [math.inf, 2.0]) == 1.0
    assert tpr_at_fpr([0.0, math.inf], [math.inf, 2.0], fpr=0.5) == 1.0
    assert tpr_at_fpr([0.0, math.inf], [math.inf, 2.0], fpr=0.0) == 0.0


def test_predictions_are_scored_by_total_uncertainty_of_each_row():
    inside = classes(torch.tensor([[[0.99, 0.01], [0.7, 0.3]]]))
    outside = classes(torch.tensor([[[0.5, 0.5], [0.8, 0.2], [0.6, 0.4]]]))
    # the entropy at 0.8 lies between those at 0.99 and 0.7, the others lie above both
    assert auroc(inside, outside) == pytest.approx(5 / 6)
    assert auroc(inside.total, outside.total) == pytest.approx(5 / 6)
    numbers = normals(torch.zeros(1, 2), torch.tensor([[0.1, 0.2]])), normals(torch.zeros(1, 1), torch.ones(1, 1))
    assert auroc(*numbers) == aupr(*numbers) == tpr_at_fpr(*numbers) == 1.0
    pixels = (
        binary(torch.tensor([[[0.5, 0.999]]])),
        binary(torch.tensor([[[0.7, 0.7]]])),
    )  # means of entropies: 0.35, 0.61
    assert auroc(*pixels) == 1.0


def _slow_risk(uncertainty: list[float], loss: list[float]) -> np.ndarray:
    """The expected mean loss of the m most certain, by replacing each loss by the mean of its ties."""
    pairs = sorted(zip(uncertainty, loss, strict=True))
    blocks = [np.mean([each for u, each in pairs if u == v]) for v, _ in pairs]
    return np.array([np.mean(blocks[: m + 1]) for m in range(len(blocks))])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=20), st.randoms())
def test_risk_coverage_equals_the_slow_version_and_ignores_order(pairs: list[tuple[int, int]], random):
    uncertainty, loss = zip(*pairs, strict=True)
    curve = risk_coverage(uncertainty, loss)
    expected = _slow_risk(list(uncertainty), list(loss))
    np.testing.assert_allclose(curve.risk, expected, atol=1e-12)
    np.testing.assert_allclose(curve.coverage, np.arange(1, len(pairs) + 1) / len(pairs))
    assert curve.area == pytest.approx(expected.mean(), abs=1e-12)
    shuffled = risk_coverage(*zip(*random.sample(pairs, len(pairs)), strict=True))
    np.testing.assert_allclose(shuffled.risk, curve.risk, atol=1e-12)


def test_ties_in_risk_are_the_mean_over_all_orders():
    # orders of the tied pair (loss 0 and 1): the second point is (0 + 0)/2 or (0 + 1)/2
    assert risk_coverage([0.1, 0.5, 0.5], [0.0, 0.0, 1.0]).risk.tolist() == pytest.approx([0.0, 0.25, 1 / 3])


def test_risk_of_a_prediction_is_its_error_in_order_of_total_uncertainty():
    numbers = normals(torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([[3.0, 1.0, 2.0]]))
    assert risk_coverage(numbers, [1.0, 1.0, 3.0]).risk.tolist() == pytest.approx([0.0, 2.0, 5 / 3])
    labels = classes(torch.tensor([[[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]]]))
    assert risk_coverage(labels, [1, 1, 0]).risk.tolist() == pytest.approx([0.0, 0.0, 1 / 3])
    pixels = classes(torch.rand(1, 2, 3, 4, dtype=DTYPE).softmax(2))
    assert len(risk_coverage(pixels, torch.zeros(2, 4, dtype=torch.long)).risk) == 8
    assert "full risk=0.3333" in repr(risk_coverage(labels, [1, 1, 0]))


@pytest.mark.parametrize("score", [auroc, aupr, tpr_at_fpr])
def test_bad_scores_are_named(score):
    with pytest.raises(InvalidData, match="inside is empty"):
        score([], [1.0])
    with pytest.raises(InvalidData, match=r"outside has 1 missing values, the first at 1"):
        score([0.0], [1.0, math.nan])
    with pytest.raises(InvalidType, match=r"outside must be a tensor, an array or a data frame of numbers, got str"):
        score([0.0], "far")
    with pytest.raises(InvalidData, match="single number"):
        score([0.0], 1.0)


def test_bad_arguments_of_the_others_are_named():
    with pytest.raises(InvalidArgument, match=r"fpr must be a finite number >= 0 and <= 1, got 5"):
        tpr_at_fpr([0.0], [1.0], fpr=5)
    with pytest.raises(InvalidData, match=r"loss must have one number for each of 2 uncertainties, got shape \(3,\)"):
        risk_coverage([0.0, 1.0], [0.0, 1.0, 2.0])
    with pytest.raises(InvalidData, match="loss has missing"):
        risk_coverage([0.0, 1.0], [0.0, math.nan])
