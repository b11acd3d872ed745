r"""Recalibration: maps of a prediction under which held-out outcomes are as probable as it says.

A map changes what each posterior draw predicts. The result is again a mixture over the draws, so the split of its
uncertainty holds as it does for every prediction.

======================  ================================================================================================
``temperature``         :math:`p_{kc} \propto p_{kc}^{1/T}` of every draw k: one number for all classes (Guo et al.,
                        2017).
``vector``              :math:`p_{kc} \propto p_{kc}^{a_c} e^{b_c}`: two numbers for each class (Guo et al., 2017). Of
                        yes/no outcomes it is beta calibration (Kull et al., 2017).
``isotonic``            A rising step function for each class, one against the others (Zadrozny and Elkan, 2002), of the
                        averaged probabilities. Draws are moved alike until their average has them.
``scale``               :math:`y' = m + s (y - m)`: the distribution is stretched about its mean m, noise and doubt
                        alike; a number for each output.
======================  ================================================================================================

Parameters minimise the negative log likelihood of the averaged predictive, in double precision, with weak priors on
:math:`\log T`, :math:`\log s` and :math:`b_c` (standard normal) and on :math:`\log (a_c T)` (of scale 1/2), so that
classes that are never confused do not send them to infinity. What they gain is measured on rows that they were not
fitted to, by cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression, minimize
from torch import Tensor

from knowable.core.prediction.components import AffineComponents, CorrelatedNormal
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData, Unsupported

FOR_CLASSES, FOR_NUMBERS = ("temperature", "vector", "isotonic"), ("scale",)
FEWEST = {"none": 50, "temperature": 50, "scale": 50, "vector": 100, "isotonic": 500}
"""How many labels or numbers a method needs to be of use."""
FOLDS = 5  # of the cross-validation
_CLEARLY = 2.0  # standard errors; few rows that are very wrong decide, and the best of three is the luckiest
_VALUES_AT_ONCE = 500_000
_MOST_OUTPUTS = 100  # with a scale each
_SPREAD_OF_SLOPES = 0.5
_MOST_STEPS, _NEAR = 50, 1e-6  # to move draws to given averages

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Recalibration:
    """A fitted map of predictions.

    Attributes:
        method: ``"temperature"``, ``"vector"``, ``"isotonic"`` or ``"scale"``; ``"none"`` leaves predictions as they
            are, which ``"auto"`` chooses where no map is clearly better.
        values: Its parameters: ``temperature``; ``slope`` and ``shift`` of each class; ``knots`` and ``heights`` of the
            step functions; ``scale``.
        rows: How many held-out rows it was fitted to.
        outcomes: How many labels or numbers these have; more than rows where a row has several, such as pixels.
        nll_before: Mean negative log likelihood of a held-out label or number as it was predicted.
        nll_after: The same after recalibration, by cross-validation.
        standard_error: Of ``nll_after - nll_before``, over rows.
    """

    method: str
    values: Values
    rows: int
    outcomes: int
    nll_before: float
    nll_after: float
    standard_error: float

    def __call__(self, prediction: Any) -> Any:
        """The prediction recalibrated."""
        if self.method == "none":
            return prediction
        values = {name: value.to(prediction.samples.device) for name, value in self.values.items()}
        if self.method == "scale":
            return _stretched(prediction, values["scale"].to(prediction.components.mean.dtype))
        log_weights = prediction.log_weights.double()
        shape = prediction.draw_log_probs.movedim(2, -1).shape
        parts = [
            _moved(self.method, each, log_weights, values).to(prediction.log_mean_probs)
            for each in _draws_in_parts(prediction)
        ]
        return prediction.with_log_probs(torch.cat(parts, 1).view(shape).movedim(-1, 2))

    def __repr__(self) -> str:
        if self.method == "none":
            return f"none: no map was clearly better on {self.rows:,} rows, NLL {self.nll_before:.4g}"
        names = {"temperature", "scale"} & self.values.keys()
        numbers = "".join(f"={', '.join(f'{v:.4g}' for v in self.values[name].flatten()[:4])}" for name in names)
        more = ", ..." if names and self.values[self.method].numel() > 4 else ""
        change = self.nll_after - self.nll_before
        return (
            f"{self.method}{numbers}{more}, fitted to {self.rows:,} rows, NLL {self.nll_before:.4g} → "
            f"{self.nll_after:.4g} ({change:+.2g} ± {self.standard_error:.1g})"
        )


def fitted(prediction: Prediction, y: Tensor, method: str = "auto") -> Recalibration:
    """The map that fits outcomes ``y`` best.

    Args:
        prediction: The prediction of held-out rows.
        y: Their outcomes, as the likelihood takes them.
        method: ``"auto"`` compares ``"none"`` with ``"scale"`` for numbers, and with ``"temperature"`` and ``"vector"``
            for classes, by the negative log likelihood of rows that they were not fitted to. It takes the simplest one
            that is within two standard errors, of the paired difference, of the best.

    Raises:
        Unsupported: If the method is not for this kind of prediction, with the reason.
        InvalidData: If the rows do not suffice.
    """
    problem = _problem(prediction, y)
    known = FOR_CLASSES if isinstance(problem, _Labels) else FOR_NUMBERS
    if method == "auto":
        enough = isinstance(problem, _Labels) and len(problem.y) >= FEWEST["vector"] and len(problem.y.unique()) > 1
        tried = known[: 2 if enough else 1]
    elif method in known:
        tried = (method,)
    else:
        raise Unsupported(_WHY_NOT.get(method, f"method={method!r} is for numbers. For classes: {', '.join(known)}."))
    before = problem.nll(None)
    fits = [_fitted(problem, name) for name in tried]
    (name, values), after = _chosen([(("none", {}), before), *fits], problem) if method == "auto" else fits[0]
    change, error = problem.mean_and_error(after - before)
    start = problem.mean_and_error(before)[0]
    rows = len(problem.row.unique())
    return Recalibration(name, values, rows, len(problem.row), start, start + change, error)


_WHY_NOT = {
    "temperature": "method='temperature' is for classes. Numbers have method='scale'.",
    "vector": "method='vector' is for classes. Numbers have method='scale'.",
    "isotonic": (
        "method='isotonic' is for classes. For numbers it would change the mixture's distribution function, and "
        "nothing would be left of what each draw says: no aleatoric and epistemic part. Use method='scale'."
    ),
}


Fit = tuple[tuple[str, Values], Tensor]
"""A map by its name and its parameters, and the loss of each outcome."""


def _chosen(fits: list[Fit], problem: _Problem) -> Fit:
    """The first of the maps, from the simplest on, that the best is not clearly better than."""
    best = min(fits, key=lambda fit: problem.mean_and_error(fit[1])[0])
    for fit in fits:
        worse, error = problem.mean_and_error(fit[1] - best[1])
        if not worse > _CLEARLY * error:  # also where a single row has no error
            return fit
    return best


def _fitted(problem: Any, method: str) -> Fit:
    """The map fitted to all rows, and the loss of each outcome where it was fitted to other rows."""
    whole = problem.fit(method, None, None)
    rows = problem.row.unique()
    folds = min(FOLDS, len(rows))
    if folds < 2:
        return (method, problem.values(method, whole)), problem.nll((method, whole))
    fold_of_row = torch.zeros(int(problem.row.max()) + 1, dtype=torch.int64)
    fold_of_row[rows] = torch.randperm(len(rows), generator=generator_for(0, "folds")) % folds
    fold, after = fold_of_row[problem.row], torch.empty(len(problem.row), dtype=torch.float64)
    for k in range(folds):
        out = fold == k
        after[out] = problem.nll((method, problem.fit(method, ~out, whole)))[out]
    return (method, problem.values(method, whole)), after


def _problem(prediction: Prediction, y: Tensor) -> _Labels | _Numbers:
    if isinstance(prediction, ClassPrediction):
        return _Labels(prediction, y)
    if not isinstance(prediction, RegressionPrediction):
        raise Unsupported(
            f"A {type(prediction).__name__} cannot be recalibrated: its outcomes have one network and one density "
            f"together. Fit models of single outcomes to recalibrate them."
        )
    if prediction.components.discrete:
        raise Unsupported(
            "Predictions of counts cannot be recalibrated: stretched, they would not be of whole numbers. Counts that "
            "vary more than a Poisson distribution says are what the NegativeBinomial() likelihood is for."
        )
    return _Numbers(prediction, y)


class _Problem:
    """Held-out outcomes, and their loss under a map.

    Attributes:
        row: The row of each outcome, ``(M,)``.
    """

    row: Tensor

    def mean_and_error(self, each: Tensor) -> tuple[float, float]:
        """Mean over outcomes, and its standard error; outcomes of a row belong together."""
        _, row, counts = self.row.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, row, each)
        mean = (sums.sum() / counts.sum()).item()
        if len(counts) < 2:
            return mean, math.nan
        residuals = sums - mean * counts  # of a ratio of two sums
        return mean, (residuals.square().sum() * len(counts) / (len(counts) - 1)).sqrt().item() / counts.sum().item()


class _Labels(_Problem):
    def __init__(self, prediction: ClassPrediction, y: Tensor):
        before = prediction.log_mean_probs.movedim(1, -1)  # (B, ..., C)
        labels = y.long().reshape(before.shape[:-1])
        counted = prediction.counted(labels)
        chosen = torch.ones_like(labels, dtype=torch.bool) if counted is None else counted
        if not chosen.any():
            raise InvalidData("No label of held_out counts: all are to be ignored.")
        parts = [each.to(before).cpu() for each in _draws_in_parts(prediction)]
        self.log_probs = torch.cat(parts, 1)[:, chosen.flatten().cpu()]  # (K, M, C)
        self.log_weights = prediction.log_weights.double().cpu()
        self.y = labels[chosen].cpu()
        self.row = chosen.flatten(1).nonzero()[:, 0].cpu() if labels.dim() > 1 else chosen.nonzero()[:, 0].cpu()
        self.before = -_of_labels(before[chosen].double().cpu(), self.y)

    def fit(self, method: str, some: Tensor | None, start: Any) -> Any:
        """Parameters that fit some of the labels, as a vector, or as step functions."""
        weights = torch.ones(len(self.y), dtype=torch.float64) if some is None else some.double()
        classes = self.log_probs.shape[-1]
        if method != "temperature" and len(self.y.unique()) < 2:
            raise InvalidData(
                f"held_out has labels of class {self.y[0].item()} only: with method={method!r} each class has "
                f"parameters of its own. Pass rows of all classes, or use method='temperature'."
            )
        if method == "isotonic":
            return self._steps(weights)
        size = 1 if method == "temperature" else 1 + 2 * classes
        spread = torch.ones(size, dtype=torch.float64)
        spread[1 : 1 + classes] = _SPREAD_OF_SLOPES
        begin = torch.zeros(size, dtype=torch.float64) if start is None else start
        return _minimum(lambda theta: self._losses((method, theta), weights), begin, spread, weights.sum().item())

    def values(self, method: str, found: Any) -> Values:
        """The parameters by name."""
        if method == "isotonic":
            return {"knots": found[0], "heights": found[1]}
        if method == "temperature":
            return {"temperature": found[0].exp()}
        slope, shift = _slope_and_shift(found)
        return {"slope": slope, "shift": shift - shift.mean()}

    def nll(self, fit: tuple[str, Any] | None) -> Tensor:
        """The loss of every label, as predicted, or under a map."""
        if fit is None:
            return self.before
        if fit[0] == "isotonic":
            return -_of_labels(_on_steps(self._averaged(), *fit[1]).log(), self.y)
        with torch.no_grad():
            return torch.cat([each for _, each in self._parts(fit)])

    def _losses(self, fit: tuple[str, Tensor], weights: Tensor) -> Iterator[Tensor]:
        for place, each in self._parts(fit):
            yield (each * weights[place]).sum()

    def _parts(self, fit: tuple[str, Tensor]) -> Iterator[tuple[slice, Tensor]]:
        count = max(1, _VALUES_AT_ONCE // (self.log_probs.shape[0] * self.log_probs.shape[-1]))
        for first in range(0, len(self.y), count):
            place = slice(first, first + count)
            given = self.log_probs[:, place].double()
            if fit[0] == "temperature":
                moved = given * (-fit[1][0]).exp()
            else:
                slope, shift = _slope_and_shift(fit[1])
                moved = given * slope + shift
            each = _of_labels(moved.log_softmax(-1), self.y[place].expand(len(moved), -1))
            yield place, -(each + self.log_weights[:, None]).logsumexp(0)

    def _averaged(self) -> Tensor:
        return torch.tensordot(self.log_weights.exp(), self.log_probs.double().exp(), dims=1)

    def _steps(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        probs, chosen = self._averaged(), weights > 0
        steps = [
            _isotonic(probs[chosen, c].numpy(), (self.y[chosen] == c).double().numpy()) for c in range(probs.shape[1])
        ]
        longest = max(len(knots) for knots, _ in steps)
        knots, heights = (
            torch.from_numpy(np.stack([np.pad(each, (0, longest - len(each)), mode="edge") for each in of_classes]))
            for of_classes in zip(*steps, strict=True)
        )
        return knots, heights


class _Numbers(_Problem):
    def __init__(self, prediction: RegressionPrediction, y: Tensor):
        self.prediction = prediction
        mean = prediction.mean
        y = y.reshape(mean.shape).to(mean.device)
        counted = prediction.counted(y)
        self.chosen = torch.ones_like(y, dtype=torch.bool) if counted is None else counted
        self.y = y.where(self.chosen, mean)
        if not isinstance(prediction.components, CorrelatedNormal):
            self.y = self.y.double()
        self.row = self.chosen.reshape(len(y), -1).nonzero()[:, 0].cpu()
        std = prediction.std.where(prediction.std.isfinite(), torch.ones_like(mean))
        if (prediction.components.log_prob(mean - 1e4 * std.clamp_min(1e-12)) == -torch.inf).any():
            raise Unsupported(
                "Predictions of numbers that have a lower bound cannot be stretched about their mean: some of the "
                "probability would lie below the bound. Choose a likelihood whose noise has the right size."
            )
        each = mean.dim() == 2 and 1 < mean.shape[1] <= _MOST_OUTPUTS
        self.size = mean.shape[1] if each else 1

    def fit(self, method: str, some: Tensor | None, start: Any) -> Tensor:
        """Logarithms of the scales that fit some of the numbers."""
        weights = torch.ones(len(self.row), dtype=torch.float64) if some is None else some.double()
        begin = torch.zeros(self.size, dtype=torch.float64) if start is None else start
        return _minimum(
            lambda theta: iter([(self._losses(theta) * weights).sum()]),
            begin, torch.ones_like(begin), weights.sum().item(),
        )  # fmt: skip

    def values(self, method: str, found: Tensor) -> Values:
        """The scales."""
        return {"scale": found.exp() if self.size > 1 else found[0].exp()}

    def nll(self, fit: tuple[str, Tensor] | None) -> Tensor:
        """The loss of every number, as predicted, or under a map."""
        with torch.no_grad():
            return self._losses(torch.zeros(self.size, dtype=torch.float64) if fit is None else fit[1])

    def _losses(self, theta: Tensor) -> Tensor:
        scale = theta.exp() if self.size > 1 else theta[0].exp()
        moved = _stretched(self.prediction, scale.to(device=self.y.device, dtype=self.y.dtype))
        return -moved._log_mix(moved.components.log_prob(self.y))[self.chosen].double().cpu()


def _minimum(losses: Callable[[Tensor], Iterator[Tensor]], start: Tensor, spread: Tensor, count: float) -> Tensor:
    """Parameters of the smallest sum of losses, with normal priors of mean zero and scales ``spread``."""

    def value_and_gradient(given: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            theta = torch.from_numpy(given).clone().requires_grad_()
            penalty = 0.5 * (theta / spread).square().sum()
            penalty.backward()
            total = penalty.item()
            for each in losses(theta):
                each.backward()
                total += each.item()
        assert theta.grad is not None
        return total / count, theta.grad.numpy() / count

    settings = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 500}
    found = minimize(value_and_gradient, start.numpy(), jac=True, method="L-BFGS-B", options=settings)
    return torch.from_numpy(found.x)


def _of_labels(log_probs: Tensor, y: Tensor) -> Tensor:
    return log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def _slope_and_shift(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Of each class, from log T, the logarithms of slopes times T, and shifts."""
    classes = (len(theta) - 1) // 2
    return (theta[1 : 1 + classes] - theta[0]).exp(), theta[1 + classes :]


