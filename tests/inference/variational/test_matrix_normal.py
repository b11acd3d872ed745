from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.params import Layout
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
    dense_moments,
    layout_of,
    model_of,
    moved,
    normal_divergence,
)

QUICK = {"epochs": 1000, "learning_rate": 0.03}


def several_outputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    x = x + torch.randn(40, 1, generator=generator, dtype=torch.float64)  # correlated inputs
    weight = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return x, x @ weight.T + 0.5 * torch.randn(40, 2, generator=generator, dtype=torch.float64)


def exact(x: torch.Tensor, y: torch.Tensor, prior_mean: torch.Tensor, prior_precision: torch.Tensor):
    """Mean and precision of vec W, rows one after the other, for y = W x + 0.5 noise."""
    precision = prior_precision + torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x) / 0.25
    right = prior_precision @ prior_mean + (y.T @ x).flatten() / 0.25
    return torch.linalg.solve(precision, right), precision


def test_linear_layer_with_several_outputs_has_a_posterior_that_factorises(seed):
    # W is (2, 3): U is the identity and V the covariance of one output's weights; 0.05 nats for what 1,000 steps leave
    x, y = several_outputs(seed)
    model = kn.Model(nn.Linear(3, 2, bias=False).double(), kn.Gaussian(0.5))
    posterior = kn.MatrixNormalVI(**QUICK, kl_gradient="path").fit(model, (x, y), seed=seed)
    mean, precision = exact(x, y, torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))
    loc, covariance = dense_moments(posterior, Layout.of(model.params()))
    assert normal_divergence(loc, covariance, mean, precision) < 0.05
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(40, dtype=torch.float64), x @ x.T + 0.25 * torch.eye(40, dtype=torch.float64)
    )
    expected = sum(evidence.log_prob(y[:, k]).item() for k in range(2))
    assert abs(posterior.log_evidence - expected) < 4 * posterior.log_evidence.standard_error + 0.05


@pytest.mark.slow
def test_both_factors_are_found(seed):
    # prior precision A ⊗ B, and inputs whose Gram matrix over the noise is B: the posterior's is (A + I) ⊗ B
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([[2.0, 1.2], [1.2, 1.5]], dtype=torch.float64)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    columns = x.T @ x / 0.25
    y = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    model = kn.Model(nn.Linear(3, 2, bias=False).double(), kn.Gaussian(0.5))
    (row_values, row_basis), (column_values, column_basis) = torch.linalg.eigh(rows), torch.linalg.eigh(columns)
    block = KroneckerBlock(("weight",), (torch.Size([2, 3]),), row_values.outer(column_values), row_basis, column_basis)
    prior = kn.KroneckerNormal(model, {"weight": torch.zeros(2, 3, dtype=torch.float64)}, [block])
    informed = kn.Model(model.net, model.likelihood, prior)
    posterior = kn.MatrixNormalVI(**QUICK, kl_gradient="path").fit(informed, (x, y), seed=seed)
    mean, precision = exact(x, y, torch.zeros(6, dtype=torch.float64), torch.kron(rows, columns))
    torch.testing.assert_close(precision, torch.kron(rows + torch.eye(2, dtype=torch.float64), columns))
    loc, covariance = dense_moments(posterior, Layout.of(model.params()))
    assert normal_divergence(loc, covariance, mean, precision) < 0.05


def test_biases_are_independent_normals_and_layers_independent(seed):
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = kn.Model(net, kn.Gaussian())
    posterior = kn.MatrixNormalVI(epochs=100).fit(model, (x, x.sin()), seed=seed)
    blocks = {block.names: block for block in posterior.blocks}
    assert all(len(names) == 1 for names in blocks)
    for name in ("0.bias", "2.bias", "likelihood.log_noise"):
        assert blocks[(name,)].out_basis is None and blocks[(name,)].in_basis is None
    assert blocks[("0.weight",)].out_basis.shape == (4, 4) and blocks[("2.weight",)].in_basis.shape == (4, 4)


def test_step_is_finite_for_a_convolution():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    model = kn.Model(net, kn.Categorical())
    x, y = torch.randn(12, 1, 4, 4), torch.arange(12) % 3
    posterior = kn.MatrixNormalVI(epochs=5).fit(model, (x, y))
    assert math.isfinite(posterior.log_evidence)
    assert posterior.blocks[0].precision.shape == (2, 9)


# --- matrix normal family --------------------------------------------------------------------------------------------


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
