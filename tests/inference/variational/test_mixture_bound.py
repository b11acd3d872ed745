"""Tests of a mixture's bound against numerical integration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knowable.inference.variational.mixture import separation

DTYPE = torch.float64


def integrated(loc: Tensor, log_scale: Tensor) -> float:
    """H(q) less the mean of the components' entropies, on a grid of one or two dimensions."""
    count, size = loc.shape
    axis = torch.linspace(-12, 12, 4001 if size == 1 else 801, dtype=DTYPE)
    values = torch.cartesian_prod(*[axis] * size).view(-1, 1, size)
    area = (axis[1] - axis[0]).item() ** size
    each = torch.distributions.Normal(loc, log_scale.exp()).log_prob(values).sum(-1)  # (points, K)
    log_q = each.logsumexp(1) - math.log(count)
    entropy = -(log_q.exp() * log_q).sum().item() * area
    own = (log_scale.sum(1) + size * 0.5 * math.log(2 * math.pi * math.e)).mean().item()
    return entropy - own


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_separation_is_the_entropy_that_mixing_adds(seed, count, size):
    loc = torch.randn(count, size, dtype=DTYPE)
    log_scale = 0.3 * torch.randn(count, size, dtype=DTYPE)
    found, error = separation(loc, log_scale)
    assert 0 < error < 0.02
    assert found == pytest.approx(integrated(loc, log_scale), abs=5 * error + 1e-6)


def test_separation_goes_from_nothing_to_the_logarithm_of_the_number(seed):
    log_scale = torch.zeros(4, 3, dtype=DTYPE)
    alike, error = separation(torch.zeros(4, 3, dtype=DTYPE), log_scale)
    assert alike == pytest.approx(0.0, abs=1e-12) and error == pytest.approx(0.0, abs=1e-12)
    apart, error = separation(100.0 * torch.arange(4.0, dtype=DTYPE).view(-1, 1).expand(4, 3), log_scale)
    assert apart == pytest.approx(math.log(4), abs=1e-12) and error == pytest.approx(0.0, abs=1e-12)
    assert separation(torch.randn(1, 3, dtype=DTYPE), torch.zeros(1, 3, dtype=DTYPE)) == (0.0, 0.0)


def test_draws_in_blocks_are_as_many(seed, monkeypatch):
    loc, log_scale = torch.randn(2, 3, dtype=DTYPE), torch.zeros(2, 3, dtype=DTYPE)
    whole, error = separation(loc, log_scale)
    monkeypatch.setattr("knowable.inference.variational.mixture._BLOCK", 300)
    parts, other = separation(loc, log_scale)
    assert error == pytest.approx(other, rel=0.2)  # as many draws: standard deviations from 2,048 each
    assert whole == pytest.approx(parts, abs=5 * math.hypot(error, other))
