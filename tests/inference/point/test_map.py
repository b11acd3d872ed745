from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import sklearn.linear_model
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.testing import LinearGaussian

QUICK = {"epochs": 500, "learning_rate": 0.05}  # full-batch Adam on a quadratic: converges to rounding error


def test_mode_of_a_linear_model_is_the_posterior_mean(seed):
    problem = LinearGaussian.make(seed=seed)
    posterior = kn.MAP(**QUICK).fit(problem.model(), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-5, atol=1e-6)
    assert len(posterior) == 1
    assert all((value == 0).all() for value in posterior.std().values())


@pytest.mark.slow
def test_default_settings_stop_by_themselves_at_the_mode(seed):
    problem = LinearGaussian.make(n=30, seed=seed)
    posterior = kn.MAP().fit(problem.model(), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-5, atol=1e-6)
    assert posterior.diagnostics.converged


def test_normal_prior_is_ridge_regression(seed):
    # |y - Xw|² / 2σ² + |w|² / 2s²: a penalty of σ² / s²; the intercept is free under a flat prior
    problem = LinearGaussian.make(n=40, d=5, seed=seed)
    prior = {"bias": kn.Flat(), "*": kn.Normal(0.2)}
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    mean = kn.MAP(**QUICK).fit(model, problem.data).mean()
    ridge = sklearn.linear_model.Ridge(alpha=problem.noise**2 / 0.2**2, tol=1e-12).fit(problem.x, problem.y[:, 0])
    np.testing.assert_allclose(mean["weight"][0], ridge.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean["bias"][0], ridge.intercept_, rtol=1e-4, atol=1e-6)


def test_laplace_prior_is_the_lasso(seed):
    # |y - Xw|² / 2σ² + |w| / b, against |y - Xw|² / 2n + α |w|: α = σ² / (b n). A weight whose pull is nearly balanced
    # creeps to zero, so what is compared is how much is left to gain: under 0.01 nats of log joint
    problem = LinearGaussian.make(n=40, d=5, seed=seed, correlation=0.0)
    prior = {"bias": kn.Flat(), "*": kn.LaplacePrior(0.01)}
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    mean = kn.MAP(epochs=800, learning_rate=0.03).fit(model, problem.data).mean()
    lasso = sklearn.linear_model.Lasso(alpha=problem.noise**2 / (0.01 * 40), tol=1e-10, max_iter=100_000)
    lasso.fit(problem.x.numpy(), problem.y[:, 0].numpy())
    best = problem.as_params(torch.tensor([*lasso.coef_, lasso.intercept_], dtype=torch.float64))
    reached, highest = (model.log_joint(each, *problem.data, size=40).item() for each in (mean, best))
    assert -1e-6 < highest - reached < 0.01
    np.testing.assert_allclose(mean["weight"][0], lasso.coef_, atol=0.02)


def test_learned_noise_is_at_the_joint_mode(seed):
    problem = LinearGaussian.make(n=40, d=2, seed=seed)
    method = kn.MAP(epochs=1000, learning_rate=0.1)  # the noise begins far off: it takes longer
    posterior = method.fit(kn.Model(problem.model().net, kn.Gaussian()), problem.data)

    def negative(at: np.ndarray) -> float:
        residual = problem.y[:, 0].numpy() - problem.design.numpy() @ at[:3]
        log_likelihood = -0.5 * (residual**2).sum() * math.exp(-2 * at[3]) - len(residual) * at[3]
        return -log_likelihood + 0.5 * (at[:3] ** 2).sum() + 0.5 * ((at[3] + 1) / 2) ** 2

    best = scipy.optimize.minimize(negative, np.zeros(4), method="BFGS", options={"gtol": 1e-6}).x
    mean = posterior.mean()
    np.testing.assert_allclose(problem.as_flat(mean), best[:3], rtol=1e-4, atol=1e-4)
    assert mean["likelihood.log_noise"].item() == pytest.approx(best[3], abs=1e-4)
    assert posterior.diagnostics["log_noise"] == pytest.approx(best[3], abs=1e-4)


