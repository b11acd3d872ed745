"""Sparse, deep and deep-kernel Gaussian processes against the exact one, each other, and GPyTorch's own bound."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.storage.folder import Checkpoint
from knowable.errors import InvalidArgument
from knowable.inference.functional.inducing import InducingLayer, best_values, inducing_points
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.functional.kernel_inputs import Units
from knowable.inference.functional.kernels import Covariance, gpytorch

from .test_gaussian_process import NOISE, data, fixed_kernel, model


def held_layer(points: torch.Tensor, outputs: int = 1, *, slope=None, spread: float = 1.0) -> InducingLayer:
    return InducingLayer(Covariance(fixed_kernel(points.shape[1])), points, outputs, slope=slope, spread=spread)


def plain_units(d: int, outputs: int = 1) -> Units:
    zeros, ones = torch.zeros, torch.ones
    double = {"dtype": torch.float64}
    return Units(zeros(d, **double), ones(d, **double), zeros(outputs, **double), ones(outputs, **double))


def test_with_all_inputs_as_inducing_points_it_is_the_exact_process(seed):
    x, y, new = data(seed)
    settings = {"kernel": fixed_kernel(), "mean": "zero"}
    exact = kn.GaussianProcess(**settings).fit(model(), (x, y))
    sparse = kn.SparseGaussianProcess(**settings, inducing=100, epochs=1).fit(model(), (x, y))
    assert float(sparse.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-5)
    found, expected = sparse.predict(new), exact.predict(new)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-5, atol=1e-5)


def test_the_bound_at_its_best_values_is_that_of_titsias(seed):
    """log N(y | 0, Q + σ²) - tr(K - Q) / 2σ², from matrices written out, and the layer's own formulas."""
    x, y, _ = data(seed)
    layer = held_layer(x[:8])
    a = layer.weights(x).detach()
    layer.set(*best_values((a @ a.T).unsqueeze(0) / NOISE**2, (a @ y).T / NOISE**2))
    mean, variance = layer.marginal(x)
    fit = torch.distributions.Normal(mean, NOISE).log_prob(y) - 0.5 * variance / NOISE**2
    k, cross = layer.covariance(x), layer.covariance(x[:8], x)
    q = cross.T @ torch.linalg.solve(layer.covariance(x[:8]), cross)
    noisy = q + NOISE**2 * torch.eye(len(x), dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(y[:, 0]), noisy).log_prob(y[:, 0])
    bound = evidence - 0.5 * (k - q).diagonal().sum() / NOISE**2
    assert (fit.sum() - layer.kl()).detach().item() == pytest.approx(bound.detach().item(), abs=1e-4)


def test_a_layer_is_gpytorchs_whitened_strategy(seed):
    gp, (x, _, new) = gpytorch(), data(seed)
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64).tril()
    mean = torch.randn(6, generator=generator, dtype=torch.float64)

    class Sparse(gp.models.ApproximateGP):
        def __init__(self):
            q = gp.variational.CholeskyVariationalDistribution(6)
            super().__init__(gp.variational.VariationalStrategy(self, x[:6], q, learn_inducing_locations=False))
            self.mean_module, self.covar_module = gp.means.ZeroMean(), fixed_kernel()

        def forward(self, at):
            return gp.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    jitter = gp.settings.variational_cholesky_jitter(double_value=1.7e-8)  # the share that ours adds
    with warnings.catch_warnings(), torch.no_grad(), jitter:
        warnings.simplefilter("ignore")
        made = Sparse().double().eval()
        made.variational_strategy.variational_params_initialized.fill_(1)
        q = made.variational_strategy._variational_distribution
        q.variational_mean.copy_(mean), q.chol_variational_covar.copy_(root)
        expected, kl = made(new), made.variational_strategy.kl_divergence()
        layer = held_layer(x[:6])
        layer.set(mean.unsqueeze(0), root.unsqueeze(0))
        found = layer.joint(new)
        torch.testing.assert_close(found[0][:, 0], expected.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1][0], expected.covariance_matrix, rtol=1e-6, atol=1e-6)
        assert layer.kl().item() == pytest.approx(kl.item(), rel=1e-6)


def test_hyperparameters_reach_those_of_the_exact_process():
    x, y, new = data(0, 40, 1)
    sparse = kn.SparseGaussianProcess(inducing=15).fit(model(d=1, likelihood=kn.Gaussian()), (x, y))
    exact = kn.GaussianProcess().fit(model(d=1, likelihood=kn.Gaussian()), (x, y))
    assert sparse.diagnostics.converged
    assert float(exact.log_evidence) - 0.1 < float(sparse.log_evidence) < float(exact.log_evidence) + 0.05
    torch.testing.assert_close(sparse.predict(new).mean, exact.predict(new).mean, rtol=0.02, atol=0.02)


