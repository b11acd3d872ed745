from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as sk

from knowable.errors import InvalidData, InvalidType
from knowable.evaluation import scores
from knowable.evaluation.scores import accuracy, brier, brier_rows, crps, crps_rows, nll, nll_rows, rmse

from .cases import DTYPE, binary, classes, counts, normals, student

NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


def _probs(*shape: int) -> torch.Tensor:
    """Random class probabilities, classes last."""
    return torch.rand(*shape, dtype=DTYPE).add(0.05).log().softmax(-1)


# nll


def test_nll_of_numbers_is_the_mean_log_density_of_the_mixture():
    loc, scale, y = torch.randn(3, 20, dtype=DTYPE), torch.rand(3, 20, dtype=DTYPE) + 0.1, torch.randn(20, dtype=DTYPE)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE)
    density = (weights.numpy()[:, None] * stats.norm.pdf(y, loc, scale)).sum(0)
    assert nll(normals(loc, scale, weights), y) == pytest.approx(-np.log(density).mean(), rel=1e-12)


def test_nll_of_classes_is_the_log_loss_of_scikit_learn():
    probs, y = _probs(2, 30, 4), torch.randint(4, (30,))
    mean = probs.mean(0)
    expected = sk.log_loss(y, mean, labels=range(4))
    assert nll(classes(probs), y) == pytest.approx(expected, rel=1e-12)
    assert nll(mean, y) == pytest.approx(expected, rel=1e-12)
    assert nll(mean.numpy(), y.numpy()) == pytest.approx(expected, rel=1e-12)


def test_nll_of_pixels_is_joint_over_the_row():
    probs = _probs(3, 2, 2, 4).permute(0, 3, 1, 2)  # (B, C, H, W)
    y = torch.randint(4, (3, 2, 2))
    expected = [
        -sum(math.log(probs[b, y[b, i, j], i, j]) for i in range(2) for j in range(2))
        for b in range(3)
    ]  # fmt: skip
    np.testing.assert_allclose(nll_rows(probs, y), expected, rtol=1e-12)
    np.testing.assert_allclose(nll_rows(classes(probs.unsqueeze(0)), y), expected, rtol=1e-12)


def test_nll_of_the_impossible_is_infinite():
    assert nll([[1.0, 0.0]], [1]) == math.inf


# rmse


def test_rmse_is_that_of_scikit_learn_and_a_vector_is_a_column():
    prediction, y = normals(torch.randn(3, 50), torch.ones(3, 50)), torch.randn(50, dtype=DTYPE)
    expected = sk.root_mean_squared_error(y, prediction.mean.squeeze(1))
    for observed in (y, y.unsqueeze(1), y.numpy(), y.tolist()):
        assert rmse(prediction, observed) == pytest.approx(expected, rel=1e-12)
        assert rmse(prediction.mean.squeeze(1), observed) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=10), st.randoms())
def test_scores_of_numbers_do_not_depend_on_the_order_of_rows(pairs: list[tuple[float, float]], random):
    shuffled = random.sample(pairs, len(pairs))
    for score in (rmse, lambda mean, y: crps(mean.unsqueeze(0), y)):
        first, second = (score(*torch.tensor(rows, dtype=DTYPE).T) for rows in (pairs, shuffled))
        assert first == pytest.approx(second, rel=1e-12, abs=1e-12)


# crps


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=10))
def test_crps_of_a_point_forecast_is_the_absolute_error(pairs: list[tuple[float, float]]):
    forecast, y = torch.tensor(pairs, dtype=DTYPE).T
    expected = (forecast - y).abs().mean().item()
    assert crps(forecast.unsqueeze(0), y) == pytest.approx(expected, abs=1e-9)
    assert crps(forecast.expand(5, -1), y) == pytest.approx(expected, abs=1e-9)
    sharp = normals(forecast.unsqueeze(0), torch.full((1, len(pairs)), 1e-9))
    assert crps(sharp, y) == pytest.approx(expected, abs=1e-8)


