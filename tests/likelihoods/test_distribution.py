"""Tests of likelihoods made of torch's distributions: scipy, and the built-in likelihoods, are the oracles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, distributions

import knowable as kn
from knowable.core.network.params import Params

DTYPE = torch.float64
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE)


class LogShape(kn.DistributionLikelihood):
    """Those that have a shape of their own, which is learned."""

    def params(self) -> Params:
        return {"log_shape": torch.tensor(0.5)}

    def priors(self) -> dict[str, kn.Normal]:
        return {"log_shape": kn.Normal(2.0)}


class Gamma(LogShape):
    def distribution(self, output, params):
        shape = params["log_shape"].exp()
        return distributions.Gamma(shape, shape * torch.exp(-output))


class Beta(LogShape):
    def distribution(self, output, params):
        count, mean = params["log_shape"].exp(), output.sigmoid()
        return distributions.Beta(count * mean, count * (1 - mean))


class LogNormal(LogShape):
    def distribution(self, output, params):
        return distributions.LogNormal(output, params["log_shape"].exp())


class Weibull(LogShape):
    def distribution(self, output, params):
        return distributions.Weibull(output.exp(), params["log_shape"].exp())


class Laplace(LogShape):
    def distribution(self, output, params):
        return distributions.Laplace(output, params["log_shape"].exp())


class Normal(kn.DistributionLikelihood):
    """The Gaussian likelihood, with its prior on the noise."""

    noise_name: ClassVar[str | None] = "log_noise"

    def params(self) -> Params:
        return {"log_noise": torch.tensor(0.0)}

    def priors(self) -> dict[str, kn.Normal]:
        return {"log_noise": kn.Normal(2.0, loc=-1.0)}

    def distribution(self, output, params):
        return distributions.Normal(output, params["log_noise"].exp())


class Poisson(kn.DistributionLikelihood):
    def distribution(self, output, params):
        return distributions.Poisson(output.exp())


class Bernoulli(kn.DistributionLikelihood):
    def distribution(self, output, params):
        return distributions.Bernoulli(logits=output)


class MeanAndSpread(kn.DistributionLikelihood):
    """Two outputs for one target."""

    def distribution(self, output, params):
        loc, log_scale = output.chunk(2, dim=-1)
        return distributions.Normal(loc, log_scale.exp())


class Correlated(kn.DistributionLikelihood):
    def distribution(self, output, params):
        covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]], dtype=output.dtype)
        return distributions.MultivariateNormal(output, covariance)


SCIPY: dict[type[LogShape], Callable[..., Any]] = {  # frozen distributions of scipy from output f and shape a
    Gamma: lambda f, a: stats.gamma(a, scale=np.exp(f) / a),
    Beta: lambda f, a: stats.beta(a * special.expit(f), a * (1 - special.expit(f))),
    LogNormal: lambda f, a: stats.lognorm(a, scale=np.exp(f)),
    Weibull: lambda f, a: stats.weibull_min(a, scale=np.exp(f)),
    Laplace: lambda f, a: stats.laplace(f, a),
}
BUILT_IN = {
    Normal: (kn.Gaussian(), lambda f: f + 0.3 * torch.randn(f.shape, dtype=DTYPE)),
    Poisson: (kn.Poisson(), lambda f: torch.poisson(f.exp())),
    Bernoulli: (kn.Bernoulli(), lambda f: torch.bernoulli(f.sigmoid())),
}
with_exact_cdf = pytest.mark.parametrize("kind", [kind for kind in SCIPY if kind is not Beta])


def mixture(kind: type[LogShape]):
    """A prediction of three draws, and the same as scipy's distributions ``(3, 4, 2)``."""
    outputs, log_shape = 0.5 * torch.randn(3, 4, 2, dtype=DTYPE), torch.tensor([0.4, 0.9, 1.2], dtype=DTYPE)
    prediction = kind().predict(outputs, {"log_shape": log_shape}, WEIGHTS.log())
    return prediction, SCIPY[kind](outputs.numpy(), log_shape.exp().view(3, 1, 1).numpy())


def mixed(values: np.ndarray) -> np.ndarray:
    return np.tensordot(WEIGHTS.numpy(), values, 1)