def test_one_layer_of_a_deep_process_is_a_sparse_one(seed):
    x, y, new = data(seed)
    settings = {"inducing": 8, "epochs": 20, "batch_size": 10}
    one = kn.DeepGaussianProcess(layers=1, **settings).fit(model(), (x, y), seed=seed)
    sparse = kn.SparseGaussianProcess(**settings).fit(model(), (x, y), seed=seed)
    assert float(one.log_evidence) == float(sparse.log_evidence)
    assert torch.equal(one.predict(new).mean, sparse.predict(new).mean)


def test_a_first_layer_that_is_the_identity_changes_nothing(seed):
    x, _, new = data(seed)
    generator = torch.Generator().manual_seed(seed)
    last = held_layer(x[:9])
    last.set(torch.randn(1, 9, generator=generator, dtype=torch.float64), 0.1 * torch.eye(9, dtype=torch.float64)[None])
    kernel = fixed_kernel()
    kernel.outputscale = 1e-14
    first = InducingLayer(Covariance(kernel), x[:9], 2, slope=torch.eye(2, dtype=torch.float64), spread=1e-9)
    single, double = (
        InducingPosterior(model(), copy.deepcopy(layers), plain_units(2), seed=seed)
        for layers in ([last], [first, last])
    )
    found, expected = double.predict(new, samples=20), single.predict(new)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-4, atol=1e-5)
    draws = double.sample_functions(new, 2_000)[..., 0]
    mean, (covariance,) = single._joint(new)
    scale = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean[:, 0]).abs() < 5 * scale / 2_000**0.5).all()
    assert ((draws.T.cov() - covariance).abs() < 5 * (2 / 2_000) ** 0.5 * scale * scale[:, None]).all()


def test_a_mixture_of_layers_has_the_moments_of_its_functions(seed):
    """Predictions row by row, and functions drawn jointly, of layers that are random: the same moments in each row."""
    x, _, new = data(seed)
    generator = torch.Generator().manual_seed(seed)
    layers = [held_layer(x[:5], 2, slope=torch.eye(2, dtype=torch.float64)), held_layer(x[5:10])]
    for layer in layers:
        layer.set(torch.randn(layer.mean.shape, generator=generator, dtype=torch.float64), 0.3 * layer.scale_tril())
    posterior = InducingPosterior(model(), layers, plain_units(2), seed=seed)
    predicted = posterior.predict(new, samples=4_000)
    draws = posterior.sample_functions(new, 4_000, torch.Generator().manual_seed(seed + 1))
    error = (predicted.epistemic / 4_000).sqrt() * 2**0.5
    assert ((draws.mean(0) - predicted.mean).abs() < 5 * error).all()
    assert ((draws.var(0) / predicted.epistemic).log().abs() < 0.3).all()


@pytest.mark.slow
def test_a_deep_process_learns_a_step_better_than_a_single_one():
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).unsqueeze(1)
    y = (x > 0).double() + 0.05 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = {"inducing": 12, "epochs": 700}
    deep, single = (
        kn.DeepGaussianProcess(layers=layers, **settings).fit(model(d=1, likelihood=kn.Gaussian()), (x, y))
        for layers in (2, 1)
    )
    assert float(deep.log_evidence) > float(single.log_evidence) + 1


# --- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 10], ids=["evidence", "bound"])
def test_features_that_are_the_inputs_make_no_difference(batch_size, seed):
    x, y, new = data(seed)
    shared = {"kernel": fixed_kernel(), "epochs": 2, "batch_size": batch_size, "inducing": 8}
    deep = kn.DeepKernel(features=nn.Identity(), **shared)
    flat = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(NOISE))  # with nothing in front of its last layer
    body = kn.DeepKernel(**shared)
    plain = kn.GaussianProcess(kernel=fixed_kernel()).fit(model(), (x, y)).predict(new)
    if batch_size is not None:
        plain = kn.SparseGaussianProcess(**shared).fit(model(), (x, y), seed=seed).predict(new)
    for method, own in ((deep, model()), (body, flat)):
        found = method.fit(own, (x, y), seed=seed).predict(new)
        # two steps leave the mean, which the evidence of the exact process has found, where it began
        torch.testing.assert_close(found.epistemic, plain.epistemic, rtol=1e-5, atol=1e-6)
        if batch_size is not None:
            torch.testing.assert_close(found.mean, plain.mean, rtol=1e-6, atol=1e-6)


