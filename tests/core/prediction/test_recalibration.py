"""Tests of the maps that recalibrate predictions, and of how they are fitted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

import knowable as kn
from knowable.core.prediction.components import CorrelatedNormal, NormalComponents, NormalOutputs
from knowable.core.prediction.recalibration import _chosen, _isotonic, _problem, _with_average, fitted
from knowable.likelihoods.bernoulli import BernoulliPrediction
from knowable.likelihoods.categorical import CategoricalPrediction
from knowable.likelihoods.poisson import PoissonComponents

DTYPE = torch.float64


def _classes(generator, draws=4, rows=400, classes=3, *, spread=0.7, trailing=(), sure=2.0):
    """A prediction that is too sure, and labels: draws scatter around the true logits times ``sure``."""
    true = torch.randn((rows, classes, *trailing), generator=generator, dtype=DTYPE)
    noise = spread * torch.randn((draws, *true.shape), generator=generator, dtype=DTYPE)
    probs = true.softmax(1).movedim(1, -1)
    y = torch.multinomial(probs.reshape(-1, classes), 1, generator=generator).view(probs.shape[:-1])
    weights = torch.rand(draws, generator=generator, dtype=DTYPE).log().log_softmax(0)
    return CategoricalPrediction((sure * (true + noise)).log_softmax(2), weights), y


def _normal(generator, draws=3, rows=300, trailing=(), *, noise=0.5):
    loc = torch.randn((draws, rows, *trailing), generator=generator, dtype=DTYPE)
    y = loc[0] + torch.randn((rows, *trailing), generator=generator, dtype=DTYPE)
    scale = torch.full_like(loc, noise)
    return kn.RegressionPrediction(NormalComponents(loc, scale), torch.zeros(draws, dtype=DTYPE).log_softmax(0)), y


def _slow_nll(prediction: CategoricalPrediction, y: Tensor, temperature: float) -> float:
    total = 0.0
    weights = prediction.log_weights.exp().tolist()
    for row in range(len(y)):
        probability = 0.0
        for k, weight in enumerate(weights):
            powers = [math.exp(v / temperature) for v in prediction.log_probs[k, row].tolist()]
            probability += weight * powers[y[row]] / sum(powers)
        total -= math.log(probability)
    return total


def test_temperature_minimises_the_loss_of_the_averaged_predictive(generator):
    prediction, y = _classes(generator, rows=60)
    found = fitted(prediction, y, "temperature")
    slow = minimize_scalar(
        lambda t: _slow_nll(prediction, y, math.exp(t)) + t**2 / 2, bounds=(-3, 3), options={"xatol": 1e-9}
    )
    assert found.values["temperature"].item() == pytest.approx(math.exp(slow.x), rel=1e-5)
    assert found.nll_before == pytest.approx(_slow_nll(prediction, y, 1.0) / 60, rel=1e-12)
    after = found(prediction)
    assert kn.metrics.nll(after, y) == pytest.approx(
        _slow_nll(prediction, y, found.values["temperature"].item()) / 60, rel=1e-9
    )


@pytest.mark.parametrize("method", ["temperature", "vector", "isotonic"])
def test_what_was_too_sure_is_calibrated_on_new_rows(method, generator):
    prediction, y = _classes(generator, rows=4000, spread=0.0, sure=2.5)
    new, new_y = _classes(generator, rows=4000, spread=0.0, sure=2.5)
    found = fitted(prediction, y, method)
    if method == "temperature":  # the information about log T is at least 0.2 a row here
        assert abs(found.values["temperature"].log().item() - math.log(2.5)) < 4 / math.sqrt(0.2 * 4000)
    assert kn.metrics.ece(new, new_y) > 0.1
    assert kn.metrics.ece(found(new), new_y) < 0.04
    gain = kn.evaluate(found(new), new_y).per_row["nll"] - kn.evaluate(new, new_y).per_row["nll"]
    promised = found.nll_after - found.nll_before
    error = math.hypot(found.standard_error, gain.std().item() / math.sqrt(4000))
    assert abs(gain.mean().item() - promised) < 4 * error


def test_vector_finds_slopes_and_shifts(generator):
    prediction, y = _classes(generator, draws=1, rows=6000, spread=0.0, sure=1.0)
    slope, shift = torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([-1.0, 0.3, 0.7]).double()
    said = ((prediction.log_probs.movedim(2, -1) - shift) / slope).movedim(-1, 2)

    # a draw's probabilities are known up to a factor, which vector scaling sees: give it these very numbers
    class Raw(CategoricalPrediction):
        pass

    raw = Raw(said, prediction.log_weights)
    found = fitted(raw, y, "vector")
    moved = said * found.values["slope"].view(1, 1, 3) + found.values["shift"].view(1, 1, 3)
    assert (moved.softmax(2) - prediction.samples).abs().mean() < 0.02


def test_yes_or_no_is_the_same_as_two_classes(generator):
    logits = 2 * torch.randn((3, 500), generator=generator, dtype=DTYPE)
    y = torch.bernoulli((logits[0] / 2).sigmoid(), generator=generator)
    weights = torch.zeros(3, dtype=DTYPE).log_softmax(0)
    yes = BernoulliPrediction(logits, weights)
    two = CategoricalPrediction(torch.stack([torch.zeros_like(logits), logits], 2).log_softmax(2), weights)
    for method in ("temperature", "vector", "isotonic"):
        first, second = fitted(yes, y, method), fitted(two, y, method)
        assert first.nll_after == pytest.approx(second.nll_after, rel=1e-6)
        torch.testing.assert_close(first(yes).probs, second(two).probs[:, 1], rtol=1e-4, atol=1e-5)
    assert isinstance(first(yes), BernoulliPrediction)


def test_isotonic_is_that_of_scikit_learn_with_one_more_row_a_block(generator):
    probs = torch.rand(5000, generator=generator, dtype=DTYPE).round(decimals=2).numpy()
    hits = torch.bernoulli(torch.from_numpy(probs) ** 2, generator=generator).numpy()
    knots, heights = _isotonic(probs, hits)
    slow = IsotonicRegression().fit(probs, hits).predict(probs)
    blocks = [slow == level for level in np.unique(slow)]
    size, middle = (np.array([f(block) for block in blocks]) for f in (np.sum, lambda block: probs[block].mean()))
    smoothed = (size * np.unique(slow) + middle) / (size + 1)
    expected = IsotonicRegression().fit(middle, smoothed, sample_weight=size + 1).predict(middle)
    np.testing.assert_allclose(np.interp(middle, knots, heights), expected, atol=1e-9)
    assert (np.diff(heights) >= 0).all() and (np.diff(knots) > 0).all()
    assert heights[0] >= 0 and heights[-1] <= 1


@pytest.mark.parametrize("hits", [[0, 0, 0], [1, 1, 1], [0, 1, 1]])
@pytest.mark.parametrize("probs", [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.3, 0.3, 0.3]])
def test_steps_of_few_rows_are_never_certain(probs, hits):
    knots, heights = _isotonic(np.array(probs), np.array(hits, dtype=float))
    assert (np.diff(heights) >= 0).all() and (np.diff(knots) > 0).all()
    found = np.interp([0.2, 0.8], knots, heights)
    assert (found > 0).all() and (found < 1).all()


@pytest.mark.parametrize("sharpness", [1.0, 30.0, 1000.0])
def test_draws_are_moved_to_given_averages(sharpness, generator):
    log_probs = (sharpness * torch.randn((5, 40, 4), generator=generator, dtype=DTYPE)).log_softmax(-1)
    weights = torch.rand(5, generator=generator, dtype=DTYPE).log().log_softmax(0)
    average = torch.rand((40, 4), generator=generator, dtype=DTYPE).pow(3).clamp_min(1e-9)
    average = average / average.sum(1, keepdim=True)
    moved = _with_average(log_probs, weights, average)
    torch.testing.assert_close(moved.exp().sum(-1), torch.ones(5, 40, dtype=DTYPE))
    torch.testing.assert_close(torch.tensordot(weights.exp(), moved.exp(), dims=1), average, rtol=1e-9, atol=1e-12)
    if sharpness == 1.0:  # where the averages are as they should be, nothing moves
        own = torch.tensordot(weights.exp(), log_probs.exp(), dims=1)
        torch.testing.assert_close(_with_average(log_probs, weights, own), log_probs)


def test_a_closed_form_average_is_kept(generator):
    """At temperature 1 the probabilities are those that were found in closed form, not those of the draws."""
    mean, root = (torch.randn((*s,), generator=generator, dtype=DTYPE) for s in ((30, 3), (30, 3, 3)))
    noise = torch.randn((8, 3), generator=generator, dtype=DTYPE)
    outputs = NormalOutputs.of_moments(mean, root @ root.mT, noise)
    prediction = kn.Categorical().predict_normal(outputs, {})
    assert isinstance(prediction, CategoricalPrediction)
    found = fitted(prediction, prediction.draw(1, generator=generator)[0], "temperature")
    found.values["temperature"].fill_(1.0)
    torch.testing.assert_close(found(prediction).probs, prediction.probs)
    binary = kn.Bernoulli().predict_normal(NormalOutputs(mean, mean**2, None, outputs.draws), {})
    torch.testing.assert_close(found(binary).probs, binary.probs)


def test_scale_of_a_normal_is_its_closed_form(generator):
    prediction, y = _normal(generator, draws=1)
    found = fitted(prediction, y)
    squares = ((y - prediction.mean) / 0.5).square().sum().item()
    slow = minimize_scalar(
        lambda u: 300 * u + squares * math.exp(-2 * u) / 2 + u**2 / 2, bounds=(-3, 3), options={"xatol": 1e-10}
    )
    assert found.method == "scale"
    assert found.values["scale"].item() == pytest.approx(math.exp(slow.x), rel=1e-6)
    assert found.values["scale"].item() == pytest.approx(math.sqrt(squares / 300), rel=0.02)  # the prior is weak
    residuals = y - prediction.mean
    nll = (0.5 * (residuals / 0.5) ** 2 + math.log(0.5) + 0.5 * math.log(2 * math.pi)).mean().item()
    assert found.nll_before == pytest.approx(nll, rel=1e-12)


def test_scale_stretches_noise_and_doubt_about_the_mean(generator):
    prediction, y = _normal(generator, trailing=(2,))
    found = fitted(prediction, y)
    scale, moved = found.values["scale"], found(prediction)
    assert scale.shape == (2,)
    torch.testing.assert_close(moved.mean, prediction.mean)
    torch.testing.assert_close(moved.aleatoric, prediction.aleatoric * scale**2)
    torch.testing.assert_close(moved.epistemic, prediction.epistemic * scale**2)
    low, high = prediction.interval(0.8)
    mean = prediction.mean
    torch.testing.assert_close(moved.interval(0.8)[0], mean + scale * (low - mean), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.interval(0.8)[1], mean + scale * (high - mean), rtol=1e-6, atol=1e-6)


def test_scale_with_correlations_within_a_row_is_fitted_to_the_joint_density(generator):
    root = torch.randn((200, 2, 2), generator=generator, dtype=DTYPE)
    covariance = root @ root.mT + 0.1 * torch.eye(2, dtype=DTYPE)
    factor, mean = torch.linalg.cholesky(covariance), torch.randn((1, 200, 2), generator=generator, dtype=DTYPE)
    components = CorrelatedNormal(mean, covariance.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(0), factor)
    prediction = kn.RegressionPrediction(components, torch.zeros(1, dtype=DTYPE))
    stretch = torch.tensor([2.0, 0.5], dtype=DTYPE)
    y = mean[0] + stretch * (factor @ torch.randn((200, 2, 1), generator=generator, dtype=DTYPE)).squeeze(-1)
    found = fitted(prediction, y)
    error = 4 / math.sqrt(200)  # the information about log s is at least 1 a row
    assert (found.values["scale"].log() - stretch.log()).abs().max() < error
    assert -2 * kn.metrics.nll(found(prediction), y) > -2 * kn.metrics.nll(prediction, y)


@pytest.mark.parametrize("method", ["temperature", "vector", "isotonic", "scale"])
def test_the_split_stays_an_identity(method, generator):
    prediction, y = _normal(generator) if method == "scale" else _classes(generator)
    moved = fitted(prediction, y, method)(prediction)
    assert torch.equal(moved.total, moved.aleatoric + moved.epistemic)
    assert (moved.epistemic >= 0).all() and moved.epistemic.max() > 0


def test_pixels_count_one_by_one_and_rows_of_pixels_together(generator):
    prediction, y = _classes(generator, rows=60, trailing=(3, 2))
    flat = prediction.log_probs.movedim(2, -1).flatten(1, 3)
    alone = CategoricalPrediction(flat, prediction.log_weights)
    pixels, singles = fitted(prediction, y, "temperature"), fitted(alone, y.flatten(), "temperature")
    assert pixels.rows == 60 and singles.rows == 360
    assert pixels.values["temperature"].item() == pytest.approx(singles.values["temperature"].item(), rel=1e-6)
    moved = pixels(prediction)
    assert moved.probs.shape == (60, 3, 3, 2)
    torch.testing.assert_close(moved.probs.movedim(1, -1).flatten(0, 2), singles(alone).probs)


def test_labels_that_do_not_count_are_left_out(generator):
    prediction, y = _classes(generator, rows=80, trailing=(2,))
    ignored = y.clone()
    ignored[::2, 0] = -1
    masked = CategoricalPrediction(prediction.log_probs, prediction.log_weights, ignore_index=-1)
    kept = ignored.flatten() >= 0
    alone = CategoricalPrediction(prediction.log_probs.movedim(2, -1).flatten(1, 2)[:, kept], prediction.log_weights)
    first, second = fitted(masked, ignored, "vector"), fitted(alone, y.flatten()[kept], "vector")
    torch.testing.assert_close(first.values["slope"], second.values["slope"], rtol=1e-4, atol=1e-4)
    numbers, target = _normal(generator)
    some = kn.RegressionPrediction(numbers.components, numbers.log_weights, missing=True)
    half = target.clone()
    half[::2] = torch.nan
    fewer = NormalComponents(numbers.components.mean[:, 1::2], numbers.components.variance[:, 1::2].sqrt())
    expected = fitted(kn.RegressionPrediction(fewer, numbers.log_weights), target[1::2])
    assert fitted(some, half).values["scale"].item() == pytest.approx(expected.values["scale"].item(), rel=1e-6)


def test_auto_takes_vector_only_where_it_is_clearly_better(generator):
    prediction, y = _classes(generator, rows=2000, spread=0.2)
    assert fitted(prediction, y).method == "temperature"
    tilted = prediction.log_probs + torch.tensor([1.0, 0.0, -1.0], dtype=DTYPE)
    assert fitted(CategoricalPrediction(tilted.log_softmax(2), prediction.log_weights), y).method == "vector"


@pytest.mark.parametrize(("errors", "expected"), [(1.5, "none"), (2.5, "vector"), (-1.0, "none")])
def test_auto_wants_a_gain_of_two_standard_errors(errors, expected, generator):
    """A gain of one standard error is what the best of three often has by chance."""
    prediction, y = _classes(generator, rows=400)
    problem = _problem(prediction, y)
    noise = torch.randn(400, generator=generator, dtype=DTYPE)
    noise = (noise - noise.mean()) / noise.std()
    before = problem.nll(None)
    gain = 0.1 * (noise + errors / math.sqrt(400))  # its mean, in standard errors of the paired difference
    fits = [(("none", {}), before), (("vector", {}), before - gain)]
    assert _chosen(fits, problem)[0][0] == expected


def test_auto_leaves_calibrated_predictions_alone(generator):
    found, parts, moved = [], [], None
    for _ in range(20):
        prediction, y = _classes(generator, draws=1, rows=300, spread=0.0, sure=1.0)
        found.append(fitted(prediction, y))
        numbers, target = _normal(generator, draws=1, rows=100, noise=1.0)
        parts.append(fitted(numbers, target))
        if found[-1].method == "none":
            moved = found[-1](prediction), prediction
    # a map that gains nothing is ahead by two standard errors in one of 40 at most: more than 4 of 20 once in 10,000
    for each in (found, parts):
        assert sum(one.method != "none" for one in each) <= 4
    assert moved is not None and moved[0] is moved[1]
    assert all("none: no map was clearly better" in repr(one) for one in found if one.method == "none")
    assert all(one.nll_after == one.nll_before for one in found if one.method == "none")


def test_more_parameters_than_rows_carry_are_seen_to_be_worse(generator):
    prediction, y = _classes(generator, rows=40, classes=12, spread=0.0, sure=1.0)
    found = fitted(prediction, y, "vector")
    assert found.nll_after > kn.metrics.nll(found(prediction), y)  # what it gains on its own rows is not believed
    assert found.nll_after > found.nll_before


def test_standard_error_is_that_of_the_paired_difference(generator):
    spread = []
    for _ in range(60):
        prediction, y = _classes(generator, rows=150)
        found = fitted(prediction, y, "temperature")
        spread.append((found.nll_after - found.nll_before, found.standard_error))
    gains, errors = torch.tensor(spread).T
    assert 0.65 < gains.std() / errors.mean() < 1.5  # 60 repetitions know a standard deviation to 9%


def test_one_class_and_counts_and_bounds_are_refused(generator):
    prediction, _ = _classes(generator)
    ones = torch.ones(400, dtype=torch.int64)
    for method in ("vector", "isotonic"):
        with pytest.raises(kn.InvalidData, match="class 1 only"):
            fitted(prediction, ones, method)
    assert fitted(prediction, ones).method == "temperature"
    counts = kn.RegressionPrediction(PoissonComponents(torch.zeros(1, 5)), torch.zeros(1))
    with pytest.raises(kn.Unsupported, match="NegativeBinomial"):
        fitted(counts, torch.ones(5))
    numbers, y = _normal(generator)
    with pytest.raises(kn.Unsupported, match="nothing would be left of what each draw says"):
        fitted(numbers, y, "isotonic")
    with pytest.raises(kn.Unsupported, match="is for numbers"):
        fitted(prediction, ones, "scale")
