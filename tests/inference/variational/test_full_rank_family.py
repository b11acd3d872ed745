from __future__ import annotations

import pytest
import torch

import knowable as kn
from tests.inference.variational.family_oracle import (
    Bag,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    layout_of,
    model_of,
    moved,
)


def build(**knobs: int):
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, kn.families.FullRank(**knobs).build(layout, loc, 0.3)


def covariance_of(module) -> torch.Tensor:
    """Element by element: L_ij = s_i (1 if i = j, R_ij below)."""
    scale, mix = module.log_scale.detach().exp(), module.mix.detach()
    triangle = torch.zeros_like(mix)
    for i in range(len(scale)):
        for j in range(i + 1):
            triangle[i, j] = scale[i] * (1.0 if i == j else mix[i, j])
    return triangle @ triangle.T


def test_it_is_a_normal_with_a_full_covariance(seed):
    model, _, module = build()
    moved(module, seed)
    check_against_dense(module, model, module.loc.detach(), covariance_of(module), seed)
    posterior = module.posterior(model)
    assert isinstance(posterior, kn.FullNormal)
    torch.testing.assert_close(posterior.covariance, covariance_of(module))


def test_it_starts_where_it_is_told():
    _, loc, module = build()
    check_start(module, loc, 0.3)


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(moved(build()[2], seed), seed)


def test_what_is_above_the_diagonal_does_not_count(seed):
    _, _, module = build()
    moved(module, seed)
    before = module.moments()[1]
    values = torch.ones(1, 5, dtype=torch.float64)
    density = module.held_log_density(values)
    with torch.no_grad():
        module.mix.add_(torch.ones_like(module.mix).triu())
    torch.testing.assert_close(module.moments()[1], before, rtol=0, atol=0)
    torch.testing.assert_close(module.held_log_density(values), density, rtol=0, atol=0)
    module.moments()[1].sum().backward()
    assert (module.mix.grad.triu() == 0).all()


def test_too_many_weights_are_refused_with_a_way_out():
    with pytest.raises(kn.Unsupported, match=r"5 x 5 matrix; max_parameters is 4\. Raise it, .*LowRankVI"):
        build(max_parameters=4)
    build(max_parameters=5)


@pytest.mark.parametrize("value", [0, 2.5, "many"], ids=repr)
def test_limit_must_be_a_count(value):
    with pytest.raises(kn.KnowableError, match="max_parameters"):
        kn.families.FullRank(max_parameters=value)


def test_gradient_along_the_draws_is_for_few_weights():
    assert build()[2].prefers_path
    model = model_of(Bag(a=(600,)))
    layout = layout_of(model)
    assert not kn.families.FullRank().build(layout, layout.flatten(model.params()), 0.1).prefers_path
