"""Draws against the truth of a density: means, variances and quantiles within their standard errors.

Standard errors come from the measured effective sample sizes. A single figure may be off by 4 of them; where many are
looked at together the limit rises so that the chance of a false alarm stays that of a single figure (Bonferroni).

Variances need care. The squares of a funnel or of a banana have such tails that a few thousand draws, exact ones too,
may not meet what makes up half of the variance, and then do not know their own error either: of variances from 400
exact draws of the banana 1% are off by more than 4 of the errors that those draws give, and not one in 16,000. So
squares are cut at the largest thousandth of exact draws, their error is that of exact draws, and it is the logarithm
of their mean that is looked at: that way at most one in 5,000 is off by more than 4 (banana, funnel and bimodal,
20,000 repeats).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knowable.core.chains.convergence import ess_mean
from knowable.core.chains.posterior import Samples
from knowable.testing.densities import Density

_SINGLE = 4.0
_EXACT = 400_000  # exact draws that quantiles are taken from
QUANTILES = (0.1, 0.5, 0.9)


def limit(figures: int) -> float:
    """Standard errors allowed when ``figures`` figures are looked at together."""
    chance = math.erfc(_SINGLE / math.sqrt(2)) / figures
    return -torch.special.ndtri(torch.tensor(chance / 2, dtype=torch.float64)).item()


def projections(density: Density) -> Tensor:
    """A few directions ``(k, D)``: the first and last coordinates, and the widest and narrowest directions."""
    axes = torch.linalg.eigh(density.covariance).eigenvectors
    identity = torch.eye(len(density.mean), dtype=torch.float64)
    return torch.unique(torch.stack([identity[0], identity[-1], axes[:, 0], axes[:, -1]]), dim=0)


def z_scores(draws: Tensor, density: Density, seed: int = 0) -> dict[str, Tensor]:
    """How many standard errors each figure is from the truth, for draws ``(chains, draws, D)``."""
    directions = projections(density)
    found = draws.double() @ directions.T  # (chains, draws, k)
    mean, variance = directions @ density.mean, (directions @ density.covariance * directions).sum(1)
    exact = density.draw(_EXACT, torch.Generator().manual_seed(seed)) @ directions.T
    most = _quantile((exact - mean).square(), 0.999)
    squares, truth = ((each - mean).square().minimum(most) for each in (found, exact))
    spread = truth.std(0) / truth.mean(0) * (1 / ess_mean(squares) + 1 / _EXACT).sqrt()
    scores = {
        "mean": (found.mean((0, 1)) - mean) / (variance / ess_mean(found)).sqrt(),
        "variance": (squares.mean((0, 1)) / truth.mean(0)).log() / spread,
    }
    for q in QUANTILES:  # the share of draws below the true quantile, whose own error is that of the exact draws
        place = _quantile(exact, q)
        below = (found <= place).double()
        error = (q * (1 - q) * (1 / _ess_of_quantile(found, q) + 1 / _EXACT)).sqrt()
        scores[f"quantile {q}"] = (below.mean((0, 1)) - q) / error
    return scores


def _ess_of_quantile(found: Tensor, q: float) -> Tensor:
    """Effective sample size for the share of draws below their own quantile."""
    return ess_mean((found <= found.flatten(0, 1).quantile(q, dim=0)).double())


def _quantile(values: Tensor, q: float) -> Tensor:
    return values.sort(0).values[int(q * len(values))]


def expect_moments(samples: Samples, density: Density, *, name: str = "x") -> None:
    """Fail if any mean, variance or quantile is further from the truth than its standard error allows."""
    scores = z_scores(samples.draws[name], density)
    most = limit(sum(len(each) for each in scores.values()))
    far = {what: each.tolist() for what, each in scores.items() if not (each.abs() < most).all()}
    assert not far, f"{density.name}: off by these many standard errors (limit {most:.2f}): {far}"
