"""SWAG: stochastic weight averaging, Gaussian (Maddox et al., 2019)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Batch, Data
from knowable.core.model.model import Model
from knowable.core.model.structured_normal import DiagonalPlusLowRank
from knowable.core.network.params import Buffers, Layout, Params, index_params
from knowable.core.posterior.normal import NormalPosterior
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import LITTLE_WORK, Trained, TrainingResult, TrainingSettings
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.point.collapsed_noise import noise_checked
from knowable.inference.point.point import (
    PointObjective,
    fit_point,
    fresh_start,
    means_for,
    one_atom,
    refuse_learned_prior,
    training_diagnostics,
)
from knowable.inference.point.trained import TrainedWeights, given_point, without_spread

_STEPS = 5_000  # at the constant rate, about, where the number of snapshots is not given
_FEWEST, _MOST = 20, 100  # snapshots, likewise
_BATCHES = 10  # in an epoch, at least: without gradient noise the iterates do not move
_STATISTICS_ROWS = 256  # on which running statistics are computed: more than a batch of training, whose noise they see
_ADVICE = "Train the network longer, give a smaller rate=, or leave rate and prior out and the spread is reduced."
_LEAST_VARIANCE = 1e-16  # of a weight that never moved


@dataclass(frozen=True, repr=False, kw_only=True)
class SWAG(Trained, Method):
    r"""A normal distribution with the moments of the weights that SGD visits once it has reached a mode.

    .. math:: \bar\theta = \frac1T \sum_i \theta_i, \qquad
        \Sigma = \tfrac12 \Big( \mathrm{diag}\big(\overline{\theta^2} - \bar\theta^2\big)
        + \frac{1}{K - 1} \hat D \hat D^\top \Big)

    First the mode is found as by :class:`~knowable.inference.point.point.MAP`. Then SGD goes on at a constant rate, and
    at the end of every epoch its weights go into the moments; the columns of D̂ are the last K deviations from the
    running mean. The variance of SGD's iterates depends on its rate and on the batch: the default rate is the one at
    which their distribution is nearest to the posterior, as far as that is stable. It remains SGD's distribution and
    not the posterior: nearly isotropic where the posterior is not. Where the iterates leave the neighbourhood of the
    mode, SGD goes back with half the rate and a warning; a rate that you set is used as it is.

    Draws of a network with batch normalisation get running statistics of their own, computed on a sample of 256
    training rows, which the posterior keeps and saves.

    Args:
        epochs: Passes over the data to find the mode; None stops when the objective has converged.
        learning_rate: Step size while finding the mode; None chooses it from the number of parameters.
        batch_size: Rows per step, in both phases; None takes all rows up to 1,024 and 128 beyond, and in the second
            phase at most a tenth of the rows.
        training: Optimiser, schedule, patience and accumulation while finding the mode; gradient clipping and
            divergence in both phases: ``kn.Training(...)``.
        rank: Number K of deviations in the low-rank part; 0 keeps the diagonal alone, which then is not halved.
        snapshots: Number T of epochs at the constant rate; None: from 20 to 100, to make about 5,000 steps.
        rate: Constant learning rate of SGD with momentum 0.9; None chooses it, see :func:`constant_rate`.
        start: ``"map"``, ``"network"`` (the network is already trained), or a fitted posterior, to begin at its mean.
            SGD goes on training these weights: with a network that was stopped early, give ``validation``. Where
            neither prior nor rate is given, the weights are then taken back, all by the same share of the way, until
            the training rows are predicted as well as at the start (or to where validation rows are predicted best).
            ``diagnostics`` hold the share, and the NLL beside the network's.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.SWAG(epochs=200, snapshots=30).fit(model, (x, 2 * x))
        >>> posterior.predict(x).mean.shape
        torch.Size([40, 1])
    """

    family = "ensembles"
    summary = "a normal with the moments of the weights that SGD visits around a mode"
    references = ("maddox2019", "mandt2017")
    supports_row_weights = True

    rank: int = 20
    snapshots: int | None = None
    rate: float | None = None
    start: str | Posterior = "map"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank, at_least=0)
        if self.rank == 1:
            raise InvalidArgument("rank must be 0 or at least 2, got 1: a single deviation has no spread.")
        if self.snapshots is not None:
            check_count("snapshots", self.snapshots, at_least=2)
        if self.rate is not None:
            check_number("rate", self.rate, above=0)
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(f"start must be 'map', 'network' or a posterior, got {type(self.start).__name__}.")
            check_choice("start", self.start, ("map", "network"))

    def _fit(self, job: FitJob) -> Posterior:
        """Find the mode and follow SGD around it. Interrupted before there are two snapshots, it gives that point."""
        model, rows, seed = job.model, job.rows, job.seed
        refuse_learned_prior(self, model)
        first = self._mode(job)
        if first.diagnostics.interrupted:
            return without_spread(first, "before the mode was found")
        given = model.with_fixed({name: first.mean()[name] for name in model.point_names}, first.buffers)
        given = given.starting_at(first.mean())
        objective = SWAGObjective(given, rows.size, self.rank)
        try:
            settings = self._around_the_mode(given, rows, seed)
            if self.rate is None:
                batch_size = settings.rows_per_step(rows.size)
                most = batches_for_rate(given, rows, batch_size, settings.epochs or 0)
                objective.lowest = lowest_log_likelihood(given, rows, batch_size, seed=seed, most=most)
        except KeyboardInterrupt:
            return without_spread(first, "before the first snapshot")
        around = job.part("swag", model=given, validation=None, seed=derive_seed(seed, "swag"))
        result = train(objective, rows, settings, **around.options)
        points = {name: first.mean()[name] for name in model.point_names}
        if objective.count < 2:
            now = {**points, **{name: value.detach() for name, value in objective.params().items()}}
            diagnostics = training_diagnostics(self, model, result, now, {"snapshots": float(objective.count)})
            point = one_atom(model, now, buffers=objective.net_buffers, seed=seed, diagnostics=diagnostics)
            return without_spread(point, "before the second snapshot", interrupted=result.interrupted)
        whole = self._posterior(model, given, rows, points, objective, result, seed)
        if self.start == "map":
            return noise_checked(whole, job, self._mode)
        return noise_checked(self._beside(job, first, whole), job, None, start=fresh_start(model, seed, 1)[0])

    def _beside(self, job: FitJob, first: Posterior, whole: SWAGPosterior) -> SWAGPosterior:
        """Weights that came from elsewhere: the posterior beside them, and nearer to them where it does harm."""
        trained, posterior = TrainedWeights.of(job, first), whole
        if self.rate is None and not job.model.prior_given:

            def make(share: float) -> SWAGPosterior:
                return whole.towards(first.mean(), share)

            share = trained.best(make, [0.5 ** (0.5 * number) for number in range(16)])
            posterior = make(share)
            posterior.diagnostics = replace(whole.diagnostics, terms={**whole.diagnostics.terms, "share": share})
        trained.compared(posterior, _ADVICE)
        return posterior

    def _mode(self, job: FitJob) -> Posterior:
        """Where to begin, as a posterior."""
        model = job.model
        if isinstance(self.start, Posterior):
            means = means_for("start", model, self.start)
            return one_atom(model, means, buffers=self.start.buffers, seed=job.seed)
        if self.start == "network":
            return given_point(job, "network")
        with share_of_time(0.5):
            return fit_point(job.part("mode", label=f"{type(self).__name__}, mode"), self.training_settings())

    def _around_the_mode(self, model: Model, rows: Data, seed: int) -> TrainingSettings:
        """Settings of SGD at the constant rate."""
        batch_size = self.batch_size or min(
            self.training_settings().rows_per_step(rows.size), max(2, rows.size // _BATCHES)
        )
        per_epoch = rows.batches_per_epoch(batch_size)
        snapshots = self.snapshots or min(_MOST, max(_FEWEST, round(_STEPS / per_epoch)))
        most = batches_for_rate(model, rows, batch_size, snapshots)
        rate = self.rate or constant_rate(model, rows, batch_size, seed=seed, most=most)
        return TrainingSettings(
            epochs=snapshots, learning_rate=rate, batch_size=batch_size, schedule="constant",
            training=replace(self.training, optimiser="sgd", scheduler=None, warmup=0, patience=20, accumulate=1),
        )  # fmt: skip

    def _posterior(
        self, model: Model, given: Model, rows: Data, points: Params, objective: SWAGObjective, result: TrainingResult,
        seed: int,
    ) -> SWAGPosterior:  # fmt: skip
        terms = {"snapshots": float(objective.count)}
        loc, diagonal, factor = objective.moments()
        objective.snapshots = []  # they are in the factor
        mean, inputs, buffers = objective.layout.views(loc), None, objective.net_buffers
        if given.network.statistics_names:  # rows to compute running statistics on, and those of the mean weights
            inputs = (rows.kept or rows).some(_STATISTICS_ROWS, seed=seed)[0]
            buffers = given.network.statistics(given.network_params(mean), inputs, buffers)
        normal = DiagonalPlusLowRank.of_covariance(objective.layout, loc, diagonal, factor)
        return SWAGPosterior.of(
            model, normal, inputs=inputs, points=points, buffers=buffers, seed=seed,
            diagnostics=training_diagnostics(self, model, result, {**points, **mean}, terms),
        )  # fmt: skip


class SWAGObjective(PointObjective):
    """The negative log joint of one network, and the moments of its weights at the ends of epochs.

    Attributes:
        count: How many snapshots are in the moments, a tensor.
        centre: Their mean, ``(D,)``.
        squares: The sum of squared distances from it, ``(D,)``.
        snapshots: The last ``rank`` deviations from the mean as it was at the time, each ``(D,)``.
        lowest: The log likelihood below which SGD has left the mode, where that is watched.
    """

    remedy = "Standardise the data, give a smaller rate=, or clip the gradient: training=kn.Training(clip=1.0)."
    lowest: float = -math.inf

    def __init__(self, model: Model, size: int, rank: int):
        super().__init__(model, size, use_prior=True)
        start = model.params()
        self.rank, self.layout = rank, Layout.of({name: start[name] for name in model.random_names})
        self.count = torch.zeros((), dtype=torch.int64)
        self.centre, self.squares = torch.zeros((2, self.layout.size), dtype=model.dtype, device=model.device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, the moments included."""
        own = {"count": self.count, "centre": self.centre, "squares": self.squares}
        return {**super().tensors(), **{f"swag.{name}": value for name, value in own.items()}}

    def fault(self, record: dict[str, float]) -> str:
        """Whether the steps of a record were too far from the mode."""
        return "SGD left the mode" if record["log_likelihood"] < self.lowest else ""

    def end_of_epoch(self) -> None:
        """Take the weights into the moments (Welford's update, which loses no digits)."""
        with torch.no_grad():
            flat = self.layout.flatten(self.params())
            self.count += 1
            away = flat - self.centre
            self.centre += away / self.count
            self.squares += away * (flat - self.centre)
            if self.rank:
                self.snapshots = [*self.snapshots, flat.sub_(self.centre)][-self.rank :]

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean ``(D,)``, and diagonal ``(D,)`` and factor F ``(D, K)`` of the covariance diag + F Fᵀ."""
        variance, kept = self.squares / self.count, len(self.snapshots)
        if kept < min(int(self.count), self.rank):
            raise InvalidArgument(
                "checkpoint was written by an earlier version, which kept the last deviations in another way, and is "
                "too near its end for new ones. Delete it and fit again."
            )
        share = 0.5 if kept else 1.0
        factor = torch.stack(self.snapshots).T if kept else self.centre.new_zeros((self.layout.size, 0))
        factor = factor.mul_((share / max(1, kept - 1)) ** 0.5)
        return self.centre.clone(), (share * variance).clamp_min(_LEAST_VARIANCE), factor


# --- the constant learning rate --------------------------------------------------------------------------------------

MOMENTUM = 0.9  # of the training loop's SGD
_RATE_BATCHES, _FEWEST_BATCHES = 50, 4  # whose gradients are compared, at most and at least
_STEPS_PER_BATCH = 100  # of the run that follows, for each of them, so that the search takes less than a tenth of it
_GRADIENTS_PER_BATCH = 8
_FIRST_ITERATIONS, _FEWEST_ITERATIONS = 20, 5  # of the power method on the first batch
_MORE_ITERATIONS = 3  # on each of the others, which begins where the one before it ended
_CHANCE = 20.0  # nats, see lowest_log_likelihood
_STEP = 1e-2  # length of the finite difference


def batches_for_rate(model: Model, rows: Data, batch_size: int, epochs: int) -> int:
    """How many batches are compared before a run of so many epochs: few where it is short and the network large."""
    each = batch_size * _GRADIENTS_PER_BATCH * sum(value.numel() for value in model.params().values())
    affordable = max(epochs * rows.batches_per_epoch(batch_size) // _STEPS_PER_BATCH, LITTLE_WORK // each)
    return min(_RATE_BATCHES, max(_FEWEST_BATCHES, affordable))


def constant_rate(model: Model, rows: Data, batch_size: int, *, seed: int, most: int = _RATE_BATCHES) -> float:
    r"""A constant learning rate for SGD with momentum that begins at a mode.

    .. math:: \epsilon = \min\Big( (1 - \mu) \frac{2 D}{N\, \mathrm{tr}\, C},\; \frac{1}{2 \lambda_\max} \Big)

    The first is the rate at which the stationary distribution of SGD, whose gradients have the covariance C, is nearest
    to the posterior (Mandt, Hoffman and Blei, 2017); momentum μ makes a step 1 / (1 - μ) as long. The second keeps the
    steepest direction of the steepest batch, whose curvature is λ_max, well within what is stable,
    :math:`2 (1 + \mu) / \lambda_\max`. (Batches differ: of a network that gets nearly all rows right most are flat, and
    those with a row that it gets wrong are steep. The few rows that are left at the end of an epoch do not count.) Both
    are for the loss per example. In networks it is the second that counts. The model's initial values are the mode.
    At ``most`` so many batches are looked at; for a short run there are few, and fewer iterations.
    """
    probe = _Probe(model, rows, seed)
    with own_randomness(derive_seed(seed, "rate")):  # a loader may shuffle
        batches = rows.some_batches(batch_size, most, seed=seed)
        whole = [batch for batch in batches if len(batch[0]) == len(batches[0][0])]
        iterations = min(_FIRST_ITERATIONS, max(_FEWEST_ITERATIONS, most))
        noise, curvature = gradient_noise(probe, batches), largest_curvature(probe, whole, iterations)
    rate = 0.5 / max(curvature, 1e-12)
    return rate if noise == 0 else min(rate, (1.0 - MOMENTUM) * 2.0 * probe.dimension / (rows.size * noise))


def lowest_log_likelihood(model: Model, rows: Data, batch_size: int, *, seed: int, most: int = _RATE_BATCHES) -> float:
    """The log likelihood below which SGD has left the mode.

    Under a normal posterior of D weights the log joint is on average D / 2 below that of the mode, and so it is for SGD
    at the rate that brings it nearest. Twice that is too far, or a nat for each number to predict if that is less; and
    twenty more, which chance may take from a few rows. The log likelihood at the mode is estimated from some batches.
    """
    objective = PointObjective(model, rows.size, use_prior=True)
    with own_randomness(derive_seed(seed, "level")), torch.no_grad():
        batches = rows.some_batches(batch_size, most, seed=seed)
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
    total, squares = torch.zeros((), dtype=torch.float64, device=probe.start[0].device), 0.0
    for batch in batches:
        gradient = probe.gradient(batch).double()
        total, squares = total + gradient, squares + (gradient @ gradient).item()
    mean = total / len(batches)
    return max(0.0, squares - len(batches) * (mean @ mean).item()) / (len(batches) - 1)


def largest_curvature(probe: _Probe, batches: list[Batch], iterations: int = _FIRST_ITERATIONS) -> float:
    """The largest eigenvalue, in size, of the Hessians of the loss on batches, by the power method on differences."""
    direction = torch.randn_like(probe.gradient(batches[0]))
    largest = 0.0
    for number, batch in enumerate(batches):
        found = 0.0
        for _ in range(_MORE_ITERATIONS if number else iterations):
            unit = direction / direction.norm().clamp_min(1e-30)
            slope = (probe.gradient(batch, _STEP * unit) - probe.gradient(batch, -_STEP * unit)) / (2 * _STEP)
            found = slope.norm().item()
            direction = slope if found > 0 else torch.randn_like(slope)
        largest = max(largest, found)
    return largest


# --- The posterior of SWAG: a normal distribution whose draws have running statistics of their own -------------------


class SWAGPosterior(NormalPosterior):
    """A normal distribution with a diagonal and a low-rank part of its covariance.

    Where the network has batch normalisation, the running statistics of every draw are those that its weights have on
    ``inputs``, a sample of the training rows, which is kept and saved for that purpose.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale: Square roots of the diagonal D of the covariance, ``(D,)``.
        basis: Q, ``(D, k)``, with orthonormal columns.
        basis_variance: λ, ``(k,)``, above 0: the variance along each column of Q, in units of the diagonal.
        inputs: Rows on which running statistics are computed, or None where the network has none.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "swag"
    layout: Layout
    loc: Tensor
    scale: Tensor
    basis: Tensor
    basis_variance: Tensor

    def __init__(
        self, model: Model, layout: Layout, loc: Tensor, scale: Tensor, basis: Tensor, basis_variance: Tensor, *,
        inputs: Tensor | None = None, **common: Any,
    ):  # fmt: skip
        super().__init__(model, DiagonalPlusLowRank(layout, loc, scale, basis, basis_variance), **common)
        self.inputs = inputs

    def towards(self, params: Params, share: float) -> SWAGPosterior:
        r"""The distribution of :math:`\theta_0 + a (\theta - \theta_0)`: a ``share`` a of the way from ``params``."""
        away = self.layout.flatten(params)
        loc = away + share * (self.loc - away)
        normal = DiagonalPlusLowRank(self.layout, loc, share * self.scale, self.basis, self.basis_variance)
        buffers = self.buffers
        if self.inputs is not None:
            weights = self.model.network_params({**self.points, **self.layout.views(loc)})
            buffers = self.model.network.statistics(weights, self.inputs, buffers)
        return SWAGPosterior.of(
            self.model, normal, inputs=self.inputs, points=self.points, buffers=buffers, seed=self.seed,
            diagnostics=self.diagnostics,
        )  # fmt: skip

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """The running statistics of draws ``start`` to ``stop``."""
        if self.inputs is None:
            return {}
        network = self.model.network
        draws = self.model.network_params(self.draw_block(start, stop, samples, seed))
        each = [network.statistics(index_params(draws, k), self.inputs, self.buffers) for k in range(stop - start)]
        return {name: torch.stack([own[name] for own in each]) for name in network.statistics_names}

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() if self.inputs is None else {**super()._tensors(), "inputs": self.inputs}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> SWAGPosterior:
        return super()._from_tensors(model, tensors, inputs=tensors.get("inputs"), **common)
