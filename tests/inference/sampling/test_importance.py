"""Importance sampling against conjugate answers, exact draws, and its own admission of failure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout
from knowable.core.posterior.normal import DiagonalNormal, FullNormal
from knowable.core.posterior.posterior import Posterior
from knowable.errors import ConvergenceWarning, Interrupted, InvalidArgument, InvalidType, Unsupported
from knowable.inference.sampling import ImportanceSampling, importance
from knowable.inference.sampling.initial_positions import Start
from knowable.testing import NETWORKS, LinearGaussian, Subject
from knowable.testing.checks.networks import check_network
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.moments import expect_moments

LITTLE = {"n": 4, "d": 2, "noise": 2.0}  # so little data that the prior is a fair proposal


def exact_normal(problem: LinearGaussian, widen: float = 1.0) -> FullNormal:
    """The exact posterior of a linear problem, as a family with a density; ``widen`` scales its covariance."""
    model = problem.model()
    layout = Layout(("weight", "bias"), (torch.Size((1, problem.x.shape[1])), torch.Size((1,))))
    covariance = widen * torch.linalg.inv(problem.precision)
    return FullNormal(model, layout, problem.mean, torch.linalg.cholesky(covariance))


# --- right answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposal", ["prior", "laplace"])
def test_evidence_and_moments_are_those_of_the_conjugate_answer(proposal, seed):
    problem = LinearGaussian.make(**LITTLE)
    posterior = ImportanceSampling(proposal=proposal).fit(problem.model(), problem.data, seed=seed)
    evidence = posterior.log_evidence
    assert evidence is not None and evidence.kind == "estimate" and 0 < evidence.standard_error < 0.1
    assert abs(evidence - problem.log_evidence) < 4 * evidence.standard_error
    # a mean over draws worth ess has a standard error of sd / sqrt(ess)
    mean, sd = problem.as_flat(posterior.mean()), torch.linalg.inv(problem.precision).diagonal().sqrt()
    assert ((mean - problem.mean).abs() < 4.5 * sd / math.sqrt(posterior.diagnostics["ess"])).all()
    found = problem.as_flat(posterior.std())
    assert ((found / sd - 1).abs() < 4.5 / math.sqrt(posterior.diagnostics["ess"])).all()
    assert posterior.diagnostics.converged and posterior.diagnostics["pareto_k"] < 0.7


def test_the_exact_posterior_as_proposal_gives_the_exact_evidence(seed):
    problem = LinearGaussian.make(n=60, d=3, seed=seed)
    posterior = ImportanceSampling(draws=200, proposal=exact_normal(problem)).fit(problem.model(), problem.data)
    assert float(posterior.log_evidence) == pytest.approx(problem.log_evidence, abs=1e-8)  # all weights are equal
    assert posterior.diagnostics["ess"] == pytest.approx(200, rel=1e-6)


def test_a_wider_posterior_as_proposal_is_corrected(seed):
    problem = LinearGaussian.make(n=60, d=3, seed=seed)
    posterior = ImportanceSampling(proposal=exact_normal(problem, 2.0)).fit(problem.model(), problem.data, seed=seed)
    assert abs(posterior.log_evidence - problem.log_evidence) < 4 * posterior.log_evidence.standard_error
    sd = torch.linalg.inv(problem.precision).diagonal().sqrt()
    assert ((problem.as_flat(posterior.std()) / sd - 1).abs() < 4.5 / math.sqrt(posterior.diagnostics["ess"])).all()


def test_evidence_ignores_the_prior_of_point_estimates_and_needs_a_proper_one():
    # frozen features: the last layer alone is random, and its evidence is that of a linear model on them
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(1.0), random="last_layer")
    posterior = ImportanceSampling().fit(model, (x, y))
    frozen = {name: posterior.points[name] for name in ("0.weight", "0.bias")}
    features = torch.tanh(x @ frozen["0.weight"].T + frozen["0.bias"])
    linear = LinearGaussian(features, y, 1.0, 1.0)
    assert abs(posterior.log_evidence - linear.log_evidence) < 4 * posterior.log_evidence.standard_error
    flat = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(1.0), kn.Flat())
    assert ImportanceSampling().fit(flat, (x, y)).log_evidence is None
    with pytest.raises(Unsupported, match="cannot be sampled"):
        ImportanceSampling(proposal="prior").fit(flat, (x, y))


@pytest.mark.parametrize("density", [correlated_gaussian(2), correlated_gaussian(30), bimodal(2), funnel(3, scale=1.0)])
def test_draws_from_a_bare_density_have_its_moments(density, seed):
    samples = ImportanceSampling().sample(density.log_density, density.start(), seed=seed)
    expect_moments(samples, density)
    diagnostics = samples.diagnostics
    error = diagnostics["log_evidence_error"]
    assert abs(diagnostics["log_evidence"]) < 4 * error  # the density is normalised
    ess = diagnostics.ess["x"]
    z = (samples.mean()["x"] - density.mean) / (density.covariance.diagonal() / ess).sqrt()
    assert (z.abs() < 4.5).all()


def test_units_and_place_do_not_matter(seed):
    scale, place = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64), torch.tensor([5.0, -300.0, 1e4])

    def density(params):
        z = (params["a"] - place) / scale
        return -0.5 * (z.square().sum() + 0.8 * z[0] * z[2]) - 0.5 * (params["b"].exp() - params["b"]).square().sum()

    samples = ImportanceSampling().sample(
        density, {"a": torch.zeros(3, dtype=torch.float64), "b": torch.ones(2, 1)}, seed=seed
    )
    assert samples.draws["a"].shape == (1, 4000, 3) and samples.draws["b"].shape == (1, 4000, 2, 1)
    sd = scale * torch.tensor([1 / (1 - 0.16), 1.0, 1 / (1 - 0.16)], dtype=torch.float64).sqrt()
    error = sd / samples.diagnostics.ess["a"].sqrt()
    assert ((samples.mean()["a"] - place).abs() < 4.5 * error).all()
    assert ((samples.std()["a"] / sd - 1).abs() < 4.5 / samples.diagnostics.ess["a"].sqrt()).all()


# --- admitted failure ------------------------------------------------------------------------------------------------


def test_draws_from_the_prior_do_not_find_the_posterior_of_many_data(seed):
    problem = LinearGaussian.make(n=2000, d=8, noise=0.3, seed=seed)
    with pytest.warns(
        ConvergenceWarning, match="from the prior have an effective sample size of 1 .*proposal='laplace'"
    ):
        blind = ImportanceSampling(proposal="prior").fit(problem.model(), problem.data, seed=seed)
    assert blind.diagnostics["ess"] < 1.5 and blind.diagnostics["pareto_k"] > 0.7
    assert blind.diagnostics.converged is False
    good = ImportanceSampling(proposal="laplace").fit(problem.model(), problem.data, seed=seed)
    assert good.diagnostics["ess"] > 2000 and good.diagnostics.converged
    assert abs(good.log_evidence - problem.log_evidence) < 4 * good.log_evidence.standard_error


def test_draws_from_the_prior_do_not_find_the_posterior_of_a_network():
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 100).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = kn.Model(net, kn.Gaussian(0.1))
    with pytest.warns(ConvergenceWarning, match="do not find the posterior"):
        posterior = ImportanceSampling(draws=1000, proposal="prior").fit(model, (x, torch.sin(2 * x)))
    assert posterior.diagnostics["ess"] < 3


def test_a_proposal_that_is_too_narrow_says_so():
    problem = LinearGaussian.make(n=60, d=3)
    with pytest.warns(ConvergenceWarning, match="too unlike the posterior"):
        ImportanceSampling(proposal=exact_normal(problem, 0.1)).fit(problem.model(), problem.data)
    density = banana(curvature=3.0)
    with pytest.warns(ConvergenceWarning, match="Pareto k"):
        ImportanceSampling().sample(density.log_density, density.start())


def test_too_few_draws_to_tell_say_nothing():
    problem = LinearGaussian.make(n=60, d=3)
    posterior = ImportanceSampling(draws=20, proposal="prior").fit(problem.model(), problem.data)
    assert posterior.diagnostics.converged is None and "pareto_k" not in posterior.diagnostics


# --- weights, memory, resampling -------------------------------------------------------------------------------------


def test_smoothing_changes_only_the_tail():
    problem = LinearGaussian.make(**LITTLE)
    smooth = ImportanceSampling(proposal="prior").fit(problem.model(), problem.data)
    raw = ImportanceSampling(proposal="prior", smooth=False).fit(problem.model(), problem.data)
    assert torch.equal(smooth.stack["weight"], raw.stack["weight"])
    ratio = smooth.log_weights - raw.log_weights
    body = raw.log_weights.argsort()[:-200]
    assert torch.allclose(ratio[body], ratio[body][0]) and not torch.allclose(ratio, ratio[0])


def test_weights_are_the_likelihood_for_draws_from_the_prior():
    problem = LinearGaussian.make(**LITTLE)
    model = problem.model()
    posterior = ImportanceSampling(draws=24, proposal="prior", smooth=False).fit(model, problem.data)
    expected = torch.stack([
        model.log_likelihood({k: v[i] for k, v in posterior.stack.items()}, *problem.data).sum() for i in range(24)
    ])  # fmt: skip
    assert torch.allclose(posterior.log_weights, expected.log_softmax(0), atol=1e-10)


def test_a_small_memory_keeps_fewer_draws_with_the_same_mean(seed):
    problem = LinearGaussian.make(**LITTLE)
    whole = ImportanceSampling(proposal="prior").fit(problem.model(), problem.data, seed=seed)
    few = ImportanceSampling(proposal="prior", max_memory=500 * 3 * 8).fit(problem.model(), problem.data, seed=seed)
    assert len(few) <= 500 < len(whole) == 4000
    assert float(few.log_evidence) == float(whole.log_evidence)
    sd = torch.linalg.inv(problem.precision).diagonal().sqrt()
    difference = problem.as_flat(few.mean()) - problem.as_flat(whole.mean())
    assert (difference.abs() < 4.5 * sd / math.sqrt(500)).all()  # resampling adds at most the error of 500 draws
    assert torch.isin(few.stack["bias"], whole.stack["bias"]).all()


def test_resampled_draws_of_large_weight_follow_themselves_so_that_chains_see_what_they_are_worth(seed):
    density = funnel(3, scale=1.0)
    samples = ImportanceSampling(rounds=0, df=3.0, draws=4000).sample(density.log_density, density.start(), seed=seed)
    from knowable.core.chains.convergence import ess_mean

    seen, said = ess_mean(samples.draws["x"]), samples.diagnostics.ess["x"]
    assert (seen < 3000).all()
    assert ((seen / said).log().abs() < math.log(2.5)).all()


# --- the same, whatever --------------------------------------------------------------------------------------------


def test_same_seed_same_draws_and_float32_is_kept(seed):
    density = correlated_gaussian(3)
    start = {"x": torch.zeros(3)}
    one, two = (ImportanceSampling(draws=300).sample(density.log_density, start, seed=seed) for _ in range(2))
    other = ImportanceSampling(draws=300).sample(density.log_density, start, seed=seed + 1)
    assert one.draws["x"].dtype == torch.float32
    assert torch.equal(one.draws["x"], two.draws["x"]) and not torch.equal(one.draws["x"], other.draws["x"])


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_can_be_weighed(network):
    check_network(Subject(ImportanceSampling(draws=20, proposal="prior"), iterates=False), network)


def test_several_starts_take_the_best_mode():
    def two_hills(params):
        x = params["x"]
        return torch.logaddexp(-0.5 * (x - 8) ** 2, math.log(1e-6) - 0.5 * (x + 8) ** 2)

    samples = ImportanceSampling(draws=500).sample(two_hills, [{"x": torch.tensor(-9.0)}, {"x": torch.tensor(5.0)}])
    assert samples.mean()["x"].item() == pytest.approx(8, abs=0.3)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused():
    for wrong in (
        {"draws": 0}, {"proposal": "posterior"}, {"smooth": 1}, {"df": 0.0}, {"rounds": -1}, {"max_memory": "much"},
    ):  # fmt: skip
        with pytest.raises((InvalidArgument, InvalidType), match=next(iter(wrong))):
            ImportanceSampling(**wrong)
    problem = LinearGaussian.make(**LITTLE)
    atoms = ImportanceSampling(draws=30).fit(problem.model(), problem.data)
    with pytest.raises(InvalidArgument, match="proposal must be a posterior with a density"):
        ImportanceSampling(proposal=atoms)


def test_a_proposal_over_other_parameters_is_refused():
    problem = LinearGaussian.make(**LITTLE)
    learned = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian())  # its noise is a parameter too
    with pytest.raises(InvalidArgument, match="log_noise"):
        ImportanceSampling(proposal=exact_normal(problem)).fit(learned, problem.data)
    wide = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(1.0))
    loc = wide.params()
    other: Posterior = DiagonalNormal(wide, loc, {k: torch.ones_like(v) for k, v in loc.items()})
    with pytest.raises(InvalidArgument, match="shape"):
        ImportanceSampling(proposal=other).fit(problem.model(), problem.data)


def test_large_networks_and_learned_priors_are_refused_in_words():
    problem = LinearGaussian.make(**LITTLE)
    with pytest.raises(Unsupported, match="Hessian; max_parameters is 2"):
        ImportanceSampling(max_parameters=2).fit(problem.model(), problem.data)
    hyper = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(1.0), kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(Unsupported, match="prior's own scale"):
        ImportanceSampling().fit(hyper, problem.data)
    with pytest.raises(Unsupported, match="precision"):
        ImportanceSampling().fit(problem.model(), problem.data, engine=kn.Engine(precision="bfloat16"))


def test_a_density_that_cannot_be_used_is_refused():
    with pytest.raises(InvalidType, match="log_density"):
        ImportanceSampling().sample(3.0, {"x": torch.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="bare density"):
        ImportanceSampling(proposal="prior").sample(lambda p: -(p["x"] ** 2), {"x": torch.zeros(())})
    with pytest.raises(InvalidArgument, match="at init_params"):
        ImportanceSampling().sample(lambda p: p["x"].log(), {"x": torch.tensor(-1.0)})


def test_an_interrupted_run_returns_what_it_has(monkeypatch):
    problem = LinearGaussian.make(**LITTLE)
    calls, weigh_block = [], importance._weights

    def stop_at_the_fourth(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return weigh_block(*args)

    monkeypatch.setattr(importance, "_weights", stop_at_the_fourth)
    with pytest.warns(Interrupted, match="192 draws"):
        part = ImportanceSampling(proposal="prior").fit(problem.model(), problem.data)
    assert len(part) == 192 and part.diagnostics.interrupted
    calls.clear()
    whole = replace(ImportanceSampling(proposal="prior"), draws=192)
    monkeypatch.setattr(importance, "_weights", weigh_block)
    assert torch.equal(part.stack["weight"], whole.fit(problem.model(), problem.data).stack["weight"])


# --- densities and draws in blocks ------------------------------------------------------------------------------------


def small_model(likelihood=None) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = kn.Model(
        nn.Linear(2, 1).double(), likelihood or kn.Gaussian(), {"bias": kn.LaplacePrior(2.0), "*": kn.Normal(1.0)}
    )
    return model, (torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64))


def density_of(model, data) -> importance.JointDensity:
    return importance.JointDensity(model, as_data(data, model), Start(torch.zeros(1, 0), {}, model.buffers()))


@pytest.mark.parametrize("likelihood", [kn.Gaussian(), kn.Gaussian(0.5), kn.StudentT()])
def test_joint_density_is_that_of_the_model(likelihood):
    model, data = small_model(likelihood)
    density = density_of(model, data)
    position, _ = importance.PriorProposal(model, density.layout).draw(70, torch.Generator().manual_seed(0))
    draws = [density.layout.views(flat) for flat in position]
    expected = torch.stack([model.log_joint(params, *data, size=7) for params in draws])
    assert torch.allclose(density(position), expected, atol=1e-9)


def test_draws_are_the_same_when_made_again(monkeypatch):
    model, data = small_model(kn.Gaussian(1.0))
    density = density_of(model, data)
    proposal = importance.PriorProposal(model, density.layout)
    run = importance.weighted_draws(proposal, density, 150, smooth=False, seed=3, progress=False)
    whole = importance.drawn_again(proposal, run, None, 3)
    assert torch.allclose(density.log_likelihood(whole), run.log_weights)
    index = torch.tensor([0, 3, 64, 149])
    assert torch.equal(importance.drawn_again(proposal, run, index, 3), whole[index])


def test_large_draws_go_in_small_blocks():
    assert importance._block_size(3) == 64
    assert importance._block_size(2**20) == 8
    assert importance._block_size(2**30) == 1
