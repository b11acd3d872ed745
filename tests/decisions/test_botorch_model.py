"""Tests of posteriors as BoTorch models: closed forms, gradients, and BoTorch's own acquisition functions on them."""

from __future__ import annotations

import importlib
import math
import sys
import warnings

import pytest
import torch
from torch import nn

import knowable as kn

as_model = kn.botorch.as_model  # imports BoTorch with its own warnings silenced

from botorch.acquisition import (  # noqa: E402
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qSimpleRegret,
    qUpperConfidenceBound,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform  # noqa: E402
from botorch.generation.sampling import MaxPosteriorSampling  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.posteriors.ensemble import EnsemblePosterior  # noqa: E402
from botorch.posteriors.gpytorch import GPyTorchPosterior  # noqa: E402
from botorch.sampling.normal import SobolQMCNormalSampler  # noqa: E402

DOUBLE = {"dtype": torch.float64}
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], **DOUBLE)
METHODS = {
    "hmc": kn.HMC(chains=2, warmup=20, draws=10),
    "mean_field": kn.MeanFieldVI(epochs=30),
    "ensemble": kn.DeepEnsemble(members=4, epochs=30),
    "last_layer": kn.Laplace(structure="full", epochs=30),
    "kron": kn.Laplace(epochs=30),
    "exact": kn.ExactLinear(),
    "process": kn.GaussianProcess(),
    "sparse": kn.SparseGaussianProcess(inducing=8, epochs=30),
    "deep_kernel": kn.DeepKernel(epochs=30),
    "deep_process": kn.DeepGaussianProcess(inducing=8, epochs=30),
}
LINEAR = ("last_layer", "kron", "exact")
NORMAL = (*LINEAR, "process", "sparse", "deep_kernel")


def data(seed=0, rows=12, outputs=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator, **DOUBLE)
    return x, torch.stack([torch.sin(4 * x[:, 0]) + k * x[:, 1] ** 2 for k in range(1, outputs + 1)], 1)


