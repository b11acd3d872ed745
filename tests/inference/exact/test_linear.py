from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.testing import LinearGaussian
from tests.inference.exact.oracle import Conditioned, linear_layer_design

TIGHT = {"rtol": 1e-9, "atol": 1e-10}  # double precision, well-conditioned 4 x 4 to 12 x 12 systems


def flat_mean(posterior: kn.FullNormal) -> torch.Tensor:
    return posterior.layout.flatten(posterior.mean())


@pytest.mark.parametrize("d", [1, 5])
def test_posterior_is_the_closed_form(seed, d):
    problem = LinearGaussian.make(d=d, seed=seed, noise=0.4, prior_scale=1.7)
    posterior = kn.ExactLinear().fit(problem.model(), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, **TIGHT)
    torch.testing.assert_close(posterior.covariance, problem.covariance, **TIGHT)
    assert posterior.log_evidence == pytest.approx(problem.log_evidence, rel=1e-10)
    assert posterior.log_evidence.kind == "exact"
    assert posterior.diagnostics.converged


def test_posterior_prediction_and_evidence_are_those_of_scipy(seed):
    problem, new = LinearGaussian.make(n=40, d=6, seed=seed, noise=0.4), np.random.default_rng(seed).normal(size=(5, 6))
    posterior = kn.ExactLinear().fit(problem.model(), problem.data)
    rows, there = (np.column_stack([each, np.ones(len(each))]) for each in (problem.x, new))
    y = problem.y[:, 0].numpy()
    precision = np.eye(7) + rows.T @ rows / 0.16
    covariance = scipy.linalg.solve(precision, np.eye(7), assume_a="pos")
    mean = covariance @ rows.T @ y / 0.16
    near = {"rtol": 0, "atol": 1e-8}
    np.testing.assert_allclose(problem.as_flat(posterior.mean()), mean, **near)
    np.testing.assert_allclose(posterior.covariance, covariance, **near)
    evidence = scipy.stats.multivariate_normal.logpdf(y, cov=rows @ rows.T + 0.16 * np.eye(40))
    np.testing.assert_allclose(float(posterior.log_evidence), evidence, **near)
    prediction = posterior.predict(torch.from_numpy(new))
    spread = np.sqrt(np.einsum("nd,de,ne->n", there, covariance, there) + 0.16)
    np.testing.assert_allclose(prediction.mean[:, 0], there @ mean, **near)
    np.testing.assert_allclose(prediction.std[:, 0], spread, **near)
    density = scipy.stats.norm.logpdf(0.3, there @ mean, spread)
    np.testing.assert_allclose(prediction.log_prob(torch.full((5, 1), 0.3, dtype=torch.float64)), density, **near)


@pytest.mark.filterwarnings("ignore:The targets are:knowable.errors.ModelWarning")
def test_float32_network_is_solved_in_double_precision(seed):
    # one weight of precision ~ 1e8 beside one of ~ 1: float32 normal equations would lose the second
    x = torch.randn(200, 2) * torch.tensor([300.0, 0.05])
    problem = LinearGaussian(x, x.sum(1, keepdim=True), noise=0.3, prior_scale=1.0)
    posterior = kn.ExactLinear().fit(problem.model(), problem.data)
    assert posterior.loc.dtype == torch.float32
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-5, atol=1e-6)
    assert posterior.log_evidence == pytest.approx(problem.log_evidence, rel=1e-5)  # the oracle's own 200 x 200 system


