from __future__ import annotations

import pytest
import torch
from scipy import stats

from knowable.errors import Unsupported
from knowable.priors import Flat


def test_every_value_is_equally_plausible():
    assert torch.equal(Flat().log_prob(torch.randn(3, 2)), torch.zeros(3, 2))
    assert Flat().normal_moments() == (0.0, 0.0)


def test_kl_from_normal_is_the_negative_entropy():
    scale = torch.tensor([0.1, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    loc = torch.randn(3, dtype=torch.float64, requires_grad=True)
    expected = -sum(stats.norm.entropy(0, s) for s in scale.tolist())
    assert Flat().kl_from_normal(loc, scale).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda s: Flat().kl_from_normal(loc, s), scale)


def test_it_cannot_be_sampled_and_says_what_can():
    with pytest.raises(Unsupported, match=r"Flat\(\) is improper and cannot be sampled. Use .* Normal\(1.0\)"):
        Flat().sample((2,), like=torch.zeros(1))
