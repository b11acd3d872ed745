"""Tests of the information in outputs: dense matrices are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knowable.core.model.likelihood import (
    DiagonalInformation,
    EmpiricalInformation,
    OutputInformation,
    SoftmaxInformation,
)

SHAPE = (3, 4)


def _diagonal(shape=SHAPE) -> DiagonalInformation:
    return DiagonalInformation(torch.rand(shape, dtype=torch.float64) + 0.1)


def _softmax(shape=SHAPE) -> SoftmaxInformation:
    return SoftmaxInformation(torch.randn(shape, dtype=torch.float64).softmax(1))


def _empirical(shape=SHAPE) -> EmpiricalInformation:
    return EmpiricalInformation(torch.randn(shape, dtype=torch.float64))


def dense(information: OutputInformation) -> Tensor:
    """The matrices, ``(rows, outputs, outputs)``, from their definitions."""
    if isinstance(information, DiagonalInformation):
        return information.values.flatten(1).diag_embed()
    if isinstance(information, EmpiricalInformation):
        flat = information.gradient.flatten(1)
        return flat.unsqueeze(2) * flat.unsqueeze(1)
    assert isinstance(information, SoftmaxInformation)
    probs = information.probs
    rows, classes = probs.shape[:2]
    pixels = probs.reshape(rows, classes, -1)
    total = torch.zeros(rows, classes, pixels.shape[2], classes, pixels.shape[2], dtype=probs.dtype)
    for pixel in range(pixels.shape[2]):
        p = pixels[:, :, pixel]
        total[:, :, pixel, :, pixel] = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    return total.reshape(rows, probs[0].numel(), -1)


KINDS = [_diagonal, _softmax, _empirical]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, (2, 3, 2, 2)])
def test_products_and_diagonals_are_those_of_the_matrix(make, shape):
    information = make(shape)
    values = torch.randn(shape, dtype=torch.float64)
    expected = torch.einsum("nij,nj->ni", dense(information), values.flatten(1))
    torch.testing.assert_close(information.times(values).flatten(1), expected)
    torch.testing.assert_close(information.diagonal().flatten(1), dense(information).diagonal(dim1=1, dim2=2))
    assert information.shape == shape


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, (2, 3, 2, 2)])
def test_columns_make_up_the_matrix(make, shape):
    information = make(shape)
    columns = [each.flatten(1) for each in information.columns(100, torch.Generator().manual_seed(0))]
    total = sum(each.unsqueeze(2) * each.unsqueeze(1) for each in columns)
    torch.testing.assert_close(total, dense(information))
    assert len(columns) <= information.shape[1:].numel()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, (3, 4, 2, 2)])
def test_weights_are_factors_of_the_rows_matrices(make, shape):
    weights = torch.tensor([0.0, 2.0, 0.5], dtype=torch.float64)
    plain = make(shape)
    information = plain.weighted(weights / 2).weighted(torch.full_like(weights, 2.0))
    expected = weights.view(-1, 1, 1) * dense(plain)
    values = torch.randn(shape, dtype=torch.float64)
    products = torch.einsum("nij,nj->ni", expected, values.flatten(1))
    torch.testing.assert_close(information.times(values).flatten(1), products)
    torch.testing.assert_close(information.diagonal().flatten(1), expected.diagonal(dim1=1, dim2=2))
    columns = [each.flatten(1) for each in information.columns(100, torch.Generator().manual_seed(0))]
    torch.testing.assert_close(sum(each.unsqueeze(2) * each.unsqueeze(1) for each in columns), expected)
    if plain.couples_only(1):
        each = torch.stack([type(plain)(row.unsqueeze(0)).total(1) for row in _held(plain)])
        torch.testing.assert_close(information.total(1), (weights.view(-1, 1, 1) * each).sum(0))


def _held(information: OutputInformation) -> Tensor:
    return information.probs if isinstance(information, SoftmaxInformation) else information.values


@pytest.mark.parametrize("make", [_diagonal, _softmax])
def test_random_columns_make_it_up_on_average(make, generator):
    # the mean of n independent estimates errs by their standard deviation over sqrt(n): 5 of those
    information = make()
    estimates = []
    for _ in range(400):
        columns = [each.flatten(1) for each in information.columns(2, generator)]
        assert len(columns) == 2
        estimates.append(sum(each.unsqueeze(2) * each.unsqueeze(1) for each in columns))
    found = torch.stack(estimates)
    assert ((found.mean(0) - dense(information)).abs() < 5 * found.std(0) / 20 + 1e-12).all()


def test_totals_are_sums_over_rows_and_positions():
    softmax, diagonal = _softmax((2, 3, 4)), _diagonal((2, 4, 3))
    blocks = dense(softmax).view(2, 3, 4, 3, 4)
    expected = sum(blocks[:, :, t, :, t].sum(0) for t in range(4))
    torch.testing.assert_close(softmax.total(1), expected)
    torch.testing.assert_close(diagonal.total(2), diagonal.values.sum((0, 1)).diag())
    torch.testing.assert_close(diagonal.total(1), diagonal.values.sum((0, 2)).diag())


def test_what_is_coupled_is_said():
    assert _softmax((2, 3, 4)).couples_only(1)
    assert not _softmax((2, 3, 4)).couples_only(2)
    assert _softmax().couples_only(-1)
    assert _diagonal((2, 3, 4)).couples_only(2)
    assert not _empirical().couples_only(1)


def test_groups_share_the_information_out():
    information = _diagonal((3, 2, 4))
    parts = [information.of_group(group, 4) for group in range(4)]
    torch.testing.assert_close(sum(part.values for part in parts), information.values)
    assert all((part.values[..., other] == 0).all() for g, part in enumerate(parts) for other in range(4) if other != g)
    assert sum(1 for _ in parts[0].columns(100, torch.Generator())) == 2  # columns of zeros are left out


@pytest.mark.parametrize(("shape", "count"), [((3, 4), 3), ((5, 2), 1), ((2, 3, 2), 4)])
def test_classes_need_one_column_less_than_there_are(shape, count):
    information = _softmax(shape)
    assert len(list(information.columns(100, torch.Generator()))) == count


def test_columns_are_finite_where_a_class_is_certain():
    information = SoftmaxInformation(torch.eye(3, dtype=torch.float64))
    total = sum(each.square().sum() for each in information.columns(100, torch.Generator()))
    assert total == 0.0  # what is certain has no information to give
