"""Exact Gaussian processes against GPyTorch used directly, closed forms, and other exact methods."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import knowable as kn
from knowable.errors import InvalidArgument, InvalidType, MissingExtra, Unsupported
from knowable.inference.functional.kernels import Covariance, gpytorch

NOISE = 0.2


def data(seed: int, n: int = 25, d: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and inputs to predict at, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    x, new = (torch.randn(k, d, generator=generator, dtype=torch.float64) for k in (n, 7))
    y = torch.sin(2 * x.sum(1, keepdim=True)) + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y, new


def fixed_kernel(d: int = 2):
    """A kernel of GPyTorch with hyperparameters that stay."""
    parts = gpytorch().kernels
    kernel = parts.ScaleKernel(parts.MaternKernel(2.5, ard_num_dims=d)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.7, torch.linspace(0.6, 1.1, d)
    return kernel.requires_grad_(False)


def model(outputs: int = 1, d: int = 2, likelihood=None) -> kn.Model:
    return kn.Model(nn.Linear(d, outputs).double(), likelihood or kn.Gaussian(NOISE))


def exact_gp(kernel, x: Tensor, y: Tensor, new: Tensor, noise: float):
    """GPyTorch's own model: mean, covariance and log evidence."""
    gp = gpytorch()

    class Exact(gp.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y[:, 0], likelihood)
            self.mean_module, self.covar_module = gp.means.ZeroMean(), kernel

        def forward(self, at):
            return gp.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        likelihood = gp.likelihoods.GaussianLikelihood().double()
        likelihood.noise = noise**2
        made = Exact(likelihood).double()
        evidence = gp.ExactMarginalLogLikelihood(likelihood, made)(made.train()(x), y[:, 0]) * len(x)
        with torch.no_grad(), gp.settings.fast_pred_var(False):
            found = made.eval()(new)
        return found.mean.detach(), found.covariance_matrix.detach(), float(evidence)


