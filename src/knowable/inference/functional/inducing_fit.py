"""The ELBO of layers known at inducing points, and the fit that maximises it: for one layer or several in a row."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knowable.core.method import FitJob
from knowable.core.model.data import Batch, Data
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import LogEvidence
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Trained, TrainingResult
from knowable.inference.functional.gaussian_process import log_prior_of_noise, own_points
from knowable.inference.functional.inducing import InducingLayer, best_values, inducing_points
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.functional.kernel_inputs import Body, Units, numbers_of
from knowable.inference.functional.kernels import Covariance, gpytorch
from knowable.inference.point.point import training_diagnostics
from knowable.inference.variational.method import estimates_of_all_rows, mean_and_error
from knowable.likelihoods import Gaussian

_NODES = 20  # of Gauss-Hermite quadrature
_FUNCTION_DRAWS = 8  # of several outputs, over which a log likelihood without a closed form is averaged
_SEEN = 10_000  # rows from which inducing points and units are taken
_ALL_ROWS, _BATCH = 2_048, 1_000  # rows that are all in one batch, and rows of a batch otherwise
_RATE = 0.01  # of Adam, where batches are not of all rows
_INNER_SPREAD = 1e-5  # of the layers in between: they begin as their mean (Salimbeni and Deisenroth, 2017)
_WIDEST = 30  # layers in between, unless another width is given
_VALIDATION_DRAWS = 16


class InducingObjective(Objective):
    r"""-ELBO / N of layers in a row; kernels, inducing points, noise and features are trained with it.

    Args:
        model: The model.
        size: Number of rows.
        shape: Of the network's output for a row.
        layers: The first takes the features, the last gives the functions of the likelihood.
        units: In which the first layer sees features, and functions are.
        points: The likelihood's own parameters that are learned.
        body: The network that makes features; None: the inputs are.
        body_params: Its parameters that are trained.
        held: Its other parameters.
        buffers: Its buffers.
        draws: Of the layers in between.
    """

    remedy = "Standardise the data, lower learning_rate, or take another kernel."

    def __init__(
        self, model: Model, size: int, shape: torch.Size, layers: Sequence[InducingLayer], units: Units, points: Params,
        *,
        body: Body | None = None, body_params: Params | None = None, held: Params | None = None,
        buffers: Params | None = None, draws: int = 1,
    ):  # fmt: skip
        super().__init__(model, size)
        self.shape = shape
        self.layers, self.units, self.body, self.draws, self.solved = nn.ModuleList(layers), units, body, draws, False
        first = {**points, **(body_params or {})}
        self.names = list(first)
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in first.values()])
        self.held = held or {}
        self.net_buffers = {} if buffers is None else buffers

    def solve_at_every_step(self, solved: bool) -> None:
        """Whether m and S are set to their best values, and so are not trained."""
        self.solved = solved
        self.last.mean.requires_grad_(not solved)
        self.last.root.requires_grad_(not solved)

    @property
    def last(self) -> InducingLayer:
        """The layer of the functions that the likelihood sees."""
        return self.layers[-1]  # type: ignore[return-value]

    def point_params(self) -> Params:
        """What is estimated as a point besides the kernels, by name."""
        return {**dict(zip(self.names, self.values, strict=True)), **self.held}

    def seen(self, x: Any, *, training: bool = False) -> Tensor:
        """What the first layer sees of inputs."""
        if self.body is None:
            return self.units.seen(numbers_of(x, "A Gaussian process"))
        return self.units.seen(self.body(self.point_params(), x, self.net_buffers, training=training))

    def forward(self, x: Any, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        fit = self.expected_log_likelihood(self.seen(x, training=True), y, points, weights).mean()
        kl = torch.stack([layer.kl() for layer in self.layers]).sum()  # type: ignore[operator]
        prior = self.log_prior(points)
        terms = {"expected_log_likelihood": fit.detach() * self.size, "kl": kl.detach(), "log_prior": prior.detach()}
        return -fit + (kl - prior) / self.size, terms

    def log_prior(self, points: Params) -> Tensor:
        """Log priors of kernels, noise, and the network's weights."""
        total = log_prior_of_noise(self.model, points, self.units)
        for layer in self.layers:
            total = total + layer.covariance()  # type: ignore[operator]
        return total + log_prior_of_weights(self.model, points)

    def expected_log_likelihood(self, seen: Tensor, y: Tensor, points: Params, weights: Tensor | None) -> Tensor:
        """Of each row, ``(rows,)``, in expectation over the last layer and a few draws of those before."""
        draws = self.draws if len(self.layers) > 1 else 1
        hidden = seen.repeat(draws, 1)
        for layer in list(self.layers)[:-1]:
            mean, variance = layer.marginal(hidden)  # type: ignore[operator]
            hidden = mean + variance.sqrt() * torch.randn_like(mean)
        a = self.last.weights(hidden)
        if self.solved:
            with torch.no_grad():
                self.last.set(*best_values(*self._told(a, y, points, weights)))
        mean, variance = self.last.marginal(hidden, a)
        mean, variance = self.units.functions(mean), variance * self.units.y_scale.square()
        rows = y.repeat(draws, *(1,) * (y.dim() - 1))
        mean, variance = (each.reshape(-1, *self.shape) for each in (mean, variance))
        counts = None if weights is None else weights.repeat(draws)
        if isinstance(self.model.likelihood, Gaussian):
            found = self.model.score(mean, rows, points) - self._loss_by_variance(variance, rows, points)
        elif mean[0].numel() == 1:
            nodes, shares = (torch.as_tensor(each).to(mean) for each in np.polynomial.hermite_e.hermegauss(_NODES))
            each = [self.model.score(mean + node * variance.sqrt(), rows, points) for node in nodes]
            found = torch.einsum("k,kn->n", shares / shares.sum(), torch.stack(each))
        else:
            count = _FUNCTION_DRAWS if len(self.layers) == 1 else 1
            noise = torch.randn((count, *mean.shape), dtype=mean.dtype, device=mean.device)
            each = [self.model.score(mean + one * variance.sqrt(), rows, points) for one in noise]
            found = torch.stack(each).mean(0)
        found = found if counts is None else counts * found
        return found.reshape(draws, -1).mean(0)

    def _loss_by_variance(self, variance: Tensor, y: Tensor, points: Params) -> Tensor:
        """What the expected log likelihood of normal noise loses by the functions' variance, ``(rows,)``."""
        noise = self.noise(points, variance).square()
        share = variance / noise
        counted = self.model.likelihood.counted(self.model.align(y, variance))
        share = share if counted is None else share * counted
        return 0.5 * share.flatten(1).sum(1)

    def noise(self, points: Params, like: Tensor) -> Tensor:
        """Standard deviations of normal noise."""
        own = self.model.likelihood_params({**self.model.params(), **points})
        return self.model.likelihood.noise_scale(own, like=like)  # type: ignore[attr-defined]

    @property
    def normal(self) -> bool:
        """Whether the best m and S are known in closed form."""
        likelihood = self.model.likelihood
        return len(self.layers) == 1 and isinstance(likelihood, Gaussian) and not likelihood.missing

    @property
    def deterministic(self) -> bool:
        """Whether the expected log likelihood is computed without draws."""
        return len(self.layers) == 1 and (isinstance(self.model.likelihood, Gaussian) or self.shape.numel() == 1)

    def is_smooth(self, x: Any, y: Tensor, weights: Tensor | None = None) -> bool:
        """Without draws, and where the network computes in training what it does in evaluation."""
        if self.body is None or not self.deterministic:
            return self.deterministic
        return self.body.is_steady(self.point_params(), x, self.net_buffers)

    def _told(self, a: Tensor, y: Tensor, points: Params, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """What a batch with normal noise says of the whitened values: the arguments of :func:`best_values`."""
        values = (y.double().reshape(len(y), -1) - self.units.y_shift) / self.units.y_scale
        values = (values - self.last.prior_mean(a.T[:, :0])).T  # (outputs, rows)
        noise = (self.noise(points, values.new_zeros(())).double() / self.units.y_scale).square()  # (outputs,)
        counted = a if weights is None else a * weights
        inner = (counted @ a.T).unsqueeze(0)
        precision = inner / noise[0] if (noise == noise[0]).all() else inner / noise.view(-1, 1, 1)
        return precision, (values @ counted.T) / noise.unsqueeze(1)

    def solve(self, rows: Data) -> None:
        """Set m and S to their best values for all rows: one pass over the data."""
        with torch.no_grad():
            points = self.point_params()
            total: tuple[Tensor, Tensor] | None = None
            for x, y, *weights in rows:
                a = self.last.weights(self.seen(x))
                told = self._told(a, y, points, *(weights or [None]))
                total = told if total is None else (total[0] + told[0], total[1] + told[1])
            assert total is not None
            self.last.set(*best_values(*total))

    def log_evidence(self, rows: Data, seed: int, epochs: float) -> LogEvidence:
        """The ELBO over all rows, without priors of hyperparameters, and its Monte Carlo error."""

        def total(batches: Iterable[Batch]) -> float:
            points = self.point_params()
            parts = (self.expected_log_likelihood(self.seen(x), y, points, *(w or [None])) for x, y, *w in batches)
            return sum(part.sum().item() for part in parts)

        kept, self.solved = self.solved, False
        with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
            kl = sum(layer.kl().item() for layer in self.layers)  # type: ignore[operator]
            held = rows.held
            if self.deterministic and held is not None:
                fit, error = total(held), 0.0
            else:
                fit, error = mean_and_error(estimates_of_all_rows(total, rows, seed, epochs, self.dimension))
        self.solved = kept
        return LogEvidence(fit - kl, "bound", error)

    def posterior(self, **common: Any) -> InducingPosterior:
        """The present distribution over functions."""
        layers: Any = copy.deepcopy(list(self.layers))
        return InducingPosterior(
            self.model, layers, self.units, self.body,
            points={name: value.to(self._dtype_of(name)) for name, value in self.point_params().items()},
            buffers=self.net_buffers, **common,
        )  # fmt: skip

    def _dtype_of(self, name: str) -> torch.dtype:
        return self.model.dtype if name.startswith(LIKELIHOOD_PREFIX) else self.point_params()[name].dtype

    def predictive_log_likelihood(self, x: Any, y: Tensor) -> Tensor:
        """Log density of held-out rows."""
        return self.posterior()._predict(x, _VALIDATION_DRAWS, 0, None).log_prob(y)


def log_prior_of_weights(model: Model, points: Params) -> Tensor:
    """Log prior of the weights of the network that are trained, under the model's prior."""
    total = torch.zeros((), dtype=torch.float64)
    for name, value in points.items():
        if name in model.names and not name.startswith(LIKELIHOOD_PREFIX):
            prior = model.prior.bound(name, {**model.params(), **points})
            total = total if prior is None else total + prior.log_prob(value).sum()
    return total


def fit_inducing(
    job: FitJob, method: Trained, *, kernel: Any, inducing: int, mean: str = "constant", layers: int = 1,
    width: int | None = None, draws: int = 1, body: Body | None = None,
) -> InducingPosterior:  # fmt: skip
    """Maximise the ELBO of so many layers over the features of ``body``, or over the inputs themselves."""
    gpytorch()
    model, rows = job.model, job.rows
    with own_randomness(derive_seed(job.seed, "start")):  # a loader may draw
        x, y, *weights = rows.some(_SEEN, seed=job.seed)
        counts = weights[0].double() if weights else torch.ones(len(x), dtype=torch.float64, device=model.device)
        x, y, counts = x[counts > 0], y[counts > 0], counts[counts > 0]
        trained, held, buffers = ({}, {}, model.buffers()) if body is None else body.start(model, x[:8])
        with torch.no_grad():
            seen = numbers_of(x, type(method).__name__) if body is None else body({**trained, **held}, x, buffers)
    shape = model.probe(x).shape[1:]
    standardise = isinstance(kernel, str) or layers > 1
    units = Units.of(seen, y, counts, model, shape.numel(), standardise=standardise, centre=mean == "constant")
    made = _layers(units.seen(seen), shape.numel(), kernel, inducing, mean, layers, width, job.seed)
    settings = method.training_settings()
    wanted = settings.batch_size or (rows.size if rows.size <= _ALL_ROWS and layers == 1 else _BATCH)
    whole = rows.in_memory and wanted >= rows.size
    settings = method.training_settings(
        batch_size=wanted, learning_rate=settings.learning_rate or (None if whole and layers == 1 else _RATE)
    )
    objective = InducingObjective(
        model, rows.size, shape, made, units, own_points(model, units, y), body=body, body_params=trained, held=held,
        buffers=buffers, draws=draws,
    )  # fmt: skip
    objective.solve_at_every_step(whole and objective.normal)
    if body is None and rows.in_memory and rows.size <= _SEEN and len(seen.unique(dim=0)) <= inducing:
        made[0].points.requires_grad_(False)  # every row is one: they are where they are needed
    if any(value.requires_grad for value in objective.parameters()):
        result = train(objective, rows, settings, **job.options)
    else:
        result = TrainingResult([], 0, 0.0, True, False, "solved in closed form", 0.0)
    if objective.normal:
        with own_randomness(derive_seed(job.seed, "solve")):  # a loader may draw
            objective.solve(rows)
    evidence = objective.log_evidence(rows, job.seed, result.epochs)
    posterior = objective.posterior(seed=job.seed, log_evidence=evidence)
    terms = {"elbo": float(evidence), "inducing_points": float(len(made[0].points)), **made[-1].covariance.terms()}
    notes = rows.sample_notes
    params = {**model.params(), **{n: v.detach() for n, v in objective.point_params().items()}}
    posterior.diagnostics = training_diagnostics(method, model, result, params, terms, notes)  # type: ignore[arg-type]
    return posterior


def _layers(
    seen: Tensor, outputs: int, kernel: Any, inducing: int, mean: str, count: int, width: int | None, seed: int
) -> list[InducingLayer]:
    """Layers that begin as the last one alone would: those before pass on what they see, or its main directions."""
    points, made = inducing_points(seen, inducing, seed), []
    for _ in range(count - 1):
        size = points.shape[1]
        narrow = min(size, _WIDEST if width is None else width)
        slope = torch.eye(size, dtype=seen.dtype, device=seen.device)
        if narrow < size:
            slope = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][:narrow].T.contiguous()
            narrow = slope.shape[1]  # no more than there are rows
        made.append(
            InducingLayer(
                Covariance.of(kernel, size).to(points.device), points, narrow, spread=_INNER_SPREAD, slope=slope
            )
        )
        points, seen = points @ slope, seen @ slope
    last = InducingLayer(Covariance.of(kernel, points.shape[1]).to(points.device), points, outputs)
    if mean == "zero" and last.constant is not None:
        last.constant.requires_grad_(False)
    return [*made, last]
