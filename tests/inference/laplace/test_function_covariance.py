from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.jacobian import BatchJacobian
from knowable.core.network.layers import NetworkLayers
from knowable.inference.laplace import function_covariance
from knowable.inference.laplace.function_covariance import block_covariance, diagonal_blocks, head_variance

F64 = torch.float64


@pytest.mark.parametrize("columns", [1, 4, 7, 15, 512])
@pytest.mark.parametrize("bias", [True, False])
def test_a_heads_covariance_by_blocks_of_columns_is_that_of_its_jacobian(columns, bias, monkeypatch, generator):
    monkeypatch.setattr(function_covariance, "COLUMNS", columns)
    rows, out, inputs = 5, 3, 4
    size = out * (inputs + bias)
    places = torch.arange(out * inputs).view(out, inputs)  # weights first, then biases, as modules name them
    if bias:
        places = torch.cat([places, (out * inputs + torch.arange(out)).unsqueeze(1)], 1)
    a = torch.randn(rows, inputs + bias, generator=generator, dtype=F64)
    scale_tril = torch.randn(size, size, generator=generator, dtype=F64).tril()
    jacobian = torch.zeros(rows, out, size, dtype=F64)
    for o, own in enumerate(places):
        jacobian[:, o, own] = a
    expected = jacobian @ (scale_tril @ scale_tril.T) @ jacobian.mT
    torch.testing.assert_close(function_covariance._head_covariance(a, places, scale_tril), expected)


class _Product(nn.Module):
    """What GPT-2 calls Conv1D: a layer whose weight is (in, out)."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("random", ["*", "last_layer"])
def test_blocks_of_single_parameters_have_the_covariance_of_those_of_layers(random, generator):
    # posteriors from before such products were seen to be layers have a block for every parameter
    net = nn.Sequential(_Product(3, 4), nn.Tanh(), _Product(4, 2)).double()
    model = kn.Model(net, kn.Gaussian(), random=["2.*"] if random == "last_layer" else "*")
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    params, names = model.network_params(model.params()), tuple(model.random_names)
    names = tuple(name for name in names if not name.startswith("likelihood."))
    layers = NetworkLayers.of(model.network, names, params, x, {})
    precision = {name: 1 + torch.rand(params[name].shape, generator=generator, dtype=torch.float64) for name in names}
    rows = BatchJacobian(model.network, layers, params, x, {})
    alone = [KroneckerBlock((name,), (value.shape,), value.reshape(-1, 1)) for name, value in precision.items()]
    assert len(layers.layers) == len(names) // 2
    expected = block_covariance(rows, diagonal_blocks(layers, precision))
    torch.testing.assert_close(block_covariance(rows, alone), expected)
    assert head_variance(rows, alone) is None