def _stretched(prediction: RegressionPrediction, scale: Tensor) -> RegressionPrediction:
    mean = prediction.mean
    components = AffineComponents(prediction.components, mean * (1 - scale), scale)
    within = None if prediction.within is None else prediction.within * scale.square()
    samples = mean + scale * (prediction.samples - mean)
    return RegressionPrediction(
        components, prediction.log_weights, within=within, samples=samples, missing=prediction.missing
    )


def _draws_in_parts(prediction: ClassPrediction) -> Iterator[Tensor]:
    """Log probabilities of draws in double precision, ``(K, some, C)``, labels of all rows one after the other.

    Where the average is known better than from the draws, in closed form, they are moved until they have it.
    """
    draws, average = prediction.draw_log_probs.movedim(2, -1), prediction.log_mean_probs.movedim(1, -1)
    size, classes, log_weights = len(draws), draws.shape[-1], prediction.log_weights.double()
    rows = max(1, _VALUES_AT_ONCE // (size * classes))
    draws, average = draws.reshape(size, -1, classes), average.reshape(-1, classes)
    for some, own in zip(draws.split(rows, 1), average.split(rows), strict=True):
        some = some.double()
        yield _with_average(some, log_weights, own.double().softmax(-1)) if prediction.closed_form else some


def _moved(method: str, log_probs: Tensor, log_weights: Tensor, values: Values) -> Tensor:
    """New log probabilities of draws ``(K, N, C)``."""
    if method == "temperature":
        return log_probs / values["temperature"]
    if method == "vector":
        return log_probs * values["slope"] + values["shift"]
    probs = torch.tensordot(log_weights.exp(), log_probs.exp(), dims=1)
    return _with_average(log_probs, log_weights, _on_steps(probs, values["knots"], values["heights"]))


def _isotonic(probs: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and heights of a rising function from probabilities to frequencies.

    Each block of the isotonic regression gets one more row, with its mean probability as the outcome: no probability
    becomes 0 or 1 because of a few rows.
    """
    at, place, counts = np.unique(probs, return_inverse=True, return_counts=True)
    share = np.bincount(place, hits) / counts
    blocks = isotonic_regression(share, weights=counts).blocks
    size = np.add.reduceat(counts, blocks[:-1]).astype(float)
    middle = np.add.reduceat(counts * at, blocks[:-1]) / size
    height = (np.add.reduceat(counts * share, blocks[:-1]) + middle) / (size + 1)
    height = isotonic_regression(height, weights=size + 1).x
    low, high = [0.0] * bool(middle[0] > 0), [1.0] * bool(middle[-1] < 1)
    return np.concatenate([low, middle, high]), np.concatenate([low, height, high])


def _on_steps(probs: Tensor, knots: Tensor, heights: Tensor) -> Tensor:
    """Class probabilities ``(N, C)`` after the step functions, linear between knots, that sum up to 1 again."""
    each = [
        np.interp(probs[:, c].cpu().numpy(), knots[c].cpu().numpy(), heights[c].cpu().numpy())
        for c in range(probs.shape[1])
    ]
    found = torch.from_numpy(np.stack(each, 1)).to(probs.device).clamp_min(1e-12)
    return found / found.sum(1, keepdim=True)


def _with_average(log_probs: Tensor, log_weights: Tensor, average: Tensor) -> Tensor:
    """Draws ``(K, N, C)`` moved until their average is ``average``: all log probabilities of a row by the same shifts.

    Shifts by the logarithm of what is missing are a contraction (Berry, Levinsohn and Pakes, 1995). What is left after
    some steps is mended exactly: of every draw the largest possible share is kept, and the rest is the same for all.
    """
    shift = torch.zeros_like(average)
    weights = log_weights.view(-1, 1, 1)
    for _ in range(_MOST_STEPS):
        moved = (log_probs + shift).log_softmax(-1)
        gap = average.log() - (moved + weights).logsumexp(0)
        if gap.abs().max() < _NEAR:
            break
        shift = shift + gap
    probs = (log_probs + shift).softmax(-1)
    reached = torch.tensordot(log_weights.exp(), probs, dims=1)
    kept = (average / reached.clamp_min(1e-300)).amin(-1, keepdim=True).clamp_max(1.0)
    return (kept * probs + (average - kept * reached).clamp_min(0.0)).log()
