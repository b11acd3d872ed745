"""Tests of what a fit warns about: parameters without gradient, and outputs or labels that are not meant."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import knowable as kn

# --- parameters that want no gradient --------------------------------------------------------------------------------


def _half_frozen() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    return net


def test_parameters_without_gradient_are_frozen_and_the_repr_says_so():
    net = _half_frozen()
    before = net[0].weight.clone()
    model = kn.Model(net, kn.Gaussian(0.1))
    assert model.random_names == ["2.weight", "2.bias"] and model.frozen_names == {"0.weight", "0.bias"}
    assert "9 more frozen by requires_grad=False" in repr(model)
    posterior = kn.MeanFieldVI(epochs=3).fit(model, (torch.randn(20, 2), torch.randn(20)))
    assert set(posterior.mean()) == {"2.weight", "2.bias"} and torch.equal(net[0].weight, before)


def test_a_parameter_without_gradient_is_random_where_it_is_named_in_full():
    assert kn.Model(_half_frozen(), kn.Gaussian(0.1), random=["0.bias", "2.*"]).random_names == [
        "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip


def test_a_network_wholly_without_gradient_is_refused():
    with pytest.raises(kn.InvalidArgument, match=r"net.requires_grad_\(True\)"):
        kn.Model(_half_frozen().requires_grad_(False), kn.Gaussian())


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left, self.cut = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x) + self.cut(x).detach()


def test_parameters_that_no_gradient_reaches_are_named():
    model = kn.Model(_Unused(), kn.Gaussian(0.1))
    with pytest.warns(kn.ModelWarning, match="left.weight, left.bias, cut.weight, cut.bias:"):
        kn.MAP(epochs=2).fit(model, (torch.randn(20, 2), torch.randn(20)))
    kn.MAP(epochs=2).fit(
        kn.Model(_Unused(), kn.Gaussian(0.1), frozen=["left.*", "cut.*"]), (torch.randn(20, 2), torch.randn(20))
    )


# --- what is allowed but probably not meant --------------------------------------------------------------------------


def _layers(*last: nn.Module, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, outputs), *last)


@pytest.mark.parametrize(
    ("net", "likelihood", "y", "says"),
    [
        (_layers(nn.Softmax(1)), kn.Categorical(), [0, 1, 2], "ends in a softmax"),
        (_layers(nn.Sigmoid(), outputs=1), kn.Bernoulli(), [0, 1, 1], "ends in a sigmoid"),
        (_layers(nn.Sigmoid(), nn.Flatten(0), outputs=1), kn.Bernoulli(), [0, 1, 1], "ends in a sigmoid"),
        (_layers(), kn.Categorical(), [1, 2, 1], "labels 1 to 2 and never 0"),
        (_layers(), kn.Categorical(), [0, 2, 2], "no row of class 1 of"),
        (_layers(), kn.Categorical(), [0, 1, 2], None),
        (_layers(nn.LogSoftmax(1)), kn.Categorical(), [0, 1, 2], None),
        (_layers(outputs=1), kn.Bernoulli(), [0, 1, 1], None),
    ],
)
def test_outputs_and_labels_that_are_probably_not_meant_are_warned_about(net, likelihood, y, says):
    data = torch.randn(3, 2), torch.tensor(y)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kn.MAP(epochs=1).fit(kn.Model(net, likelihood), data)
    said = [str(each.message) for each in seen if each.category is kn.ModelWarning]
    assert len(said) == (says is not None) and all(says in each for each in said)


@pytest.mark.parametrize("method", [kn.MAP(epochs=1), kn.DeepEnsemble(2, epochs=1), kn.Laplace(epochs=1)], ids=repr)
@pytest.mark.parametrize(("factor", "shift"), [(20.0, 300.0), (5000.0, 0.0)])
def test_targets_that_are_not_standardised_are_said_to_be_so_by_every_method(method, factor, shift):
    x, y = kn.datasets.sine_with_gap(n=60)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    with pytest.warns(kn.ModelWarning, match="from the network's first outputs .* Standardise x and y"):
        method.fit(kn.Model(net, kn.Gaussian()), (x, factor * y + shift))


def test_a_network_that_was_trained_on_such_targets_is_left_alone():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 5000.0)
    nn.init.constant_(net.bias, 300.0)
    y = 5000.0 * x + 300.0 + 500.0 * torch.sin(9 * x)
    kn.Laplace().fit(kn.Model(net, kn.Gaussian()), (x, y), start="network")  # warnings are errors here
