from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from knowable.errors import InvalidData
from knowable.likelihoods import Poisson

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3)])
def test_log_prob_matches_scipy(shape: tuple[int, ...]):
    output = 2 * torch.randn(shape, dtype=torch.float64)
    y = torch.randint(0, 30, shape).double()
    expected = stats.poisson.logpmf(y.numpy(), output.exp().numpy()).reshape(6, -1).sum(1)
    np.testing.assert_allclose(Poisson().log_prob(output, y, {}), expected, rtol=1e-11)


def test_probabilities_sum_to_one():
    counts = torch.arange(200).double()
    log_prob = Poisson().log_prob(torch.full((200,), 3.0, dtype=torch.float64), counts, {})
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 5, (4, 2)).double()
    assert torch.autograd.gradcheck(lambda f: Poisson().log_prob(f, y, {}), outputs[0])
    batched = torch.func.vmap(lambda f: Poisson().log_prob(f, y, {}))(outputs)
    torch.testing.assert_close(batched, torch.stack([Poisson().log_prob(f, y, {}) for f in outputs]))


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-1"), (2.5, "2.5")])
def test_what_is_not_a_count_is_refused_with_row_and_value(value: float, shown: str):
    with pytest.raises(InvalidData, match=f"y must be a whole number, 0 or more, got {shown} in row 1"):
        Poisson().check_target(torch.tensor([0.0, value]), torch.zeros(2, 1))


def _prediction():
    log_rate = torch.randn(3, 4, 2, dtype=torch.float64) + 1
    return log_rate.exp().numpy(), Poisson().predict(log_rate, {}, WEIGHTS.log())


def test_moments_follow_the_law_of_total_variance():
    rate, prediction = _prediction()
    w = WEIGHTS.view(3, 1, 1).numpy()
    mean = (w * rate).sum(0)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(prediction.variance, (w * (rate + rate**2)).sum(0) - mean**2, rtol=1e-10)
    assert torch.equal(prediction.total, prediction.aleatoric + prediction.epistemic)


def test_log_prob_and_cdf_of_the_mixture_match_scipy():
    rate, prediction = _prediction()
    y = torch.randint(0, 6, (4, 2)).double()
    joint = stats.poisson.logpmf(y.numpy(), rate).sum(-1)
    expected = special.logsumexp(joint, axis=0, b=WEIGHTS.numpy()[:, None])
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-11)
    for shift in (0.0, 0.4, -0.6):
        cdf = np.tensordot(WEIGHTS.numpy(), stats.poisson.cdf(y.numpy() + shift, rate), 1)
        np.testing.assert_allclose(prediction.cdf(y + shift), cdf, rtol=1e-10, atol=1e-14)
    assert torch.isneginf(prediction.log_prob(y + 0.5)).all()


def test_quantiles_are_the_smallest_counts_that_reach_the_level():
    rate, prediction = _prediction()
    counts = np.arange(400)
    cdf = np.tensordot(WEIGHTS.numpy(), stats.poisson.cdf(counts[:, None, None], rate[:, None]), 1)  # (400, 4, 2)
    for q in (0.01, 0.5, 0.95):
        np.testing.assert_array_equal(prediction.quantile(q), (cdf >= q).argmax(0))


def test_draws_are_counts_with_the_mixtures_moments(generator: torch.Generator):
    _, prediction = _prediction()
    n = 20_000
    drawn = prediction.draw(n, generator=generator)
    assert torch.equal(drawn, drawn.round()) and (drawn >= 0).all()
    assert ((drawn.mean(0) - prediction.mean).abs() < 4 * prediction.std / n**0.5).all()