@pytest.mark.parametrize("noise", [0.5, (0.2, 0.5, 1.5)])
def test_several_outputs_share_or_have_their_own_noise(seed, noise):
    x, y = torch.randn(25, 2, dtype=torch.float64), torch.randn(25, 3, dtype=torch.float64)
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 3).double(), kn.Gaussian(noise)), (x, y))
    each = torch.as_tensor(noise, dtype=torch.float64).expand(3).repeat(25)
    zero, one = torch.zeros(9, dtype=torch.float64), torch.ones(9, dtype=torch.float64)
    oracle = Conditioned(linear_layer_design(x, 3), y.flatten(), each, zero, one)
    torch.testing.assert_close(flat_mean(posterior), oracle.mean, **TIGHT)
    torch.testing.assert_close(posterior.covariance, oracle.covariance, **TIGHT)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_noise_of_each_output_is_repeated_along_the_dimensions_before_it(seed):
    # output (rows, 2 steps, 3 outputs): one noise for each of the last dimension
    net = nn.Sequential(nn.Linear(2, 6), nn.Unflatten(1, (2, 3))).double()
    x, y = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 2, 3, dtype=torch.float64)
    noise = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(tuple(noise.tolist()))), (x, y))
    zero, one = torch.zeros(18, dtype=torch.float64), torch.ones(18, dtype=torch.float64)
    oracle = Conditioned(linear_layer_design(x, 6), y.flatten(), noise.repeat(40), zero, one)
    torch.testing.assert_close(flat_mean(posterior), oracle.mean, **TIGHT)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_each_parameter_has_the_prior_that_its_glob_gives_it(seed):
    x, y = torch.randn(15, 2, dtype=torch.float64), torch.randn(15, 1, dtype=torch.float64)
    prior = {"bias": kn.Normal(3.0, loc=1.0), "*": kn.Normal(0.5, loc=-0.2)}
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.5), prior), (x, y))
    oracle = Conditioned(
        linear_layer_design(x, 1),
        y.flatten(),
        torch.full((15,), 0.5, dtype=torch.float64),
        torch.tensor([-0.2, -0.2, 1.0], dtype=torch.float64),
        torch.tensor([0.5, 0.5, 3.0], dtype=torch.float64),
    )
    torch.testing.assert_close(flat_mean(posterior), oracle.mean, **TIGHT)
    torch.testing.assert_close(posterior.covariance, oracle.covariance, **TIGHT)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_two_halves_in_turn_are_the_whole(seed):
    # p(θ | D1, D2) from the prior p(θ | D1), and log p(D1) + log p(D2 | D1) = log p(D1, D2)
    problem = LinearGaussian.make(seed=seed)
    model, (x, y) = problem.model(), problem.data
    first = kn.ExactLinear().fit(model, (x[:20], y[:20]))
    second = kn.ExactLinear().fit(kn.Model(model.net, model.likelihood, first), (x[20:], y[20:]))
    torch.testing.assert_close(problem.as_flat(second.mean()), problem.mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(second.covariance, problem.covariance, rtol=1e-8, atol=1e-9)
    assert first.log_evidence + second.log_evidence == pytest.approx(problem.log_evidence, rel=1e-9)


def test_freezing_a_weight_conditions_the_correlated_prior_on_it(seed):
    # p(w | D1, D2, b): the posterior of everything, conditioned on the frozen value of the bias
    problem = LinearGaussian.make(seed=seed)
    model, (x, y) = problem.model(), problem.data
    first = kn.ExactLinear().fit(model, (x[:20], y[:20]))
    second = kn.ExactLinear().fit(kn.Model(model.net, model.likelihood, first, frozen="bias"), (x[20:], y[20:]))
    mean, covariance = problem.mean, problem.covariance
    slope = covariance[:-1, -1] / covariance[-1, -1]
    expected = mean[:-1] + slope * (model.net.bias.item() - mean[-1])
    torch.testing.assert_close(second.mean()["weight"][0], expected, rtol=1e-8, atol=1e-9)
    conditional = covariance[:-1, :-1] - slope.outer(covariance[:-1, -1])
    torch.testing.assert_close(second.covariance, conditional, rtol=1e-7, atol=1e-9)


def test_independent_normals_are_a_prior_too(seed):
    x, y = torch.randn(15, 2, dtype=torch.float64), torch.randn(15, 1, dtype=torch.float64)
    net, noise = nn.Linear(2, 1).double(), torch.full((15,), 0.5, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5))
    loc = {name: torch.randn_like(value) for name, value in model.params().items()}
    std = {name: torch.rand_like(value) + 0.1 for name, value in model.params().items()}
    prior = kn.DiagonalNormal(model, loc, std)
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.5), prior), (x, y))
    flat = [posterior.layout.flatten(each) for each in (loc, std)]
    oracle = Conditioned(linear_layer_design(x, 1), y.flatten(), noise, *flat)
    torch.testing.assert_close(flat_mean(posterior), oracle.mean, **TIGHT)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_last_layer_on_frozen_features_is_regression_on_them(seed):
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, y = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.3), kn.Normal(0.8), random="last_layer", frozen="0.*")
    posterior = kn.ExactLinear().fit(model, (x, y))
    with torch.no_grad():
        problem = LinearGaussian(net[:2](x), y, noise=0.3, prior_scale=0.8)
    torch.testing.assert_close(flat_mean(posterior), problem.mean, **TIGHT)
    torch.testing.assert_close(posterior.covariance, problem.covariance, **TIGHT)
    assert posterior.log_evidence == pytest.approx(problem.log_evidence, rel=1e-10)
    assert list(posterior.mean()) == ["2.weight", "2.bias"]


def test_embedding_weights_shrink_to_the_prior_as_counts_say(seed):
    # y = w[k] + noise: the mean of n_k values shrinks by n_k / (n_k + σ² / s²)
    counts = torch.tensor([0.0, 1.0, 5.0, 50.0], dtype=torch.float64)
    groups = torch.repeat_interleave(torch.arange(4), counts.long()).unsqueeze(1)
    net = nn.Sequential(nn.Embedding(4, 1), nn.Flatten()).double()
    y = torch.randn(len(groups), dtype=torch.float64) + groups.flatten()
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.7), kn.Normal(2.0)), (groups, y))
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, groups.flatten(), y)
    torch.testing.assert_close(posterior.mean()["0.weight"].flatten(), sums / (counts + 0.7**2 / 4.0), **TIGHT)
    torch.testing.assert_close(posterior.std()["0.weight"].flatten(), (counts / 0.49 + 0.25).rsqrt(), **TIGHT)


