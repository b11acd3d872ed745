from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.testing import BananaRegression, LinearGaussian
from tests.inference.variational.family_oracle import dense_moments, normal_divergence
from tests.inference.variational.oracle import expected_log_likelihood, integrated_kl

METHODS = [kn.FullRankVI, kn.LowRankVI, kn.MatrixNormalVI]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # another case of a check that the quick run has
ONE_QUICK = [kn.FullRankVI, slow(kn.LowRankVI), slow(kn.MatrixNormalVI)]
FULL, MEAN, LOW = kn.families.FullRank(), kn.families.MeanField(), kn.families.LowRank(2)
EVERY = [
    kn.MeanFieldVI(families={"*": MEAN}),
    kn.MeanFieldVI(families={"weight": FULL}),
    kn.FullRankVI(),
    kn.LowRankVI(1),
    kn.LowRankVI(families={"bias": MEAN}),
    kn.MatrixNormalVI(),
]


@functools.cache
def early(place: int, seed: int) -> tuple[LinearGaussian, kn.Posterior]:
    """A problem, and one of the methods on it long before the optimum."""
    problem = LinearGaussian.make(n=30, d=3, noise=0.7, correlation=0.8, seed=seed)
    method = dataclasses.replace(EVERY[place], epochs=60, learning_rate=0.03)
    return problem, method.fit(problem.model(), problem.data, seed=seed)


every = pytest.mark.parametrize("place", range(len(EVERY)), ids=[repr(method) for method in EVERY])


@every
def test_bound_and_divergence_add_up_to_the_evidence(seed, place):
    # ELBO + KL(q ‖ p) = log p(D) for whatever q is, within 4.5 Monte Carlo errors
    problem, posterior = early(place, seed)
    loc, covariance = dense_moments(posterior, Layout.of(problem.model().params()))
    kl = normal_divergence(loc, covariance, problem.mean, problem.precision)
    assert kl > 0.01
    bound = posterior.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - problem.log_evidence) < 4.5 * bound.standard_error


@every
def test_density_of_the_posterior_gives_the_same_divergence(seed, place):
    # KL(q ‖ p) = E_q[log q - log p] from draws and log_prob, 2,000 of them
    problem, posterior = early(place, seed)
    exact = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    draws = posterior.sample(2000, torch.Generator().manual_seed(seed))
    ratio = posterior.log_prob(draws) - exact.log_prob(problem.as_flat(draws))
    kl = problem.log_evidence - posterior.diagnostics["elbo"]
    error = math.hypot(ratio.std().item() / math.sqrt(2000), posterior.log_evidence.standard_error)
    assert abs(ratio.mean().item() - kl) < 4.5 * error


def test_families_are_ordered_as_theory_says(seed):
    # on a posterior with strong correlations: mean field, one direction, all of them; 0.15 nats for Adam's last steps
    problem = LinearGaussian.make(n=30, d=4, noise=0.7, correlation=0.9, seed=seed)
    layout = Layout.of(problem.model().params())
    settings = {"epochs": 800, "learning_rate": 0.03, "draws": 2}
    methods = {
        "mean field": kn.MeanFieldVI(**settings, families={"*": MEAN}),
        "weights full rank": kn.MeanFieldVI(**settings, families={"weight": FULL}),
        "full rank": kn.FullRankVI(**settings),
    }
    kl = {}
    for name, method in methods.items():
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        kl[name] = normal_divergence(*dense_moments(posterior, layout), problem.mean, problem.precision)
    # what is known: the best independent normals, the best product of a normal over the weights and one for the bias
    best = problem.divergence(problem.mean, problem.mean_field_std)
    blocks = torch.block_diag(*(torch.linalg.inv(problem.precision[a, a]) for a in (slice(0, 4), slice(4, 5))))
    best_product = normal_divergence(problem.mean, blocks, problem.mean, problem.precision)
    assert best > best_product + 0.3
    assert best - 1e-9 < kl["mean field"] < best + 0.15
    assert best_product - 1e-9 < kl["weights full rank"] < best_product + 0.05
    assert -1e-9 < kl["full rank"] < 0.001


@pytest.mark.slow
def test_families_are_ordered_on_a_bent_posterior(seed):
    # the bound of each fitted normal is exact by quadrature; 0.05 nats for Adam's last steps
    problem = BananaRegression()
    settings = {"epochs": 800, "learning_rate": 0.03, "draws": 4}
    found = {}
    for name, method in {
        "mean field": kn.MeanFieldVI(**settings),
        "one direction": kn.LowRankVI(1, **settings),
        "full rank": kn.FullRankVI(**settings),
    }.items():
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        moments = dense_moments(posterior, Layout.of(problem.model().params()))
        found[name] = problem.divergence(*moments)
        assert abs(posterior.log_evidence + found[name] - problem.log_evidence) < (
            4.5 * posterior.log_evidence.standard_error
        )
    assert found["mean field"] > found["full rank"] + 0.1
    assert abs(found["one direction"] - found["full rank"]) < 0.05  # of two weights, one direction is all there is
    assert found["full rank"] > 0.02  # no normal is bent


# --- groups ----------------------------------------------------------------------------------------------------------


def test_mean_field_family_reaches_the_closed_form_optimum(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kn.MeanFieldVI(families={"*": MEAN}, epochs=800, learning_rate=0.03)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.DiagonalNormal)
    shortfall = problem.elbo() - problem.elbo(problem.as_flat(posterior.loc), problem.as_flat(posterior.scale))
    assert 0 <= shortfall < 0.15  # as for the other estimators of mean field


