"""Random-walk Metropolis against densities whose moments are known, and its moves one by one."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.core.chains.convergence import ess_bulk
from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.errors import ConvergenceWarning, InvalidArgument, InvalidType
from knowable.inference.sampling.metropolis import Metropolis
from knowable.testing.densities import Density, banana, bimodal, correlated_gaussian, funnel
from knowable.testing.targets import LinearGaussian
from tests.core.chain_cases import copied, same_state
from tests.inference.sampling.moments import expect_moments, limit, z_scores


def target_of(density: Density, dtype: torch.dtype = torch.float64) -> DensityTarget:
    return DensityTarget(density.log_density, Layout.of({"x": density.mean.to(dtype)}))


def scaled(d: int, smallest: float, largest: float) -> Density:
    """Correlated normals (0.9) with standard deviations spread over so many orders of magnitude."""
    base = correlated_gaussian(d)
    wanted = torch.logspace(math.log10(smallest), math.log10(largest), d, dtype=torch.float64)
    stretch = wanted / base.covariance.diagonal().sqrt()
    return Density(
        "scaled", lambda p: base.log_density({"x": p["x"] / stretch.to(p["x"])}),
        lambda n, generator: base.draw(n, generator) * stretch, base.mean, base.covariance * stretch.outer(stretch),
    )  # fmt: skip


def linear_density(problem: LinearGaussian) -> Density:
    """The exact posterior of a regression."""
    factor = torch.linalg.cholesky(problem.covariance)

    def draw(n: int, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn((n, len(factor)), generator=generator, dtype=torch.float64)
        return problem.mean + noise @ factor.T

    return Density("regression", lambda p: p["x"].sum(), draw, problem.mean, problem.covariance)


def expect_regression(posterior, problem: LinearGaussian) -> None:
    scores = z_scores(problem.as_flat(posterior.draws), linear_density(problem))
    most = limit(sum(len(each) for each in scores.values()))
    assert all((each.abs() < most).all() for each in scores.values()), scores


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [bimodal(), correlated_gaussian(10)], ids=lambda each: each.name)
def test_draws_have_the_moments_of_the_density(density, seed):
    expect_moments(Metropolis().sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.slow
@pytest.mark.parametrize(
    "density", [correlated_gaussian(50), banana(), funnel(), scaled(10, 1e-3, 1e3)], ids=lambda each: each.name
)
def test_draws_have_the_moments_of_harder_densities(density, seed):
    expect_moments(Metropolis().sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.slow
def test_scales_six_orders_of_magnitude_apart_are_found_from_afar(seed):
    density = scaled(3, 1e-3, 1e3)
    start = {"x": torch.tensor([1.0, -1.0, 100.0])}  # a thousand standard deviations off in the first direction
    samples = Metropolis(chains=8).sample(density.log_density, start, seed=seed)
    assert samples.draws["x"].dtype == torch.float32
    expect_moments(samples, density)


def test_the_neck_of_the_original_funnel_is_too_narrow_and_it_says_so(seed):
    # steps that fit the mouth are hardly ever accepted in the neck: chains that go in stay for long, others never do
    density = funnel(scale=3.0)
    with pytest.warns(ConvergenceWarning, match="not mixed"):
        samples = Metropolis(draws=200, warmup=150).sample(density.log_density, density.start(), seed=seed)
    plain = correlated_gaussian(5)
    reference = Metropolis(draws=200, warmup=150).sample(plain.log_density, plain.start(), seed=seed)
    assert ess_bulk(samples.draws["x"]).min() < 0.2 * ess_bulk(reference.draws["x"]).min()


def test_a_regression_has_the_exact_posterior(seed):
    problem = LinearGaussian.make()
    posterior = Metropolis(chains=8, start="prior", warmup=200).fit(problem.model(), problem.data, seed=seed)
    expect_regression(posterior, problem)


def test_where_the_density_is_zero_no_chain_goes(seed):
    # a half normal, in one dimension: mean sqrt(2 / pi), variance 1 - 2 / pi
    def log_density(params):
        x = params["x"]
        return torch.where(x > 0, -0.5 * x.square(), -math.inf).sum()

    samples = Metropolis().sample(log_density, {"x": torch.tensor([1.5])}, seed=seed)
    draws = samples.draws["x"]
    assert (draws > 0).all()
    error = draws.std() / samples.diagnostics.ess["x"].sqrt()
    assert abs(draws.mean() - math.sqrt(2 / math.pi)) < 4 * error
    # tuned to 0.44: Robbins-Monro leaves the log scale within some 0.1 of the optimum, where the slope is below 0.5
    assert samples.diagnostics.terms["acceptance"] == pytest.approx(0.44, abs=0.06)


# --- the kernel ------------------------------------------------------------------------------------------------------


def test_no_gradient_is_taken(generator):
    density = correlated_gaussian(3)
    kernel, target = Metropolis().kernel(3), target_of(density)
    state = kernel.init(target, density.draw(4, generator), generator=generator)
    before = target.gradients
    kernel.advance(target, state, 5, generator=generator, warmup=WarmUp(0, 10))
    assert target.gradients == before


def test_a_block_of_ten_is_two_blocks_of_five(seed):
    density = correlated_gaussian(3)
    kernel, target = Metropolis().kernel(3), target_of(density)
    start = density.draw(4, torch.Generator().manual_seed(seed))
    ends = []
    for parts in ([(0, 30)], [(0, 15), (15, 15)]):
        generator = torch.Generator().manual_seed(seed)
        state = kernel.init(target, start, generator=generator)
        for first, n in parts:
            untouched = copied(state)
            after, _ = kernel.advance(target, state, n, generator=generator, warmup=WarmUp(first, 40))
            assert same_state(state, untouched)  # nothing changed in place
            state = after
        ends.append(state)
    assert same_state(*ends)


def test_the_proposal_learns_the_covariance_and_the_scale_suits_it(seed):
    density = correlated_gaussian(4)
    kernel, target = Metropolis().kernel(4), target_of(density)
    generator = torch.Generator().manual_seed(seed)
    state = kernel.init(target, density.draw(16, generator), generator=generator)
    for first in range(0, 500, 50):
        state, _ = kernel.advance(target, state, 50, generator=generator, warmup=WarmUp(first, 500))
    learned = state.factor[0] @ state.factor[0].T
    ratios = torch.linalg.eigvals(torch.linalg.solve(density.covariance, learned)).real
    # some 16 x 130 / 2 independent draws in the last window: each ratio is within 4 sqrt(2 / 1000) of 1
    assert ((ratios > 0.8) & (ratios < 1.25)).all()
    assert kernel.tuned(state)["step_size"] == pytest.approx(2.38 / 2, rel=0.2)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"proposal": "round"}, InvalidArgument),
        ({"steps": 0}, InvalidArgument),
        ({"target_acceptance": 1.0}, InvalidArgument),
        ({"steps": 1.5}, InvalidType),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad, error):
    with pytest.raises(error, match=next(iter(bad))):
        Metropolis(**bad)
