"""R-hat and effective sample sizes against ArviZ, against closed forms of AR(1) chains, and against slow versions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from knowable.core.chains.convergence import (
    ess_bulk,
    ess_mean,
    ess_tail,
    prediction_error,
    rhat,
    share_between_chains,
)

PHIS = (-0.9, -0.5, 0.0, 0.5, 0.9, 0.99, 0.999)


def ar1(phi: float, chains: int, draws: int, quantities: int, *, seed: int = 0) -> Tensor:
    """Stationary AR(1) chains of unit innovations, ``(chains, draws, quantities)``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((chains, draws, quantities), generator=generator, dtype=torch.float64)
    x[:, 0] /= math.sqrt(1 - phi**2)
    for t in range(1, draws):
        x[:, t] += phi * x[:, t - 1]
    return x


# --- against ArviZ ---------------------------------------------------------------------------------------------------


def arviz_figures(draws: Tensor) -> dict[str, np.ndarray]:
    stats = pytest.importorskip("arviz_stats.base").array_stats
    axes = {"chain_axis": 0, "draw_axis": 1}
    return {
        "bulk": stats.ess(draws.numpy(), method="bulk", **axes),
        "mean": stats.ess(draws.numpy(), method="mean", **axes),
        "tail": stats.ess(draws.numpy(), method="tail", prob=(0.05, 0.95), **axes),
        "rhat": stats.rhat(draws.numpy(), method="rank", **axes),
    }


def expect_agreement(draws: Tensor) -> None:
    ours = {
        "bulk": ess_bulk(draws), "mean": ess_mean(draws), "tail": ess_tail(draws), "rhat": rhat(draws),
    }  # fmt: skip
    theirs = arviz_figures(draws)
    if len(draws) == 1:
        theirs.pop("rhat")  # they need two chains
    for name, found in theirs.items():
        np.testing.assert_allclose(ours[name].numpy(), found, rtol=1e-8, err_msg=name)


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(("chains", "draws"), [(1, 200), (2, 101), (4, 300), (3, 999)])
def test_figures_agree_with_arviz_however_slowly_chains_mix(phi, chains, draws):
    expect_agreement(ar1(phi, chains, draws, 5))


@pytest.mark.parametrize("draws", range(4, 21))
def test_figures_agree_with_arviz_on_few_draws(draws):
    for phi in (-0.5, 0.0, 0.9):
        expect_agreement(ar1(phi, 3, draws, 4, seed=draws))


@pytest.mark.parametrize("draws", [50, 51, 400])
def test_figures_agree_with_arviz_on_tied_values(draws):
    for phi in (-0.5, 0.0, 0.9):
        expect_agreement(ar1(phi, 4, draws, 4, seed=7).round())  # a handful of distinct values
        expect_agreement(ar1(phi, 4, draws, 4, seed=7).round(decimals=1))


def test_figures_agree_with_arviz_on_chains_that_stand_apart():
    expect_agreement(ar1(0.5, 4, 100, 3) + 3 * torch.arange(4.0).view(4, 1, 1))


def test_figures_agree_with_arviz_on_a_chain_that_stands_still():
    draws = ar1(0.5, 4, 100, 3)
    draws[2] = 0.25
    expect_agreement(draws)


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression_is_that_of_its_closed_form(phi, seed):
    # var(mean) = var / S * (1 + phi) / (1 - phi). The relative error of one estimate is below 0.3 here; of the mean of
    # 50 independent ones below 0.3 / sqrt(50) = 0.042, and four of these are allowed.
    draws = ar1(phi, 4, 1000, 50, seed=seed)
    expected = 4000 * (1 - phi) / (1 + phi)
    found = ess_mean(draws)
    assert found.std() / expected < 0.3
    assert abs(found.mean().item() / expected - 1) < 4 * 0.3 / math.sqrt(50)
    bulk = ess_bulk(draws)  # ranks of a normal are as correlated as the values, nearly
    assert abs(bulk.mean().item() / expected - 1) < 4 * 0.3 / math.sqrt(50)


def test_effective_sample_size_predicts_the_error_of_the_mean(seed):
    # 400 independent runs: the sd of their means against sd / sqrt(ess), whose own error is 1 / sqrt(2 * 400)
    draws = ar1(0.8, 4, 500, 400, seed=seed)
    error = draws.mean((0, 1)).std().item()
    predicted = (draws.flatten(0, 1).std(0) / ess_mean(draws).sqrt()).square().mean().sqrt().item()
    assert abs(error / predicted - 1) < 4 / math.sqrt(800)


