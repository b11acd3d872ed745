from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.inference.variational.matrix_normal import (
    MatrixFactor,
    MatrixNormalModule,
    Side,
    Spread,
    VectorFactor,
)
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


@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("column", [True, False])
def test_gradient_written_by_hand_is_that_of_the_plain_formula(seed, row, column):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    noise = normal(4, 2, 3)
    a, b = normal(2).exp().requires_grad_(), normal(3).exp().requires_grad_()
    mixes = [normal(n, n).tril(-1).requires_grad_() if given else None for n, given in ((2, row), (3, column))]
    inputs = [value for value in (a, mixes[0], b, mixes[1]) if value is not None]
    left, right = (
        scale.diag() @ (torch.eye(len(scale), dtype=torch.float64) + (0.0 if mix is None else mix.tril(-1)))
        for scale, mix in ((a, mixes[0]), (b, mixes[1]))
    )
    plain, found = left @ noise @ right.T, Spread.apply(noise, a, mixes[0], b, mixes[1])
    torch.testing.assert_close(found, plain)
    weights = normal(4, 2, 3)
    grads = [torch.autograd.grad((weights * value).sum(), inputs) for value in (found, plain)]
    torch.testing.assert_close(grads[0], grads[1])


def test_factors_stay_triangular_in_training(seed):
    x = torch.randn(10, 3)
    model = kn.Model(torch.nn.Linear(3, 2), kn.Gaussian(0.3))
    objective = kn.MatrixNormalVI(kl_gradient="path").objective(model, x, 10)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        objective(x, torch.randn(10, 2))[0].backward()
        optimiser.step()
    factor = next(factor for part in objective.parts for factor in part.factors if isinstance(factor, MatrixFactor))
    for side in (factor.rows, factor.columns):
        assert (side.mix.triu() == 0).all() and side.mix.abs().max() > 0


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
