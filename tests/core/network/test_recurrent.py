"""Tests of recurrent layers by steps: PyTorch's own are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from knowable.core.network.jacobian import differentiable_operations

SETTINGS = [
    {}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False},
    {"batch_first": True},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_outputs_and_states_are_those_of_the_layer(kind, settings):
    layer, x = kind(3, 4, **settings).double(), torch.randn(5, 6, 3, dtype=torch.float64)
    expected, found = _flat(layer(x)), _flat(_by_steps(layer, x))
    assert len(found) == len(expected)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second)


def test_a_state_to_begin_with_is_used():
    layer, x = nn.LSTM(3, 4).double(), torch.randn(5, 6, 3, dtype=torch.float64)
    state = tuple(torch.randn(1, 6, 4, dtype=torch.float64) for _ in range(2))
    with differentiable_operations():
        found = layer(x, state)[0]
    torch.testing.assert_close(found, layer(x, state)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_are_left_to_the_layer(kind):
    layer, x = kind(3, 4, batch_first=True).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    with differentiable_operations():
        found = layer(packed)[0].data
    torch.testing.assert_close(found, layer(packed)[0].data)


def test_projections_are_left_to_the_layer():
    layer, x = nn.LSTM(3, 4, proj_size=2).double(), torch.randn(5, 6, 3, dtype=torch.float64)
    with differentiable_operations():
        found = layer(x)[0]
    torch.testing.assert_close(found, layer(x)[0])


def _by_steps(layer: nn.Module, x: torch.Tensor):
    with differentiable_operations():
        return layer(x)


def _flat(result) -> list[torch.Tensor]:
    output, state = result
    return [output, *(state if isinstance(state, tuple) else (state,))]
