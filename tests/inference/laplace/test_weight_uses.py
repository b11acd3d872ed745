"""Tests of the recorded forward pass: the same function, every weight matrix noted, gradients as autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import knowable as kn
from knowable.inference.laplace.weight_uses import ConvolutionUse, LinearUse, Recorder, Recording
from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion


def record(net: nn.Module, x: Tensor) -> Recording:
    model = kn.Model(net, kn.Gaussian(1.0))
    return Recording(model, tuple(model.random_names), model.params(), x, model.buffers())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_recording_has_the_networks_output(name):
    expansion = case_expansion(name)
    x, _ = expansion.data.tensors
    found = Recording(expansion.model, expansion.layout.names, expansion.params, x, expansion.buffers).output
    torch.testing.assert_close(found, expansion.model.forward(expansion.params, x, buffers=expansion.buffers))


def test_every_use_is_noted_with_its_input_and_its_gradient():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2, bias=False)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    recording = record(net, x)
    first, second = recording.uses
    assert (first.names, second.names) == (("0.weight", "0.bias"), ("2.weight",))
    hidden = F.linear(x, net[0].weight, net[0].bias)
    torch.testing.assert_close(first.activations(), torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1))
    torch.testing.assert_close(second.activations(), hidden.relu())
    directions = torch.randn(3, 5, 2, dtype=torch.float64)
    gradients = recording.gradients(directions)
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

    recording = record(Net(), torch.randn(5, 3))
    directions = torch.randn(4, 5, 2)
    torch.testing.assert_close(recording.gradients(directions)[0], 2 * directions)


def test_only_the_last_layer_is_the_output():
    recording = record(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3))
    assert [recording.is_output(use) for use in recording.uses] == [False, True]
    recording = record(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3))
    assert not recording.is_output(recording.uses[0])


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
    recording = record(nn.Sequential(layer), x)
    (use,) = recording.uses
    assert isinstance(use, ConvolutionUse)
    matrix = layer.weight.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias.unsqueeze(1)], 1)
    torch.testing.assert_close(use.activations() @ matrix.T, layer(x).flatten(2).mT)


def test_groups_and_transposed_convolutions_are_not_noted():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 3))
    recording = record(net, torch.randn(2, 2, 6, 6))
    assert recording.uses == []
    assert recording.unnoted() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_weight_that_is_also_used_in_another_way_is_found_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer.weight.sum()

    assert record(Twice(), torch.randn(2, 3)).unnoted() == {"layer.weight"}


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
    recording = record(net, x)
    assert [use.weight for use in recording.uses] == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert all(isinstance(use, LinearUse) for use in recording.uses)
    torch.testing.assert_close(recording.output, net(x))
    assert recording.unnoted() == set()


def test_nothing_is_noted_of_parameters_that_are_not_asked_about():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = kn.Model(net, kn.Gaussian(1.0), random="2.bias")
    recording = Recording(model, ("2.bias",), model.params(), torch.randn(5, 3), {})
    (use,) = recording.uses
    assert use.names == ("2.bias",)
    assert torch.equal(use.activations(), torch.ones(5, 1))


def test_the_mode_without_names_changes_nothing():
    net, x = nn.LSTM(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    expected = net(x)[0]
    with Recorder() as recorder:
        found = net(x)[0]
    torch.testing.assert_close(found, expected)
    assert recorder.uses == []


def test_the_networks_own_parameters_keep_no_gradient():
    net = nn.Sequential(nn.Linear(3, 2))
    recording = record(net, torch.randn(4, 3))
    recording.gradients(torch.ones(1, 4, 2))
    assert all(value.grad is None for value in net.parameters())
