"""Tests of the predictive distribution: a mixture of draws, with scipy and closed forms as oracles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

import knowable as kn
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.likelihoods.poisson import PoissonComponents
from tests.core.cases import DTYPE

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE)
LOC = torch.tensor([[-1.0, 4.0], [0.5, 4.1], [3.0, -50.0]], dtype=DTYPE)  # three draws at two rows, far apart
SCALE = torch.tensor([[0.3, 1.0], [0.2, 1.1], [1.5, 0.01]], dtype=DTYPE)


def _mixture(loc=LOC, scale=SCALE, weights=WEIGHTS, **settings) -> RegressionPrediction:
    return RegressionPrediction(NormalComponents(loc, scale), weights.log(), **settings)


def _oracle_cdf(row: int, y: float | np.ndarray) -> float | np.ndarray:
    return stats.norm.cdf(np.expand_dims(y, -1), LOC[:, row].numpy(), SCALE[:, row].numpy()) @ WEIGHTS.numpy()


def _oracle_pdf(row: int, y: float) -> float:
    return float((WEIGHTS.numpy() * stats.norm.pdf(y, LOC[:, row].numpy(), SCALE[:, row].numpy())).sum())


# --- the mixture itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1e-9, 0.001, 0.05, 0.2, 0.5, 0.9, 0.999])
def test_quantiles_are_those_of_the_mixture_and_not_of_a_normal(q):
    found = _mixture().quantile(q)
    for row in range(2):
        expected = optimize.brentq(lambda y, row=row: _oracle_cdf(row, y) - q, -100, 100, xtol=1e-12)
        assert found[row].item() == pytest.approx(expected, abs=1e-8)


def test_quantiles_of_counts_are_the_smallest_count_with_enough_probability():
    rates = torch.tensor([[0.1, 3.0], [8.0, 3.5], [1.0, 200.0]], dtype=DTYPE)
    prediction = RegressionPrediction(PoissonComponents(rates.log()), WEIGHTS.log())
    for q in (0.01, 0.3, 0.5, 0.95, 0.999):
        found = prediction.quantile(q)
        for row in range(2):
            cdf = (WEIGHTS.numpy()[:, None] * stats.poisson.cdf(np.arange(400), rates[:, row].numpy()[:, None])).sum(0)
            assert found[row].item() == np.argmax(cdf >= q)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_quantiles_survive_single_precision_far_from_zero(offset):
    # near 1e6 neighbouring floats are 0.0625 apart: no quantile can be nearer than that
    loc, scale = LOC.float() + offset, SCALE.float()
    found = _mixture(loc, scale, WEIGHTS.float()).quantile(0.35).double() - offset
    expected = _mixture().quantile(0.35)
    torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-5, 0.13 if offset else 0))


def test_the_quantile_of_a_symmetric_mixture_at_a_half_is_its_centre():
    loc = torch.tensor([[-2.0], [2.0]], dtype=DTYPE)
    found = _mixture(loc, torch.ones_like(loc), torch.tensor([0.5, 0.5], dtype=DTYPE)).quantile(0.5)
    assert found.item() == pytest.approx(0.0, abs=1e-9)


def test_an_interval_holds_its_level_of_the_probability_with_equal_tails():
    prediction = _mixture()
    low, high = prediction.interval(0.8)
    torch.testing.assert_close(prediction.cdf(low), torch.full((2,), 0.1, dtype=DTYPE))
    torch.testing.assert_close(prediction.cdf(high), torch.full((2,), 0.9, dtype=DTYPE))


def test_the_distribution_function_is_that_of_the_mixture():
    y = torch.tensor([0.7, 4.05], dtype=DTYPE)
    expected = [_oracle_cdf(row, y[row].item()) for row in range(2)]
    np.testing.assert_allclose(_mixture().cdf(y), expected, rtol=1e-12)


def test_the_log_density_is_that_of_the_mixture_and_survives_far_tails():
    y = torch.tensor([0.7, 4.05], dtype=DTYPE)
    expected = [math.log(_oracle_pdf(row, y[row].item())) for row in range(2)]
    np.testing.assert_allclose(_mixture().log_prob(y), expected, rtol=1e-12)
    far = _mixture().log_prob(torch.tensor([300.0, 300.0], dtype=DTYPE))
    assert torch.isfinite(far).all()
    expected = math.log(0.3) + stats.norm.logpdf(300, 3.0, 1.5)
    assert far[0].item() == pytest.approx(expected, rel=1e-9)


def test_mean_and_variance_are_those_of_the_density_by_integration():
    prediction = _mixture()
    pieces = [-20.0, -1.0, 0.5, 3.0, 20.0]
    moments = [
        sum(
            integrate.quad(lambda y, k=k: y**k * _oracle_pdf(0, y), low, high)[0]
            for low, high in itertools.pairwise(pieces)
        )
        for k in (1, 2)
    ]
    assert prediction.mean[0].item() == pytest.approx(moments[0], rel=1e-7)
    assert prediction.variance[0].item() == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-6)


# --- the split of uncertainty ---------------------------------------------------------------------------------------


def test_the_variance_splits_by_the_law_of_total_variance():
    prediction = _mixture()
    weights = WEIGHTS.unsqueeze(1)
    noise = (weights * SCALE**2).sum(0)
    mean = (weights * LOC).sum(0)
    between = (weights * (LOC - mean) ** 2).sum(0)
    torch.testing.assert_close(prediction.aleatoric, noise)
    torch.testing.assert_close(prediction.epistemic, between)
    torch.testing.assert_close(prediction.total, noise + between)
    torch.testing.assert_close(prediction.std, (noise + between).sqrt())


def test_epistemic_variance_inside_the_components_is_counted_as_epistemic():
    within = 0.25 * SCALE**2
    plain, prediction = _mixture(), _mixture(within=within)
    inside = (WEIGHTS.unsqueeze(1) * within).sum(0)
    torch.testing.assert_close(prediction.epistemic, plain.epistemic + inside)
    torch.testing.assert_close(prediction.aleatoric, plain.aleatoric - inside)
    torch.testing.assert_close(prediction.total, plain.total)


def test_one_draw_has_no_epistemic_part():
    prediction = _mixture(LOC[:1], SCALE[:1], torch.ones(1, dtype=DTYPE))
    assert torch.equal(prediction.epistemic, torch.zeros(2, dtype=DTYPE))
    torch.testing.assert_close(prediction.total, SCALE[0] ** 2)


def test_the_entropy_splits_into_expected_entropy_and_mutual_information():
    probs = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]], [[0.5, 0.5]]], dtype=DTYPE)
    prediction = kn.Categorical().predict(probs.log(), {}, WEIGHTS.log())
    mean = (WEIGHTS.view(3, 1, 1) * probs).sum(0)
    expected = sum(w * stats.entropy(p.numpy()) for w, p in zip(WEIGHTS.tolist(), probs[:, 0], strict=True))
    assert prediction.total.item() == pytest.approx(stats.entropy(mean[0].numpy()))
    assert prediction.aleatoric.item() == pytest.approx(expected)
    assert prediction.epistemic.item() == pytest.approx(stats.entropy(mean[0].numpy()) - expected)


def test_draws_that_agree_have_no_mutual_information_and_it_is_never_negative():
    logits = torch.randn(1, 50, 3).expand(7, 50, 3)
    prediction = kn.Categorical().predict(logits, {}, torch.full((7,), 1 / 7).log())
    assert (prediction.epistemic >= 0).all()
    assert prediction.epistemic.max() < 1e-6


# --- weights --------------------------------------------------------------------------------------------------------


def test_a_draw_of_weight_zero_does_not_count():
    weights = torch.tensor([0.4, 0.6, 0.0], dtype=DTYPE)
    y = torch.tensor([0.1, 4.0], dtype=DTYPE)
    all_of_them, two = _mixture(weights=weights), _mixture(LOC[:2], SCALE[:2], weights[:2])
    for name in ("mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(all_of_them, name), getattr(two, name))
    torch.testing.assert_close(all_of_them.log_prob(y), two.log_prob(y))
    torch.testing.assert_close(all_of_them.quantile(0.3), two.quantile(0.3))


def test_repeating_a_draw_is_the_same_as_doubling_its_weight():
    index = torch.tensor([0, 1, 1, 2])
    split = torch.tensor([0.2, 0.25, 0.25, 0.3], dtype=DTYPE)
    torch.testing.assert_close(_mixture(LOC[index], SCALE[index], split).quantile(0.4), _mixture().quantile(0.4))


# --- draws of outcomes ----------------------------------------------------------------------------------------------


def test_drawn_outcomes_have_the_distribution_of_the_mixture(generator):
    # Kolmogorov-Smirnov: p below 1e-4 at one of two rows happens once in 5,000 seeds
    draws = _mixture().draw(5_000, generator=generator)
    assert draws.shape == (5_000, 2)
    for row in range(2):
        assert stats.kstest(draws[:, row].numpy(), lambda y, row=row: _oracle_cdf(row, y)).pvalue > 1e-4


def test_all_outputs_of_one_row_come_from_the_same_draw(generator):
    loc = torch.tensor([[[-5.0, -5.0]], [[5.0, 5.0]]], dtype=DTYPE)  # two draws that differ in both outputs
    halves = torch.tensor([0.5, 0.5], dtype=DTYPE)
    draws = _mixture(loc, torch.full_like(loc, 0.1), halves).draw(500, generator=generator)
    assert (draws[..., 0].sign() == draws[..., 1].sign()).all()
    assert 0 < (draws[..., 0] > 0).double().mean() < 1


def test_outcomes_repeat_with_their_generator():
    first, second = (_mixture().draw(3, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_the_number_of_outcomes_is_checked(n):
    with pytest.raises(kn.KnowableError, match="n must be a whole number"):
        _mixture().draw(n)
    probs = torch.full((2, 3, 2), 0.5)
    with pytest.raises(kn.KnowableError, match="n must be a whole number"):
        kn.Categorical().predict(probs.log(), {}, torch.full((2,), 0.5).log()).draw(n)


# --- several outputs, shapes, wrong calls ---------------------------------------------------------------------------


def test_the_density_of_several_outputs_is_joint_within_each_draw():
    loc = torch.randn(3, 4, 2, dtype=DTYPE)
    y = torch.randn(4, 2, dtype=DTYPE)
    prediction = _mixture(loc, torch.full_like(loc, 0.7))
    joint = torch.distributions.Normal(loc, 0.7).log_prob(y).sum(-1) + WEIGHTS.log().unsqueeze(1)
    torch.testing.assert_close(prediction.log_prob(y), joint.logsumexp(0), rtol=1e-6, atol=1e-6)


def test_a_vector_of_targets_is_scored_as_a_column():
    prediction = _mixture(LOC.unsqueeze(-1), SCALE.unsqueeze(-1))
    y = torch.tensor([0.1, 4.0], dtype=DTYPE)
    assert torch.equal(prediction.log_prob(y), prediction.log_prob(y.unsqueeze(1)))
    assert prediction.log_prob(y.numpy()).shape == (2,)


@pytest.mark.parametrize("q", [0, 1, -0.1, 2, math.nan])
def test_a_quantile_outside_zero_and_one_is_refused(q):
    with pytest.raises(kn.InvalidArgument, match="q must be a finite number > 0 and < 1, got"):
        _mixture().quantile(q)


@pytest.mark.parametrize("level", [0, 1, 90])
def test_a_level_outside_zero_and_one_is_refused(level):
    with pytest.raises(kn.InvalidArgument, match="level must be a finite number > 0 and < 1, got"):
        _mixture().interval(level)


@pytest.mark.parametrize(
    ("y", "wanted"),
    [
        (torch.zeros(3), r"y must have 2 rows, one for each prediction; got shape \(3,\)"),
        (torch.tensor(1.0), r"y must have 2 rows.*got shape \(\)"),
        (torch.zeros(2, 5), r"y has shape \(2, 5\)"),
        (torch.tensor([0.0, torch.nan]), "y has missing or infinite values in row 1"),
    ],
)
def test_targets_that_do_not_fit_the_prediction_are_refused(y, wanted):
    with pytest.raises(kn.InvalidData, match=wanted):
        _mixture().log_prob(y)


def test_targets_that_are_not_numbers_are_refused():
    with pytest.raises(kn.InvalidType, match="y must be"):
        _mixture().log_prob(["high", "low"])  # type: ignore[arg-type]


def test_predictions_print_what_matters():
    assert repr(_mixture()).startswith("RegressionPrediction(rows=2, outputs=(), draws=3, mean std=")
    probs = torch.full((4, 5, 2), 0.5)
    shown = repr(kn.Categorical().predict(probs.log(), {}, torch.full((4,), 0.25).log()))
    assert shown == "CategoricalPrediction(rows=5, outputs=(2,), draws=4, mean entropy=0.693 nats, epistemic share=0%)"


# --- several predictions as one -------------------------------------------------------------------------------------

SHARES = torch.tensor([0.25, 0.75], dtype=DTYPE)


def _halves(**settings) -> list[RegressionPrediction]:
    """Two predictions that, weighed by SHARES, are the mixture of all five components."""
    first, second = slice(0, 1), slice(1, 3)
    return [
        _mixture(LOC[part], SCALE[part], torch.ones(len(LOC[part]), dtype=DTYPE) / len(LOC[part]), **settings)
        for part in (first, second)
    ]


def test_joined_predictions_are_the_mixture_of_all_their_components():
    joined = RegressionPrediction.joined(_halves(), SHARES.log())
    whole = _mixture(weights=torch.tensor([0.25, 0.375, 0.375], dtype=DTYPE))
    y = torch.tensor([0.7, -50.0], dtype=DTYPE)
    for name in ("mean", "variance", "aleatoric", "epistemic", "samples", "log_weights"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
    torch.testing.assert_close(joined.log_prob(y), whole.log_prob(y))
    torch.testing.assert_close(joined.quantile(0.2), whole.quantile(0.2))
    torch.testing.assert_close(joined.cdf(y), whole.cdf(y))


def test_outcomes_drawn_from_joined_predictions_follow_their_distribution(generator):
    joined = RegressionPrediction.joined(_halves(), SHARES.log())
    draws = joined.draw(4_000, generator=generator)
    for row in range(2):

        def cdf(y: np.ndarray, row: int = row) -> np.ndarray:
            return np.array([joined.cdf(torch.full((2,), each, dtype=DTYPE))[row] for each in y])

        assert stats.ks_1samp(draws[:, row].numpy(), cdf).pvalue > 1e-4


def test_variance_integrated_in_closed_form_stays_epistemic_when_predictions_are_joined():
    plain, with_part = _halves()
    with_part = RegressionPrediction(with_part.components, with_part.log_weights, within=0.5 * SCALE[1:] ** 2)
    joined = RegressionPrediction.joined([plain, with_part], SHARES.log())
    each = [part.mean for part in (plain, with_part)]
    between = SHARES.prod() * (each[0] - each[1]) ** 2
    torch.testing.assert_close(
        joined.epistemic, SHARES[0] * plain.epistemic + SHARES[1] * with_part.epistemic + between
    )
    torch.testing.assert_close(joined.aleatoric, SHARES[0] * plain.aleatoric + SHARES[1] * with_part.aleatoric)


@pytest.mark.parametrize(
    ("likelihood", "shape", "y"),
    [
        (kn.Categorical(), (4, 3), torch.tensor([0, 2, 1, 1])),
        (kn.Bernoulli(), (4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0])),
    ],
    ids=["labels", "yes or no"],
)
def test_joined_predictions_of_labels_average_their_probabilities(likelihood, shape, y, generator):
    parts = [
        likelihood.predict(torch.randn(k, *shape, generator=generator, dtype=DTYPE), {}, torch.zeros(k).log_softmax(0))
        for k in (2, 5)
    ]
    joined = type(parts[0]).joined(parts, SHARES.log())
    torch.testing.assert_close(joined.probs, SHARES[0] * parts[0].probs + SHARES[1] * parts[1].probs)
    torch.testing.assert_close(joined.aleatoric, SHARES[0] * parts[0].aleatoric + SHARES[1] * parts[1].aleatoric)
    expected = SHARES[0] * parts[0].log_prob(y).exp() + SHARES[1] * parts[1].log_prob(y).exp()
    torch.testing.assert_close(joined.log_prob(y), expected.log())
