"""Tests of the printed table."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn
from tests.decisions.compress.cases import posterior_of


def test_the_table_says_what_was_gained():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    masks = {"0.weight": torch.zeros(6, 4, dtype=torch.bool), "2.weight": torch.ones(2, 6, dtype=torch.bool)}
    masks["0.weight"][:2] = True
    data = torch.randn(5, 4), torch.arange(5) % 2
    text = repr(kn.compress(posterior_of(net, masks), data=data))
    lines = text.splitlines()
    assert lines[0] == "Compressed: 20 of 36 weights left (44.44% zero, 1.8 times fewer)"
    assert lines[2].split() == ["weight", "weights", "nonzero", "sparsity", "before", "after", "bits"]
    assert lines[3].split() == ["0.weight", "24", "8", "66.67%", "6x4", "2x4", "32"]
    assert any(line.split() == ["parameters", "44", "16", "2.75x"] for line in lines)
    assert any(line.startswith("milliseconds a batch") for line in lines)
    assert any(line.startswith("accuracy") for line in lines)
    assert lines[-1].startswith("sparse on disk: ")


def test_notes_and_missing_measurements_show():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

    net = Odd()
    masks = {"first.weight": torch.ones(6, 4, dtype=torch.bool)}
    text = repr(kn.compress(posterior_of(net, masks), example=torch.randn(3, 4), repeats=0))
    assert "milliseconds" not in text and "accuracy" not in text
    assert text.splitlines()[-1] == "note: norm (LayerNorm) was left as it is"
