"""Tests of the metric of momenta and of how it is learned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.metric import Metric, Window

D = 3
COVARIANCE = torch.tensor([[4.0, 1.0, 0.0], [1.0, 1.0, 0.2], [0.0, 0.2, 0.01 + 0.09]], dtype=torch.float64)


def both() -> list[Metric]:
    return [Metric(COVARIANCE), Metric(COVARIANCE.diagonal().clone())]


def matrix(metric: Metric) -> torch.Tensor:
    return metric.inverse_mass if metric.dense else metric.inverse_mass.diag()


# --- momenta ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", both(), ids=["dense", "diagonal"])
def test_velocity_and_kinetic_energy_are_those_of_the_matrix(metric):
    momentum = torch.randn(5, D, dtype=torch.float64)
    torch.testing.assert_close(metric.velocity(momentum), momentum @ matrix(metric))
    kinetic = 0.5 * torch.einsum("ci,ij,cj->c", momentum, matrix(metric), momentum)
    torch.testing.assert_close(metric.kinetic(momentum), kinetic)


@pytest.mark.parametrize("metric", both(), ids=["dense", "diagonal"])
def test_momenta_have_the_inverse_of_the_matrix_as_covariance(metric):
    # momentum is linear in the noise: p = A z, so its covariance is A Aᵀ
    a = metric.momentum(torch.eye(D, dtype=torch.float64)).T
    torch.testing.assert_close(a @ a.T, torch.linalg.inv(matrix(metric)))


@pytest.mark.parametrize("metric", both(), ids=["dense", "diagonal"])
def test_whitened_differences_have_unit_covariance(metric):
    w = metric.whiten(torch.eye(D, dtype=torch.float64)).T  # L⁻¹
    torch.testing.assert_close(w @ matrix(metric) @ w.T, torch.eye(D, dtype=torch.float64))


def test_the_kinetic_energy_of_fresh_momenta_is_half_the_squared_noise():
    noise = torch.randn(5, D, dtype=torch.float64)
    for metric in both():
        torch.testing.assert_close(metric.kinetic(metric.momentum(noise)), 0.5 * noise.square().sum(1))


def test_scales_that_are_far_apart_are_no_trouble_in_single_precision():
    scale = torch.tensor([1e-4, 1.0, 1e4])
    correlation = torch.tensor([[1.0, 0.9, 0.5], [0.9, 1.0, 0.3], [0.5, 0.3, 1.0]])
    metric = Metric(scale.outer(scale) * correlation)
    noise = torch.randn(4, D)
    torch.testing.assert_close(
        metric.kinetic(metric.momentum(noise)), 0.5 * noise.square().sum(1), rtol=1e-4, atol=1e-4
    )


def test_a_matrix_that_rounding_made_indefinite_is_taken():
    direction = torch.ones(4)
    metric = Metric(direction.outer(direction))
    assert torch.isfinite(metric.momentum(torch.randn(2, 4))).all()


# --- learning --------------------------------------------------------------------------------------------------------


def observed(kind: str, draws: torch.Tensor) -> Window:
    """A window that saw draws ``(n, C, D)``."""
    seen = Window.open(draws[0], dense=kind == "dense")
    for each in draws:
        seen = seen.observe(each)
    return seen


def estimate(kind: str, draws: torch.Tensor) -> torch.Tensor | None:
    return metrics.estimate(observed(kind, draws), metrics.initial(kind, draws[0]))


def pooled(draws: torch.Tensor) -> np.ndarray:
    """Mean of the chains' own covariances, by numpy."""
    return np.mean([np.cov(draws[:, c].numpy().T, ddof=1) for c in range(draws.shape[1])], axis=0)


def window(n: int, chains: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    factor = torch.linalg.cholesky(COVARIANCE)
    means = 100 * torch.randn(chains, D, dtype=torch.float64)  # chains in modes far apart
    return (means + torch.randn(n, chains, D, dtype=torch.float64) @ factor.T).to(dtype)


@pytest.mark.parametrize("chains", [1, 4])
def test_the_estimate_of_a_long_window_is_the_pooled_covariance_within_chains(chains):
    draws = window(4000, chains)
    expected = pooled(draws)
    # what draws it towards the diagonal is of the order of D over the draws
    np.testing.assert_allclose(estimate("diagonal", draws), np.diag(expected), rtol=0.01)
    dense = estimate("dense", draws).numpy()  # type: ignore[union-attr]
    scale = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(dense / np.outer(scale, scale), expected / np.outer(scale, scale), atol=0.01)


def test_sums_are_those_of_the_window_to_rounding_even_far_from_zero():
    draws = window(50, 3) + 1e6
    seen = observed("dense", draws)
    away = (draws - draws[0]).numpy()
    np.testing.assert_allclose(seen.position.total, away.sum(0), rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(seen.position.squares[0], np.einsum("nci,ncj->ij", away, away), rtol=1e-9, atol=1e-6)
    assert seen.count == 50


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_any_window_gives_a_metric_that_can_be_used(kind):
    for n, chains in ((5, 1), (6, 2), (20, 1), (100, 4)):
        draws = window(n, chains, torch.float32)
        found = estimate(kind, draws)
        assert found is not None and found.dtype == torch.float32
        assert torch.isfinite(Metric(found).momentum(torch.randn(2, D))).all()


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_chains_that_never_moved_give_a_metric_that_can_be_used(kind):
    draws = window(1, 3).expand(20, 3, D)
    found = estimate(kind, draws)
    assert found is None or torch.isfinite(Metric(found).momentum(torch.randn(2, D, dtype=torch.float64))).all()


def test_correlations_that_are_known_to_be_nearly_perfect_stay(generator):
    truth = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-8]], dtype=torch.float64)
    factor = torch.linalg.cholesky(truth)
    draws = torch.randn(20, 10, 2, generator=generator, dtype=torch.float64) @ factor.T
    found = metrics.estimate(observed("dense", draws), truth)
    assert found is not None
    whitened = torch.linalg.solve(factor, torch.linalg.solve(factor, found).T)
    # 190 degrees of freedom: variances have a relative standard error of 0.1
    assert (torch.linalg.eigvalsh(whitened).log().abs() < 0.6).all()


