from __future__ import annotations

import pytest
import torch

from knowable.inference.sampling import preconditioner
from knowable.testing.densities import correlated_gaussian


def _window(positions, precision, kind):
    """The state after a window of positions ``(n, C, D)`` of a normal with this precision."""
    state = {"position": positions[0], "gradient": -positions[0] @ precision}
    preconditioner.open_window(state, kind)
    for each in positions[1:]:
        state |= {"position": each, "gradient": -each @ precision}
        preconditioner.observe(state)
    return state


@pytest.mark.parametrize("extent", [1.0, 0.01])
def test_dense_estimate_is_the_covariance_of_a_normal_however_little_of_it_was_seen(generator, extent):
    # for a normal, Cov(g) = P Cov(x) P, and then Cov(x) # Cov(g)^-1 = P^-1 whatever Cov(x); what is left is the
    # shrinkage of correlations by (D / C n)^2 = (5 / 4000)^2, times the condition of Cov(g), about 10^3
    covariance = correlated_gaussian(5, correlation=0.6, ratio=2.0).covariance
    positions = extent * torch.randn((1001, 4, 5), generator=generator, dtype=torch.float64)
    found = preconditioner.estimate(_window(positions, torch.linalg.inv(covariance), "dense"))
    torch.testing.assert_close(found, covariance, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("extent", [1.0, 0.01])
def test_diagonal_estimate_has_the_variances_of_independent_coordinates(generator, extent):
    variance = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)
    positions = extent * torch.randn((20, 4, 3), generator=generator, dtype=torch.float64)
    found = preconditioner.estimate(_window(positions, torch.diag(1 / variance), "diagonal"))
    torch.testing.assert_close(found, variance)


def test_too_few_positions_or_gradients_that_do_not_change_tell_nothing(generator):
    positions = torch.randn((4, 4, 3), generator=generator, dtype=torch.float64)
    assert preconditioner.estimate(_window(positions, torch.eye(3, dtype=torch.float64), "diagonal")) is None
    positions = torch.randn((20, 4, 3), generator=generator, dtype=torch.float64)
    assert preconditioner.estimate(_window(positions, torch.zeros(3, 3, dtype=torch.float64), "dense")) is None
