from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special

from knowable.priors.horseshoe import log_scaled_exponential_integral


def _oracle(z: np.ndarray) -> np.ndarray:
    """exp(z) E1(z): scipy's E1 up to 50, beyond it the asymptotic series, whose first omitted term is below 1e-12."""
    near, far = np.minimum(z, 50.0), np.maximum(z, 50.0)
    series = sum((-1.0) ** k * special.factorial(k) / far**k for k in range(20)) / far
    return np.where(z <= 50, np.exp(near) * special.exp1(near), series)


Z = np.concatenate([np.logspace(-12, 6, 2001), [np.nextafter(1.0, 0), 1.0, np.nextafter(1.0, 2)]])


def test_values_and_slopes_match_the_oracle_over_eighteen_decades():
    z = torch.tensor(Z, requires_grad=True)
    value = log_scaled_exponential_integral(z)
    value.sum().backward()
    np.testing.assert_allclose(value.detach().exp(), _oracle(Z), rtol=1e-11)
    moderate = Z < 1e3  # the oracle for the slope, 1 - 1 / (z F), cancels beyond
    np.testing.assert_allclose(z.grad[moderate], (1 - 1 / (Z * _oracle(Z)))[moderate], rtol=1e-8)
    large = Z >= 1e3  # -1 / z + 1 / z^2 - 3 / z^3 + ...
    np.testing.assert_allclose(z.grad[large], -1 / Z[large] + 1 / Z[large] ** 2, rtol=1e-5)


def test_float32_keeps_six_digits():
    value = log_scaled_exponential_integral(torch.tensor(Z, dtype=torch.float32))
    np.testing.assert_allclose(value.exp(), _oracle(Z), rtol=2e-6)


def test_first_and_second_derivatives_match_finite_differences():
    z = torch.tensor([0.01, 0.7, 0.999, 1.001, 3.0, 40.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_scaled_exponential_integral, z)
    assert torch.autograd.gradgradcheck(log_scaled_exponential_integral, z)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, from jvp
def test_it_works_under_vmap_reverse_and_forward_differentiation():
    z = torch.tensor([[0.1, 0.9], [2.0, 30.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(log_scaled_exponential_integral)(z), log_scaled_exponential_integral(z))
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(log_scaled_exponential_integral)))(z)
    _, tangent = torch.func.jvp(log_scaled_exponential_integral, (z,), (torch.ones_like(z),))
    expected = 1 - 1 / (z.numpy() * _oracle(z.numpy()))
    np.testing.assert_allclose(slope, expected, rtol=1e-10)
    np.testing.assert_allclose(tangent, expected, rtol=1e-10)
    curvature = torch.func.hessian(lambda v: log_scaled_exponential_integral(v).sum())(z[0])
    assert torch.isfinite(curvature).all() and curvature[0, 1] == 0


def test_zero_has_a_finite_value_and_no_slope():
    z = torch.zeros(1, requires_grad=True)
    value = log_scaled_exponential_integral(z)
    value.backward()
    assert torch.isfinite(value).all() and z.grad.item() == 0.0