def test_identity_features_trained_to_the_end_are_the_exact_process():
    x, y, new = data(1)
    deep = kn.DeepKernel(features=nn.Identity()).fit(model(likelihood=kn.Gaussian()), (x, y))
    exact = kn.GaussianProcess().fit(model(likelihood=kn.Gaussian()), (x, y))
    assert deep.diagnostics.converged
    assert float(deep.log_evidence) == pytest.approx(float(exact.log_evidence), abs=0.02)
    torch.testing.assert_close(deep.predict(new).mean, exact.predict(new).mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(deep.predict(new).std, exact.predict(new).std, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("features", ["network", "module"])
@pytest.mark.parametrize("batch_size", [None, 10], ids=["evidence", "bound"])
def test_features_are_trained_saved_and_loaded(features, batch_size, tmp_path):
    x, y, new = data(2, 40)
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    module = None if features == "network" else nn.Sequential(nn.Linear(2, 3), nn.Tanh()).double()
    before = {name: value.clone() for name, value in (net if module is None else module).state_dict().items()}
    own = kn.Model(net if module is None else nn.Linear(2, 1).double(), kn.Gaussian())
    posterior = kn.DeepKernel(features=module, epochs=30, batch_size=batch_size).fit(own, (x, y))
    name = "0.weight" if module is None else "features.0.weight"
    assert not torch.equal(posterior.points[name], before["0.weight"])
    after = (net if module is None else module).state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    if module is None:
        assert "3.weight" not in posterior.points and not torch.equal(
            posterior.buffers["1.running_mean"], torch.zeros(6, dtype=torch.float64)
        )
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(new).mean, posterior.predict(new).mean)
    assert torch.equal(loaded.predict(new).std, posterior.predict(new).std)


# --- likelihoods, resuming -------------------------------------------------------------------------------------------


LIKELIHOODS = [
    kn.Categorical(), kn.Bernoulli(), kn.Poisson(), kn.StudentT(), kn.HeteroscedasticGaussian(),
    kn.Gaussian(missing=True),
]  # fmt: skip


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda each: type(each).__name__)
def test_any_likelihood_is_fitted(likelihood, tmp_path):
    x, y, new = data(3, 30)
    outputs = {"Categorical": 3, "HeteroscedasticGaussian": 2, "Gaussian": 2}.get(type(likelihood).__name__, 1)
    if isinstance(likelihood, kn.Categorical):
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    elif isinstance(likelihood, kn.Bernoulli | kn.Poisson):
        y = (x[:, :1] > 0).double()
    elif isinstance(likelihood, kn.Gaussian):
        y = torch.cat([y, y], 1)
        y[::3, 0] = torch.nan
    own = model(outputs, likelihood=likelihood)
    for method in (kn.SparseGaussianProcess, kn.DeepGaussianProcess):
        posterior = method(inducing=8, epochs=60, batch_size=15).fit(own, (x, y), validation=(x, y))
        found = posterior.predict(new, samples=8)
        assert found.total.isfinite().all() and (found.epistemic >= 0).all()
        first, last = (posterior.diagnostics.history[k]["loss"] for k in (0, -1))
        assert last <= first
        loaded = kn.load(posterior.save(tmp_path / method.__name__))
        assert torch.equal(loaded.predict(new).samples, posterior.predict(new).samples)


@pytest.mark.parametrize("method", [kn.SparseGaussianProcess, kn.DeepGaussianProcess], ids=lambda each: each.__name__)
def test_a_fit_that_is_killed_resumes_to_the_same_bits(method, tmp_path, monkeypatch):
    from knowable.inference.functional.inducing_fit import InducingObjective

    x, y, new = data(4)
    fit, own = method(inducing=6, epochs=90, batch_size=10).fit, model()
    whole = fit(own, (x, y), seed=1)
    forward, calls = InducingObjective.forward, [0]

    def counted(self, *batch):
        calls[0] += 1
        if calls[0] == 220:
            raise RuntimeError("killed")
        return forward(self, *batch)

    monkeypatch.setattr(InducingObjective, "forward", counted)
    with pytest.raises(RuntimeError, match="killed"):
        fit(own, (x, y), seed=1, checkpoint=Checkpoint(tmp_path / "state", seconds=0))
    again = fit(own, (x, y), seed=1, checkpoint=Checkpoint(tmp_path / "state", seconds=0))
    assert calls[0] < 220 + 200  # not from the beginning, which takes 270
    assert torch.equal(again.predict(new).samples, whole.predict(new).samples)
    assert float(again.log_evidence) == float(whole.log_evidence)


def test_inducing_points_are_rows_where_there_are_few_and_centres_of_clusters_else(seed):
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert len(inducing_points(torch.cat([x, x]), 50, seed)) == 50
    clustered = torch.cat([x * 0.01 + centre for centre in (0.0, 5.0, 10.0)])
    centres = inducing_points(clustered, 3, seed)
    torch.testing.assert_close(centres.mean(1).sort()[0], torch.tensor([0.0, 5.0, 10.0]).double(), atol=0.1, rtol=0)
    assert torch.equal(centres, inducing_points(clustered, 3, seed))


def test_bad_settings_are_refused():
    with pytest.raises(InvalidArgument, match="inducing"):
        kn.SparseGaussianProcess(inducing=0)
    with pytest.raises(InvalidArgument, match="layers"):
        kn.DeepGaussianProcess(layers=0)
    with pytest.raises(kn.InvalidType, match="features"):
        kn.DeepKernel(features="network")  # type: ignore[arg-type]