def test_flat_prior_gives_least_squares_and_no_evidence(seed):
    problem = LinearGaussian.make(seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), kn.Flat())
    posterior = kn.ExactLinear().fit(model, problem.data)
    solution = np.linalg.lstsq(problem.design.numpy(), problem.y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(flat_mean(posterior), solution[:, 0], rtol=1e-8)
    expected = problem.noise**2 * np.linalg.inv(problem.design.T @ problem.design)
    np.testing.assert_allclose(posterior.covariance, expected, rtol=1e-8, atol=1e-12)
    assert posterior.log_evidence is None


def test_flat_prior_without_enough_rows_is_refused():
    model = kn.Model(nn.Linear(5, 1), kn.Gaussian(0.1), kn.Flat())
    with pytest.raises(kn.InvalidArgument, match="flat prior"):
        kn.ExactLinear().fit(model, (torch.randn(3, 5), torch.randn(3)))


def test_flat_prior_on_collinear_features_is_refused():
    x = torch.linspace(-1, 1, 20).unsqueeze(1)  # rounding leaves this singular matrix a Cholesky factor
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), kn.Flat())
    with pytest.raises(kn.InvalidArgument, match="flat prior"):
        kn.ExactLinear().fit(model, (torch.cat([x, x], 1), x))


@pytest.mark.parametrize("noise", [None, 1e-9], ids=["learned", "tiny"])
def test_evidence_never_exceeds_the_density_of_a_perfect_fit(noise):
    # y on a line to the last bit: p(y) <= (2 π σ²)^(-N / 2) at any noise σ, however small
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(1, 1).double(), kn.Gaussian(noise)), (x, 2 * x))
    log_noise = math.log(noise) if noise else posterior.points["likelihood.log_noise"].item()
    assert posterior.log_evidence <= -20 * (log_noise + 0.5 * math.log(2 * math.pi)) + 1e-6
    assert posterior.mean()["weight"].item() == pytest.approx(2.0, abs=1e-6)


# --- what is learned by maximising the evidence ----------------------------------------------------------------------


def test_learned_noise_maximises_evidence_times_its_prior(seed):
    problem = LinearGaussian.make(seed=seed, noise=0.4)
    posterior = kn.ExactLinear().fit(kn.Model(problem.model().net, kn.Gaussian()), problem.data)

    def negative(log_noise: float) -> float:
        evidence = replace(problem, noise=math.exp(log_noise)).log_evidence
        return -evidence - scipy.stats.norm(-1.0, 2.0).logpdf(log_noise)

    best = scipy.optimize.minimize_scalar(negative, bounds=(-4, 2), method="bounded", options={"xatol": 1e-9}).x
    assert posterior.points["likelihood.log_noise"].item() == pytest.approx(best, abs=1e-5)
    given = replace(problem, noise=math.exp(best))
    torch.testing.assert_close(problem.as_flat(posterior.mean()), given.mean, rtol=1e-4, atol=1e-5)
    area, _ = scipy.integrate.quad(lambda log_noise: math.exp(negative(best) - negative(log_noise)), best - 3, best + 3)
    # Laplace's method in the logarithm of the noise: the next term of its series is of order 1 / rows
    assert posterior.log_evidence == pytest.approx(-negative(best) + math.log(area), abs=1 / len(problem.y))
    assert posterior.log_evidence.kind == "estimate"


