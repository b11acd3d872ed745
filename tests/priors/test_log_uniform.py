from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import Unsupported
from knowable.priors import LogUniform


def _exact_kl(distance: float) -> float:
    """E log|ε + distance| - E log|ε| with ε standard normal: the exact KL less its limit for a distance of 0."""
    points = [-distance] if distance < 12 else None
    mean_log = integrate.quad(
        lambda e: np.log(abs(e + distance)) * stats.norm.pdf(e), -12, 12, points=points, limit=400
    )[0]
    return mean_log + (np.euler_gamma + np.log(2)) / 2


def test_log_prob_falls_with_the_logarithm_of_the_size():
    w = torch.tensor([-2.0, 0.5, 10.0])
    torch.testing.assert_close(LogUniform().log_prob(w), -torch.tensor([2.0, 0.5, 10.0]).log())
    assert torch.isposinf(LogUniform().log_prob(torch.zeros(1))).all()


@pytest.mark.parametrize("log_alpha", np.linspace(-10, 10, 21))
def test_kl_is_within_a_hundredth_of_the_exact_value(log_alpha: float):
    # The largest gap of the paper's fit, 0.0094, is near log alpha = -3.5.
    distance = np.exp(-log_alpha / 2)
    found = LogUniform().kl_from_normal(
        torch.tensor([3.0 * distance], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    )
    assert abs(found.item() - _exact_kl(distance)) < 0.01


@pytest.mark.parametrize("log_alpha", [-6.0, -2.0, 0.0, 2.0, 6.0])
def test_kl_is_the_papers_expression(log_alpha: float):
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    negative = k1 / (1 + np.exp(-(k2 + k3 * log_alpha))) - 0.5 * np.log1p(np.exp(-log_alpha)) - k1
    loc = torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = LogUniform().kl_from_normal(loc, torch.full((2,), np.exp(log_alpha / 2), dtype=torch.float64))
    assert found.item() == pytest.approx(-2 * negative, rel=1e-10)


def test_gradients_match_finite_differences():
    loc = torch.tensor([0.3, -2.0, 1e-2], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.5, 0.1, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LogUniform().kl_from_normal, (loc, scale))
    assert torch.autograd.gradcheck(LogUniform().log_prob, loc)


def test_kl_and_gradients_are_finite_and_right_at_both_ends_in_float32():
    loc = torch.tensor([0.0, 1e-30, 1.0, 1e15], requires_grad=True)
    scale = torch.tensor([1.0, 1.0, 1e-15, 1e-15], requires_grad=True)
    each = torch.stack([LogUniform().kl_from_normal(m, s) for m, s in zip(loc, scale, strict=True)])
    each.sum().backward()
    ends = torch.tensor([0.0, 0.0, 15 * np.log(10), 30 * np.log(10)]) + torch.tensor([0.0, 0.0, 0.63576, 0.63576])
    torch.testing.assert_close(each, ends.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loc.grad, torch.tensor([0.0, 0.0, 1.0, 1e-15]))  # d log|m| / dm
    torch.testing.assert_close(scale.grad, torch.tensor([0.0, 0.0, -1e15, -1e15]))


def test_it_cannot_be_sampled():
    with pytest.raises(Unsupported, match=r"LogUniform\(\) is improper"):
        LogUniform().sample((2,), like=torch.zeros(1))