def test_posterior_as_prior_leads_to_the_mode_of_all_data(seed):
    problem = LinearGaussian.make(seed=seed)
    model, (x, y) = problem.model(), problem.data
    first = kn.ExactLinear().fit(model, (x[:20], y[:20]))
    second = kn.MAP(**QUICK).fit(kn.Model(model.net, model.likelihood, first), (x[20:], y[20:]))
    torch.testing.assert_close(problem.as_flat(second.mean()), problem.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("as_loader", [False, True], ids=["tensors", "loader"])
def test_mini_batches_lead_to_the_same_mode(seed, as_loader):
    # the last steps have a rate near zero: what is left is far below the posterior's own spread (0.06 to 0.1 here)
    problem = LinearGaussian.make(n=64, seed=seed)
    loader = DataLoader(TensorDataset(*problem.data), batch_size=16, shuffle=True)
    method = kn.MAP(epochs=150, learning_rate=0.03, batch_size=16)
    mean = method.fit(problem.model(), loader if as_loader else problem.data, seed=seed).mean()
    distance = (problem.as_flat(mean) - problem.mean) / problem.covariance.diagonal().sqrt()
    assert distance.abs().max() < 0.15


def test_stochastic_gradient_descent_leads_there_too(seed):
    problem = LinearGaussian.make(seed=seed)
    mean = (
        kn.MAP(epochs=500, learning_rate=0.03, training=kn.Training(optimiser="sgd"))
        .fit(problem.model(), problem.data)
        .mean()
    )
    torch.testing.assert_close(problem.as_flat(mean), problem.mean, rtol=1e-4, atol=1e-4)


def test_terms_of_the_report_are_those_of_the_model(seed):
    problem = LinearGaussian.make(seed=seed)
    posterior = kn.MAP(**QUICK).fit(problem.model(), problem.data)
    model, mean = posterior.model, posterior.mean()
    terms = posterior.diagnostics
    assert terms["log_likelihood"] == pytest.approx(model.log_likelihood(mean, *problem.data).sum().item(), rel=1e-6)
    assert terms["log_prior"] == pytest.approx(model.log_prior(mean).item(), rel=1e-6)
    assert terms["loss"] == pytest.approx(-(terms["log_likelihood"] + terms["log_prior"]) / len(problem.x), rel=1e-9)


def test_validation_keeps_the_best_state_and_stops_early(seed):
    # more weights than rows: the fit to held-out rows gets worse after a while
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(60, 20, generator=generator), torch.randn(60, 1, generator=generator)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    model, held_out = kn.Model(net, kn.Gaussian(0.5), kn.Normal(10.0)), (x[30:], y[30:])
    method = kn.MAP(epochs=4000, training=kn.Training(patience=3))
    posterior = method.fit(model, (x[:30], y[:30]), validation=held_out)
    scores = [record["validation_log_likelihood"] for record in posterior.diagnostics.history]
    found = posterior.predict(held_out[0]).log_prob(held_out[1]).mean().item()
    assert found == pytest.approx(max(scores), rel=1e-4)
    assert scores.index(max(scores)) == len(scores) - 1 - 3  # three records without a gain, then the end
    assert "validation" in posterior.diagnostics.message
    assert posterior.diagnostics.history[-1]["step"] < 4000


def test_running_statistics_belong_to_the_fit():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(32, 2)
    model = kn.Model(net, kn.Gaussian(0.5), frozen="0.*")
    posterior = kn.MAP(epochs=400).fit(model, (x, torch.randn(32, 1)))
    with torch.no_grad():
        features = net[0](
            x
        )  # frozen, so the statistics converge to those of one batch: 0.9 ** 400 of the start is left
    torch.testing.assert_close(posterior.buffers["1.running_mean"], features.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(posterior.buffers["1.running_var"], features.var(0), rtol=1e-4, atol=1e-5)
    assert (net[1].running_mean == 0).all() and (net[1].running_var == 1).all()


def test_learned_prior_scale_is_refused_because_it_has_no_mode():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.5), kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="MeanFieldVI"):
        kn.MAP(epochs=1).fit(model, (torch.randn(5, 2), torch.randn(5, 1)))


def test_bfloat16_leads_close_to_the_same_mode(seed):
    # outputs are rounded to 8 bits: a relative error of 2**-9 each, far below the noise of 0.5; the mode moves by a
    # fraction of the posterior's spread
    problem = LinearGaussian.make(seed=seed, dtype=torch.float32)
    mean = kn.MAP(**QUICK).fit(problem.model(), problem.data, engine=kn.Engine("bfloat16")).mean()
    assert mean["weight"].dtype == torch.float32
    distance = (problem.as_flat(mean) - problem.mean) / problem.covariance.diagonal().sqrt()
    assert distance.abs().max() < 0.3