# --- densities, moments, quantiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCIPY)
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3)])
def test_log_prob_matches_scipy(kind, shape: tuple[int, ...]):
    output, log_shape = torch.randn(shape, dtype=DTYPE), torch.tensor(0.7, dtype=DTYPE)
    y = torch.rand(shape, dtype=DTYPE)
    expected = SCIPY[kind](output.numpy(), log_shape.exp().item()).logpdf(y.numpy()).reshape(6, -1).sum(1)
    np.testing.assert_allclose(kind().log_prob(output, y, {"log_shape": log_shape}), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", SCIPY)
def test_moments_and_density_of_the_mixture_match_scipy(kind):
    prediction, components = mixture(kind)
    mean = mixed(components.mean())
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(prediction.aleatoric, mixed(components.var()), rtol=1e-10)
    np.testing.assert_allclose(prediction.epistemic, mixed((components.mean() - mean) ** 2), rtol=1e-9)
    y = torch.rand(4, 2, dtype=DTYPE)
    expected = special.logsumexp(components.logpdf(y.numpy()).sum(-1), axis=0, b=WEIGHTS.numpy()[:, None])
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-9)


@with_exact_cdf
def test_distribution_function_and_quantiles_of_the_mixture_match_scipy(kind):
    prediction, components = mixture(kind)
    for y in (-0.5, 0.0, 0.3, 2.0):
        found = prediction.cdf(torch.full((4, 2), y, dtype=DTYPE))
        np.testing.assert_allclose(found, mixed(components.cdf(y)), rtol=1e-8, atol=1e-12)
    for q in (0.01, 0.5, 0.95):
        np.testing.assert_allclose(mixed(components.cdf(prediction.quantile(q).numpy())), q, rtol=1e-8)


def test_without_a_distribution_function_quantiles_come_from_outcomes():
    # 4,096 outcomes: 5 standard errors of a share q are 5 sqrt(q (1 - q) / 4096); weights and strata do not raise it
    # by more than a factor of sqrt(3 Σ w²) = 1.07
    prediction, components = mixture(Beta)
    for q in (0.05, 0.5, 0.95):
        error = np.abs(mixed(components.cdf(prediction.quantile(q).numpy())) - q)
        assert (error < 5 * 1.07 * np.sqrt(q * (1 - q) / 4096) + 1 / 1365).all()
    assert torch.equal(prediction.quantile(0.3), prediction.quantile(0.3))


def test_a_distribution_without_a_mean_has_quantiles():
    class Cauchy(kn.DistributionLikelihood):
        def distribution(self, output, params):
            return distributions.Cauchy(output, torch.ones_like(output))

    outputs = torch.tensor([[[3.0]]], dtype=DTYPE)
    prediction = Cauchy().predict(outputs, {}, torch.zeros(1, dtype=DTYPE))
    assert prediction.quantile(0.75).item() == pytest.approx(4.0)


@pytest.mark.parametrize("kind", SCIPY)
def test_draws_have_the_mixtures_moments(kind, generator):
    prediction, components = mixture(kind)
    n = 20_000
    before = torch.get_rng_state()
    drawn = prediction.draw(n, generator=generator)
    assert torch.equal(before, torch.get_rng_state())  # the caller's own stream is untouched
    assert ((drawn.mean(0) - prediction.mean).abs() < 5 * prediction.std / n**0.5).all()
    share = (drawn < prediction.mean).double().mean(0)
    expected = mixed(components.cdf(prediction.mean.numpy()))
    assert (np.abs(share.numpy() - expected) < 5 * 0.5 / n**0.5).all()


def test_all_targets_of_a_row_are_drawn_together(generator):
    outputs = torch.tensor([[[0.0, 0.0]], [[100.0, -100.0]]], dtype=DTYPE)
    drawn = (
        Correlated().predict(outputs, {}, torch.full((2,), 0.5, dtype=DTYPE).log()).draw(40_000, generator=generator)
    )
    near = drawn[drawn[:, 0, 0] < 50, 0]
    covariance = torch.cov(near.T)
    # standard error of a covariance: sqrt((s11 s22 + s12²) / n)
    assert abs(covariance[0, 1] - 0.6) < 5 * ((0.5 + 0.36) / len(near)) ** 0.5
    assert (drawn[drawn[:, 0, 0] > 50, 0, 1] < -50).all()