@pytest.mark.parametrize("way", ["mean field", "full rank"])
def test_a_group_is_correlated_within_and_independent_of_the_others(seed, way):
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.2))
    method = {
        "mean field": kn.MeanFieldVI(epochs=200, families={"2.*": FULL}),
        "full rank": kn.FullRankVI(epochs=200, families={"0.*": MEAN}),
    }[way]
    posterior = method.fit(model, (x, x.sin()), seed=seed)
    assert isinstance(posterior, kn.ProductPosterior)
    assert type(posterior.part_of("2.weight")) is kn.FullNormal
    assert posterior.part_of("2.weight") is posterior.part_of("2.bias")
    assert type(posterior.part_of("0.weight")) is kn.DiagonalNormal
    assert posterior.predict(x).mean.shape == (30, 1)
    off = posterior.part_of("2.weight").covariance
    assert (off - off.diagonal().diag()).abs().max() > 0


def test_last_layer_by_name_and_rest_by_the_method(seed):
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    method = kn.LowRankVI(2, epochs=20, families={"last_layer": FULL, "0.bias": MEAN})
    posterior = method.fit(kn.Model(net, kn.Gaussian()), (x, x.sin()), seed=seed)
    assert posterior.names == [("2.weight", "2.bias", "likelihood.log_noise"), ("0.bias",), ("0.weight",)]
    assert [type(part) for part in posterior.parts] == [kn.FullNormal, kn.DiagonalNormal, kn.LowRankNormal]


def test_glob_without_a_match_is_refused_by_name():
    problem = LinearGaussian.make(n=20)
    with pytest.raises(kn.InvalidArgument, match=r"families='head.\*' matches no parameter"):
        kn.FullRankVI(epochs=1, families={"head.*": MEAN}).fit(problem.model(), problem.data)


@pytest.mark.parametrize("estimator", ["local", "flipout", "score"])
def test_other_families_beside_mean_field_draw_weights(estimator):
    with pytest.raises(kn.InvalidArgument, match="estimator must be 'auto' or 'weight' with families"):
        kn.MeanFieldVI(estimator=estimator, families={"*": FULL})


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", METHODS)
def test_start_and_scale_are_heeded(kind):
    problem = LinearGaussian.make(n=20)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    method = kind(epochs=1, learning_rate=1e-9, start=exact, initial_scale=0.3)
    posterior = method.fit(problem.model(seed=5), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        problem.as_flat(posterior.std()), torch.full((4,), 0.3, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_beta_is_in_the_report_and_leads_to_the_tempered_optimum(seed, kind):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kind(epochs=1000, learning_rate=0.03, beta=0.3, kl_gradient="path")
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert "beta" in posterior.diagnostics.notes[0] and "beta=0.3" in posterior.diagnostics.method
    cold = problem.tempered(0.3)
    moments = dense_moments(posterior, Layout.of(problem.model().params()))
    kl = normal_divergence(*moments, cold.mean, cold.precision)
    blocks = torch.block_diag(*(torch.linalg.inv(cold.precision[a, a]) for a in (slice(0, 3), slice(3, 4))))
    matrix = normal_divergence(cold.mean, blocks, cold.mean, cold.precision)  # the bias apart from the weights
    assert kl < (matrix if kind is kn.MatrixNormalVI else 0.0) + 0.1


@pytest.mark.parametrize(
    "batches", [slow({"batch_size": 20, "draws": 2}), {"batch_size": 10, "accumulate": 3}], ids=str
)
@pytest.mark.parametrize("kind", ONE_QUICK)
def test_mini_batches_with_several_draws_or_accumulated_aim_at_the_same(seed, kind, batches):
    problem = LinearGaussian.make(n=60, noise=0.7, correlation=0.2, seed=seed)
    method = kind(epochs=400, learning_rate=0.03, **batches)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    moments = dense_moments(posterior, Layout.of(problem.model().params()))
    assert normal_divergence(*moments, problem.mean, problem.precision) < 0.3


@pytest.mark.parametrize("prior", [slow(kn.LaplacePrior(0.5)), kn.ScaleMixture(0.5, 1.0, 0.1)], ids=repr)
def test_bound_under_other_priors_is_likelihood_less_divergence(seed, prior):
    # likelihood in closed form; divergence: correlations in closed form, independent normals by quadrature
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    posterior = kn.FullRankVI(epochs=150, learning_rate=0.05).fit(model, problem.data, seed=seed)
    loc, covariance = posterior.loc, posterior.covariance
    std = covariance.diagonal().sqrt()
    design = problem.design
    spread = (design @ (covariance - std.square().diag()) * design).sum() / problem.noise**2
    fit = expected_log_likelihood(problem, loc, std) - 0.5 * spread.item()
    correlation = -0.5 * torch.logdet(covariance / std.outer(std)).item()
    kl = sum(integrated_kl(prior, *pair) for pair in zip(loc.tolist(), std.tolist(), strict=True)) + correlation
    assert abs(posterior.log_evidence - (fit - kl)) < 4.5 * posterior.log_evidence.standard_error


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    "knobs", [{"kl_gradient": "score"}, {"draws": 0}, {"beta": 0}, {"initial_scale": -1.0}, {"families": {}}], ids=str
)
def test_settings_that_make_no_sense_are_refused_by_name(kind, knobs):
    with pytest.raises(kn.InvalidArgument, match=next(iter(knobs))):
        kind(**knobs)


def test_all_methods_have_the_same_knobs():
    common = {field.name for field in dataclasses.fields(kn.FullRankVI)} - {"max_parameters"}
    for kind, own in itertools.zip_longest(METHODS[1:], [{"rank"}, {"full_up_to"}]):
        assert {field.name for field in dataclasses.fields(kind)} - own == common
