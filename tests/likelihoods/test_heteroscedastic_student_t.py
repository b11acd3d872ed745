from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.core.model.prior import Normal
from knowable.errors import InvalidData
from knowable.likelihoods import HeteroscedasticGaussian, HeteroscedasticStudentT

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
LOG_DF = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)


def test_log_prob_matches_scipy():
    output, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    found = HeteroscedasticStudentT().log_prob(output, y, {"log_df": LOG_DF[0]})
    centre, scale = output[:, :2].numpy(), output[:, 2:].exp().numpy()
    expected = stats.t.logpdf(y.numpy(), 2 + np.exp(0.5), centre, scale).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_with_many_degrees_of_freedom_it_is_normal():
    output, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    found = HeteroscedasticStudentT().log_prob(output, y, {"log_df": torch.tensor(16.0, dtype=torch.float64)})
    torch.testing.assert_close(found, HeteroscedasticGaussian().log_prob(output, y, {}), rtol=1e-4, atol=1e-4)


def test_tails_are_a_parameter_with_a_prior():
    assert HeteroscedasticStudentT().params() == {"log_df": torch.tensor(2.0)}
    assert HeteroscedasticStudentT().priors() == {"log_df": Normal(1.0, loc=2.0)}


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y, own = torch.randn(4, 1, dtype=torch.float64), LOG_DF.clone().requires_grad_()
    score = lambda f, d: HeteroscedasticStudentT().log_prob(f, y, {"log_df": d})  # noqa: E731
    assert torch.autograd.gradcheck(score, (outputs[0], own[0]))
    loop = torch.stack([score(f, d) for f, d in zip(outputs, own, strict=True)])
    torch.testing.assert_close(torch.func.vmap(score)(outputs, own), loop)


def test_information_is_the_expected_square_of_the_gradient(generator: torch.Generator):
    """By Monte Carlo, within five standard errors."""
    count, df = 200_000, 2 + np.exp(1.5)
    output = torch.tensor([[0.3, -0.4]], dtype=torch.float64).repeat(count, 1).requires_grad_()
    noise = torch.from_numpy(stats.t.rvs(df, size=(count, 1), random_state=generator.initial_seed() % 2**32))
    y = output[:, :1].detach() + output[:, 1:].detach().exp() * noise
    params = {"log_df": LOG_DF[1]}
    (gradient,) = torch.autograd.grad(HeteroscedasticStudentT().log_prob(output, y, params).sum(), output)
    squares = gradient.square()
    error = squares.std(0) / count**0.5
    expected = HeteroscedasticStudentT().information(output[:1].detach(), params).diagonal()[0]
    assert ((squares.mean(0) - expected).abs() < 5 * error).all()


def test_prediction_matches_scipy(generator: torch.Generator):
    outputs = torch.randn(3, 5, 2, dtype=torch.float64)
    prediction = HeteroscedasticStudentT().predict(outputs, {"log_df": LOG_DF}, WEIGHTS.log())
    df = 2 + np.exp(LOG_DF.numpy())[:, None]
    each = stats.t(df, outputs[..., 0].numpy(), outputs[..., 1].exp().numpy())
    w, y = WEIGHTS.numpy()[:, None], torch.randn(5, 1, dtype=torch.float64)
    mean = (w * each.mean()).sum(0)
    np.testing.assert_allclose(prediction.mean[:, 0], mean, rtol=1e-10)
    np.testing.assert_allclose(prediction.variance[:, 0], (w * (each.var() + each.mean() ** 2)).sum(0) - mean**2)
    np.testing.assert_allclose(prediction.log_prob(y), np.log((w * each.pdf(y[:, 0].numpy())).sum(0)), rtol=1e-9)
    np.testing.assert_allclose(prediction.cdf(y)[:, 0], (w * each.cdf(y[:, 0].numpy())).sum(0), rtol=1e-9)
    drawn = prediction.draw(40_000, generator=generator)[..., 0]
    low = prediction.quantile(0.3)[:, 0]
    assert ((drawn < low).double().mean(0) - 0.3).abs().max() < 4.5 * (0.21 / 40_000) ** 0.5


def test_an_odd_number_of_outputs_is_refused():
    with pytest.raises(InvalidData, match="last dimension is even"):
        HeteroscedasticStudentT().check_target(torch.zeros(2), torch.zeros(2, 1))
