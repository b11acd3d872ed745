from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.exact.design import Design

CONVOLUTION = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(9, 1))


def design_of(model: kn.Model) -> Design:
    params = model.params()
    return Design(model, Layout.of({name: params[name] for name in model.random_names}), model.buffers())


@pytest.mark.parametrize(
    ("net", "shape", "frozen"),
    [
        (nn.Linear(3, 2), (5, 3), ()),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), (5, 3), ("0.*", "1.*")),
        (CONVOLUTION, (4, 2, 6), ("3.*",)),
        (CONVOLUTION, (4, 2, 6), ("0.*",)),
    ],
    ids=["linear layer", "head on frozen features", "convolution under a frozen head", "head on a frozen convolution"],
)
def test_design_is_the_jacobian(seed, net, shape, frozen):
    net, x = net.double().eval(), torch.randn(shape, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.1), frozen=frozen)
    offset, matrix = design_of(model)(x)
    random = {name: torch.randn_like(model.params()[name]) for name in model.random_names}  # the same anywhere
    jacobian = jacrev(lambda params: functional_call(net, params, (x,)))(random)
    expected = torch.cat([jacobian[name].flatten(2) for name in model.random_names], dim=-1)
    torch.testing.assert_close(matrix, expected, rtol=1e-10, atol=1e-12)
    zero = {name: torch.zeros_like(value) for name, value in random.items()}
    torch.testing.assert_close(offset, functional_call(net, zero, (x,)).detach(), rtol=1e-12, atol=1e-12)


def test_design_is_computed_in_double_precision(seed):
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1))
    x = torch.tensor([[1e-4, 1e4]])
    _, matrix = design_of(model)(x)
    assert matrix.dtype == torch.float64
    torch.testing.assert_close(matrix[0, 0], torch.cat([x[0].double(), torch.ones(1).double()]), rtol=0, atol=0)


def test_columns_in_blocks_are_the_same_columns(seed, monkeypatch):
    design, x = design_of(kn.Model(nn.Linear(5, 2).double(), kn.Gaussian(0.1))), torch.randn(4, 5, dtype=torch.float64)
    whole = design(x)[1]
    monkeypatch.setattr("knowable.inference.exact.design._BLOCK", 5)
    torch.testing.assert_close(design(x)[1], whole, rtol=1e-12, atol=1e-12)


def test_chunks_are_all_rows_in_order(monkeypatch):
    design, x = design_of(kn.Model(nn.Linear(3, 2), kn.Gaussian(0.1))), torch.randn(11, 3)
    monkeypatch.setattr("knowable.inference.exact.design._CHUNK_VALUES", 2 * 8 * 3)  # three rows of 2 x 8
    chunks = list(design.chunks(x))
    assert [len(chunk) for chunk in chunks] == [3, 3, 3, 2]
    assert torch.equal(torch.cat(chunks), x)


def test_linear_networks_pass_and_others_do_not(seed):
    x = torch.randn(6, 3, dtype=torch.float64)
    deep = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()  # no activation, but a product of weights
    design_of(kn.Model(deep, kn.Gaussian(0.1), frozen="0.*")).check_linear(x)
    with pytest.raises(kn.Unsupported, match="last_layer"):
        design_of(kn.Model(deep, kn.Gaussian(0.1))).check_linear(x)
