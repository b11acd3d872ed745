from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout, Params
from knowable.inference.variational.function_space.linearised import LinearisedNetwork
from knowable.testing import network_case

STEP = 1e-5


def mlp() -> tuple[kn.Model, Tensor]:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return kn.Model(net, kn.Gaussian(0.1)), torch.randn(5, 2, dtype=torch.float64)


def case(name: str) -> tuple[kn.Model, Tensor]:
    found = network_case(name, dtype=torch.float64)
    return found.model(), found.x[:3]


def weights(model: kn.Model) -> tuple[Params, Params]:
    loc = {name: value for name, value in model.network_params(model.params()).items() if name in model.random_names}
    return loc, {name: torch.rand_like(value) + 0.1 for name, value in loc.items()}


def fixed(model: kn.Model) -> Params:
    return {name: value for name, value in model.network_params(model.params()).items() if name in model.point_names}


def squares(values: Params) -> Params:
    return {name: value.square() for name, value in values.items()}


def slow_jacobian(model: kn.Model, x: Tensor, loc: Params) -> Tensor:
    """All outputs ``(n, outputs, weights)`` differentiated by central differences, weight by weight."""
    layout = Layout.of(loc)
    flat = layout.flatten(loc)

    def outputs(vector: Tensor) -> Tensor:
        params = {**model.network_params(model.params()), **layout.views(vector)}
        return model.network(params, x, buffers=model.buffers()).reshape(len(x), -1)

    columns = []
    for d in range(len(flat)):
        step = torch.zeros_like(flat)
        step[d] = STEP
        columns.append((outputs(flat + step) - outputs(flat - step)) / (2 * STEP))
    return torch.stack(columns, dim=-1)


@pytest.mark.parametrize("name", ["mlp", "linear", "batchnorm_cnn", "lstm", "transformer", "last_layer", "tied"])
def test_covariance_is_the_slow_jacobian_times_variances_times_itself(name):
    # central differences in double precision: an error of the order of STEP^2, and of rounding 1e-16 / STEP
    model, x = mlp() if name == "mlp" else case(name)
    loc, scale = weights(model)
    with torch.no_grad():
        linearised = LinearisedNetwork(model)
        mean, covariance = linearised.moments(x, loc, squares(scale), fixed=fixed(model), buffers=model.buffers())
        jacobian = slow_jacobian(model, x, loc).movedim(1, 0)
    variances = Layout.of(loc).flatten(scale).square()
    expected = (jacobian * variances) @ jacobian.mT
    assert torch.allclose(covariance, expected, rtol=1e-5, atol=1e-6 * expected.abs().max())
    assert covariance.dtype == mean.dtype == torch.float64
    output = model.network({**fixed(model), **loc}, x, buffers=model.buffers()).reshape(len(x), -1)
    assert torch.allclose(mean, output.T)


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "tied"])
def test_row_by_row_is_the_same_as_together_also_in_gradient(name):
    model, x = mlp() if name == "mlp" else case(name)
    found = []
    for together in (True, False):
        loc, _ = weights(model)
        leaves = {key: value.clone().requires_grad_() for key, value in loc.items()}
        linearised = LinearisedNetwork(model)
        linearised._vectorises = together
        jacobian = linearised.jacobian(x, leaves, fixed=fixed(model), buffers=model.buffers())
        assert linearised._vectorises is together
        total = sum(value.square().sum() for value in jacobian.values())
        gradient = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        found.append((jacobian, gradient))
    assert all(torch.allclose(found[0][0][key], found[1][0][key], atol=1e-10) for key in found[0][0])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "shared", "tied", "transformer", "frozen_backbone"])
def test_layer_by_layer_is_the_jacobian_written_out_also_in_gradient(name):
    model, x = mlp() if name == "mlp" else case(name)
    found = []
    for by_layers in (True, False):
        torch.manual_seed(1)
        loc, scale = ({key: value.clone().requires_grad_() for key, value in each.items()} for each in weights(model))
        linearised = LinearisedNetwork(model)
        linearised._by_layers = by_layers
        _, covariance = linearised.moments(x, loc, squares(scale), fixed=fixed(model), buffers=model.buffers())
        leaves = [*loc.values(), *scale.values()]
        gradient = torch.autograd.grad(covariance.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        found.append((covariance, *gradient))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10 * other.abs().max().item())


class UsedTwice(nn.Module):
    """A linear layer whose weight is also used behind one's back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            hidden = self.layer.weight.sum()
        return self.layer(x) + hidden


@pytest.mark.parametrize(("net", "simple"), [(UsedTwice(), False), (nn.Linear(2, 3), True)], ids=["hidden", "plain"])
def test_layers_are_taken_apart_only_where_that_is_right(net, simple):
    model = kn.Model(net.double(), kn.Gaussian(0.1))
    loc, scale = weights(model)
    x = torch.randn(4, 2, dtype=torch.float64)
    linearised = LinearisedNetwork(model)
    _, covariance = linearised.moments(x, loc, squares(scale), fixed={}, buffers={})
    jacobian = slow_jacobian(model, x, loc).movedim(1, 0)
    expected = (jacobian * Layout.of(loc).flatten(scale).square()) @ jacobian.mT
    assert linearised._by_layers is simple
    assert torch.allclose(covariance, expected, rtol=1e-6, atol=1e-7)


def test_activations_that_change_in_place_are_no_trouble():
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.1))
    loc, scale = weights(model)
    x = torch.randn(4, 2, dtype=torch.float64)
    linearised = LinearisedNetwork(model)
    _, covariance = linearised.moments(x, loc, squares(scale), fixed={}, buffers={})
    jacobian = slow_jacobian(model, x, loc).movedim(1, 0)
    expected = (jacobian * Layout.of(loc).flatten(scale).square()) @ jacobian.mT
    assert linearised._by_layers is True
    assert torch.allclose(covariance, expected, rtol=1e-6, atol=1e-7)


def test_covariance_is_differentiable_in_means_and_scales():
    model, x = mlp()
    loc, scale = weights(model)
    names = list(loc)

    def total(*values: Tensor) -> Tensor:
        given = dict(zip(names, values[: len(names)], strict=True)), dict(zip(names, values[len(names) :], strict=True))
        return LinearisedNetwork(model).moments(x, given[0], squares(given[1]), fixed={}, buffers={})[1]

    inputs = [value.clone().requires_grad_() for value in (*loc.values(), *scale.values())]
    assert torch.autograd.gradcheck(total, inputs)


def test_rows_in_batches_are_the_same(monkeypatch):
    model, x = mlp()
    loc, _ = weights(model)
    whole = LinearisedNetwork(model).jacobian(x, loc, fixed={}, buffers={})
    monkeypatch.setattr("knowable.inference.variational.function_space.linearised._ELEMENTS", 1)
    single = LinearisedNetwork(model).jacobian(x, loc, fixed={}, buffers={})
    assert all(torch.allclose(whole[name], single[name]) for name in whole)
