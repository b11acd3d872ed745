"""Tests of how many rows go through a network at once, in training and around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import Data, as_data


class Counting(nn.Module):
    """Keeps the size of the largest batch."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        Counting.most = max(Counting.most, len(x))
        return self.layers(x)


EIGHT = {"epochs": 2, "batch_size": 8}


@pytest.mark.parametrize(
    "method",
    [
        kn.MAP(**EIGHT),
        kn.MeanFieldVI(**EIGHT),
        kn.NaturalVI(**EIGHT),
        kn.MCDropout(**EIGHT),
        kn.Laplace(**EIGHT),
        kn.SWAG(**EIGHT, snapshots=3, rate=1e-4),
        kn.DeepEnsemble(2, **EIGHT),
        kn.DeepEnsemble(2, **EIGHT, vectorise=False),
    ],
    ids=repr,
)
def test_no_pass_over_the_data_takes_more_rows_than_a_batch(method):
    """Training, held-out rows, the final bound, the curvature and the figures of a report."""
    x = torch.randn(1200, 3)
    Counting.most = 0
    model = kn.Model(Counting(), kn.Gaussian(0.5))
    posterior = method.fit(model, (x, x.sum(1)), validation=(x[:300], x[:300].sum(1)))
    assert posterior.log_evidence is None or float(posterior.log_evidence) < 0  # a bound that is asked for is found
    assert Counting.most == 8


def test_without_a_batch_size_rows_that_are_large_come_in_fewer():
    small, large = torch.zeros(6000, 3), torch.zeros(600, 3, 96, 96)
    assert max(len(x) for x, _ in as_data((small, small.sum(1)))) == 4096
    sizes = [len(x) for x, _ in as_data((large, large.sum((1, 2, 3))))]
    assert sum(sizes) == 600 and max(sizes) == 16 * 2**20 // (3 * 96 * 96 * 4 + 4) == 151


def test_the_largest_part_has_no_influence_on_a_sum_over_all_rows():
    x = torch.randn(1000, 3, dtype=torch.float64)
    model = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(0.5))
    whole = model.log_likelihood(model.params(), x, x.sum(1)).sum()
    parts = Data((x, x.sum(1)), at_once=7)
    torch.testing.assert_close(sum(model.log_likelihood(model.params(), *each).sum() for each in parts), whole)


@pytest.mark.parametrize("likelihood", [kn.Categorical(), kn.Bernoulli()], ids=repr)
def test_mixing_some_rows_at_a_time_changes_only_rounding(likelihood, monkeypatch):
    outputs, weights = torch.randn(5, 30, 4), torch.randn(5).log_softmax(0)
    whole = likelihood.predict(outputs, {}, weights)
    monkeypatch.setattr("knowable.core.prediction.prediction._MIXED_AT_ONCE", 90)
    parts = likelihood.predict(outputs, {}, weights)
    torch.testing.assert_close(whole.probs, parts.probs)  # to rounding
    torch.testing.assert_close(whole.total, parts.total)
    expected = outputs.softmax(2) if isinstance(likelihood, kn.Categorical) else outputs.sigmoid()
    torch.testing.assert_close(parts.probs, torch.tensordot(weights.exp(), expected, dims=1))