def fitted(name, outputs=1, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    kept = {"random": "last_layer", "frozen": ["0.*"]} if name == "exact" else {}
    kept = {"random": "last_layer"} if name == "last_layer" else kept
    model = kn.Model(net, kn.Gaussian(noise=0.1), **kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ConvergenceWarning)  # fits of a moment
        return METHODS[name].fit(model, data(outputs=outputs), progress=False)


@pytest.fixture(scope="module")
def posteriors():
    return {name: fitted(name) for name in METHODS}


@pytest.fixture(params=METHODS)
def case(request, posteriors):
    return request.param, as_model(posteriors[request.param], samples=32)


# --- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_shapes_are_those_of_botorch_for_any_batch(case, lead):
    name, model = case
    found = model.posterior(torch.rand(*lead, 4, 2, **DOUBLE))
    assert isinstance(found, GPyTorchPosterior if name in NORMAL else EnsemblePosterior)
    assert found.mean.shape == found.variance.shape == (*lead, 4, 1)
    assert found.mean.dtype == torch.float64 and (found.variance >= 0).all()
    assert found.rsample(torch.Size([5])).shape == (5, *lead, 4, 1)
    assert model.num_outputs == 1 and model.batch_shape == ()


def test_moments_are_those_of_the_posterior(case, posteriors):
    name, model = case
    x = torch.rand(3, 2, 2, **DOUBLE)
    found = model.posterior(x)
    prediction = posteriors[name].predict_jointly(x.view(-1, 2), samples=32)
    if name in NORMAL:
        prediction = posteriors[name].predict(x.view(-1, 2))
        torch.testing.assert_close(found.variance.flatten(), prediction.epistemic.flatten(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.mean.flatten(), prediction.mean.flatten())
    elif name == "deep_process":  # whose functions are drawn for each set of points
        each = [posteriors[name].predict_jointly(rows, samples=32).samples for rows in x]
        torch.testing.assert_close(found.values, torch.stack(each))
    else:
        values = prediction.samples.view(-1, 3, 2, 1).movedim(0, 1)
        torch.testing.assert_close(found.values, values)
        torch.testing.assert_close(found.mean.flatten(), prediction.mean.flatten())


def test_gradients_to_the_points_agree_with_finite_differences(case):
    _, model = case
    x = torch.rand(2, 3, 2, **DOUBLE, requires_grad=True)
    weights = torch.randn(2, 3, 1, **DOUBLE)

    def value(points):
        found = model.posterior(points)
        return (weights * found.mean).sum() + found.variance.sum()

    assert torch.autograd.gradcheck(value, (x,), eps=1e-6, atol=1e-5)


def test_noise_comes_on_request(case):
    name, model = case
    x = torch.rand(400, 1, 2, **DOUBLE)
    for noise, added in ((True, 0.01), (torch.tensor([[0.25]], **DOUBLE), 0.25)):
        more = (model.posterior(x, observation_noise=noise).variance - model.posterior(x).variance).mean().item()
        if name in NORMAL:
            assert more == pytest.approx(added, rel=1e-6)
        else:  # the variance of as many draws of the noise as there are draws
            draws = model.posterior(x).ensemble_size
            assert 0 < more < added * (1 + 6 * math.sqrt(2 / (draws - 1)))


def test_the_joint_covariance_is_that_of_the_functions(posteriors):
    posterior = posteriors["exact"]
    x = torch.rand(5, 2, **DOUBLE)
    draws = posterior.predict_jointly(x, samples=4_000).samples.squeeze(-1)
    covariance = as_model(posterior).posterior(x).distribution.covariance_matrix
    scale = torch.outer(covariance.diagonal(), covariance.diagonal()).sqrt()
    assert ((torch.cov(draws.T) - covariance).abs() < 6 * scale * math.sqrt(2 / 4_000)).all()


def test_copies_of_a_point_and_more_points_than_weights_have_a_cholesky_factor(posteriors):
    model = as_model(posteriors["exact"])
    x = torch.rand(1, 2, **DOUBLE).expand(30, 2)
    found = model.posterior(x)
    assert (found.variance > 0).all()
    torch.linalg.cholesky(found.distribution.covariance_matrix)


@pytest.mark.parametrize("name", ["exact", "last_layer", "ensemble"])
def test_several_outputs(name):
    posterior = fitted(name, outputs=2)
    model, x = as_model(posterior), torch.rand(3, 4, 2, **DOUBLE)
    found = model.posterior(x)
    assert found.mean.shape == (3, 4, 2) and model.num_outputs == 2
    expected = posterior.predict(x.view(-1, 2))
    torch.testing.assert_close(found.mean.view(-1, 2), expected.mean)
    if name in NORMAL:
        torch.testing.assert_close(found.variance.view(-1, 2), expected.epistemic, rtol=1e-6, atol=1e-9)
    second = model.posterior(x, output_indices=[1])
    torch.testing.assert_close(second.mean, found.mean[..., 1:])
    torch.testing.assert_close(second.variance, found.variance[..., 1:])
    total = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(torch.tensor([1.0, -2.0], **DOUBLE)))
    torch.testing.assert_close(total.mean.squeeze(-1), found.mean @ torch.tensor([1.0, -2.0], **DOUBLE))


def test_classes_and_shapes_that_are_none_are_refused(posteriors):
    net = nn.Linear(2, 3).double()
    x, _ = data()
    labels = kn.MeanFieldVI(epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = labels.fit(kn.Model(net, kn.Categorical()), (x, torch.arange(12) % 3), progress=False)
    with pytest.raises(kn.Unsupported, match="predicts numbers"):
        as_model(posterior).posterior(x)
    with pytest.raises(kn.InvalidData, match="must have shape"):
        as_model(posteriors["exact"]).posterior(torch.rand(2, **DOUBLE))
    with pytest.raises(kn.InvalidType, match="a fitted posterior"):
        as_model(net)


def test_without_botorch_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.models.model", None)
    monkeypatch.delitem(sys.modules, "knowable.decisions.botorch_model")
    with pytest.raises(kn.MissingExtra, match=r"pip install 'knowable\[bo\]'"):
        importlib.import_module("knowable.decisions.botorch_model")


# --- conditioning ----------------------------------------------------------------------------------------------------


def test_conditioning_equals_a_fit_to_all_rows_and_in_two_steps_too():
    x, y = data(rows=20)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = kn.Model(net, kn.Gaussian(noise=0.1), random="last_layer", frozen=["0.*"])
    first, every = (kn.ExactLinear().fit(model, (x[:n], y[:n])) for n in (10, 20))
    at = torch.rand(4, 2, **DOUBLE)
    expected = as_model(every).posterior(at)
    for parts in ([slice(10, 20)], [slice(10, 13), slice(13, 20)]):
        found = as_model(first)
        for part in parts:
            found = found.condition_on_observations(x[part], y[part])
        found = found.posterior(at)
        torch.testing.assert_close(found.mean, expected.mean)
        a, b = found.distribution.covariance_matrix, expected.distribution.covariance_matrix
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def test_fantasies_have_a_batch_of_their_own_and_draws_refuse_them(posteriors):
    model, x = as_model(posteriors["exact"]), torch.rand(3, 1, 2, **DOUBLE)
    made = model.fantasize(x, SobolQMCNormalSampler(torch.Size([5]), seed=0))
    assert made.batch_shape == (5, 3)
    found = made.posterior(torch.rand(5, 3, 2, 2, **DOUBLE))
    assert found.mean.shape == (5, 3, 2, 1)
    assert (made.posterior(x).variance < model.posterior(x).variance).all()
    with pytest.raises(kn.Unsupported, match="cannot be conditioned"):
        as_model(posteriors["hmc"]).fantasize(x, None)
    with pytest.raises(kn.InvalidData, match="Y must have shape"):
        model.condition_on_observations(x, torch.zeros(3, 2, 1, **DOUBLE))


# --- BoTorch's acquisition functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("acquisition", ["logei", "ucb", "lognei", "regret"])
def test_acquisition_functions_are_optimised_on_every_model(case, acquisition):
    _, model = case
    x, y = data()
    sampler = None
    made = {
        "logei": lambda: qLogExpectedImprovement(model, best_f=y.max(), sampler=sampler),
        "ucb": lambda: qUpperConfidenceBound(model, beta=4.0),
        "lognei": lambda: qLogNoisyExpectedImprovement(model, X_baseline=x, cache_root=False, prune_baseline=False),
        "regret": lambda: qSimpleRegret(model),
    }[acquisition]()
    point, value = optimize_acqf(
        made, BOUNDS, q=2, num_restarts=2, raw_samples=8, options={"maxiter": 4, "batch_limit": 2}
    )
    assert point.shape == (2, 2) and ((point >= 0) & (point <= 1)).all() and value.isfinite()


def test_thompson_sampling_takes_points_that_are_best_under_a_draw(case):
    _, model = case
    candidates = torch.rand(20, 2, **DOUBLE)
    with torch.no_grad():
        found = MaxPosteriorSampling(model)(candidates, num_samples=3)
    assert found.shape == (3, 2)


def test_knowledge_gradient_runs_where_there_is_a_closed_form(posteriors):
    model = as_model(posteriors["exact"])
    gradient = qKnowledgeGradient(model, num_fantasies=3)
    point, value = optimize_acqf(gradient, BOUNDS, q=1, num_restarts=2, raw_samples=4, options={"maxiter": 3})
    assert point.shape == (1, 2) and value.isfinite()


def test_draws_are_taken_evenly_and_the_same_for_every_set_of_points(posteriors):
    model = as_model(posteriors["ensemble"])
    found = model.posterior(torch.rand(1, 2, **DOUBLE).expand(3, 1, 2))
    acquisition = qSimpleRegret(model)
    values = acquisition(torch.rand(1, 2, **DOUBLE).expand(3, 1, 2))
    assert (values == values[0]).all()
    samples = acquisition.get_posterior_samples(found)
    torch.testing.assert_close(samples.mean(0), found.mean)
