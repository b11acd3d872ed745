"""Tests of the traced forward pass: the same function, every weight matrix noted, gradients as autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.weight_uses import ForwardTrace, WeightTracer, WeightUse
from knowable.inference.laplace.curvature_kron import input_moment
from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion


def traced(net: nn.Module, x: Tensor) -> ForwardTrace:
    model = kn.Model(net, kn.Gaussian(1.0))
    return ForwardTrace(model.network, tuple(model.random_names), model.params(), x, model.buffers(), cut=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_trace_has_the_networks_output(name):
    expansion = case_expansion(name)
    x, _ = expansion.data.tensors
    network, params = expansion.model.network, expansion.model.network_params(expansion.params)
    found = ForwardTrace(network, expansion.layout.names, params, x, expansion.buffers).output
    torch.testing.assert_close(found, expansion.model.forward(expansion.params, x, buffers=expansion.buffers))


def test_every_use_is_noted_with_its_input_and_its_gradient():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2, bias=False)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    trace = traced(net, x)
    first, second = trace.uses
    assert (first.names, second.names) == (("0.weight", "0.bias"), ("2.weight",))
    hidden = F.linear(x, net[0].weight, net[0].bias)
    torch.testing.assert_close(first.activations(), torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1))
    torch.testing.assert_close(second.activations(), hidden.relu())
    directions = torch.randn(3, 5, 2, dtype=torch.float64)
    gradients = trace.gradients(directions)
    torch.testing.assert_close(gradients[1], directions)
    torch.testing.assert_close(gradients[0], (directions @ net[2].weight) * (hidden > 0))  # before the ReLU in place


def test_directions_that_cannot_be_batched_are_followed_one_by_one():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * torch.from_numpy(gradient.numpy())  # no vmap goes through numpy

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.layer(x))

    trace = traced(Net(), torch.randn(5, 3))
    directions = torch.randn(4, 5, 2)
    torch.testing.assert_close(trace.gradients(directions)[0], 2 * directions)


def test_only_the_last_layer_is_the_output():
    trace = traced(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3))
    assert [trace.is_output(use) for use in trace.uses] == [False, True]
    trace = traced(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3))
    assert not trace.is_output(trace.uses[0])


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")  # torch's own, of the fourth
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 3, 3, padding=1, stride=2),
        nn.Conv1d(2, 3, 3, padding="same", dilation=2),
        nn.Conv2d(2, 3, (3, 2), padding=(1, 0), stride=(2, 1)),
        nn.Conv2d(2, 3, (2, 4), padding="same"),
        nn.Conv2d(2, 3, 3, padding="valid", bias=False),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    ],
    ids=str,
)
def test_a_convolution_is_its_matrix_times_patches(layer):
    layer = layer.double()
    x = torch.randn((4, 2, 8, 7) if isinstance(layer, nn.Conv2d) else (4, 2, 9), dtype=torch.float64)
    trace = traced(nn.Sequential(layer), x)
    (use,) = trace.uses
    assert use.kind == "convolution"
    matrix = layer.weight.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias.unsqueeze(1)], 1)
    torch.testing.assert_close(use.activations() @ matrix.T, layer(x).flatten(2).mT)


def test_groups_and_transposed_convolutions_are_not_noted():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 3))
    trace = traced(net, torch.randn(2, 2, 6, 6))
    assert trace.uses == []
    assert trace.unnoted() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_weight_that_is_also_used_in_another_way_is_found_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer.weight.sum()

    assert traced(Twice(), torch.randn(2, 3)).unnoted() == {"layer.weight"}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_taken_apart_into_its_matrices(need_weights, batch_first):
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            out = self.attention(x, x, x, need_weights=need_weights)[0]
            return out if batch_first else out.transpose(0, 1)

    net, x = SelfAttention().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    trace = traced(net, x)
    assert [use.weight for use in trace.uses] == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert all(use.kind == "linear" for use in trace.uses)
    torch.testing.assert_close(trace.output, net(x))
    assert trace.unnoted() == set()


def test_nothing_is_noted_of_parameters_that_are_not_asked_about():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = kn.Model(net, kn.Gaussian(1.0), random="2.bias")
    trace = ForwardTrace(model.network, ("2.bias",), model.network_params(model.params()), torch.randn(5, 3), {})
    (use,) = trace.uses
    assert use.names == ("2.bias",)
    assert torch.equal(use.activations(), torch.ones(5, 1))


def test_the_mode_without_names_changes_nothing():
    net, x = nn.LSTM(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    expected = net(x)[0]
    with WeightTracer({}, take_apart=True) as tracer:
        found = net(x)[0]
    torch.testing.assert_close(found, expected)
    assert tracer.uses == []


def test_the_networks_own_parameters_keep_no_gradient():
    net = nn.Sequential(nn.Linear(3, 2))
    trace = traced(net, torch.randn(4, 3))
    trace.gradients(torch.ones(1, 4, 2))
    assert all(value.grad is None for value in net.parameters())


# --- one use as a product with a matrix: autograd is the oracle

F64 = torch.float64
Case = tuple[WeightUse, Tensor, Tensor]
CONVOLUTIONS = {
    "plain": {"shape": (2, 3, 7, 6), "kernel": (3, 2)},
    "stride and zeros around": {"shape": (2, 3, 7, 6), "kernel": (3, 3), "stride": (2, 1), "padding": (1, 2)},
    "same": {"shape": (2, 3, 7, 6), "kernel": (4, 3), "padding": "same"},
    "valid": {"shape": (2, 3, 7, 6), "kernel": (3, 3), "padding": "valid"},
    "dilated": {"shape": (2, 3, 9, 8), "kernel": (3, 2), "dilation": (2, 3)},
    "a line": {"shape": (2, 3, 9), "kernel": (4,), "stride": (2,), "padding": (1,)},
    "a line, same, dilated": {"shape": (2, 3, 9), "kernel": (4,), "padding": "same", "dilation": (2,)},
}


def linear(shape: tuple[int, ...], weight: bool, bias: bool, generator: torch.Generator) -> Case:
    x = torch.randn(*shape, 4, generator=generator, dtype=F64)
    w = torch.randn(3, 4, generator=generator, dtype=F64, requires_grad=True)
    b = torch.randn(3, generator=generator, dtype=F64, requires_grad=True)
    return one_use(F.linear, x, w, b, weight, bias)


def convolution(case: dict, weight: bool, bias: bool, generator: torch.Generator) -> Case:
    settings = {name: value for name, value in case.items() if name in ("stride", "padding", "dilation")}
    x = torch.randn(case["shape"], generator=generator, dtype=F64)
    w = torch.randn(5, 3, *case["kernel"], generator=generator, dtype=F64, requires_grad=True)
    b = torch.randn(5, generator=generator, dtype=F64, requires_grad=True)
    return one_use(F.conv1d if len(case["kernel"]) == 1 else F.conv2d, x, w, b, weight, bias, **settings)


def one_use(op, x: Tensor, w: Tensor, b: Tensor, weight: bool, bias: bool, **settings) -> Case:
    with WeightTracer(({"w": w} if weight else {}) | ({"b": b} if bias else {}), take_apart=True) as tracer:
        op(x, w, b, **settings)
    (use,) = tracer.uses
    return use, w, b


def packed(use: WeightUse, w: Tensor, b: Tensor, slope: Tensor) -> Tensor:
    """What autograd says of the parameters asked about, as the matrix (out, in + 1)."""
    found = torch.autograd.grad(use.output, (w, b), slope)
    columns = [found[0].flatten(1)] if use.weight else []
    return torch.cat([*columns, *([found[1].unsqueeze(1)] if use.bias else [])], 1)


def check(use: WeightUse, w: Tensor, b: Tensor, generator: torch.Generator) -> None:
    slope = torch.randn(use.output.shape, generator=generator, dtype=F64)
    a, g = use.activations().flatten(0, -2), use.in_front(slope).flatten(0, -2)  # (count, in), (count, out)
    assert len(a) == use.count
    torch.testing.assert_close(g.T @ a, packed(use, w, b, slope))
    torch.testing.assert_close(input_moment(use), a.T @ a)
    several = torch.stack([slope, 2 * slope])
    torch.testing.assert_close(
        use.in_front(several, lead=1), torch.stack([use.in_front(slope), 2 * use.in_front(slope)])
    )
    assert use.output.shape[use.feature_dim] == g.shape[1]


ASKED = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4)])
def test_gradients_of_a_linear_layer_are_sums_of_outer_products(shape, asked, generator):
    check(*linear(shape, *asked, generator), generator)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_a_convolution_are_sums_of_outer_products(name, asked, generator):
    check(*convolution(CONVOLUTIONS[name], *asked, generator), generator)


def test_a_use_names_what_is_asked_about(generator):
    assert linear((6,), True, True, generator)[0].names == ("w", "b")
    assert linear((6,), False, True, generator)[0].names == ("b",)
