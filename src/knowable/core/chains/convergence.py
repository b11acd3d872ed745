r"""Convergence of chains: R-hat and effective sample sizes (Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021).

All functions take draws of many scalar quantities at once, ``(chains, draws, ...)``, and return one number for each
quantity, in double precision on the CPU. They are nan for a quantity that is not finite or constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidArgument

_NUMBERS_AT_ONCE = 2**19  # numbers ranked and transformed together: they stay in the cache
ACCURATE = 0.01
"""Greatest Monte Carlo error of predictions that can be used although their chains disagree, in nats a row."""
_TAILS = (0.05, 0.95)


def rhat(draws: Tensor | np.ndarray) -> Tensor:
    r"""Rank-normalised split R-hat, the larger of bulk and folded: 1 where all halves of all chains agree.

    .. math:: \hat R = \sqrt{\frac{\frac{n-1}{n} W + \frac1n B}{W}}

    with W the variance within half-chains and B between them, of the ranks turned to normal scores; folded means that
    the same is done to the distances from the median, which notices chains that differ in spread.

    Args:
        draws: ``(chains, draws, ...)``, at least 4 draws. A single chain is compared with itself, half with half.

    Returns:
        Shape ``(...)``; nan where a quantity is not finite or constant.

    Example:
        >>> independent = torch.randn((4, 1000), generator=torch.Generator().manual_seed(0))
        >>> round(rhat(independent).item(), 2)
        1.0
    """
    return _by_quantity(_rhat_of_some, draws)


def ess_bulk(draws: Tensor | np.ndarray) -> Tensor:
    """Effective sample size for the middle of the distribution: of the split, rank-normalised draws.

    Args:
        draws: ``(chains, draws, ...)``, at least 4 draws.

    Returns:
        Shape ``(...)``: number of independent draws with the same accuracy.
    """
    return _by_quantity(lambda some: _ess(_normal_scores(_split(some))), draws)


def ess_tail(draws: Tensor | np.ndarray) -> Tensor:
    """Effective sample size for the tails: the smaller of those for the 5% and the 95% quantile.

    Args:
        draws: ``(chains, draws, ...)``, at least 4 draws.

    Returns:
        Shape ``(...)``: number of independent draws with the same accuracy.
    """
    return _by_quantity(lambda some: _ess_of_quantiles(some, _TAILS), draws)


def ess_mean(draws: Tensor | np.ndarray) -> Tensor:
    r"""Effective sample size for the mean: its standard error is :math:`\mathrm{sd} / \sqrt{\mathrm{ess}}`."""
    return _by_quantity(lambda some: _ess(_split(some)), draws)


def prediction_error(scores: Tensor) -> float:
    r"""Monte Carlo error of predictions: the log score that is expected to be lost to the finite number of draws.

    .. math:: \frac12 \overline{v}, \qquad v_i = \frac{\mathrm{var}_c(p_{ic})}{C\, \bar p_i^2}

    with :math:`p_{ic}` the mean of :math:`p(y_i \mid x_i, \theta)` over the draws of chain c, so that :math:`v_i` is
    the relative variance of row i's predictive density: half its mean over rows is, to second order, the
    Kullback-Leibler divergence from the prediction of infinitely many such chains. Chains that never meet count as one
    draw each, whether or not each has mixed. The same is done with the first and the second halves of all chains as two
    groups, which notices what drifts in all of them; the larger counts.

    Args:
        scores: Log likelihoods of rows, ``(chains, draws, rows)``.

    Returns:
        Nats a row; nan for fewer than four draws of each chain, or where a row has no finite density.
    """
    chains, draws, _ = scores.shape
    if draws < 4:
        return math.nan
    scores = scores.detach().cpu().double()
    density = (scores - scores.amax((0, 1))).exp()
    half = draws // 2
    groups = [torch.stack([density[:, :half].mean((0, 1)), density[:, -half:].mean((0, 1))])]
    if chains > 1:
        groups.append(density.mean(1))
    return max(0.5 * (each.var(0) / (len(each) * each.mean(0).square())).mean().item() for each in groups)


def share_between_chains(draws: Tensor) -> float:
    """Share of the variance of quantities ``(chains, draws, M)`` that chains' means make up, of all quantities pooled.

    What a mean of dependent draws varies by itself is in it too: 0 only for long chains that explore the same region.
    """
    draws = draws.detach().cpu().double()
    within, means = draws.var(1, correction=0).mean(0), draws.mean(1).var(0, correction=0)
    return (means.mean() / (within + means).mean()).item()


# --- the pieces, for (M, chains, draws) in double precision ----------------------------------------------------------


def _by_quantity(function: Callable[[Tensor], Tensor], draws: Tensor | np.ndarray) -> Tensor:
    """Apply a function to blocks of quantities ``(M, chains, draws)``, in double precision."""
    draws = to_tensor(draws, "draws")
    if draws.dim() < 2:
        raise InvalidArgument(f"draws must have shape (chains, draws, ...), got {tuple(draws.shape)}.")
    chains, count, *shape = draws.shape
    found = torch.full((math.prod(shape),), math.nan, dtype=torch.float64)
    if count >= 4 and chains and len(found):
        flat = draws.detach().reshape(chains, count, -1)
        size = max(1, _NUMBERS_AT_ONCE // (chains * count))
        for block, place in zip(flat.split(size, dim=-1), found.split(size), strict=True):
            some = block.cpu().double().permute(2, 0, 1).contiguous()
            good = _moves(some)
            if good.any():
                place[good] = function(some if good.all() else some[good])
    return found.reshape(shape)


def _moves(draws: Tensor) -> Tensor:
    """Which quantities are finite and not constant, ``(M,)``."""
    low, high = draws.flatten(1).aminmax(dim=1)  # nan wherever there is one
    return torch.isfinite(low) & torch.isfinite(high) & (low < high)


def _split(draws: Tensor) -> Tensor:
    """Every chain as two: ``(M, 2 chains, draws // 2)``; of an odd number of draws the middle one is left out."""
    half = draws.shape[2] // 2
    return torch.cat([draws[..., :half], draws[..., -half:]], dim=1)


def _normal_scores(draws: Tensor) -> Tensor:
    """Ranks over all chains, ties sharing their mean rank, as quantiles of a normal (Blom, 1958)."""
    flat = draws.flatten(1)  # (M, S)
    order = torch.from_numpy(np.argsort(flat.numpy(), axis=-1))
    ordered = flat.gather(1, order)
    rank = torch.arange(1.0, flat.shape[1] + 1, dtype=torch.float64)
    scores = _score_of_rank(rank, len(rank)).expand(flat.shape)
    tied = ordered[:, 1:] == ordered[:, :-1]
    if tied.any():
        scores = _share_scores(scores.clone(), tied.numpy())
    return torch.empty_like(flat).scatter_(1, order, scores).view(draws.shape)


def _score_of_rank(rank: Tensor, count: int) -> Tensor:
    return torch.special.ndtri((rank - 0.375) / (count + 0.25))


def _share_scores(scores: Tensor, tied: np.ndarray) -> Tensor:
    """Give every run of equal values the score of its mean rank; ``tied`` ``(M, S - 1)``: as the one before."""
    count = scores.shape[1]
    tied = np.pad(tied, ((0, 0), (1, 1))).reshape(-1)  # (M, S + 1): runs end at the end of a row
    first = np.flatnonzero(tied[1:] & ~tied[:-1])  # of the run, in rows of S + 1
    length = np.flatnonzero(tied[1:-1] & ~tied[2:]) + 1 - first + 1
    row, place = np.divmod(first, count + 1)
    mean = torch.from_numpy(place + 0.5 * (length + 1))
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    members = np.repeat(row * count + place, length) + inside
    scores.view(-1)[torch.from_numpy(members)] = _score_of_rank(mean, count).repeat_interleave(torch.from_numpy(length))
    return scores


def _rhat_of_some(draws: Tensor) -> Tensor:
    halves = _split(draws)
    folded = (halves - _median(halves)[:, None, None]).abs()
    return torch.fmax(_plain_rhat(_normal_scores(halves)), _plain_rhat(_normal_scores(folded)))


def _plain_rhat(halves: Tensor) -> Tensor:
    n = halves.shape[2]
    within = halves.var(2).mean(1)
    between = halves.mean(2).var(1)  # B / n
    return ((n - 1) / n + between / within).sqrt()


def _ess_of_quantiles(draws: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """The smallest of the effective sample sizes for some quantiles: those of the indicators of being below."""
    found = [_ess(_split((draws <= at[:, None, None]).double())) for at in _quantiles(draws, quantiles)]
    return torch.stack(found).amin(0)


def _median(draws: Tensor) -> Tensor:
    """The middle of an even number of draws."""
    flat = draws.flatten(1)
    half = flat.shape[1] // 2
    middle = np.partition(flat.numpy(), (half - 1, half), axis=-1)[:, half - 1 : half + 1]
    return torch.from_numpy(middle.mean(-1))


def _quantiles(draws: Tensor, quantiles: tuple[float, ...]) -> list[Tensor]:
    """Quantiles ``(M,)`` each, interpolated linearly between the two nearest draws."""
    ordered = torch.from_numpy(np.sort(draws.flatten(1).numpy(), axis=-1))
    found = []
    for q in quantiles:
        place = q * (ordered.shape[1] - 1)
        low = math.floor(place)
        below, above = ordered[:, low], ordered[:, min(low + 1, ordered.shape[1] - 1)]
        share = place - low  # from the nearer end, so that the far end is reached exactly
        found.append(below + share * (above - below) if share < 0.5 else above - (1 - share) * (above - below))
    return found


def _ess(halves: Tensor) -> Tensor:
    r"""Effective sample size from the combined autocorrelations of all chains (Geyer's monotone sequence).

    .. math:: S_\mathrm{eff} = \frac{m n}{\hat\tau}, \qquad
        \hat\tau = -1 + 2 \sum_{k=0}^{K-1} \hat P_k + \hat\rho_{2K}, \quad \hat P_k = \hat\rho_{2k} + \hat\rho_{2k+1}

    where K is the first pair that is not positive, or the last one there are enough draws for, and the P are made to
    decrease. The even term of pair K lessens the variance for antithetic chains.
    """
    _, m, n = halves.shape
    flat = halves.flatten(1)
    constant = (flat == flat[:, :1]).all(1)
    covariance = _mean_autocovariance(halves)  # (M, n), divided by n at every lag
    within = covariance[:, :1] * n / (n - 1)
    plus = covariance[:, :1].clone()
    if m > 1:
        plus += halves.mean(2).var(1, keepdim=True)
    rho = 1 - (within - covariance) / plus
    rho[:, 0] = 1.0
    last = max(0, (n - 3) // 2)
    pairs = rho[:, : 2 * last + 2].unflatten(1, (-1, 2)).sum(2)  # P_0 ... P_last
    number = torch.arange(last + 1)
    end = (pairs > 0).long().cumprod(1).sum(1, keepdim=True).clamp_max(last)  # K
    total = torch.where(number < end, pairs.cummin(1).values, 0.0).sum(1, keepdim=True)
    even = rho.gather(1, 2 * end)
    even = torch.where(pairs.gather(1, end) >= 0, even, even.clamp_min(0.0))
    tau = (-1 + 2 * total + even).squeeze(1).clamp_min(1 / math.log10(m * n))
    return torch.where(constant, float(m * n), m * n / tau)


def _mean_autocovariance(halves: Tensor) -> Tensor:
    """Along draws, averaged over chains, by the fast Fourier transform: ``(M, n)``, divided by n at every lag."""
    n = halves.shape[2]
    size = 2 ** math.ceil(math.log2(2 * n))
    spectrum = torch.view_as_real(torch.fft.rfft(halves - halves.mean(2, keepdim=True), n=size))
    power = spectrum.square_().sum(-1).mean(1)
    return torch.fft.irfft(torch.complex(power, torch.zeros_like(power)), n=size)[:, :n] / n


def convergence_terms(monitored: Tensor) -> dict[str, float]:
    """Largest R-hat and smallest effective sample sizes over the monitored quantities ``(chains, n, M)``."""

    def worst(values: Tensor, largest: bool) -> float:
        known = values[~values.isnan()]
        return float("nan") if len(known) == 0 else (known.max() if largest else known.min()).item()

    return {
        "rhat": worst(rhat(monitored), True),
        "ess_bulk": worst(ess_bulk(monitored), False),
        "ess_tail": worst(ess_tail(monitored), False),
    }
