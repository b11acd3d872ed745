"""The evidence lower bound at the end of a fit, with its standard error."""

from __future__ import annotations

import math

import torch

from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.variational_objective import VariationalObjective

_KL_DRAWS = 64  # estimates of the KL that are averaged; they differ only where it has no closed form
_BOUND_ROWS = 200_000  # forward passes of single rows spent on the likelihood


def final_bound(
    objective: VariationalObjective, data: Data, seed: int
) -> tuple[LogEvidence | None, dict[str, float]]:  # fmt: skip
    """The bound, and its terms: full passes over the data with fresh weight draws.

    Args:
        objective: Holds the distribution. Whatever factor it has on the KL, this is the bound of the model as stated.
        data: All rows.
        seed: Of the fit.

    Returns:
        The bound (None under an improper prior, whose constant is arbitrary), and ``expected_log_likelihood``, ``kl``
        and ``elbo``.
    """
    with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
        kl, kl_error = mean_and_error(_divergences(objective))
        fit, fit_error = mean_and_error([_full_log_likelihood(objective, data) for _ in range(passes_over(data.size))])
    terms = {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl}
    priors = [objective.model.prior.prior_of(name) for name in objective.model.random_names]
    if any(prior is not None and not prior.proper for prior in priors):
        return None, terms
    return LogEvidence(fit - kl, "bound", math.hypot(fit_error, kl_error)), terms


def _divergences(objective: VariationalObjective) -> list[float]:
    """Estimates of the KL; two are enough where it is in closed form."""
    found = [objective.divergence().item() for _ in range(2)]
    return found if found[0] == found[1] else [*found, *(objective.divergence().item() for _ in range(_KL_DRAWS - 2))]


def _full_log_likelihood(objective: VariationalObjective, data: Data) -> float:
    """Log p(D | θ) of all rows for one draw of the weights."""
    model = objective.model
    params = {**objective.point_params(), **objective.draw_weights(1)[0]}
    return sum(
        model.score(model.forward(params, x, buffers=objective.net_buffers), y, params).sum().item() for x, y in data
    )


def passes_over(size: int) -> int:
    """How many passes over ``size`` rows a final estimate is worth."""
    return int(min(256, max(4, _BOUND_ROWS // size)))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
