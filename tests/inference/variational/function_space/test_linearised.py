from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def written_out(model: kn.Model, x: Tensor, loc: Params, variance: Params) -> Tensor:
    """The covariance by torch.func, row by row and output by output."""

    def outputs(params: Params, row: Tensor) -> Tensor:
        given = {**model.network_params(model.params()), **params}
        return model.network(given, row.unsqueeze(0), buffers=model.buffers()).flatten()

    with sdpa_kernel(SDPBackend.MATH):
        each = [jacrev(outputs, chunk_size=1)(loc, row) for row in x]
    layout = Layout.of(loc)
    jacobian = torch.stack([layout.flatten(one) for one in each]).movedim(1, 0)  # (outputs, n, D)
    return (jacobian * layout.flatten(variance)) @ jacobian.mT


def normalised(name: str) -> tuple[kn.Model, Tensor]:
    """Normalisation layers, whose second derivatives PyTorch has wrong under vmap; two outputs."""
    if name == "layer_norm":
        net, shape = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), (5, 2)
    else:
        norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=name == "tracked_instance_norm")
        net, shape = (
            nn.Sequential(nn.Conv1d(1, 3, 2, bias=False), norm, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)),
            (5, 1, 4),
        )
    return kn.Model(net.double(), kn.Gaussian(0.1)), torch.randn(shape, dtype=torch.float64)


NORMALISED = ["layer_norm", "instance_norm", "tracked_instance_norm"]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "name", ["mlp", "batchnorm_cnn", "shared", "tied", "transformer", "frozen_backbone", *NORMALISED]
)
def test_covariance_is_the_jacobian_written_out_also_in_gradient(name, batched, monkeypatch):
    model, x = mlp() if name == "mlp" else normalised(name) if name in NORMALISED else case(name)
    loc, scale = ({key: value.clone().requires_grad_() for key, value in each.items()} for each in weights(model))
    expected = written_out(model, x, loc, squares(scale))
    if not batched:
        monkeypatch.setattr("knowable.core.network.jacobian.vmap", refused)
    _, found = LinearisedNetwork(model).moments(x, loc, squares(scale), fixed=fixed(model), buffers=model.buffers())
    leaves = [*loc.values(), *scale.values()]
    for one, other in zip(with_gradients(found, leaves), with_gradients(expected, leaves), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10 * other.abs().max().item())


def with_gradients(value: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    gradients = torch.autograd.grad(value.square().sum(), leaves, allow_unused=True, materialize_grads=True)
    return value, *gradients


def refused(*_, **__):
    raise RuntimeError("vmap: no")


class UsedTwice(nn.Module):
    """A linear layer whose weight is also used behind one's back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            hidden = self.layer.weight.sum()
        return self.layer(x) + hidden


def test_a_weight_that_is_used_unseen_has_its_jacobian_written_out():
    model = kn.Model(UsedTwice().double(), kn.Gaussian(0.1))
    loc, scale = weights(model)
    x = torch.randn(4, 2, dtype=torch.float64)
    linearised = LinearisedNetwork(model)
    _, covariance = linearised.moments(x, loc, squares(scale), fixed={}, buffers={})
    jacobian = slow_jacobian(model, x, loc).movedim(1, 0)
    expected = (jacobian * Layout.of(loc).flatten(scale).square()) @ jacobian.mT
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
