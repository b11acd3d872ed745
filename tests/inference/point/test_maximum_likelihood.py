from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

import knowable as kn
from knowable.testing import LinearGaussian

QUICK = {"epochs": 500, "learning_rate": 0.05}  # full-batch Adam on a quadratic: converges to rounding error


def least_squares(problem: LinearGaussian) -> np.ndarray:
    return np.linalg.lstsq(problem.design.numpy(), problem.y.numpy(), rcond=None)[0][:, 0]


def test_linear_model_is_least_squares(seed):
    problem = LinearGaussian.make(seed=seed)
    mean = kn.MaximumLikelihood(**QUICK).fit(problem.model(), problem.data).mean()
    np.testing.assert_allclose(problem.as_flat(mean), least_squares(problem), rtol=1e-5, atol=1e-6)


def test_learned_noise_is_the_root_mean_square_of_the_residuals(seed):
    problem = LinearGaussian.make(seed=seed)
    method = kn.MaximumLikelihood(epochs=1000, learning_rate=0.1)  # the noise begins far off: it takes longer
    posterior = method.fit(kn.Model(problem.model().net, kn.Gaussian()), problem.data)
    residual = problem.y[:, 0].numpy() - problem.design.numpy() @ least_squares(problem)
    log_noise = posterior.mean()["likelihood.log_noise"].item()
    assert log_noise == pytest.approx(math.log(math.sqrt((residual**2).mean())), abs=1e-5)


@pytest.mark.parametrize("prior", [kn.Normal(0.01), kn.EmpiricalBayes(kn.Normal(1.0))], ids=repr)
def test_prior_makes_no_difference(seed, prior):
    problem = LinearGaussian.make(seed=seed)
    model = problem.model()
    fits = [
        kn.MaximumLikelihood(epochs=20).fit(kn.Model(model.net, model.likelihood, each), problem.data).mean()
        for each in (kn.Normal(1.0), prior)
    ]
    assert all(torch.equal(fits[0][name], fits[1][name]) for name in ("weight", "bias"))


def test_logistic_regression_is_where_its_likelihood_is_largest(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(120, 2, generator=generator, dtype=torch.float64)
    y = (x.sum(1) + 1.5 * torch.randn(120, generator=generator, dtype=torch.float64) > 0).long()
    model = kn.Model(nn.Linear(2, 1).double(), kn.Bernoulli())
    mean = kn.MaximumLikelihood(epochs=500, learning_rate=0.1).fit(model, (x, y)).mean()

    def negative(at: np.ndarray) -> float:
        logits = x.numpy() @ at[:2] + at[2]
        return (np.logaddexp(0, logits) - y.numpy() * logits).sum()

    best = scipy.optimize.minimize(negative, np.zeros(3), method="BFGS").x
    np.testing.assert_allclose(mean["weight"][0], best[:2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mean["bias"][0], best[2], rtol=1e-3, atol=1e-3)


def test_report_has_no_prior_term(seed):
    problem = LinearGaussian.make(seed=seed)
    posterior = kn.MaximumLikelihood(epochs=10).fit(problem.model(), problem.data)
    assert "log_prior" not in posterior.diagnostics
    assert posterior.diagnostics["loss"] == pytest.approx(-posterior.diagnostics["log_likelihood"] / len(problem.x))
    assert posterior.log_evidence is None
