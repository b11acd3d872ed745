"""Where to evaluate next: acquisition functions on BoTorch models, and their maximum over a search space."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed, generator_for
from knowable.decisions.botorch_model import DrawsModel, as_model
from knowable.decisions.space import Space

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which a dependency still uses
    from botorch.acquisition import (
        AcquisitionFunction,
        qLogExpectedImprovement,
        qLogNoisyExpectedImprovement,
        qUpperConfidenceBound,
    )
    from botorch.generation.gen import gen_candidates_scipy
    from botorch.sampling.get_sampler import get_sampler

ACQUISITIONS = ("ucb", "logei", "lognei", "thompson", "random")
_DRAWS = 256  # with which batches are judged
_PATHS = 64  # functions of which Thompson sampling takes one
_SPREAD, _STARTS, _STEPS = 512, 6, 60  # points that are looked at, of which some are improved so many times
_NEAR = 0.05  # distance in each dimension within which a point that failed keeps others away
_MOST_LISTED = 20_000  # points of a space that are all looked at


@dataclass(frozen=True)
class Known:
    """What has been told, standardised, and what has been asked.

    Attributes:
        x: Rows of the points with a value, ``(N, width)``.
        y: Their values, to be maximised, ``(N,)``.
        feasible: Which of them satisfy all constraints, ``(N,)``.
        pending: Rows that were asked and not told.
        failed: Rows that were told without a value.
    """

    x: Tensor
    y: Tensor
    feasible: Tensor
    pending: Tensor
    failed: Tensor


class ConfidenceBound(AcquisitionFunction):
    r"""The upper confidence bound of one point, :math:`a(x) = m(x) + \beta\, \sigma(x)` with epistemic σ.

    Args:
        model: A BoTorch model.
        beta: How many standard deviations.
    """

    def __init__(self, model: Any, beta: float):
        super().__init__(model)
        self.beta = beta

    def forward(self, X: Tensor) -> Tensor:
        """Values of the points ``(..., 1, d)``."""
        found: Any = self.model.posterior(X)
        return (found.mean + self.beta * found.variance.clamp_min(1e-18).sqrt()).flatten(-2).squeeze(-1)


class OneFunction(AcquisitionFunction):
    """The value of one function drawn from the posterior (Thompson sampling).

    Args:
        model: A model of draws.
        seed: Which of them.
    """

    def __init__(self, model: DrawsModel, seed: int):
        super().__init__(model)
        self.seed = seed

    def forward(self, X: Tensor) -> Tensor:
        """Values of the points ``(..., 1, d)``."""
        found: Any = self.model.posterior(X)
        place = torch.multinomial(found.weights, 1, generator=generator_for(self.seed))
        return found.values[..., int(place), :, :].flatten(-2).squeeze(-1)


class Weighted(AcquisitionFunction):
    """An acquisition function times the probability that a point is feasible, on the logarithmic scale.

    Args:
        inner: The acquisition function; None where nothing feasible is known, and only feasibility counts.
        constraints: BoTorch models of the constraints, feasible where all are <= 0.
        floor: Value of ``inner`` that counts as nothing; None if it is a logarithm.
        failed: Points at which there was no value, to be kept away from.
    """

    def __init__(self, inner: Any, constraints: list[Any], floor: float | None, failed: Tensor):
        super().__init__(None)  # type: ignore[arg-type]  # each has one of its own
        self.inner, self.floor, self.failed = inner, floor, failed
        self.constraints = constraints

    def forward(self, X: Tensor) -> Tensor:
        """Values of the points ``(..., 1, d)``."""
        total = X.new_zeros(X.shape[:-2])
        if self.inner is not None:
            value = self.inner(X)
            if self.floor is not None:
                gain = value - self.floor
                value = torch.where(gain > 20, gain.clamp_min(1.0).log(), torch.nn.functional.softplus(gain).log())
            total = total + value
        for model in self.constraints:
            found = model.posterior(X)
            score = -found.mean / found.variance.clamp_min(1e-12).sqrt()
            total = total + torch.special.log_ndtr(score).sum((-1, -2))
        if len(self.failed):
            square = ((X.unsqueeze(-2) - self.failed) / _NEAR).square().mean(-1)  # (..., 1, failed)
            total = total + torch.log1p(-torch.exp(-0.5 * square).clamp_max(1 - 1e-9)).sum((-1, -2))
        return total


def build(
    name: str, posterior: Posterior, constraints: list[Posterior], known: Known, *, beta: float, seed: int
) -> AcquisitionFunction:
    """The acquisition function of that name."""
    models = [as_model(each) for each in constraints]
    inner, floor = None, None
    if known.feasible.any() or not constraints:
        best = known.feasible if constraints else torch.ones_like(known.feasible)
        inner = _inner(name, posterior, known, best, beta, seed)
        floor = known.y.min().item() if name in ("ucb", "thompson") else None
    if inner is not None and not models and not len(known.failed):
        return inner
    return Weighted(inner, models, floor, known.failed)


def _inner(name: str, posterior: Posterior, known: Known, good: Tensor, beta: float, seed: int) -> AcquisitionFunction:
    if name == "thompson":
        return OneFunction(DrawsModel(posterior, _PATHS), derive_seed(seed, "path"))
    model = as_model(posterior)
    pending = known.pending if len(known.pending) else None
    if name == "ucb" and pending is None:
        return ConfidenceBound(model, beta)
    with torch.no_grad():
        at = model.posterior(known.x[:1])
    sampler = get_sampler(at, torch.Size([_DRAWS]), seed=derive_seed(seed, "draws") % 2**31)
    common = {"sampler": sampler, "X_pending": pending}
    if name == "ucb":
        return qUpperConfidenceBound(model, beta=beta**2, **common)
    if name == "lognei":
        return qLogNoisyExpectedImprovement(
            model, X_baseline=known.x[good], cache_root=False, prune_baseline=False, **common
        )
    with torch.no_grad():  # the largest mean: what noise has lifted does not count
        best = model.posterior(known.x[good].unsqueeze(1)).mean.max()
    return qLogExpectedImprovement(model, best_f=best, **common)


# --- the maximum -----------------------------------------------------------------------------------------------------


def best_row(acquisition: AcquisitionFunction, space: Space, known: Known, taken: Tensor, seed: int) -> Tensor | None:
    """The row of the point with the largest value.

    Points from all over the space and near the best ones are looked at; the best of them are improved, numbers in an
    interval by L-BFGS-B with gradients, other dimensions by trying their values one after the other.

    Args:
        acquisition: The acquisition function.
        space: The space.
        known: What has been told.
        taken: Rows that must not come again, where the space has no intervals.
        seed: Fixes where it looks.

    Returns:
        The row, or None if all are taken.
    """
    if space.size <= _MOST_LISTED:
        rows = _without(space.every_row(), taken)
        return None if len(rows) == 0 else rows[_values(acquisition, rows).argmax()]
    rows = _first_rows(space, known, seed)
    chosen = rows[_values(acquisition, rows).topk(min(_STARTS, len(rows))).indices]
    free = torch.ones(space.width, dtype=torch.bool)
    for place in space.discrete:
        free[space.columns[place]] = False
    for turn in range(2 if space.discrete else 1):
        if free.any():
            chosen = _climbed(acquisition, chosen, free)
        for place in space.discrete:
            chosen = torch.stack([_best_of(acquisition, space.alternatives(row, place)) for row in chosen])
        if turn == 0 and space.discrete:
            chosen = chosen[_values(acquisition, chosen).topk(min(3, len(chosen))).indices]
    if not free.any():
        others = _without(torch.cat([chosen, rows]), taken)
        chosen = others if len(others) else chosen
    return chosen[_values(acquisition, chosen).argmax()]


def _first_rows(space: Space, known: Known, seed: int) -> Tensor:
    """Rows spread over the space, and rows near the best that were told."""
    count = len(space.dimensions)
    u = torch.quasirandom.SobolEngine(count, scramble=True, seed=seed % 2**31).draw(_SPREAD, dtype=torch.float64)
    spread = space.from_uniform(u)
    near = known.x[known.y.topk(min(5, len(known.y))).indices].repeat(20, 1)
    generator = generator_for(seed, "near")
    scale = 10 ** -(1 + 2 * torch.rand(len(near), 1, generator=generator, dtype=torch.float64))
    moved = (near + scale * torch.randn(near.shape, generator=generator, dtype=torch.float64)).clamp(0, 1)
    for place in space.discrete:
        own = space.columns[place]
        fresh = torch.rand(len(near), generator=generator) < 0.3
        new = space.dimensions[place].from_uniform(torch.rand(len(near), generator=generator, dtype=torch.float64))
        moved[:, own] = torch.where(fresh[:, None], new, near[:, own])
    return torch.cat([spread, moved])


def _climbed(acquisition: AcquisitionFunction, rows: Tensor, free: Tensor) -> Tensor:
    """Local maxima in the columns that are free."""
    fixed: Any = {int(column): rows[:, column] for column in (~free).nonzero().flatten()}
    with warnings.catch_warnings(record=True):  # a start that did not converge is one of several
        found, _ = gen_candidates_scipy(
            rows.unsqueeze(1), acquisition, 0.0, 1.0, fixed_features=fixed or None, options={"maxiter": _STEPS}
        )
    return found.squeeze(1).detach().clamp(0, 1)


def _best_of(acquisition: AcquisitionFunction, rows: Tensor) -> Tensor:
    return rows[_values(acquisition, rows).argmax()]


def _values(acquisition: AcquisitionFunction, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([acquisition(part.unsqueeze(1)) for part in rows.split(128)]).nan_to_num(nan=-torch.inf)


def _without(rows: Tensor, taken: Tensor) -> Tensor:
    if not len(taken) or not len(rows):
        return rows
    return rows[torch.cdist(rows, taken).min(1).values > 1e-9]
