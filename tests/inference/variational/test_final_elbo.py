from __future__ import annotations

import math
import statistics

import pytest
import torch

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.method import final_elbo
from knowable.inference.variational.structured import Group, StructuredObjective
from knowable.testing import LinearGaussian


def of_kind(kind: str, model: kn.Model, problem: LinearGaussian, **knobs: float):
    if kind == "mean field":
        return MeanFieldObjective(model, problem.x, len(problem.x), initial_scale=0.1, **knobs)  # type: ignore[arg-type]
    groups = [Group(kn.families.FullRank(), tuple(model.random_names))]
    return StructuredObjective(model, len(problem.x), groups, initial_scale=0.1, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mean field", "structured"])
@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_bound_is_that_of_the_distribution_whatever_the_factor_on_the_divergence(seed, kind, beta):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    objective = of_kind(kind, model, problem, beta=beta)
    bound, terms = final_elbo(objective, as_data(problem.data, model), seed)
    loc = problem.as_flat(model.params())
    exact = problem.elbo(loc, torch.full_like(loc, 0.1))
    assert abs(bound - exact) < 4.5 * bound.standard_error
    assert bound.kind == "bound" and bound.standard_error > 0
    assert terms["elbo"] == terms["expected_log_likelihood"] - terms["kl"] == float(bound)
    kl = kn.Normal(1.0).kl_from_normal(loc, torch.full_like(loc, 0.1)).item()
    assert terms["kl"] == pytest.approx(kl, rel=1e-9)


def test_error_counts_the_noise_of_a_sampled_divergence(seed, monkeypatch):
    # noise so large that the data say next to nothing: all that varies is the divergence. The spread of 30 estimates is
    # known to 1 / sqrt(2 * 29) = 13%: within 5 of those of the error they state
    monkeypatch.setattr("knowable.inference.variational.method._ELBO_ROWS", 100)
    problem = LinearGaussian.make(n=20, seed=seed)
    stated, spread = {}, {}
    for name, prior in {"closed": kn.Normal(1.0), "sampled": kn.ScaleMixture(0.5, 1.0, 0.1)}.items():
        model = kn.Model(problem.model().net, kn.Gaussian(1e4), prior)
        objective, data = of_kind("structured", model, problem), as_data(problem.data, model)
        bounds = [final_elbo(objective, data, 1000 * seed + number)[0] for number in range(30)]
        stated[name] = statistics.fmean(bound.standard_error for bound in bounds)
        spread[name] = statistics.stdev(map(float, bounds))
    assert stated["closed"] < 1e-3 * stated["sampled"]
    assert 1 - 5 * 0.13 < spread["sampled"] / stated["sampled"] < 1 + 5 * 0.13


def test_improper_prior_has_terms_but_no_bound(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), kn.Flat())
    bound, terms = final_elbo(of_kind("structured", model, problem), as_data(problem.data, model), seed)
    assert bound is None and math.isfinite(terms["elbo"])


def test_random_numbers_of_the_caller_are_left_alone(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    objective, data = of_kind("mean field", model, problem), as_data(problem.data, model)
    state = torch.get_rng_state()
    first = final_elbo(objective, data, seed)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert float(final_elbo(objective, data, seed)[0]) == float(first)
