from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.inference.variational.full_rank import FullRankModule
from tests.inference.variational.family_oracle import (
    Bag,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    layout_of,
    model_of,
    moved,
)


def build(*, whitened: bool = True):
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, FullRankModule(layout, loc, 0.3, whitened=whitened)


def shaken(module: FullRankModule, seed: int) -> FullRankModule:
    """With a base of its own too."""
    if module.base is not None:
        noise = torch.randn(module.base.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        module.base.copy_(noise.tril(-1) + noise.diagonal().exp().diag())
    moved(module, seed)
    return module


def dense(module: FullRankModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance, element by element: L = B diag(s) (I + R), m + B u; R = mix / √D where there is a B."""
    size = len(module.loc)
    scale, mix = module.log_scale.detach().exp(), module.mix.detach()
    mix = mix if module.base is None else mix / math.sqrt(size)
    inner = torch.zeros_like(mix)
    for i in range(size):
        for j in range(i + 1):
            inner[i, j] = scale[i] * (1.0 if i == j else mix[i, j])
    base = torch.eye(size, dtype=torch.float64) if module.base is None else module.base
    drift = torch.zeros(size, dtype=torch.float64) if module.drift is None else module.drift.detach()
    return module.loc.detach() + base @ drift, (base @ inner) @ (base @ inner).T


@pytest.mark.parametrize("whitened", [True, False])
def test_it_is_a_normal_with_a_full_covariance(seed, whitened):
    model, _, module = build(whitened=whitened)
    shaken(module, seed)
    check_against_dense(module, model, *dense(module), seed)
    posterior = module.posterior(model)
    assert isinstance(posterior, kn.FullNormal)
    torch.testing.assert_close(posterior.covariance, dense(module)[1])


@pytest.mark.parametrize("whitened", [True, False])
def test_it_starts_where_it_is_told(whitened):
    _, loc, module = build(whitened=whitened)
    check_start(module, loc, 0.3)


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(shaken(build()[2], seed), seed)


def test_base_takes_in_what_was_learned_and_the_distribution_stays(seed):
    _, _, module = build()
    shaken(module, seed)
    mean, covariance = dense(module)
    with torch.no_grad():
        for _ in range(9):
            module.after_step()
        assert module.drift.abs().max() > 0
        module.after_step()
    assert module.drift.abs().max() == module.log_scale.abs().max() == module.mix.abs().max() == 0
    torch.testing.assert_close(dense(module), (mean, covariance))
    torch.testing.assert_close(module.base @ module.base.T, covariance)
    assert (module.base.triu(1) == 0).all() and (module.base.diagonal() > 0).all()


@pytest.mark.parametrize("whitened", [True, False])
def test_what_is_above_the_diagonal_does_not_count(seed, whitened):
    _, _, module = build(whitened=whitened)
    shaken(module, seed)
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
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    with pytest.raises(kn.Unsupported, match=r"5 x 5 matrix; max_parameters is 4\. Raise it, .*LowRankVI"):
        kn.families.FullRank(max_parameters=4).build(layout, loc, 0.3)
    kn.families.FullRank(max_parameters=5).build(layout, loc, 0.3)


@pytest.mark.parametrize("value", [0, 2.5, "many"], ids=repr)
def test_limit_must_be_a_count(value):
    with pytest.raises(kn.KnowableError, match="max_parameters"):
        kn.families.FullRank(max_parameters=value)


def test_whitened_coordinates_and_gradients_along_the_draws_are_for_few_weights():
    for size, few in ((300, True), (301, False)):
        model = model_of(Bag(a=(size,)))
        layout = layout_of(model)
        module = kn.families.FullRank().build(layout, layout.flatten(model.params()), 0.1)
        assert module.prefers_path is few and (module.base is not None) is few
