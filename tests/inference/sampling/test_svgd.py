from __future__ import annotations

import math

import pytest
import torch
from torch.func import jacrev, vmap

import knowable as kn
from knowable.core.chains.settings import ChainStorage
from knowable.errors import ConvergenceWarning, InvalidArgument
from knowable.inference.sampling import SVGD
from knowable.inference.sampling.svgd import stein_forces
from knowable.testing.densities import bimodal, correlated_gaussian
from knowable.testing.targets import LinearGaussian


def _normal(params):
    return -0.5 * params["x"].square().sum()


def test_forces_are_those_of_the_formula_written_out(generator):
    particles = torch.randn((7, 3), generator=generator, dtype=torch.float64)
    gradient = torch.randn((7, 3), generator=generator, dtype=torch.float64)
    distance = (particles[:, None] - particles[None]).norm(dim=-1)
    median = distance[~torch.eye(7, dtype=torch.bool)].median()
    for given, width in ((None, median**2 / math.log(8)), (2.5, torch.tensor(2.5))):

        def kernel(a, b, width=width):
            return torch.exp(-(a - b).square().sum() / width)

        pull, push = torch.zeros(7, 3, dtype=torch.float64), torch.zeros(7, 3, dtype=torch.float64)
        for i in range(7):
            for j in range(7):
                pull[i] += kernel(particles[j], particles[i]) * gradient[j] / 7
                push[i] += jacrev(kernel)(particles[j], particles[i]) / 7
        torch.testing.assert_close(stein_forces(particles, gradient, given), (pull, push))
    assert vmap(kernel)(particles, particles).eq(1).all()


@pytest.mark.parametrize("dimension", [1, 3, 20])
def test_two_particles_end_as_far_apart_as_the_closed_form_says_in_any_dimension(dimension, seed):
    # at x and -x: -x (1 - k) + 4 k x / h = 0 with h = 4 |x|^2 / log 3, so k = 1/3 and |x|^2 = log(3) / 2: the sum of
    # all variances is bounded by that, and variances are understated by a factor of D; pull and push cancel to 1%
    samples = SVGD(chains=2).sample(_normal, {"x": torch.zeros(dimension, dtype=torch.float64)}, seed=seed)
    first, second = samples.draws["x"][:, 0]
    assert (first - second).norm().item() == pytest.approx(2 * math.sqrt(math.log(3) / 2), rel=0.03)
    assert (first + second).norm().item() < 0.05


def test_variances_are_understated_the_more_the_higher_the_dimension(seed):
    ratio = [
        SVGD(chains=20).sample(_normal, {"x": torch.zeros(d)}, seed=seed).draws["x"].var(0).mean().item()
        for d in (1, 10, 100)
    ]
    assert ratio[0] > ratio[1] > ratio[2]
    assert 0.75 < ratio[0] < 1.05 and ratio[2] < 0.5


@pytest.mark.parametrize("density", [correlated_gaussian(2), bimodal()], ids=lambda each: each.name)
def test_particles_stand_like_draws_in_two_dimensions(density, seed):
    """64 particles: means to a tenth of a standard deviation, variances 0 to 15% too small (stated, and seen above)."""
    samples = SVGD().sample(density.log_density, density.start(), seed=seed)
    draws, sd = samples.draws["x"][:, 0], density.covariance.diagonal().sqrt()
    within = (draws.mean(0) - density.mean).abs() / sd
    assert (within < (0.1 if density.name != "bimodal" else 0.25)).all()  # modes are weighed by where particles began
    ratio = draws.var(0) / density.covariance.diagonal()
    assert ((ratio > 0.8) & (ratio < 1.15)).all()


def test_scales_do_not_matter(seed):
    scale = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)
    start = [{"x": row} for row in torch.randn(30, 3, dtype=torch.float64) * scale]
    draws = SVGD(chains=30).sample(lambda p: -0.5 * (p["x"] / scale).square().sum(), start, seed=seed).draws["x"]
    plain = [{"x": one["x"] / scale} for one in start]
    unit = SVGD(chains=30).sample(_normal, plain, seed=seed).draws["x"]
    torch.testing.assert_close(draws / scale, unit, rtol=1e-4, atol=1e-4)


