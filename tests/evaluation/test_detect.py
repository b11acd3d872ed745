"""Tests of kn.detect: scores by their formulas, curves of scikit-learn, thresholds from validation data alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from sklearn import metrics as sk
from torch import nn

import knowable as kn
from knowable.evaluation.detect import detect, uncertainty_score

SCORES = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=30)


def _classes(seed: int, rows: int = 20, draws: int = 3, scale: float = 2.0) -> tuple[kn.Prediction, np.ndarray]:
    """A prediction, and the draws' logits."""
    logits = scale * torch.randn((draws, rows, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[:draws]
    return kn.Categorical().predict(logits, {}, (weights / weights.sum()).log()), logits.numpy()


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_classes_are_their_formulas(seed):
    prediction, logits = _classes(seed)
    weights = np.array([0.5, 0.3, 0.2])
    probs = np.exp(logits - logsumexp(logits, 2, keepdims=True))
    mean = np.tensordot(weights, probs, 1)
    entropy = -(mean * np.log(mean)).sum(1)
    expected_entropy = np.tensordot(weights, -(probs * np.log(probs)).sum(2), 1)
    expected = {
        "entropy": entropy,
        "expected_entropy": expected_entropy,
        "mutual_information": entropy - expected_entropy,
        "max_prob": 1 - mean.max(1),
        "variance": np.tensordot(weights, ((probs - mean) ** 2).sum(2), 1),
        "energy": -np.tensordot(weights, logsumexp(logits, 2), 1),
        "max_logit": -np.tensordot(weights, logits.max(2), 1),
    }
    expected |= {"total": entropy, "aleatoric": expected_entropy, "epistemic": entropy - expected_entropy}
    for name, values in expected.items():
        np.testing.assert_allclose(uncertainty_score(name)(prediction).numpy(), values, atol=1e-12)


def test_scores_of_numbers_are_variances(seed):
    means = torch.randn((3, 6, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = {"log_noise": torch.full((3,), math.log(0.5), dtype=torch.float64)}
    prediction = kn.Gaussian().predict(means, noise, torch.full((3,), 1 / 3, dtype=torch.float64).log())
    between = means.var(0, correction=0).mean(1)
    torch.testing.assert_close(uncertainty_score("epistemic")(prediction), between)
    torch.testing.assert_close(uncertainty_score("variance")(prediction), between + 0.25)
    torch.testing.assert_close(uncertainty_score("aleatoric")(prediction), torch.full_like(between, 0.25))


def test_two_outcomes_are_scored_like_two_classes(seed):
    logits = torch.randn((3, 5), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    one = kn.Bernoulli().predict(logits, {}, weights)
    two = kn.Categorical().predict(torch.stack((torch.zeros_like(logits), logits), 2), {}, weights)
    for name in ("entropy", "mutual_information", "max_prob", "variance"):
        torch.testing.assert_close(uncertainty_score(name)(one), uncertainty_score(name)(two))
    with pytest.raises(kn.Unsupported, match="a logit for each class"):
        uncertainty_score("energy")(one)


def test_pixels_are_averaged(seed):
    logits = torch.randn((2, 3, 4, 5, 6), generator=torch.Generator().manual_seed(seed))
    prediction = kn.Categorical().predict(logits, {}, torch.full((2,), 0.5).log())
    for name in ("entropy", "max_prob", "energy", "variance"):
        assert uncertainty_score(name)(prediction).shape == (3,)
    torch.testing.assert_close(uncertainty_score("energy")(prediction), -logits.logsumexp(2).mean((0, 2, 3)))


def test_the_largest_probability_keeps_its_digits_near_one():
    logits = torch.tensor([[[50.0, 0.0, 0.0]]])
    prediction = kn.Categorical().predict(logits, {}, torch.zeros(1))
    assert uncertainty_score("max_prob")(prediction).item() == pytest.approx(2 * math.exp(-50), rel=1e-5)


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("method", [kn.EnsembleOf(kn.MAP(epochs=1), 2), kn.Laplace(structure="kron")])
def test_the_energy_exists_for_mixtures_and_for_closed_forms(method):
    x, y = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    posterior = method.fit(kn.Model(nn.Linear(2, 3), kn.Categorical()), (x, y))
    energy = uncertainty_score("energy")(posterior.predict(x))
    assert energy.shape == (20,) and energy.isfinite().all()


# --- detection -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES)
def test_curves_and_areas_are_those_of_scikit_learn_with_ties(inside: list[float], outside: list[float]):
    truth, scores = [0] * len(inside) + [1] * len(outside), inside + outside
    found = detect(inside, outside)
    assert found.auroc == pytest.approx(sk.roc_auc_score(truth, scores), abs=1e-12)
    assert found.aupr == pytest.approx(sk.average_precision_score(truth, scores), abs=1e-12)
    fpr, tpr, _ = sk.roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose(torch.stack(found.roc()).numpy(), np.stack((fpr, tpr)), atol=1e-12)
    assert found.fpr95 == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-12)], abs=1e-12)
    recall, precision = found.precision_recall()
    expected_precision, expected_recall, _ = sk.precision_recall_curve(truth, scores)
    np.testing.assert_allclose(recall.flip(0).numpy(), expected_recall[:-1], atol=1e-12)
    np.testing.assert_allclose(precision.flip(0).numpy(), expected_precision[:-1], atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES, SCORES)
def test_thresholds_come_from_validation_data_alone(inside: list[float], outside: list[float], validation: list[float]):
    found = detect(inside, outside, validation=validation)
    threshold = kn.metrics.threshold_at_fpr(validation)
    assert found.threshold == threshold == detect(validation, outside).threshold
    assert np.mean(np.array(validation) > threshold) <= 0.05
    assert found.tpr_at_fpr(0.05) == np.mean(np.array(outside) > threshold)
    assert found.fpr_at_threshold() == np.mean(np.array(inside) > threshold)
    assert found.flags(inside).tolist() == [value > threshold for value in inside]
    assert f"{len(validation)} validation rows" in repr(found)
    alone = detect(inside, outside)
    assert alone.tpr_at_fpr(0.05) == kn.metrics.tpr_at_fpr(inside, outside)
    assert "from the points inside themselves" in repr(alone)


@settings(deadline=None, max_examples=30)
@given(SCORES, SCORES)
def test_increasing_changes_of_a_score_change_nothing(inside: list[float], outside: list[float]):
    first = detect(inside, outside)
    second = detect([math.exp(each) for each in inside], [math.exp(each) for each in outside])
    for name in ("auroc", "aupr", "fpr95"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), abs=1e-12)
    assert first.tpr_at_fpr() == second.tpr_at_fpr()


def test_standard_errors_are_those_of_repeated_samples(seed):
    def scores(generator: torch.Generator) -> kn.Detection:
        return detect(torch.randn(200, generator=generator), 1.5 + torch.randn(150, generator=generator))

    generator = torch.Generator().manual_seed(seed)
    repeated = [scores(generator) for _ in range(200)]
    found = repeated[0].standard_errors
    # both are estimates from 200 values, each with a relative error of 1 / sqrt(400); AUROC is nearly normal
    assert found["auroc"] == pytest.approx(np.std([each.auroc for each in repeated]), rel=4 * math.sqrt(2 / 400) + 0.1)
    assert set(found) == {"auroc", "aupr", "fpr95", "tpr_at_fpr"}
    assert all(0 < value < 0.2 for value in found.values())


def test_predictions_and_functions_are_scored(seed):
    (inside, _), (outside, _) = _classes(seed, rows=60, scale=5.0), _classes(seed + 1, rows=50, scale=0.3)
    by_name = detect(inside, outside, score="entropy")
    assert by_name.auroc > 0.9
    by_function = detect(inside, outside, score=lambda prediction: prediction.total)
    assert by_function.auroc == by_name.auroc == detect(inside.total, outside.total).auroc
    assert by_name.flags(outside).tolist() == (outside.total > by_name.threshold).tolist()


def test_a_posterior_of_one_draw_is_warned_of():
    one, _ = _classes(0, draws=1)
    with pytest.warns(kn.ModelWarning, match="one draw"):
        detect(one, one, score="mutual_information")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: detect([], [1.0]), kn.InvalidData, "inside is empty"),
        (lambda: detect([1.0], [math.nan]), kn.InvalidData, "outside has 1 missing"),
        (lambda: detect([1.0], [1.0], validation=[]), kn.InvalidData, "validation is empty"),
        (lambda: detect([1.0], [1.0], score="entrpy"), kn.InvalidArgument, "Did you mean 'entropy'"),
        (lambda: detect([1.0], [1.0], score="density"), kn.Unsupported, "kn.FeatureDensity"),
        (lambda: detect([1.0], [1.0]).tpr_at_fpr(2.0), kn.InvalidArgument, "fpr"),
        (lambda: kn.metrics.fpr95([1.0], [1.0], tpr=0.0), kn.InvalidArgument, "tpr"),
    ],
)
def test_wrong_calls_are_named(call, error, said: str):
    with pytest.raises(error, match=said):
        call()


def test_scores_of_classes_are_refused_for_numbers():
    means = torch.randn(3, 6, 1)
    prediction = kn.Gaussian(0.1).predict(means, {}, torch.full((3,), 1 / 3).log())
    with pytest.raises(kn.Unsupported, match="is for classes"):
        detect(prediction, prediction, score="max_prob")


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_the_plot_has_histograms_and_a_curve(scale: float):
    generator = torch.Generator().manual_seed(0)
    found = detect(scale * torch.rand(50, generator=generator), torch.rand(40, generator=generator))
    left, right = found.plot().axes
    assert left.get_xscale() == ("log" if scale < 1 else "linear")
    assert right.get_title() == f"AUROC {found.auroc:.4f}"
    assert len(detect([0.0, 0.0], [0.0]).plot().axes) == 2  # all the same
