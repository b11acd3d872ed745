"""Tests of Kronecker-factored precisions, of one layer and of a posterior and prior; dense matrices are the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.params import Layout, pack, unpack
from tests.core.cases import DTYPE, same_params

NAMES, SHAPES = ("weight", "bias"), (torch.Size((3, 2, 2)), torch.Size((3,)))


def _log_prob(block: KroneckerBlock, deviation: torch.Tensor) -> torch.Tensor:
    return 0.5 * (block.log_det() - block.quadratic(deviation) - block.size * math.log(2 * math.pi))


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=DTYPE))[0].contiguous()


def block_of(kind: str) -> KroneckerBlock:
    precision = torch.rand(3, 5, dtype=DTYPE) + 0.1
    bases = {"both": (orthogonal(3), orthogonal(5)), "out": (orthogonal(3), None), "in": (None, orthogonal(5))}
    return KroneckerBlock(NAMES, SHAPES, precision, *bases.get(kind, (None, None)))


def dense(block: KroneckerBlock) -> Tensor:
    out = torch.eye(3, dtype=DTYPE) if block.out_basis is None else block.out_basis
    inner = torch.eye(5, dtype=DTYPE) if block.in_basis is None else block.in_basis
    basis = torch.kron(out, inner)
    return basis @ block.precision.flatten().diag() @ basis.T


KINDS = ["both", "out", "in", "none"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_matrix_its_diagonal_and_its_determinant(kind):
    block = block_of(kind)
    expected = dense(block)
    torch.testing.assert_close(block.dense(), expected)
    torch.testing.assert_close(block.diagonal(block.precision), expected.diagonal().view(3, 5))
    torch.testing.assert_close(block.diagonal(block.precision.reciprocal()), expected.inverse().diagonal().view(3, 5))
    torch.testing.assert_close(block.log_det(), torch.logdet(expected))
    assert block.size == 15


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_is_that_of_torch(kind):
    block = block_of(kind)
    deviation = torch.randn(4, 3, 5, dtype=DTYPE)
    normal = torch.distributions.MultivariateNormal(torch.zeros(15, dtype=DTYPE), precision_matrix=dense(block))
    torch.testing.assert_close(_log_prob(block, deviation), normal.log_prob(deviation.flatten(1)))
    quadratic = torch.einsum("ni,ij,nj->n", deviation.flatten(1), dense(block), deviation.flatten(1))
    torch.testing.assert_close(block.quadratic(deviation), quadratic)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_covariance(kind, generator):
    # entries of a sample covariance err by sqrt((c_ij² + c_ii c_jj) / n): 5 of those
    block, n = block_of(kind), 40_000
    covariance = dense(block).inverse()
    found = block.draw(n, generator).flatten(1).T.cov()
    variances = covariance.diagonal()
    assert ((found - covariance).abs() < 5 * ((covariance**2 + variances.outer(variances)) / n).sqrt()).all()


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_the_diagonal_along_the_basis_of_another_block(first, second):
    one, other = block_of(first), block_of(second)
    out = torch.eye(3, dtype=DTYPE) if other.out_basis is None else other.out_basis
    inner = torch.eye(5, dtype=DTYPE) if other.in_basis is None else other.in_basis
    basis = torch.kron(out, inner)
    expected = (basis.T @ dense(one) @ basis).diagonal().view(3, 5)
    torch.testing.assert_close(one.along(other), expected)


def test_rotating_there_and_back_changes_nothing():
    block, matrix = block_of("both"), torch.randn(2, 3, 5, dtype=DTYPE)
    torch.testing.assert_close(block.back(block.rotate(matrix)), matrix)


@pytest.mark.parametrize("lead", [(), (4,), (4, 2)])
def test_packing_puts_the_bias_last_and_unpacking_undoes_it(lead):
    params = {name: torch.randn(*lead, *shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
    matrix = pack(params, NAMES, SHAPES, 3)
    assert matrix.shape == (*lead, 3, 5)
    assert torch.equal(matrix[..., -1], params["bias"])
    assert torch.equal(matrix[..., :-1], params["weight"].reshape(*lead, 3, 4))
    again = unpack(matrix, NAMES, SHAPES)
    assert all(torch.equal(again[name], params[name]) for name in NAMES)


def test_one_parameter_of_any_shape_is_a_column_or_a_matrix():
    shapes, value = (torch.Size((2, 3)),), {"scale": torch.randn(5, 2, 3)}
    for out in (6, 2):
        matrix = pack(value, ("scale",), shapes, out)
        assert matrix.shape == (5, out, 6 // out)
        assert torch.equal(unpack(matrix, ("scale",), shapes)["scale"], value["scale"])


def test_a_column_with_a_basis_is_a_full_normal():
    basis, values = orthogonal(4), torch.rand(4, dtype=DTYPE) + 0.5
    block = KroneckerBlock(("v",), (torch.Size((4,)),), values.unsqueeze(1), basis)
    precision = (basis * values) @ basis.T
    torch.testing.assert_close(block.dense(), precision)
    deviation = torch.randn(4, dtype=DTYPE)
    expected = 0.5 * (torch.logdet(precision) - deviation @ precision @ deviation - 4 * math.log(2 * math.pi))
    torch.testing.assert_close(_log_prob(block, deviation.unsqueeze(1)), expected)


# --- several layers: a posterior ------------------------------------------------------------------------------------


def model_of(**settings) -> kn.Model:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False)).to(DTYPE)
    return kn.Model(net, kn.Gaussian(0.1), **settings)


def posterior_of(model: kn.Model, generator: torch.Generator | None = None, **common) -> kn.KroneckerNormal:
    def basis(size: int):
        return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=DTYPE))[0]

    def values(*shape: int):
        return torch.rand(shape, generator=generator, dtype=DTYPE) + 0.2

    loc = {name: torch.randn(v.shape, generator=generator, dtype=DTYPE) for name, v in model.params().items()}
    blocks = [
        KroneckerBlock(
            ("0.weight", "0.bias"), (torch.Size((3, 2)), torch.Size((3,))), values(3, 3), basis(3), basis(3)
        ),
        KroneckerBlock(("1.weight",), (torch.Size((3,)),), values(3, 1), basis(3)),
        KroneckerBlock(("1.bias",), (torch.Size((3,)),), values(3, 1)),
        KroneckerBlock(("2.weight",), (torch.Size((1, 3)),), values(1, 3), None, basis(3)),
    ]
    return kn.KroneckerNormal(model, loc, blocks, **common)


def oracle_of(posterior: kn.KroneckerNormal) -> tuple[Layout, torch.distributions.MultivariateNormal]:
    layout = Layout.of(posterior.loc)
    mean, precision = posterior.as_prior().joint_normal(layout)
    return layout, torch.distributions.MultivariateNormal(mean, precision_matrix=precision)


def test_the_log_density_is_that_of_torch(generator):
    posterior = posterior_of(model_of(), generator)
    layout, oracle = oracle_of(posterior)
    draws = posterior.sample(5, generator)
    torch.testing.assert_close(posterior.log_prob(draws), oracle.log_prob(layout.flatten(draws)))
    one = {name: value[2] for name, value in draws.items()}
    torch.testing.assert_close(posterior.log_prob(one), oracle.log_prob(layout.flatten(draws))[2])


def test_draws_have_its_moments(generator):
    # covariances err by sqrt((c_ij² + c_ii c_jj) / n): 5 of those
    posterior, n = posterior_of(model_of(), generator), 20_000
    layout, oracle = oracle_of(posterior)
    draws, covariance = layout.flatten(posterior.sample(n, generator)), oracle.covariance_matrix
    variances = covariance.diagonal()
    assert ((draws.mean(0) - oracle.mean).abs() < 5 * (variances / n).sqrt()).all()
    error = ((covariance**2 + variances.outer(variances)) / n).sqrt()
    assert ((draws.T.cov() - covariance).abs() < 5 * error).all()
    torch.testing.assert_close(layout.flatten(posterior.std()), variances.sqrt())


def test_every_random_parameter_is_held_once():
    model = model_of()
    posterior = posterior_of(model)
    with pytest.raises(kn.InvalidArgument, match="must hold each of"):
        kn.KroneckerNormal(model, posterior.loc, posterior.blocks[:-1])
    with pytest.raises(kn.InvalidArgument, match="must hold each of"):
        kn.KroneckerNormal(model, posterior.loc, [*posterior.blocks, posterior.blocks[0]])


def test_a_missing_parameter_is_refused_by_name():
    posterior = posterior_of(model_of())
    params = posterior.mean()
    del params["1.bias"]
    with pytest.raises(kn.InvalidArgument, match=r"1\.bias"):
        posterior.log_prob(params)


def test_tensors_and_back_give_the_same_posterior(generator):
    model = model_of()
    posterior = posterior_of(model, generator)
    again = kn.KroneckerNormal._from_tensors(model, posterior._tensors())
    assert same_params(again.mean(), posterior.mean())
    assert same_params(again.std(), posterior.std())
    draws = [each.sample(3, torch.Generator().manual_seed(1)) for each in (posterior, again)]
    assert same_params(*draws)


# --- as a prior -------------------------------------------------------------------------------------------------------


def test_as_a_prior_it_has_the_same_density(generator):
    posterior = posterior_of(model_of(), generator)
    params = {name: value[0] for name, value in posterior.sample(1, generator).items()}
    torch.testing.assert_close(posterior.as_prior().log_prob(params), posterior.log_prob(params))


def test_its_precision_is_given_in_the_order_asked_for(generator):
    posterior = posterior_of(model_of(), generator)
    prior, own = posterior.as_prior(), Layout.of(posterior.loc)
    other = Layout.of({name: posterior.loc[name] for name in reversed(list(posterior.loc))})
    order = other.flatten(own.views(torch.arange(own.size)))
    mean, precision = prior.joint_normal(own)
    torch.testing.assert_close(prior.joint_normal(other)[1], precision[order][:, order])
    torch.testing.assert_close(prior.joint_normal(other)[0], mean[order])
    torch.testing.assert_close(other.flatten(prior.normal.precision_diagonal()), precision.diagonal()[order])


def test_the_divergence_from_independent_normals_is_that_of_torch(generator):
    posterior = posterior_of(model_of(), generator)
    layout, oracle = oracle_of(posterior)
    loc = {k: torch.randn(v.shape, generator=generator, dtype=DTYPE) for k, v in posterior.loc.items()}
    scale = {k: torch.rand(v.shape, generator=generator, dtype=DTYPE) + 0.1 for k, v in posterior.loc.items()}
    q = torch.distributions.MultivariateNormal(layout.flatten(loc), layout.flatten(scale).square().diag())
    torch.testing.assert_close(posterior.as_prior().joint_kl(loc, scale), torch.distributions.kl_divergence(q, oracle))


def test_draws_from_the_prior_have_its_spread(generator):
    # standard deviations err by sd / sqrt(2 n): 5 of those
    posterior, n = posterior_of(model_of(), generator), 2_000
    like = posterior.mean()
    draws = [posterior.as_prior().sample(like, generator=generator) for _ in range(n)]
    for name, std in posterior.std().items():
        values = torch.stack([draw[name] for draw in draws])
        assert ((values.std(0) - std).abs() < 5 * std / (2 * n) ** 0.5).all()


def test_freezing_a_whole_layer_leaves_the_others_and_a_half_is_refused(generator):
    model = model_of()
    posterior = posterior_of(model, generator)
    next_model = kn.Model(model.net, kn.Gaussian(0.1), prior=posterior, frozen="0.*")
    assert next_model.random_names == ["1.weight", "1.bias", "2.weight"]
    params = {name: posterior.loc[name] for name in next_model.random_names}
    expected = sum(0.5 * (b.log_det() - b.size * math.log(2 * math.pi)) for b in posterior.blocks[1:])
    torch.testing.assert_close(next_model.log_prior(params), expected)
    with pytest.raises(kn.Unsupported, match=r"0\.weight and 0\.bias go together"):
        kn.Model(model.net, kn.Gaussian(0.1), prior=posterior, frozen="0.bias")


def test_a_model_with_this_prior_is_saved_and_loaded(tmp_path, generator):
    model = model_of()
    prior = posterior_of(model, generator)
    data = torch.randn(6, 2, dtype=DTYPE), torch.randn(6, 1, dtype=DTYPE)
    fitted = kn.MeanFieldVI(epochs=2).fit(kn.Model(model.net, kn.Gaussian(0.1), prior=prior), data)
    fitted.save(tmp_path / "fitted")
    loaded = kn.load(tmp_path / "fitted")
    params = prior.mean()
    assert torch.equal(loaded.model.log_prior(params), fitted.model.log_prior(params))
