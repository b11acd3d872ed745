"""The learning rate at which stochastic gradient descent wanders like a draw from the posterior."""

from __future__ import annotations

import itertools
import statistics

import torch
from torch import Tensor

from knowable.core.model.data import Batch, Data
from knowable.core.model.model import Model
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.inference.point.point import PointObjective

MOMENTUM = 0.9  # of the training loop's SGD
_BATCHES = 50  # whose gradients are compared, at the most
_ITERATIONS = 20  # of the power method on the first batch
_MORE = 3  # on each of the others, which begins where the one before it ended
_CHANCE = 20.0  # nats, see lowest_log_likelihood
_STEP = 1e-2  # length of the difference that stands for a derivative


def constant_rate(model: Model, rows: Data, batch_size: int, *, seed: int) -> float:
    r"""A constant learning rate for SGD with momentum that begins at a mode.

    .. math:: \epsilon = \min\Big( (1 - \mu) \frac{2 D}{N\, \mathrm{tr}\, C},\; \frac{1}{2 \lambda_\max} \Big)

    The first is the rate at which the stationary distribution of SGD, whose gradients have the covariance C, is nearest
    to the posterior (Mandt, Hoffman and Blei, 2017); momentum μ makes a step 1 / (1 - μ) as long. The second keeps the
    steepest direction of the steepest batch, whose curvature is λ_max, well within what is stable,
    :math:`2 (1 + \mu) / \lambda_\max`. (Batches differ: of a network that gets nearly all rows right most are flat, and
    those with a row that it gets wrong are steep. The few rows that are left at the end of an epoch do not count.) Both
    are for the loss per example. In networks it is the second that counts.

    Args:
        model: The model, whose start values are the mode.
        rows: The data.
        batch_size: Rows per step.
        seed: Fixes the batches and the first vector of the power method.
    """
    probe = _Probe(model, rows, seed)
    with own_randomness(derive_seed(seed, "rate")):  # a loader may shuffle
        batches = list(itertools.islice(rows.batches(batch_size, seed=seed), _BATCHES))
        whole = [batch for batch in batches if len(batch[0]) == len(batches[0][0])]
        noise, curvature = gradient_noise(probe, batches), largest_curvature(probe, whole)
    rate = 0.5 / max(curvature, 1e-12)
    return rate if noise == 0 else min(rate, (1.0 - MOMENTUM) * 2.0 * probe.dimension / (rows.size * noise))


def lowest_log_likelihood(model: Model, rows: Data, batch_size: int, *, seed: int) -> float:
    """The log likelihood below which SGD has left the mode.

    Under a normal posterior of D weights the log joint is on average D / 2 below that of the mode, and so it is for SGD
    at the rate that brings it nearest. Twice that is too far, or a nat for each number to predict if that is less; and
    twenty more, which chance may take from a few rows.

    Args:
        model: The model, whose start values are the mode.
        rows: The data.
        batch_size: Rows per step; some batches tell what the log likelihood at the mode is.
        seed: Fixes the batches.
    """
    objective = PointObjective(model, rows.size, use_prior=True)
    with own_randomness(derive_seed(seed, "level")), torch.no_grad():
        batches = list(itertools.islice(rows.batches(batch_size, seed=seed), _BATCHES))
        values = [objective(*batch)[1]["log_likelihood"].item() for batch in batches]
    targets = rows.size * batches[0][1][0].numel()
    return statistics.fmean(values) - min(objective.dimension, targets) - _CHANCE


class _Probe:
    """Gradients of the loss at and near the model's start values, with the same dropout every time."""

    def __init__(self, model: Model, rows: Data, seed: int):
        self.objective = PointObjective(model, rows.size, use_prior=True)
        self.values = list(self.objective.parameters())
        self.start = [value.detach().clone() for value in self.values]
        self.dimension = self.objective.dimension
        self.seed = derive_seed(seed, "dropout")

    def gradient(self, batch: Batch, away: Tensor | None = None) -> Tensor:
        """The gradient ``(D,)`` on a batch, at ``away`` ``(D,)`` from the start."""
        with torch.no_grad():
            moves = [None] * len(self.start) if away is None else away.split([each.numel() for each in self.start])
            for value, first, move in zip(self.values, self.start, moves, strict=True):
                value.copy_(first if move is None else first + move.view_as(first))
        with own_randomness(self.seed):
            loss, _ = self.objective(*batch)
            found = torch.autograd.grad(loss, self.values, allow_unused=True, materialize_grads=True)
        return torch.cat([each.flatten() for each in found])


def gradient_noise(probe: _Probe, batches: list[Batch]) -> float:
    """Trace of the covariance of the batches' gradients; 0 of a single batch."""
    if len(batches) < 2:
        return 0.0
    total, squares = torch.zeros(()), 0.0
    for batch in batches:
        gradient = probe.gradient(batch).double()
        total, squares = total + gradient, squares + gradient.square().sum().item()
    mean = total / len(batches)
    return max(0.0, squares - len(batches) * mean.square().sum().item()) / (len(batches) - 1)


def largest_curvature(probe: _Probe, batches: list[Batch]) -> float:
    """The largest eigenvalue, in size, of the Hessians of the loss on batches, by the power method on differences."""
    direction = torch.randn_like(probe.gradient(batches[0]))
    largest = 0.0
    for number, batch in enumerate(batches):
        found = 0.0
        for _ in range(_MORE if number else _ITERATIONS):
            unit = direction / direction.norm().clamp_min(1e-30)
            slope = (probe.gradient(batch, _STEP * unit) - probe.gradient(batch, -_STEP * unit)) / (2 * _STEP)
            found = slope.norm().item()
            direction = slope if found > 0 else torch.randn_like(slope)
        largest = max(largest, found)
    return largest