def test_one_draw_of_each_particle_has_no_mixing_to_report_and_says_whether_it_settled(seed):
    samples = SVGD(chains=10).sample(_normal, {"x": torch.zeros(2)}, seed=seed)
    assert samples.draws["x"].shape == (10, 1, 2) and samples.log_density.shape == (10, 1)
    assert samples.diagnostics.rhat["x"].isnan().all() and samples.diagnostics.ess["x"].isnan().all()
    assert samples.diagnostics.converged is True and "settled" in samples.diagnostics.message
    torch.testing.assert_close(samples.log_density[:, 0], -0.5 * samples.draws["x"][:, 0].square().sum(-1))


def test_particles_that_have_not_settled_say_so_unless_the_number_of_updates_was_asked_for(monkeypatch):
    hasty = SVGD(chains=10, warmup=5).sample(_normal, {"x": torch.full((2,), 9.0)})
    assert hasty.diagnostics.converged is False and "not settled" in hasty.diagnostics.message
    monkeypatch.setattr(SVGD, "default_warmup", 5)
    with pytest.warns(ConvergenceWarning, match="not settled"):
        SVGD(chains=10).sample(_normal, {"x": torch.full((2,), 9.0)})


@pytest.mark.parametrize("batch_size", [None, 20])
def test_posterior_of_a_model_is_found_also_from_batches(batch_size, seed):
    # particles stand for a mean whose own error is small: to a tenth of a standard deviation, or with batches a half
    problem = LinearGaussian.make(60, 2, seed=seed)
    found = SVGD(chains=32, start="prior", batch_size=batch_size).fit(problem.model(), problem.data, seed=seed)
    draws, sd = problem.as_flat(found.stack), problem.covariance.diagonal().sqrt()
    assert ((draws.mean(0) - problem.mean).abs() < (0.1 if batch_size is None else 0.5) * sd).all()
    ratio = draws.var(0) / problem.covariance.diagonal()
    assert ((ratio > 0.5) & (ratio < (1.1 if batch_size is None else 2.0))).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("chains", 1), ("draws", 2), ("storage", ChainStorage(thin=2)), ("bandwidth", 0.0), ("learning_rate", 0.0)],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=field):
        SVGD(**{field: value})


def test_scales_that_are_far_apart_are_found(seed):
    scale = torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64)
    place = torch.tensor([5.0, -1e3, 1e5], dtype=torch.float64)

    def density(params):
        return -0.5 * ((params["x"] - place) / scale).square().sum()

    found = SVGD(chains=50).sample(density, {"x": torch.zeros(3, dtype=torch.float64)}, seed=seed)
    draws = (found.draws["x"][:, 0] - place) / scale
    assert found.diagnostics.converged
    assert (draws.mean(0).abs() < 0.3).all() and (draws.std(0) > 0.7).all() and (draws.std(0) < 1.1).all()


def test_particles_that_are_stuck_say_so(monkeypatch):
    monkeypatch.setattr(SVGD, "begins_near_modes", lambda self, dimension: False)
    scale = torch.tensor([1.0, 1e4], dtype=torch.float64)
    mix = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)

    def narrow(params):  # in a direction that is none of the coordinates'
        return -0.5 * ((mix @ params["x"] - 3e5) / scale).square().sum()

    with pytest.warns(ConvergenceWarning, match="no longer less"):
        found = SVGD(chains=10).sample(narrow, {"x": torch.zeros(2, dtype=torch.float64)})
    assert found.diagnostics.converged is False


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_particles_that_begin_at_one_mode_move_apart(scale, seed):
    # a logistic regression has one mode, to which all networks of the starting ensemble are trained, up to rounding
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(100, 9, generator=generator), torch.randn(9, 1, generator=generator)
    y = torch.bernoulli(torch.sigmoid(2.0 * x @ weight), generator=generator)
    model = kn.Model(torch.nn.Linear(9, 1), kn.Bernoulli())
    posterior = SVGD(chains=20).fit(model, (scale * x, y), seed=seed)
    laplace = kn.Laplace(structure="full").fit(model, (scale * x, y))
    assert posterior.diagnostics.converged
    std = laplace.std()["weight"]
    # the posterior is about normal: its mean is within a standard deviation of the mode; SVGD understates spreads
    assert ((posterior.mean()["weight"] - laplace.mean()["weight"]).abs() < std).all()
    assert (posterior.std()["weight"] > 0.1 * std).all() and (posterior.std()["weight"] < 1.5 * std).all()
