from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.inference.variational.matrix_normal_family import MatrixFactor, MatrixNormalModule, Side, VectorFactor
from tests.inference.variational.family_oracle import (
    Bag,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    layout_of,
    model_of,
    moved,
)


def build(full_up_to: int = 1024, **shapes: tuple[int, ...]):
    model = model_of(Bag(**(shapes or {"weight": (2, 3), "bias": (2,)})))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, kn.families.MatrixNormal(full_up_to).build(layout, loc, 0.3)


def side_covariance(side: Side) -> torch.Tensor:
    scale = side.log_scale.detach().exp()
    below = torch.zeros(len(scale), len(scale), dtype=scale.dtype) if side.mix is None else side.mix.detach().tril(-1)
    factor = scale.unsqueeze(1) * (torch.eye(len(scale), dtype=scale.dtype) + below)
    return factor @ factor.T


def covariance_of(module: MatrixNormalModule) -> torch.Tensor:
    blocks = []
    for factor in module.factors:
        if isinstance(factor, MatrixFactor):
            blocks.append(torch.kron(side_covariance(factor.rows), side_covariance(factor.columns)))
        else:
            assert isinstance(factor, VectorFactor)
            blocks.append((2 * factor.log_scale.detach()).exp().diag())
    return torch.block_diag(*blocks)


@pytest.mark.parametrize(
    "shapes",
    [
        {"weight": (2, 3), "bias": (2,)},
        {"bias": (2,), "weight": (3, 2), "scale": ()},
        {"convolution": (2, 1, 2, 1)},
        {"row": (1, 3), "column": (3, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("full_up_to", [1024, 2])
def test_covariance_is_a_kronecker_product_for_each_matrix(seed, shapes, full_up_to):
    model, _, module = build(full_up_to, **shapes)
    moved(module, seed)
    check_against_dense(module, model, module.loc.detach(), covariance_of(module), seed)
    assert isinstance(module.posterior(model), kn.KroneckerNormal)


def test_it_starts_where_it_is_told():
    _, loc, module = build()
    check_start(module, loc, 0.3)


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(moved(build()[2], seed), seed)


def test_long_sides_have_a_diagonal_factor_and_no_basis():
    model, _, module = build(2, weight=(2, 3))
    (factor,) = module.factors
    assert factor.rows.mix is not None and factor.columns.mix is None
    (block,) = module.posterior(model).blocks
    assert block.out_basis is not None and block.in_basis is None


def test_posterior_of_float32_is_float32(seed):
    model = kn.Model(torch.nn.Linear(3, 2), kn.Gaussian(0.3))
    layout = layout_of(model)
    module = moved(kn.families.MatrixNormal().build(layout, layout.flatten(model.params()), 0.1), seed)
    assert all(value.dtype == torch.float32 for value in module.posterior(model).sample(2).values())


@pytest.mark.parametrize("value", [0, 1.5, "many"], ids=repr)
def test_longest_full_side_must_be_a_count(value):
    with pytest.raises(kn.KnowableError, match="full_up_to"):
        kn.families.MatrixNormal(full_up_to=value)