def test_outputs_that_are_correlated_have_their_joint_density():
    output, y = torch.randn(5, 2, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    covariance: Any = [[1.0, 0.6], [0.6, 0.5]]
    expected = [stats.multivariate_normal(f, covariance).logpdf(t) for f, t in zip(output, y, strict=True)]
    np.testing.assert_allclose(Correlated().log_prob(output, y, {}), expected, rtol=1e-10)
    prediction = Correlated().predict(output.unsqueeze(0), {}, torch.zeros(1, dtype=DTYPE))
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-10)
    median = prediction.quantile(0.5)  # of each output, from 4,096 outcomes
    assert ((median - output).abs() < 5 * 1.2533 * torch.tensor([1.0, 0.5**0.5]) / 64).all()


def test_independent_around_a_distribution_changes_nothing():
    class Together(Normal):
        def distribution(self, output, params):
            return distributions.Independent(super().distribution(output, params), 1)

    output, y, own = torch.randn(4, 3), torch.randn(4, 3), {"log_noise": torch.tensor(-0.3)}
    assert torch.equal(Together().log_prob(output, y, own), Normal().log_prob(output, y, own))
    one = torch.zeros(1)
    found, expected = (each.predict(output[None], own, one) for each in (Together(), Normal()))
    assert torch.equal(found.quantile(0.2), expected.quantile(0.2))


# --- the built-in likelihoods ----------------------------------------------------------------------------------------