def test_it_is_gpytorch_used_directly(seed):
    x, y, new = data(seed)
    posterior = kn.GaussianProcess(kernel=fixed_kernel(), mean="zero").fit(model(), (x, y))
    mean, covariance, evidence = exact_gp(fixed_kernel(), x, y, new, NOISE)
    found = posterior.predict(new)
    torch.testing.assert_close(found.mean[:, 0], mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.epistemic[:, 0], covariance.diagonal(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.aleatoric, torch.full_like(found.aleatoric, NOISE**2))
    torch.testing.assert_close(posterior._joint(new)[1][0], covariance, rtol=1e-6, atol=1e-6)
    assert posterior.log_evidence.kind == "exact"
    assert float(posterior.log_evidence) == pytest.approx(evidence, abs=1e-6)


def test_it_is_the_closed_form_for_several_outputs_and_weighted_rows(seed):
    x, y, new = data(seed)
    y = torch.cat([y, 3 + y.cos()], 1)
    posterior = kn.GaussianProcess(kernel=fixed_kernel(), mean="zero").fit(model(2), (x, y))
    k = Covariance(fixed_kernel())
    noisy = k(x) + NOISE**2 * torch.eye(len(x), dtype=torch.float64)
    torch.testing.assert_close(posterior.predict(new).mean, k(new, x) @ torch.linalg.solve(noisy, y))
    evidence = MultivariateNormal(torch.zeros_like(y[:, 0]), noisy).log_prob(y.T).sum()
    assert float(posterior.log_evidence) == pytest.approx(float(evidence), rel=1e-8)
    weights = torch.ones(len(x))
    weights[:5], weights[5:8] = 2.0, 0.0
    rows = torch.cat([x[:5], x[:5], x[8:]]), torch.cat([y[:5], y[:5], y[8:]])
    held = kn.GaussianProcess(kernel=fixed_kernel(), mean="zero")
    weighted, twice = held.fit(model(2), kn.Data((x, y), weights=weights)), held.fit(model(2), rows)
    torch.testing.assert_close(weighted.predict(new).mean, twice.predict(new).mean)
    torch.testing.assert_close(weighted.predict(new).std, twice.predict(new).std)
    weighted, twice = (kn.GaussianProcess().fit(model(2), each) for each in (kn.Data((x, y), weights=weights), rows))
    assert float(weighted.log_evidence) == pytest.approx(float(twice.log_evidence), abs=0.01)


def test_hyperparameters_are_where_the_evidence_times_its_priors_is_largest(seed):
    """Its slope there, by GPyTorch's own evidence at these values, is that of minus the log prior; and it has risen."""
    x, y, _ = data(seed, 30)
    posterior = kn.GaussianProcess(mean="zero").fit(model(likelihood=kn.Gaussian()), (x, y))
    units, noise = posterior.units, float(posterior.points["likelihood.log_noise"].exp())
    seen, target = units.seen(x), y / units.y_scale

    def evidence(logs: Tensor) -> float:
        parts = gpytorch().kernels
        kernel = parts.ScaleKernel(parts.RBFKernel(ard_num_dims=2)).double()
        kernel.outputscale, kernel.base_kernel.lengthscale = logs[0].exp(), logs[1:3].exp()
        return exact_gp(kernel, seen, target, seen[:1], float(logs[3].exp()))[2]

    def objective(logs: Tensor) -> float:
        modes = torch.tensor([0.0, 0.5 * math.log(2), 0.5 * math.log(2)], dtype=torch.float64)
        prior = -((logs[:3] - modes) ** 2).sum() / (2 * 2.0**2) - (logs[3] + 1) ** 2 / (2 * 2.0**2)
        return evidence(logs) + float(prior)

    inner, scale = posterior.covariance.kernel, float(units.y_scale)
    own = torch.tensor([noise / scale], dtype=torch.float64).log()
    best = torch.cat([inner.outputscale.log().reshape(1), inner.base_kernel.lengthscale.log()[0], own])
    for step in 0.02 * torch.eye(4, dtype=torch.float64):
        slope = (objective(best + step) - objective(best - step)) / 0.04
        assert abs(slope) < 0.05
    assert objective(best) > objective(torch.tensor([0.0, 0.35, 0.35, math.log(0.3)], dtype=torch.float64))
    assert float(posterior.log_evidence) == pytest.approx(evidence(best) - len(x) * math.log(scale), abs=1e-5)


def test_units_make_no_difference(seed):
    """A kernel by its name: the same functions of inputs and targets in other units."""
    x, y, new = data(seed, 40)
    one = kn.GaussianProcess(kernel="matern52").fit(model(likelihood=kn.Gaussian()), (x, y))
    shift, scale = torch.tensor([1e4, -3.0], dtype=torch.float64), torch.tensor([1e3, 1e-4], dtype=torch.float64)
    other = kn.GaussianProcess(kernel="matern52").fit(
        model(likelihood=kn.Gaussian()), (shift + scale * x, 1e6 + 500 * y)
    )
    found, expected = other.predict(shift + scale * new), one.predict(new)
    torch.testing.assert_close(found.mean, 1e6 + 500 * expected.mean, rtol=1e-6, atol=5)
    torch.testing.assert_close(found.std, 500 * expected.std, rtol=1e-2, atol=1e-2)
    assert float(other.log_evidence) == pytest.approx(float(one.log_evidence) - 40 * math.log(500), abs=0.1)


def test_four_ways_to_a_linear_model_on_features_agree(seed):
    """Last-layer Laplace and full-rank VI, Bayesian linear regression, and the linear kernel on the features."""
    x, y, new = data(seed)
    generator = torch.Generator().manual_seed(seed)
    body, head = nn.Sequential(nn.Linear(2, 4), nn.Tanh()).double(), nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        for value in body.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    scale = 0.8
    settings = {"random": "last_layer", "frozen": ["0.*"]}
    linear = kn.Model(nn.Sequential(*body, head), kn.Gaussian(NOISE), kn.Normal(scale), **settings)
    exact = kn.ExactLinear().fit(linear, (x, y))
    laplace = kn.Laplace().fit(linear, (x, y), seed=seed)
    variational = kn.FullRankVI().fit(linear, (x, y), seed=seed)
    kernel = gpytorch().kernels.LinearKernel().double()
    kernel.variance = scale**2
    with torch.no_grad():
        features, new_features = body(x), body(new)
    process = kn.GaussianProcess(kernel=kernel.requires_grad_(False), mean="zero").fit(model(d=4), (features, y))
    expected = exact.predict(new)
    assert float(process.log_evidence) == pytest.approx(float(exact.log_evidence), rel=1e-8)
    for other, at, tolerance in ((laplace, new, 1e-5), (process, new_features, 1e-7)):
        found = other.predict(at)
        torch.testing.assert_close(found.mean, expected.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.variance, expected.variance, rtol=tolerance, atol=tolerance)
    # the normal that VI found, integrated over its weights as the others are
    (weights,) = (value for name, value in variational.mean().items() if name in linear.random_names)
    covariance = variational.normal.covariance_matrix()
    torch.testing.assert_close(new_features @ weights.T, expected.mean, rtol=1e-3, atol=1e-3)
    variance = torch.einsum("nd,de,ne->n", new_features, covariance, new_features) + NOISE**2
    torch.testing.assert_close(variance, expected.variance[:, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("likelihood", [kn.Bernoulli(), kn.Categorical(), kn.Poisson()], ids=lambda each: repr(each))
def test_labels_and_counts_by_laplace(likelihood, seed, tmp_path):
    x, _, new = data(seed, 40)
    labels = (x.sum(1) > 0).long()
    outputs = 2 if isinstance(likelihood, kn.Categorical) else 1
    y = labels if outputs == 2 else labels.double().unsqueeze(1) * (3 if isinstance(likelihood, kn.Poisson) else 1)
    posterior = kn.GaussianProcess().fit(model(outputs, likelihood=likelihood), (x, y))
    assert kn.evaluate(posterior.predict(x), y)["nll"] < 1.4 * (1 if isinstance(likelihood, kn.Poisson) else 0.3)
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(new).samples, posterior.predict(new).samples)


def test_variances_are_never_negative_and_rows_may_be_crowded(seed):
    x, y, _ = data(seed)
    x, y = x[:1].repeat(40, 1) + 1e-9 * torch.randn(40, 2, dtype=torch.float64), y[:1].repeat(40, 1)
    kernel = gpytorch().kernels.RBFKernel()  # smooth, and so without a factor by itself
    for likelihood in (kn.Gaussian(1e-9), kn.Gaussian(0.1)):
        posterior = kn.GaussianProcess(kernel=kernel.requires_grad_(False), mean="zero").fit(
            model(likelihood=likelihood), (x, y)
        )
        found = posterior.predict(x)
        assert (found.epistemic >= 0).all() and found.total.isfinite().all() and (found.total > 0).all()
        assert posterior.sample_functions(x, 3).isfinite().all()


def test_kernels_are_saved_without_code(tmp_path):
    x, y, new = data(0, 12)
    parts, bounds = gpytorch().kernels, gpytorch().constraints
    inner = parts.RBFKernel(active_dims=[1], lengthscale_constraint=bounds.Interval(0.1, 4.0))
    kernel = parts.ScaleKernel(inner + parts.PeriodicKernel(active_dims=[0]) * parts.RQKernel()) + parts.LinearKernel()
    posterior = kn.GaussianProcess(kernel=kernel).fit(model(), (x, y))
    assert 0.1 < float(posterior.diagnostics["kernel.kernels.0.kernels.0.lengthscale"]) < 4.0
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(new).mean, posterior.predict(new).mean)
    assert torch.equal(loaded.predict(new).std, posterior.predict(new).std)

    class Own(parts.RBFKernel):
        pass

    with pytest.raises(InvalidArgument, match="kernel Own cannot be saved"):
        kn.GaussianProcess(kernel=Own()).fit(model(), (x, y)).save(tmp_path / "own")
    assert not any(p.is_file() for p in tmp_path.rglob("*.pkl"))


def test_what_cannot_be_done_is_refused(monkeypatch):
    x, y, _ = data(0)
    with pytest.raises(InvalidArgument, match=r"max_rows is 10\. .*SparseGaussianProcess"):
        kn.GaussianProcess(max_rows=10).fit(model(), (x, y))
    with pytest.raises(Unsupported, match=r"StudentT.*SparseGaussianProcess takes any"):
        kn.GaussianProcess().fit(model(likelihood=kn.StudentT()), (x, y))
    with pytest.raises(InvalidArgument, match=r"kernel must be one of 'rbf'.*Did you mean 'matern52'"):
        kn.GaussianProcess(kernel="matern55")
    with pytest.raises(InvalidType, match="kernel must be one of"):
        kn.GaussianProcess(kernel=nn.Linear(1, 1))
    with pytest.raises(InvalidArgument, match="a batch of shape"):
        kn.GaussianProcess(kernel=gpytorch().kernels.RBFKernel(batch_shape=torch.Size([2])))
    words = kn.Model(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 1)), kn.Gaussian())
    with pytest.raises(Unsupported, match="Use DeepKernel"):
        kn.GaussianProcess().fit(words, (torch.randint(0, 5, (9, 3)), torch.randn(9)))
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'knowable\[gp\]'"):
        kn.GaussianProcess().fit(model(), (x, y))