def test_crps_uses_the_closed_form_for_normals_and_only_for_normals(monkeypatch: pytest.MonkeyPatch):
    used = []
    monkeypatch.setattr(
        scores, "normal_mixture_crps", lambda *args: used.append("exact") or torch.zeros(args[-1].shape)
    )
    monkeypatch.setattr(scores, "continuous_crps", lambda *args: used.append("integral") or torch.zeros(args[1].shape))
    monkeypatch.setattr(scores, "count_crps", lambda *args: used.append("sum") or torch.zeros(args[1].shape))
    loc, y = torch.randn(3, 5), torch.ones(5)
    crps(normals(loc, torch.rand(3, 5) + 0.01), y)
    crps(student(30.0, loc, 0.5), y)
    crps(student(1.0, loc, 0.5), y)
    crps(counts(loc.exp()), y)
    assert used == ["exact", "integral", "integral", "sum"]


def test_crps_in_single_precision_is_recognised_as_normal_and_agrees(monkeypatch: pytest.MonkeyPatch):
    loc, scale, y = 100 + torch.randn(3, 5), 0.01 + torch.rand(3, 5), 100 + torch.randn(5)
    double = normals(loc, scale)
    single = normals(loc, scale)
    single.components.loc, single.components.scale = loc.unsqueeze(-1).float(), scale.unsqueeze(-1).float()
    monkeypatch.setattr(scores, "continuous_crps", None)  # must not be called
    assert crps(single, y) == pytest.approx(crps(double, y), rel=1e-5)


def test_crps_of_a_weighted_mixture_of_normals_matches_numerical_integration():
    weights, parts, y = torch.tensor([0.7, 0.2, 0.1], dtype=DTYPE), stats.norm([0.0, 2.0, -1.0], [1.0, 0.3, 0.1]), 1.3
    expected = (
        integrate.quad(lambda x: (weights.numpy() @ parts.cdf(x)) ** 2, -12, y, limit=300)[0]
        + integrate.quad(lambda x: (weights.numpy() @ parts.sf(x)) ** 2, y, 12, limit=300)[0]
    )
    prediction = normals(torch.tensor([[0.0], [2.0], [-1.0]]), torch.tensor([[1.0], [0.3], [0.1]]), weights)
    assert crps(prediction, [y]) == pytest.approx(expected, abs=1e-7)  # scales were given in single precision


@pytest.mark.parametrize("df", [1.5, 4.0])
def test_crps_of_student_mixtures_matches_numerical_integration(df: float):
    loc, y, weights = torch.randn(3, 4, dtype=DTYPE), 2 * torch.randn(4, dtype=DTYPE), torch.tensor([0.2, 0.5, 0.3])
    prediction = student(df, loc, 0.4, weights)
    expected = []
    for row in range(4):
        parts, at = stats.t(df, loc[:, row].numpy(), 0.4), y[row].item()
        w = weights.double().numpy() / weights.double().sum().item()
        pieces = (
            integrate.quad(lambda x: (w @ parts.cdf(x)) ** 2, -np.inf, at - 4),  # noqa: B023
            integrate.quad(lambda x: (w @ parts.cdf(x)) ** 2, at - 4, at, limit=200),  # noqa: B023
            integrate.quad(lambda x: (w @ parts.sf(x)) ** 2, at, at + 4, limit=200),  # noqa: B023
            integrate.quad(lambda x: (w @ parts.sf(x)) ** 2, at + 4, np.inf),  # noqa: B023
        )
        expected.append(sum(value for value, _ in pieces))
    np.testing.assert_allclose(crps_rows(prediction, y), expected, atol=3e-5)  # the stated 1e-5 of a length of 1 to 3


def test_crps_of_a_poisson_matches_the_sum_written_out():
    k, y = np.arange(200), 7
    expected = ((stats.poisson.cdf(k, 4.5) - (k >= y)) ** 2).sum()
    assert crps(counts(torch.full((1, 1), 4.5)), [y]) == pytest.approx(expected, rel=1e-9)


