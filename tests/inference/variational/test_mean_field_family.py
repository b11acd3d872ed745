from __future__ import annotations

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


def build():
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, kn.families.MeanField().build(layout, loc, 0.3)


def test_it_is_a_normal_with_a_diagonal_covariance(seed):
    model, _, module = build()
    moved(module, seed)
    check_against_dense(module, model, module.loc.detach(), (2 * module.log_scale.detach()).exp().diag(), seed)
    assert isinstance(module.posterior(model), kn.DiagonalNormal)


def test_it_starts_where_it_is_told():
    _, loc, module = build()
    check_start(module, loc, 0.3)
    loc.add_(1.0)
    assert not torch.equal(module.loc, loc)  # its own copy


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(moved(build()[2], seed), seed)
