r"""What a mixture of normals says of the evidence.

For equal weights the mixture's own bound is the mean of its components' bounds and a gain that is never negative:

.. math:: \mathrm{ELBO}(q) = \frac1K \sum_k \mathrm{ELBO}(q_k) + I, \qquad
    I = \frac1K \sum_k E_{q_k}\Big[\log \frac{q_k(\theta)}{q(\theta)}\Big] \in [0, \log K]

I is how much a draw tells about which component it came from: 0 where all components are the same, log K where they are
apart. It needs no network, only densities of normals, so that it is cheap to know well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.final_bound import final_bound
from knowable.core.randomness import derive_seed, own_randomness
from knowable.inference.variational.mean_field_objective import MeanFieldObjective

_MOST_DRAWS, _FEWEST_DRAWS = 2048, 32  # of each component
_VALUES = 2**26  # numbers handled for the gain, where that is enough draws
_BLOCK = 2**21  # numbers in memory at a time


def mixture_bound(
    components: Sequence[MeanFieldObjective], data: Data, seed: int
) -> tuple[LogEvidence | None, dict[str, float], list[tuple[LogEvidence | None, dict[str, float]]]]:
    """The mixture's bound and its terms, and those of every component by itself.

    The terms are the expected log likelihood, the KL from the mixture to the prior, the bound, the mean of the
    components' bounds, and the gain between the two.
    """
    each = [
        final_bound(component, data, seed if k == 0 else derive_seed(seed, "component", k))
        for k, component in enumerate(components)
    ]
    mean = {name: sum(terms[name] for _, terms in each) / len(each) for name in each[0][1]}
    with torch.no_grad(), own_randomness(derive_seed(seed, "separation")):
        gain, gain_error = separation(*_moments(components))
    terms = {
        **mean,
        "kl": mean["kl"] - gain,
        "elbo": mean["elbo"] + gain,
        "mean_elbo": mean["elbo"],
        "separation": gain,
    }
    bounds = [bound for bound, _ in each if bound is not None]
    if len(bounds) < len(each):
        return None, terms, each  # the prior is improper: there is no evidence to bound
    error = math.hypot(*(bound.standard_error for bound in bounds)) / len(bounds)
    return LogEvidence(terms["elbo"], "bound", math.hypot(error, gain_error)), terms, each


def separation(loc: Tensor, log_scale: Tensor) -> tuple[float, float]:
    """The gain I of an equal mixture of normals with means and log scales ``(K, D)``, and its standard error."""
    count, size = loc.shape
    if count == 1:
        return 0.0, 0.0
    draws = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _VALUES // (count**2 * size)))
    block = max(1, min(draws, _BLOCK // size))
    means, variances = [], []
    for k in range(count):
        parts = [_gains(loc, log_scale, k, min(block, draws - first)) for first in range(0, draws, block)]
        gains = torch.cat(parts)
        means.append(gains.mean().item())
        variances.append(gains.var().item() / draws)
    return sum(means) / count, math.sqrt(sum(variances)) / count


def _gains(loc: Tensor, log_scale: Tensor, k: int, draws: int) -> Tensor:
    """Log q_k - log q at ``draws`` draws of component k."""
    noise = torch.randn((draws, loc.shape[1]), dtype=loc.dtype, device=loc.device)
    values = torch.addcmul(loc[k], log_scale[k].exp(), noise)
    log_densities = torch.stack(
        [
            -0.5 * (noise if j == k else (values - loc[j]) / log_scale[j].exp()).square().sum(1) - log_scale[j].sum()
            for j in range(len(loc))
        ]
    )  # (K, draws), up to a constant that all share
    return log_densities[k] - log_densities.logsumexp(0) + math.log(len(loc))


def _moments(components: Sequence[MeanFieldObjective]) -> tuple[Tensor, Tensor]:
    """Means and log scales of all components in double precision, each ``(K, D)``."""
    loc, log_scale = torch.stack([each.q.detach().double() for each in components], dim=1)
    return loc, log_scale