def test_crps_of_several_outputs_is_the_mean_over_them():
    samples, y = torch.randn(9, 5, 2, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    each = [crps(samples[..., i], y[:, i]) for i in range(2)]
    assert crps(samples, y) == pytest.approx(sum(each) / 2, rel=1e-12)


# accuracy and brier


def test_accuracy_is_that_of_scikit_learn_in_every_encoding():
    probs, y = _probs(40, 3), torch.randint(3, (40,))
    expected = sk.accuracy_score(y, probs.argmax(1))
    assert accuracy(probs, y) == accuracy(classes(probs.unsqueeze(0)), y) == pytest.approx(expected, rel=1e-12)
    assert accuracy(probs.float(), y.float().unsqueeze(1)) == pytest.approx(expected, rel=1e-12)


def test_brier_is_twice_that_of_scikit_learn_for_two_classes():
    p, y = torch.rand(50, dtype=DTYPE), torch.randint(2, (50,))
    expected = 2 * sk.brier_score_loss(y, p)
    for prediction in (p, p.unsqueeze(1), torch.stack((1 - p, p), 1), binary(p.unsqueeze(0)), binary(p.view(1, 50, 1))):
        assert brier(prediction, y) == pytest.approx(expected, rel=1e-12)


def test_brier_of_three_classes_by_hand():
    # (0.5 - 1)² + 0.3² + 0.2² = 0.38 and 0.1² + 0.8² + (0.1 - 1)² = 1.46
    np.testing.assert_allclose(brier_rows([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], [0, 2]), [0.38, 1.46], rtol=1e-12)
    assert brier([[0.0, 1.0]], [0]) == 2.0


@pytest.mark.parametrize("score", [nll, accuracy, brier])
def test_both_encodings_of_a_binary_problem_agree(score):
    draws, y = torch.rand(4, 30, dtype=DTYPE), torch.randint(2, (30,))
    two = classes(torch.stack((1 - draws, draws), -1))
    assert score(binary(draws), y) == pytest.approx(score(two, y), rel=1e-10)


@pytest.mark.parametrize("score", [accuracy, brier])
def test_every_pixel_counts_as_one_prediction(score):
    probs, y = _probs(3, 2, 5, 4), torch.randint(4, (3, 2, 5))  # (B, H, W, C)
    flat = score(probs.reshape(-1, 4), y.flatten())
    dense = probs.permute(0, 3, 1, 2)
    assert score(dense, y) == pytest.approx(flat, rel=1e-12)
    assert score(classes(dense.unsqueeze(0)), y) == pytest.approx(flat, rel=1e-12)


@pytest.mark.parametrize("score", [accuracy, brier])
def test_every_output_of_a_binary_prediction_counts(score):
    p, y = torch.rand(6, 3, dtype=DTYPE), torch.randint(2, (6, 3))
    flat = score(p.flatten(), y.flatten())
    assert score(p, y) == pytest.approx(flat, rel=1e-12)
    assert score(binary(p.unsqueeze(0)), y) == pytest.approx(flat, rel=1e-12)


# bad input


@pytest.mark.parametrize("score", [nll, accuracy, brier])
def test_scores_of_classes_refuse_labels_that_are_none(score):
    with pytest.raises(InvalidData, match=r"y must hold class labels, whole numbers from 0 to 1; got 2 in row 1"):
        score([[0.5, 0.5], [0.5, 0.5]], [0, 2])
    with pytest.raises(InvalidData, match=r"got 0\.5 in row 0"):
        score([[0.5, 0.5]], [0.5])


@pytest.mark.parametrize("score", [nll, rmse, crps])
def test_scores_of_numbers_refuse_missing_and_misplaced_rows(score):
    prediction = normals(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(InvalidData, match=r"y has missing or infinite values in row 1"):
        score(prediction, [0.0, math.nan, 1.0])
    with pytest.raises(InvalidData, match=r"y must have 3 rows, one for each prediction; got shape \(4,\)"):
        score(prediction, torch.zeros(4))
    with pytest.raises(InvalidData, match="y is empty"):
        score(prediction, [])


def test_scores_refuse_the_wrong_kind_of_prediction():
    numbers, labels = normals(torch.zeros(2, 3), torch.ones(2, 3)), classes(torch.full((1, 3, 2), 0.5))
    for score in (rmse, crps):
        with pytest.raises(
            InvalidType, match=r"prediction must be a Prediction over numbers.*For classes use accuracy"
        ):
            score(labels, [0, 1, 0])
    for score in (accuracy, brier):
        with pytest.raises(InvalidType, match=r"Prediction over classes.*got a RegressionPrediction.*rmse"):
            score(numbers, [0.0, 1.0, 0.0])


def test_crps_refuses_what_is_no_count_or_no_sample():
    with pytest.raises(InvalidData, match=r"y must hold counts.*got 1\.5 in row 0"):
        crps(counts(torch.ones(1, 1)), [1.5])
    with pytest.raises(InvalidData, match=r"samples of shape \(K, B, \.\.\.\)"):
        crps(torch.zeros(3), [0.0, 0.0, 0.0])
    with pytest.raises(InvalidData, match=r"prediction has missing or infinite values in row 1"):
        crps([[0.0, math.nan]], [0.0, 0.0])
