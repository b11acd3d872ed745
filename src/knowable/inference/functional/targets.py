"""What targets say of functions that are a Gaussian process: numbers, labels as numbers, logits of labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.likelihood import SoftmaxInformation
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import NOT_BAYES, LogEvidence
from knowable.core.support.randomness import own_randomness
from knowable.errors import Diverged, InvalidArgument, InvalidData, Unsupported
from knowable.inference.functional.normal_functions import (
    Factors,
    Information,
    laplace_evidence,
    left_out,
    most_probable_functions,
    normal_evidence,
)
from knowable.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from knowable.likelihoods.categorical import average_log_softmax

_NOISE = "noise"  # how the names of noises end
_LABEL_NOISE = "label_noise"  # the logarithm of that of labels as numbers
_LOG_SCALES = (-4.0, 8.0)  # of scores, among which the best is looked for
_TOO_FAR = 1e12  # minus the log evidence where it cannot be computed
FARTHEST = 8.0
"""How far the logarithms of noise and scales may move, where nothing else is said."""
MEAN = "mean"  # of functions, where it is learned with the kernel


@dataclass(frozen=True)
class Solved:
    """The posterior at the training rows."""

    slope: Tensor  # K⁻¹ m, (outputs, N)
    information: Information
    message: str
    evidence: float | None = None
    scale: float = 1.0  # of function values, where they are scores
    settled: bool = True
    terms: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def log_evidence(self, kind: str) -> LogEvidence | None:
        """The evidence, where there is one."""
        return None if self.evidence is None else LogEvidence(self.evidence, kind)


@dataclass(frozen=True)
class Targets:
    """Targets under a likelihood, as a function of the kernel."""

    model: Model
    outputs: int  # of the network

    def start(self) -> Params:
        """Parameters that are learned besides the model's own."""
        return {}

    def evidence(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Tensor:
        """The log evidence, differentiable in the kernel and in ``points``."""
        raise NotImplementedError

    def solve(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Solved:
        """The posterior."""
        raise NotImplementedError


@dataclass(frozen=True)
class Numbers(Targets):
    """Numbers with normal noise, of functions shift + scale · g where g has the kernel (and the mean in ``points``)."""

    shift: Tensor | None = None  # (outputs,); none is 0
    scale: Tensor | None = None  # (outputs,); none is 1

    def evidence(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Tensor:
        value = normal_evidence(kernel, self.values(y, points), self.noise(points), weights)
        return value if self.scale is None else value - weights.sum() * self.scale.log().sum()

    def solve(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Solved:
        values, information = self.values(y, points), Information(weights / self.noise(points))
        evidence, factors = float(self.evidence(kernel, y, weights, points)), Factors(kernel, information)
        notes = ()
        if factors.jitter:
            notes = (
                f"The noise is below the rounding errors of the kernel: {factors.jitter:g} of the kernel's size was "
                f"added to it.",
            )
        return Solved(factors.solve(values), information, "solved in closed form", evidence, notes=notes)

    def values(self, y: Tensor, points: Params) -> Tensor:
        """Targets of g, ``(outputs, N)``."""
        values = y.double().flatten(1).T if y.dim() > 1 else y.double().unsqueeze(0)
        if self.shift is not None:
            values = values - self.shift.unsqueeze(1)
        if self.scale is not None:
            values = values / self.scale.unsqueeze(1)
        return values - points[MEAN].unsqueeze(1) if MEAN in points else values

    def noise(self, points: Params) -> Tensor:
        """Variances of the noise of g, ``(outputs, 1)`` or ``(1, 1)``."""
        like = torch.zeros((), dtype=torch.float64, device=self.model.device)
        own = self.model.likelihood_params({**self.model.params(), **points})
        scale = self.model.likelihood.noise_scale(own, like=like)  # type: ignore[attr-defined]
        variance = scale.double().square().reshape(-1, 1)
        if self.scale is None:
            return variance
        found = variance / self.scale.square().unsqueeze(1)
        return found[:1] if (found == found[0]).all() else found


@dataclass(frozen=True)
class LabelsAsNumbers(Targets):
    """Labels as numbers with normal noise, and a scale by which scores are logits."""

    def start(self) -> Params:
        return {_LABEL_NOISE: torch.tensor(-1.0, dtype=torch.float64, device=self.model.device)}

    def evidence(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Tensor:
        log_noise = points[_LABEL_NOISE]
        prior = -0.5 * ((log_noise + 1) / 2).square()
        return normal_evidence(kernel, self._values(y), self._noise(points), weights) + prior

    def solve(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Solved:
        values, noise = self._values(y), self._noise(points)
        information = Information(weights / noise)
        mean, variance = left_out(kernel, values, noise, weights)
        labels = y.reshape(len(y)).long()
        scale, score = _calibrated(mean.T, variance[0], labels, weights)
        return Solved(
            Factors(kernel, information).solve(values), information, "solved in closed form", scale=scale,
            terms={"left_out_log_likelihood": score, "score_scale": scale},
            notes=(
                f"Labels were fitted as numbers with normal noise, and scores calibrated on rows left out: {NOT_BAYES} "
                "of the likelihood. labels='laplace' approximates that one.",
            ),
        )  # fmt: skip

    def _values(self, y: Tensor) -> Tensor:
        """Of two labels ½ and -½; of C one score for each, which sum up to 0."""
        labels = y.reshape(len(y)).long()
        if isinstance(self.model.likelihood, Bernoulli):
            return labels.double().unsqueeze(0) - 0.5
        return torch.nn.functional.one_hot(labels, self.outputs).double().T - 1 / self.outputs

    def _noise(self, points: Params) -> Tensor:
        return (2 * points[_LABEL_NOISE]).exp().reshape(1, 1)


def _calibrated(mean: Tensor, variance: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, float]:
    """The scale of scores under which labels are most probable, and their log likelihood.

    ``mean`` are scores ``(N, C)`` of rows left out, or ``(N, 1)`` of label 1, and ``variance`` those of each row.
    """
    if mean.shape[1] == 1:  # the logit of label 1 is the difference of two
        mean, variance = (
            torch.cat([torch.zeros_like(mean), mean], 1),
            variance.unsqueeze(1) * variance.new_tensor([0, 1.0]),
        )
    else:
        variance = variance.unsqueeze(1).expand(mean.shape)

    def cost(log_scale: float) -> float:
        scale = math.exp(log_scale)
        log_probs = average_log_softmax(scale * mean, (scale**2 * variance).diag_embed())
        return -float((weights * log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)).sum())

    found: Any = minimize_scalar(cost, bounds=_LOG_SCALES, method="bounded", options={"xatol": 1e-3})
    return math.exp(found.x), -float(found.fun)


@dataclass(frozen=True)
class Logits(Targets):
    """Labels or counts, by Laplace's approximation."""

    def evidence(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Tensor:
        score, curvature, start = self._functions(y, weights)
        mode = most_probable_functions(kernel, score, curvature, start)
        return laplace_evidence(kernel, score, curvature, mode.values)

    def solve(self, kernel: Tensor, y: Tensor, weights: Tensor, points: Params) -> Solved:
        score, curvature, start = self._functions(y, weights)
        mode = most_probable_functions(kernel, score, curvature, start)
        evidence = float(laplace_evidence(kernel, score, curvature, mode.values))
        return Solved(
            mode.slope, curvature(mode.values), f"Laplace's approximation after {mode.steps} steps of Newton's method",
            evidence, settled=mode.settled,
        )  # fmt: skip

    def _functions(self, y: Tensor, weights: Tensor) -> tuple[Any, Any, Tensor]:
        likelihood = self.model.likelihood
        own = self.model.likelihood_params(self.model.params())
        start = torch.zeros((self.outputs, len(y)), dtype=torch.float64, device=self.model.device)
        target = likelihood.align(y.double() if y.is_floating_point() else y, start.T)

        def score(f: Tensor) -> Tensor:
            return (weights * likelihood.log_prob(f.T, target, own)).sum()

        def curvature(f: Tensor) -> Information:
            found = likelihood.information(f.T, own)
            if isinstance(found, SoftmaxInformation):
                return Information((weights.unsqueeze(1) * found.probs).T.clamp_min(1e-12), labels=True)
            return Information((weights.unsqueeze(1) * found.diagonal()).T)

        return score, curvature, start


def targets_of(
    method: Method, model: Model, outputs: int, *, as_numbers: bool = False, **units: Tensor | None
) -> Targets:
    """What the model's likelihood says of functions; ``units`` are those of :class:`Numbers`."""
    likelihood = model.likelihood
    if isinstance(likelihood, Gaussian) and not likelihood.missing:
        return Numbers(model, outputs, **units)
    plain = isinstance(likelihood, Bernoulli) or (
        isinstance(likelihood, Categorical) and likelihood.ignore_index is None
    )
    if plain and as_numbers:
        return LabelsAsNumbers(model, outputs)
    if plain or type(likelihood) is Poisson:
        return Logits(model, outputs)
    raise Unsupported(
        f"{type(method).__name__} is for Gaussian(), Categorical(), Bernoulli() and Poisson() likelihoods without "
        f"missing targets, got {likelihood!r}. SparseGaussianProcess takes any."
    )


def counted_rows(job: FitJob, most: int, advice: str) -> tuple[Any, Tensor, Tensor]:
    """Inputs, targets and weights of all rows that count; more than ``most`` are refused with ``advice``."""
    if job.rows.size > most:
        raise InvalidArgument(
            f"{type(job.method).__name__} would need a {job.rows.size:,} x {job.rows.size:,} kernel; max_rows is "
            f"{most:,}. Raise max_rows, fit fewer rows, or {advice}."
        )
    with own_randomness(job.seed):  # a loader may draw
        x, y, *weights = job.rows.tensors
    counts = weights[0].double() if weights else torch.ones(len(x), dtype=torch.float64, device=job.model.device)
    kept = counts > 0
    if not kept.any():
        raise InvalidData("All rows have weight 0: there is nothing to fit.")
    return x[kept], y[kept], counts[kept]


# --- what is learned with them ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maximum:
    """Where the search for the largest evidence ended."""

    points: Params
    evaluations: int
    settled: bool  # or whether it came to the most evaluations that it may make
    at_limit: tuple[str, ...]  # names of those that went as far as they may


def maximise_evidence(
    evidence: Callable[[Tensor, Params], Tensor],
    rows: Callable[[Params, Tensor], Tensor],
    blocks: Sequence[Tensor],
    start: Params,
    hypers: list[str],
    *,
    evaluations: int = 80,
    farthest: float = FARTHEST,
    note: Callable[[int, float], None] = lambda count, value: None,
) -> Maximum:
    """The parameters that maximise the evidence, by L-BFGS.

    The kernel of all rows would not fit in memory with all that its gradient needs: first the evidence is derived in
    the kernel, then each block of its rows is computed once more, and derived in the hyperparameters.

    Args:
        evidence: A function of the kernel and the parameters.
        rows: The kernel between a block and all rows, at the hyperparameters.
        blocks: Inputs of all rows, in blocks.
        start: Where the parameters begin.
        hypers: Names of those that the kernel depends on.
        evaluations: How many may be made.
        farthest: How far each parameter may move.
        note: Called with the number of each evaluation and its value.
    """
    shapes = {name: value.shape for name, value in start.items()}
    first = torch.cat([value.detach().double().flatten() for value in start.values()])
    constant = None if hypers else torch.cat([rows(start, some) for some in blocks])

    def named(flat: Tensor) -> Params:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def value_and_slope(flat: Tensor) -> tuple[float, Tensor]:
        leaves = {name: part.clone().requires_grad_() for name, part in named(flat).items()}
        with torch.no_grad():
            matrix = torch.cat([rows(named(flat), some) for some in blocks]) if constant is None else constant
        matrix = matrix.detach().clone().requires_grad_()
        with torch.enable_grad():
            value = evidence(matrix, leaves)
            value.backward()
            if constant is None:
                assert matrix.grad is not None
                for some, slope in zip(blocks, matrix.grad.split([len(each) for each in blocks]), strict=True):
                    (rows(leaves, some) * slope).sum().backward()
        slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
        return float(value.detach()), torch.cat([slope.flatten() for slope in slopes])

    count = 0

    def cost(at: Any) -> tuple[float, Any]:
        nonlocal count
        count += 1
        try:
            value, slope = value_and_slope(torch.as_tensor(at).to(first))
        except (InvalidArgument, InvalidData, Unsupported, Diverged):  # a step too far: the line search comes back
            return _TOO_FAR, np.zeros(len(at))
        if not (math.isfinite(value) and slope.isfinite().all()):
            return _TOO_FAR, np.zeros(len(at))
        note(count, value)
        return -value, -slope.cpu().numpy()

    value_and_slope(first)  # what is wrong from the start is an error
    bounds = [(float(each) - farthest, float(each) + farthest) for each in first]
    options = {"maxiter": evaluations, "maxfun": evaluations, "ftol": 1e-7, "gtol": 1e-3}
    found: Any = minimize(cost, first.cpu().numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    best = named(torch.as_tensor(found.x).to(first))
    ends = []
    for name, value in best.items():
        moved = value - start[name].detach().double()
        if name.endswith(_NOISE):  # targets without any noise are no reason to doubt
            moved = moved.clamp_min(0.0)
        if moved.abs().max() > 0.999 * farthest:
            ends.append(name)
    return Maximum(best, count, found.status != 1, tuple(ends))
