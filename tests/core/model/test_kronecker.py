"""Tests of a precision in a Kronecker basis: dense matrices are the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knowable.core.model.kronecker import KroneckerBlock, pack, unpack

DTYPE = torch.float64
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
