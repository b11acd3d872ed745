"""Tests of side effects, shapes that are asked for and values that are overwritten; the network is its own oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.decisions.compress.rewrite import rewrite


class Between(nn.Module):
    """A unit that is dead, for it is constant or for nothing reads it, and something between it and the next layer."""

    def __init__(self, between, *, constant: bool):
        super().__init__()
        self.first, self.last, self.other = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.relu, self.between = nn.ReLU(inplace=True), between
        with torch.no_grad():
            if constant:
                self.first.weight[1] = 0.0
                self.first.bias[1] = -1.0
            else:
                self.last.weight[:, 1] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.first(x))


def _kept(between, *, constant: bool) -> int:
    """How many units are left, once the outputs are found to be the same."""
    net, x = Between(between, constant=constant).eval(), torch.randn(6, 3)
    made = rewrite(net, x)
    with torch.no_grad():
        torch.testing.assert_close(made.net(x), net(x))
    return made.net.first.out_features


@pytest.mark.parametrize(
    "between",
    [
        lambda self, x: self.last(self.relu(x)),
        lambda self, x: self.last(F.relu(x).view(x.size(0), -1)),
        lambda self, x: self.last(F.relu(x).view(x.shape[0], x.shape[1])),
        lambda self, x: self.last(F.relu(x) + x.dim()),
        lambda self, x: self.last(F.relu(x) * x.size(0)),
        lambda self, x: self.last(F.relu(x).reshape(-1, 4)),
    ],
)
def test_a_dead_unit_goes_where_nobody_counts_units(between):
    assert _kept(between, constant=False) == 3


@pytest.mark.parametrize(
    "between",
    [
        lambda self, x: self.last(F.relu(x) / x.size(1)),
        lambda self, x: self.last(F.relu(x) / x.shape[-1]),
        lambda self, x: self.last(F.relu(x)) * x.numel(),
        lambda self, x: self.last(F.relu(x) + sum(x.shape[1:])),
    ],
)
def test_units_stay_where_their_number_matters(between):
    assert _kept(between, constant=False) == 4


@pytest.mark.parametrize(
    "between",
    [
        lambda self, x: self.last(self.relu(x)) + self.other(x),
        lambda self, x: self.last(x.relu_()) + self.other(x),
        lambda self, x: self.last(F.relu(x, inplace=True)) + self.other(x),
        lambda self, x: self.last(F.relu(x.flatten(1), True)) + self.other(x),
        lambda self, x: self.last(self.relu(x.view(x.size(0), -1).contiguous())) + self.other(x),
    ],
)
def test_values_that_are_overwritten_while_others_read_them_are_not_taken_for_constant(between):
    assert _kept(between, constant=True) == 4


def test_in_place_activations_behind_a_dropped_branch_leave_the_other_branch_alone():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.zero, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.relu = nn.ReLU(inplace=True)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            y = self.relu(x + self.zero(x))
            return self.last(y) - self.last.weight.sum() * x.sum(1, keepdim=True)

    net, x = Two().eval(), torch.randn(6, 3)
    made = rewrite(net, x)
    assert "zero.weight" not in dict(made.net.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(made.net(x), net(x))


def test_a_squeeze_does_not_squeeze_the_last_unit_away():
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 3, 4), nn.Linear(3, 2)
            with torch.no_grad():
                self.last.weight[:, 1:] = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x).squeeze())

    net, x = Squeezed().eval(), torch.randn(6, 1, 4, 4)
    made = rewrite(net, x)
    assert made.net.conv.out_channels == 1
    with torch.no_grad():
        torch.testing.assert_close(made.net(x), net(x))