def test_a_window_of_hardly_any_draws_gives_nothing():
    draws = window(4, 3)
    assert estimate("dense", draws) is None


@given(total=st.integers(0, 5000))
def test_windows_double_and_leave_time_before_and_after(total):
    ends = metrics.windows(total)
    assert ends == sorted(set(ends))
    if not ends:
        assert total < 40
        return
    widths = np.diff([metrics.window_opens(total), *ends])
    assert all(width >= 10 for width in widths)
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(widths))
    assert total - ends[-1] >= max(round(0.1 * total), min(50, total // 4))
    assert metrics.window_opens(total) >= round(0.1 * total)
    assert 2 * widths[-1] >= 0.4 * (ends[-1] - metrics.window_opens(total)), "the last window sees about half of it"


@pytest.mark.parametrize("total", [20, 60, 100, 300, 1000])
def test_early_windows_double_and_end_where_the_others_begin(total):
    ends = metrics.early_windows(total)
    widths = [after - before for before, after in itertools.pairwise([0, *ends])]
    assert ends == sorted(set(ends)) and all(width >= 10 for width in widths)
    assert not ends or ends[-1] == metrics.window_opens(total) < metrics.windows(total)[0]
    assert (metrics.window_opens(total) >= 10) is bool(ends)


def test_the_kind_of_the_metric_follows_the_dimension_unless_it_is_said():
    assert metrics.kind_for("auto", 10) == "dense"
    assert metrics.kind_for("auto", 1000) == "diagonal"
    for kind in ("diagonal", "dense", "identity"):
        assert metrics.kind_for(kind, 10) == metrics.kind_for(kind, 1000) == kind


def test_the_first_metric_is_the_identity():
    position = torch.zeros(2, D)
    assert torch.equal(metrics.initial("dense", position), torch.eye(D))
    assert torch.equal(metrics.initial("diagonal", position), torch.ones(D))


# --- windows of the warm-up -------------------------------------------------------------------------------------------


GROUPS, CHAINS = 2, 3


@pytest.mark.parametrize("dense", [True, False])
def test_covariances_within_and_between_chains_are_those_of_each_group(dense, generator):
    history = 1e6 + torch.randn((50, GROUPS * CHAINS, 2), generator=generator, dtype=torch.float64)
    history = history + 10 * torch.randn((GROUPS * CHAINS, 2), generator=generator, dtype=torch.float64)
    seen = Window.open(history[0], dense=dense, groups=GROUPS)
    for each in history:
        seen = seen.observe(each)
    sums = seen.position
    assert seen.enough and sums.freedom(seen.count) == CHAINS * 49
    for group in range(GROUPS):
        mine = history[:, group * CHAINS : (group + 1) * CHAINS]
        within = torch.stack([mine[:, chain].T.cov() for chain in range(CHAINS)]).mean(0)
        between = mine.mean(0).T.cov()
        for found, expected in ((sums.within(seen.count), within), (sums.between(seen.count), between)):
            torch.testing.assert_close(found[group], expected if dense else expected.diagonal(), rtol=1e-6, atol=1e-8)


def test_gradients_are_counted_beside_positions():
    x, g = torch.zeros(2, 3), torch.zeros(2, 3)
    seen = Window.open(x, g, dense=False)
    for i in range(6):
        seen = seen.observe(x + i, g + 2 * i)
    assert seen.gradient is not None and seen.count == 6
    torch.testing.assert_close(4 * seen.position.within(6), seen.gradient.within(6))


def test_one_chain_has_no_covariance_between_chains():
    seen = Window.open(torch.zeros(1, 2), dense=False)
    for _ in range(6):
        seen = seen.observe(torch.randn(1, 2))
    assert torch.equal(seen.position.between(6), torch.zeros(1, 2, dtype=torch.float64))
