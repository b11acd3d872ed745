"""Tests of constants that are carried by one channel; the network before is the oracle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knowable.decisions.compress.rewrite import rewrite


class Two(nn.Module):
    """Four constant channels of six; two padded convolutions read them, each behind an activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = (
            nn.Conv2d(1, 6, 3),
            nn.Conv2d(6, 3, 3, padding=1),
            nn.Conv2d(6, 3, 3, padding=1),
        )
        with torch.no_grad():
            self.first.weight[:4] = 0.0
            self.first.bias.copy_(torch.tensor([0.3, 1.0, -0.5, 2.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.one(torch.sigmoid(x)) * self.two(torch.tanh(x))


def _same(net: nn.Module, made: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(made(x), net(x), rtol=1e-5, atol=1e-5)


def test_one_channel_carries_all_with_ratios_of_their_own_for_each_reader():
    net, x = Two().eval(), torch.randn(4, 1, 7, 7)
    made = rewrite(net, x).net
    assert made.first.out_channels == 3
    _same(net, made, x)


def test_channels_read_by_different_layers_are_carried_apart():
    net, x = Two().eval(), torch.randn(4, 1, 7, 7)
    with torch.no_grad():
        net.one.weight[:, :2] = 0.0  # channels 0 and 1 are read by the second alone, 2 and 3 by both
    made = rewrite(net, x).net
    assert made.first.out_channels == 4
    _same(net, made, x)


def test_a_channel_that_varies_elsewhere_is_not_carried():
    class Summed(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.one(torch.sigmoid(y)) * self.two(torch.tanh(y + x[:, :, 1:-1, 1:-1].expand(-1, 6, -1, -1)))

    net, x = Summed().eval(), torch.randn(4, 1, 7, 7)
    made = rewrite(net, x).net
    assert made.first.out_channels == 6
    _same(net, made, x)
