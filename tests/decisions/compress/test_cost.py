"""Tests of costs, against counts by hand and layers that sleep."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from knowable.decisions.compress.compressed import count_parameters, latencies, multiply_adds
from tests.core.cases import Tied


def test_multiply_adds_are_those_counted_by_hand():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),  # 8 x 8 pixels, each 8 outputs of 3 x 9 products
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),  # 4 x 4 pixels, 8 outputs of 9
        nn.ConvTranspose2d(8, 4, 2, stride=2),  # 4 x 4 pixels, each of 8 spreads to 4 x 4 places
        nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )
    by_hand = 64 * 8 * 27 + 16 * 8 * 9 + 16 * 8 * 4 * 4 + 256 * 10
    assert multiply_adds(net, torch.randn(5, 3, 8, 8)) == by_hand
    assert multiply_adds(net, torch.randn(1, 3, 8, 8)) == by_hand
    assert not any(module._forward_hooks for module in net.modules())


def test_a_layer_over_tokens_counts_once_for_each():
    assert multiply_adds(nn.Linear(3, 5), torch.randn(2, 7, 3)) == 7 * 15


def test_tied_parameters_count_once():
    assert count_parameters(nn.Linear(3, 5)) == 20
    assert count_parameters(Tied()) == 6


class Slow(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.threads = seconds, set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(torch.get_num_threads())
        time.sleep(self.seconds)
        return x


def test_latencies_are_medians_on_one_thread_and_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        slow, quick = Slow(0.02), Slow(0.0)
        times = latencies([slow, quick], torch.zeros(1), 5)
        assert times[0] >= 0.02 > times[1]
        assert slow.threads == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