@pytest.mark.parametrize("figure", [ess_bulk, ess_tail, ess_mean])
def test_independent_draws_are_worth_themselves(figure, seed):
    found = figure(ar1(0.0, 4, 1000, 50, seed=seed))
    assert abs(found.mean().item() / 4000 - 1) < 0.05


def test_independent_draws_have_rhat_one(seed):
    # E R-hat² - 1 is about (1 + 1/m)/n for halves of n draws: 0.002; the folded one is as large
    found = rhat(ar1(0.0, 4, 1000, 50, seed=seed))
    assert (found > 0.998).all() and (found < 1.02).all()


def test_chains_that_stand_apart_have_a_large_rhat(seed):
    draws = ar1(0.0, 4, 500, 3, seed=seed)
    apart = draws + 2 * torch.arange(4.0).view(4, 1, 1)
    assert (rhat(apart) > 1.5).all()
    wide = draws * torch.tensor([1.0, 1.0, 1.0, 5.0]).view(4, 1, 1)  # same middle, other spread: the folded one sees it
    assert (rhat(wide) > 1.1).all()


def test_a_trend_within_one_chain_has_a_large_rhat(seed):
    draws = ar1(0.0, 1, 500, 3, seed=seed) + torch.linspace(0, 4, 500).view(1, 500, 1)
    assert (rhat(draws) > 1.3).all()


def test_plain_rhat_is_the_formula_of_within_and_between(generator):
    draws = torch.randn((1, 40), generator=generator, dtype=torch.float64)
    halves = draws.view(2, 20)
    flat = halves.flatten()

    def scores(x: Tensor) -> Tensor:  # the slow way: count
        rank = (x[None] < x[:, None]).sum(1).double() + 0.5 * ((x[None] == x[:, None]).sum(1).double() + 1)
        return torch.special.ndtri((rank - 0.375) / (len(x) + 0.25)).view(2, 20)

    def formula(z: Tensor) -> float:
        within, between = z.var(1).mean(), 20 * z.mean(1).var()
        return ((19 / 20 * within + between / 20) / within).sqrt().item()

    median = flat.sort().values[19:21].mean()
    expected = max(formula(scores(flat)), formula(scores((flat - median).abs())))
    assert rhat(draws).item() == pytest.approx(expected, rel=1e-12)


# --- the edges -------------------------------------------------------------------------------------------------------


def test_scale_and_place_do_not_matter(generator):
    draws = torch.randn((4, 100, 5), generator=generator, dtype=torch.float64)
    for figure in (rhat, ess_bulk, ess_tail, ess_mean):
        assert torch.allclose(figure(draws * 2**-60), figure(draws), rtol=1e-9)
    for figure in (rhat, ess_bulk, ess_tail):
        assert torch.allclose(figure(draws.exp()), figure(draws), rtol=0.2)  # ranks are kept, folding is not
    assert torch.equal(ess_bulk(draws.exp()), ess_bulk(draws))


@pytest.mark.parametrize("figure", [rhat, ess_bulk, ess_tail, ess_mean])
def test_nothing_is_known_of_what_never_moved_or_is_not_finite(figure):
    draws = ar1(0.0, 2, 50, 4)
    draws[..., 1] = 3.0
    draws[0, 3, 2] = math.nan
    draws[1, 7, 3] = math.inf
    found = figure(draws)
    assert torch.isfinite(found[0]) and found[1:].isnan().all()
    assert torch.equal(figure(draws[..., :1])[0], found[0])


@pytest.mark.parametrize("figure", [rhat, ess_bulk, ess_tail, ess_mean])
def test_shapes_are_kept(figure):
    draws = ar1(0.3, 2, 30, 6)
    assert figure(draws).shape == (6,)
    assert torch.equal(figure(draws.view(2, 30, 2, 3)).flatten(), figure(draws))
    assert figure(draws[..., 0]).shape == ()
    assert figure(draws[..., :0]).shape == (0,)
    assert figure(draws[:, :3]).isnan().all()  # too few to say


