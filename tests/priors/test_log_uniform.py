from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import Unsupported
from knowable.inference.variational.divergence import LogUniformSegment, NormalSegment
from knowable.priors import LogUniform
from knowable.priors.log_uniform import divergence_at


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


# --- the gradient, and the segment that has it written by hand ------------------------------------------------------


def _slope(log_alpha: float) -> float:
    """The fit's d KL / d log alpha, by autograd."""
    at = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    divergence_at(at).backward()
    assert at.grad is not None
    return at.grad.item()


@pytest.mark.parametrize("log_alpha", np.linspace(-8, 8, 33))
def test_slope_is_within_fourteen_thousandths_of_the_exact_one(log_alpha: float):
    # d/dm E log|ε + m| = E 1 / (ε + m), the principal value. The largest gap, 0.0137, is at log alpha = -2.5.
    distance = np.exp(-log_alpha / 2)
    if distance < 10:
        principal, _ = integrate.quad(stats.norm.pdf, -12, 12, weight="cauchy", wvar=-distance)
    else:  # the pole is out of reach
        principal, _ = integrate.quad(lambda e: stats.norm.pdf(e) / (e + distance), -9, 9)
    exact = -0.5 * distance * principal  # dm / d log alpha = -m / 2
    assert _slope(log_alpha) == pytest.approx(exact, abs=0.014)


def _buffer(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    loc = torch.randn(40, generator=generator, dtype=torch.float64)
    loc[3] = 0.0
    return loc, 3.0 * torch.randn(40, generator=generator, dtype=torch.float64)


def test_segment_has_the_value_and_gradient_of_autograd(generator):
    loc, log_scale = (each.requires_grad_() for each in _buffer(generator))
    segment = LogUniformSegment(2, 35)
    expected = LogUniform().kl_from_normal(loc[2:35], log_scale[2:35].exp())
    by_autograd = torch.stack(torch.autograd.grad(1.7 * expected, (loc, log_scale)))
    at = loc.detach(), log_scale.detach(), log_scale.detach().exp()
    value, slopes = segment.value_and_slopes(*at)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert segment.value(*at).item() == pytest.approx(expected.item(), rel=1e-12)
    for kept in (slopes, None):
        found = torch.zeros(2, 40, dtype=torch.float64)
        segment.write_gradient(found, at[0], at[2], 1.7, kept)
        torch.testing.assert_close(found, by_autograd, rtol=1e-10, atol=1e-14)


def test_segment_is_finite_where_signal_or_noise_vanish_in_float32():
    loc = torch.tensor([0.0, 1e-30, 1.0, 1e15])
    log_scale = torch.tensor([0.0, 1.0, -40.0, -60.0])
    segment, gradient = LogUniformSegment(0, 4), torch.empty(2, 4)
    value, slopes = segment.value_and_slopes(loc, log_scale, log_scale.exp())
    segment.write_gradient(gradient, loc, log_scale.exp(), 1.0, slopes)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 1.0, 1e-15], [0.0, 0.0, -1.0, -1.0]]))


def test_segmentes_of_neighbours_are_joined():
    first, second = LogUniformSegment(0, 4), LogUniformSegment(4, 9)
    assert first.joined(second) == LogUniformSegment(0, 9)
    assert first.joined(NormalSegment(4, 9, 0.0, 1.0, 1.0)) is None
    assert NormalSegment(0, 4, 0.0, 1.0, 1.0).joined(second) is None