def pair(kind, rows: int = 40):
    """The same model with a built-in likelihood and with one made of a distribution, and data."""
    x = torch.randn(rows, 2, dtype=DTYPE)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).to(DTYPE)
    built_in, draw = BUILT_IN[kind]
    return kn.Model(net, built_in), kn.Model(net, kind()), (x, draw(x[:, :1]))


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_log_joint_is_that_of_the_built_in_likelihood(kind):
    first, second, (x, y) = pair(kind)
    params = first.prior_draws(1)
    params = {name: value[0] for name, value in params.items()}
    for target in (y, y.squeeze(1), y.squeeze(1).long() if kind is not Normal else y):
        expected = first.log_joint(params, x, target, 100)
        torch.testing.assert_close(second.log_joint(params, x, target, 100), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize(
    "method",
    [kn.MAP(epochs=5), kn.MeanFieldVI(epochs=5), kn.DeepEnsemble(2, epochs=5)],
    ids=lambda each: type(each).__name__,
)
def test_fits_and_predictions_are_those_of_the_built_in_likelihood(kind, method):
    first, second, data = pair(kind)
    expected, found = (method.fit(model, data) for model in (first, second))
    for name, value in expected.mean().items():
        torch.testing.assert_close(found.mean()[name], value, rtol=1e-7, atol=1e-9)
    ours, theirs = (posterior.predict(data[0]) for posterior in (found, expected))
    torch.testing.assert_close(ours.log_prob(data[1]), theirs.log_prob(data[1]), rtol=1e-7, atol=1e-9)
    if isinstance(theirs, kn.RegressionPrediction):
        torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-7, atol=1e-9)
    else:
        torch.testing.assert_close(ours.mean, theirs.probs, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::knowable.ConvergenceWarning")
def test_chains_are_those_of_the_built_in_likelihood():
    first, second, data = pair(Normal)
    method = kn.HMC(chains=2, warmup=5, draws=5, steps=3, start="network")
    expected, found = (method.fit(model, data) for model in (first, second))
    for name, value in expected.draws.items():
        torch.testing.assert_close(found.draws[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_laplace_is_that_of_the_built_in_likelihood(structure):
    # the information of 40 rows x 1,024 outcomes has a relative standard error of sqrt(2 / 40,960) = 0.7 %, a standard
    # deviation half of it
    first, second, data = pair(Normal)
    start = kn.MAP(epochs=200).fit(first, data)
    method = kn.Laplace(structure=structure, start=start, tune="never")
    expected, found = (method.fit(model, data) for model in (first, second))
    for name, value in expected.std().items():
        torch.testing.assert_close(found.std()[name], value, rtol=5 * 0.0035, atol=1e-12)


def test_laplace_of_finite_outcomes_is_exact():
    first, second, data = pair(Bernoulli)
    start = kn.MAP(epochs=200).fit(first, data)
    expected, found = (kn.Laplace(start=start, tune="never").fit(model, data) for model in (first, second))
    for name, value in expected.std().items():
        torch.testing.assert_close(found.std()[name], value, rtol=1e-9, atol=1e-12)


# --- the Fisher information ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "output", "expected"),
    [
        (Normal(), [0.3], [[np.exp(0.8)]]),
        (Poisson(), [0.3], [[np.exp(0.3)]]),
        (Gamma(), [0.3], [[np.exp(-0.4)]]),
        (Laplace(), [0.3], [[np.exp(0.8)]]),
        (MeanAndSpread(), [0.3, -0.6], [[np.exp(1.2), 0.0], [0.0, 2.0]]),
        (Correlated(), [0.3, -0.6], np.linalg.inv([[1.0, 0.6], [0.6, 0.5]])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_information_is_the_fisher_information(likelihood, output, expected):
    rows = 300
    own = {name: torch.tensor(-0.4, dtype=DTYPE) for name in likelihood.params()}
    outputs = torch.tensor([output] * rows, dtype=DTYPE)
    matrix = likelihood.information(outputs, own).matrix
    error = 5 * matrix.std(0) / rows**0.5 + 1e-12
    assert ((matrix.mean(0) - torch.as_tensor(expected)).abs() < error).all()
    assert torch.equal(likelihood.information(outputs, own).matrix, matrix)  # the same at every call


def test_operations_on_the_information_are_those_of_its_matrices():
    outputs = torch.randn(3, 2, dtype=DTYPE)
    information = MeanAndSpread().information(outputs, {})
    values = torch.randn(3, 2, dtype=DTYPE)
    torch.testing.assert_close(information.times(values), torch.einsum("bij,bj->bi", information.matrix, values))
    units = [torch.eye(2, dtype=DTYPE)[k].expand(3, 2) for k in range(2)]
    root = torch.stack([information.root(unit) for unit in units], dim=-1)
    torch.testing.assert_close(root @ root.mT, information.matrix)
    torch.testing.assert_close(information.diagonal(), information.matrix.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(information.total(1), information.matrix.sum(0))
    columns = torch.stack(list(information.columns(8, torch.Generator())))
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", columns, columns), information.matrix)


def test_information_of_very_many_outputs_is_refused_with_a_way_out():
    with pytest.raises(kn.Unsupported, match=r"matrix of each row's 40 outputs.*empirical_fisher"):
        Poisson().information(torch.zeros(2, 40), {})


# --- own parameters and saving ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudentT(kn.DistributionLikelihood):
    """One with a setting."""

    df: float = 5.0

    def distribution(self, output, params):
        return distributions.StudentT(self.df, output, torch.ones_like(output))


def test_a_saved_posterior_comes_back_with_its_likelihood(tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    for number, likelihood in enumerate([StudentT(3.5), Normal()]):
        posterior = kn.MAP(epochs=2).fit(kn.Model(torch.nn.Linear(2, 1), likelihood), (x, y))
        with pytest.warns(kn.NeedsClasses, match=type(likelihood).__name__):
            posterior.save(tmp_path / str(number))
        loaded = kn.load(tmp_path / str(number), classes=[type(likelihood)])
        assert loaded.model.likelihood == likelihood
        assert torch.equal(loaded.predict(x).log_prob(y), posterior.predict(x).log_prob(y))


def test_a_name_that_a_built_in_likelihood_has_too_means_the_one_that_was_saved(tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    for likelihood in (StudentT(), kn.StudentT()):
        posterior = kn.MAP(epochs=2).fit(kn.Model(torch.nn.Linear(2, 1), likelihood), (x, y))
        folder = tmp_path / type(likelihood).__module__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kn.NeedsClasses)
            posterior.save(folder)
        for classes in ([], [StudentT]):
            assert type(kn.load(folder, classes=classes).model.likelihood) is type(likelihood)


def test_settings_that_are_not_fields_are_not_lost_in_silence(tmp_path):
    class Hidden(kn.DistributionLikelihood):
        def __init__(self, df: float = 5.0):
            self.df = df

        def distribution(self, output, params):
            return distributions.StudentT(self.df, output, torch.ones_like(output))

    posterior = kn.MAP(epochs=2).fit(kn.Model(torch.nn.Linear(2, 1), Hidden(3.0)), (torch.randn(9, 2), torch.randn(9)))
    with pytest.raises(kn.InvalidArgument, match="Hidden cannot be saved: make it a frozen dataclass"):
        posterior.save(tmp_path / "p")


def test_an_own_parameter_that_is_frozen_serves_all_draws():
    model = kn.Model(torch.nn.Linear(2, 1), Normal(), frozen="likelihood.log_noise")
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    prediction = kn.MeanFieldVI(epochs=2).fit(model, (x, y)).predict(x)
    torch.testing.assert_close(prediction.aleatoric, torch.ones(20, 1))


# --- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "value", "support"),
    [(Gamma(), -0.5, "Gamma, GreaterThan"), (Beta(), 1.5, "Beta, Interval"), (Poisson(), 2.5, "Poisson, Integer")],
    ids=lambda value: type(value).__name__,
)
def test_a_target_outside_the_support_is_refused_with_row_and_value(likelihood, value, support):
    y = torch.tensor([1.0, 1.0, value, value])
    with pytest.raises(kn.InvalidData, match=rf"y must be in the support of {support}.*, got {value} in row 2"):
        kn.MAP(epochs=1).fit(kn.Model(torch.nn.Linear(2, 1), likelihood), (torch.randn(4, 2), y))


def test_outside_the_support_there_is_no_density():
    output = torch.zeros(1, 1, dtype=DTYPE)
    for kind in (Gamma, Beta, LogNormal, Weibull):
        own = {"log_shape": torch.tensor(0.5, dtype=DTYPE)}
        assert torch.isneginf(kind().log_prob(output, torch.tensor([[-0.5]], dtype=DTYPE), own)).all()


def test_a_support_that_moves_with_the_output_is_not_held_against_targets():
    class Uniform(kn.DistributionLikelihood):
        def distribution(self, output, params):
            return distributions.Uniform(output, output + 1.0)

    y = torch.tensor([[5.0], [-5.0]])
    assert torch.equal(Uniform().check_target(y, torch.zeros(2, 1)), y)
    assert torch.isneginf(Uniform().log_prob(torch.zeros(2, 1), y, {})).all()


def test_a_support_of_fixed_ends_is_held_against_targets():
    class Binomial(kn.DistributionLikelihood):
        def distribution(self, output, params):
            return distributions.Binomial(10, logits=output)

    with pytest.raises(kn.InvalidData, match=r"support of Binomial.*got 11 in row 1"):
        Binomial().check_target(torch.tensor([10.0, 11.0]), torch.zeros(2, 1))


def fit(likelihood: kn.Likelihood, y: Tensor | list | None = None, outputs: int = 1):
    y = torch.ones(6) if y is None else y
    net = torch.nn.Linear(2, outputs)
    torch.nn.init.constant_(net.bias, -9.0)
    return kn.MAP(epochs=1).fit(kn.Model(net, likelihood), (torch.rand(6, 2), y))


def make(function, **members):
    return type("Own", (kn.DistributionLikelihood,), {"distribution": function, **members})()


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda self, f, p: f, kn.InvalidType, "Own.distribution.* must return a torch.distributions.*, got Tensor"),
        (lambda self, f, p: distributions.Normal(f.sum(), 1.0), kn.InvalidArgument, "begins with the number of rows"),
        (lambda self, f, p: distributions.Gamma(-f.abs(), 1.0), kn.InvalidArgument, "first output: Expected parameter"),
        (lambda self, f, p: distributions.Categorical(logits=f), kn.Unsupported, "use kn.Categorical"),
    ],
)
@pytest.mark.parametrize("checks", [True, False])  # torch.compile switches them off for good
def test_a_distribution_that_cannot_be_one_is_refused(function, error, words, checks, monkeypatch):
    monkeypatch.setattr(distributions.Distribution, "_validate_args", checks)
    with pytest.raises(error, match=words):
        fit(make(function))
    assert distributions.Distribution._validate_args is checks


def test_targets_of_a_wrong_shape_or_type_are_refused():
    with pytest.raises(kn.InvalidData, match=r"y has shape \(6, 3\)"):
        fit(Normal(), torch.ones(6, 3))
    with pytest.raises(kn.InvalidData, match=r"output for that many rows has shape \(6, 1\)"):
        fit(MeanAndSpread(), torch.ones(6, 2), outputs=2)
    with pytest.raises(kn.InvalidType, match="y must be a tensor"):
        fit(Normal(), list("abcdef"))


def test_a_distribution_without_moments_says_what_to_define():
    def logit_normal(self, f, p):
        return distributions.TransformedDistribution(distributions.Normal(f, 1.0), [distributions.SigmoidTransform()])

    posterior = fit(make(logit_normal), torch.full((6,), 0.5))
    with pytest.raises(kn.Unsupported, match="TransformedDistribution has no mean, which predictions need"):
        posterior.predict(torch.rand(3, 2))


def test_the_class_itself_is_abstract():
    with pytest.raises(TypeError, match="distribution"):
        kn.DistributionLikelihood()  # type: ignore[abstract]