def test_blocks_of_quantities_change_nothing(monkeypatch):
    draws = ar1(0.5, 2, 30, 7).float()
    whole = [figure(draws) for figure in (rhat, ess_bulk, ess_tail, ess_mean)]
    monkeypatch.setattr("knowable.core.chains.convergence._NUMBERS_AT_ONCE", 2 * 60)
    for figure, expected in zip((rhat, ess_bulk, ess_tail, ess_mean), whole, strict=True):
        assert torch.allclose(figure(draws), expected, rtol=1e-12)


def test_draws_are_left_alone_and_may_need_gradients():
    draws = ar1(0.5, 2, 30, 2).requires_grad_()
    before = draws.detach().clone()
    assert torch.isfinite(ess_bulk(draws)).all() and not rhat(draws).requires_grad
    assert torch.equal(draws.detach(), before)


# --- predictions -----------------------------------------------------------------------------------------------------


def normal_scores(y: Tensor, loc: Tensor) -> Tensor:
    """log N(y; loc, 1) of rows ``y`` for draws ``loc`` ``(chains, draws)``."""
    return -0.5 * (y - loc.unsqueeze(-1)).square() - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("spread", [0.2, 0.4])
def test_error_of_predictions_is_the_divergence_from_that_of_infinitely_many_chains(spread, seed):
    # each chain keeps to a mode of its own, drawn from N(0, spread²): infinitely many of them predict N(0, 1 + spread²)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    exact = torch.distributions.Normal(0.0, math.sqrt(1 + spread**2))
    truth, found = [], []
    for _ in range(300):
        modes = spread * torch.randn((8, 1), generator=generator, dtype=torch.float64).expand(8, 4)
        log_mixture = normal_scores(grid, modes)[:, 0].logsumexp(0) - math.log(8)
        density = exact.log_prob(grid)
        truth.append(torch.trapezoid(density.exp() * (density - log_mixture), grid).item())
        y = math.sqrt(1 + spread**2) * torch.randn(50, generator=generator, dtype=torch.float64)
        found.append(prediction_error(normal_scores(y, modes)))
    difference = torch.tensor(found) - torch.tensor(truth)
    error = difference.std().item() / math.sqrt(len(found))  # and higher orders, of a relative size near the spread²
    assert abs(difference.mean().item()) < 4 * error + spread**2 * torch.tensor(truth).mean().item()


def test_error_of_predictions_of_independent_draws_falls_with_their_number(seed):
    # one chain's variance of p over S draws: half the relative variance over S
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(200, generator=generator, dtype=torch.float64)
    loc = 0.5 * torch.randn((8, 1000), generator=generator, dtype=torch.float64)
    scores = normal_scores(y, loc)
    density = scores.exp().flatten(0, 1)
    expected = 0.5 * (density.var(0) / density.mean(0).square()).mean().item() / 8000
    assert expected / 5 < prediction_error(scores) < 5 * expected  # 7 degrees of freedom, of which the larger of two


def test_error_of_predictions_sees_what_drifts_in_all_chains(seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(50, generator=generator, dtype=torch.float64)
    loc = 0.01 * torch.randn((8, 100), generator=generator, dtype=torch.float64) + torch.linspace(0, 2, 100).double()
    assert prediction_error(normal_scores(y, loc)) > 0.03
    assert prediction_error(normal_scores(y, loc[:, torch.randperm(100, generator=generator)])) < 0.01


def test_error_of_predictions_is_half_a_nat_where_one_chain_alone_explains_the_rows():
    scores = torch.full((4, 10, 3), -1e6)
    scores[2] = -1.0
    assert prediction_error(scores) == pytest.approx(0.5)
    assert math.isnan(prediction_error(torch.full((4, 10, 3), -math.inf)))
    assert math.isnan(prediction_error(scores[:, :3]))


def test_share_between_chains_is_that_of_their_means(seed):
    draws = ar1(0.0, 4, 1000, 5, seed=seed)
    assert share_between_chains(draws) < 0.01  # 0.001 is expected
    offset = torch.tensor([-1.0, -1.0, 1.0, 1.0]).double().view(4, 1, 1)
    assert share_between_chains(draws - draws.mean(1, keepdim=True) + offset) == pytest.approx(0.5, abs=0.03)
    assert share_between_chains(offset.expand(4, 10, 5)) == 1.0