def test_each_output_learns_its_own_noise(seed):
    x = torch.randn(40, 2, dtype=torch.float64)
    y = x + torch.randn(40, 2, dtype=torch.float64) * torch.tensor([0.1, 1.0])
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 2).double(), kn.Gaussian(outputs=2)), (x, y))
    for output in range(2):  # with a prior that factorises, each output is a problem of its own
        problem = LinearGaussian(x, y[:, output : output + 1], noise=1.0, prior_scale=1.0)
        one = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian()), problem.data)
        found = posterior.points["likelihood.log_noise"][output].item()
        assert found == pytest.approx(one.points["likelihood.log_noise"].item(), abs=1e-5)
        torch.testing.assert_close(posterior.mean()["weight"][output], one.mean()["weight"][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hyperprior", [None, kn.Normal(0.5, loc=1.0)])
def test_learned_scale_of_the_prior_maximises_the_evidence(seed, hyperprior):
    problem = LinearGaussian.make(seed=seed, prior_scale=0.3, d=6)
    prior = kn.EmpiricalBayes(kn.Normal(1.0), hyperprior)
    posterior = kn.ExactLinear().fit(kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior), problem.data)

    def negative(log_scale: float) -> float:
        evidence = replace(problem, prior_scale=math.exp(log_scale)).log_evidence
        return -evidence - (0.0 if hyperprior is None else scipy.stats.norm(1.0, 0.5).logpdf(log_scale))

    best = scipy.optimize.minimize_scalar(negative, bounds=(-5, 3), method="bounded", options={"xatol": 1e-9}).x
    found = posterior.points["prior.*.log_scale"].item()
    assert found == pytest.approx(best, abs=1e-5)
    assert posterior.log_evidence == pytest.approx(replace(problem, prior_scale=math.exp(found)).log_evidence, abs=1e-8)


def test_noise_and_scale_are_learned_together(seed):
    problem = LinearGaussian.make(n=80, seed=seed, prior_scale=2.0, noise=0.2)
    model = kn.Model(problem.model().net, kn.Gaussian(), kn.EmpiricalBayes(kn.Normal(1.0)))
    points = kn.ExactLinear().fit(model, problem.data).points

    def negative(at: np.ndarray) -> float:
        evidence = replace(problem, noise=math.exp(at[0]), prior_scale=math.exp(at[1])).log_evidence
        return -evidence - scipy.stats.norm(-1.0, 2.0).logpdf(at[0])

    best = scipy.optimize.minimize(negative, [-1.0, 0.5], method="Powell", options={"xtol": 1e-8, "ftol": 1e-12})
    found = [points["likelihood.log_noise"].item(), points["prior.*.log_scale"].item()]
    np.testing.assert_allclose(found, best.x, atol=1e-4)


def test_learning_noise_under_a_flat_prior_is_refused():
    with pytest.raises(kn.Unsupported, match="proper prior"):
        kn.ExactLinear().fit(
            kn.Model(nn.Linear(1, 1), kn.Gaussian(), kn.Flat()), (torch.randn(9, 1), torch.randn(9, 1))
        )


# --- how the data comes, and what is refused -------------------------------------------------------------------------


def test_loader_and_chunks_give_the_same_sums(seed, monkeypatch):
    problem = LinearGaussian.make(seed=seed)
    whole = kn.ExactLinear().fit(problem.model(), problem.data)
    loader = DataLoader(TensorDataset(*problem.data), batch_size=7, shuffle=True)
    monkeypatch.setattr("knowable.inference.exact.design._CHUNK_VALUES", 12)  # 3 rows of 4 columns at a time
    monkeypatch.setattr("knowable.inference.exact.design._BLOCK", 3)  # columns in blocks that do not divide them
    for data in (problem.data, loader):
        parts = kn.ExactLinear().fit(problem.model(), data)
        torch.testing.assert_close(parts.mean(), whole.mean(), **TIGHT)
        assert parts.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)


def test_rows_are_counted_and_not_taken_from_the_loader(seed):
    problem = LinearGaussian.make(n=50, seed=seed)
    loader = DataLoader(TensorDataset(*problem.data), batch_size=20, drop_last=True)
    try:
        evidence = kn.ExactLinear().fit(problem.model(), loader).log_evidence
    except kn.KnowableError:
        return  # refusing a loader that leaves rows out is as good as counting them
    assert evidence == pytest.approx(problem.log_evidence, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            kn.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), kn.Gaussian(0.1)),
            "linear in its random",
        ),
        (kn.Model(nn.Linear(2, 1), kn.StudentT()), "Gaussian likelihood"),
        (kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), kn.LaplacePrior()), "normal prior on 'weight'"),
        (kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), random="weight"), "point parameters bias"),
    ],
    ids=["a network that is not linear", "other noise", "another prior", "point estimates"],
)
def test_what_has_no_closed_form_is_refused(model, words):
    with pytest.raises(kn.Unsupported, match=words):
        kn.ExactLinear().fit(model, (torch.randn(10, 2), torch.randn(10, 1)))


def test_product_of_two_weights_is_not_linear():
    # zero at the origin and on all axes: only mixed directions show it
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.a * self.b

    with pytest.raises(kn.Unsupported, match="linear"):
        kn.ExactLinear().fit(kn.Model(Product(), kn.Gaussian(0.1)), (torch.randn(10, 1), torch.randn(10, 1)))


def test_too_many_parameters_are_refused_by_number():
    model = kn.Model(nn.Linear(20, 1), kn.Gaussian(0.1))
    with pytest.raises(kn.InvalidArgument, match="max_parameters is 20"):
        kn.ExactLinear(max_parameters=20).fit(model, (torch.randn(10, 20), torch.randn(10, 1)))
    with pytest.raises(kn.InvalidArgument, match="max_parameters"):
        kn.ExactLinear(max_parameters=0)
