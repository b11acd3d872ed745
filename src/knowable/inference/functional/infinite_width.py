"""The posterior of a network in the limit of infinite width: a Gaussian process with the kernel of its layers."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import ConvergenceWarning, ModelWarning
from knowable.inference.functional.normal_functions import Conditioned, Information
from knowable.inference.functional.targets import (
    FARTHEST,
    Logits,
    Maximum,
    Numbers,
    Targets,
    counted_rows,
    maximise_evidence,
    targets_of,
)
from knowable.inference.functional.width_kernel import KINDS, WidthKernel
from knowable.priors import EmpiricalBayes

_NOISE = "likelihood.log_noise"
_ROWS_CHECKED = 200  # for labels that averages give otherwise than the mode does,
_MOST_DISAGREEMENT = 0.1  # and the share of them that is too many
_NUMBERS_OF_A_GRADIENT = 2**17  # of the kernel, a thousand times as much with all that its gradient needs


@dataclass(frozen=True, repr=False, kw_only=True)
class InfiniteWidth(Method):
    r"""The posterior of the network as its layers become infinitely wide: exact, without training.

    .. math:: f \mid D \sim \mathcal{GP}\big(k^\top (K + \sigma^2 I)^{-1} y,\;
        k_{**} - k^\top (K + \sigma^2 I)^{-1} k\big)

    with a kernel that follows from the layers and the prior's variances (see
    :func:`~knowable.inference.functional.width_kernel.infinite_width_kernel`). It is a posterior over functions,
    without weights. The network's own width counts only through the prior's variances: a layer that sums over n units
    with prior scale s has variance n s², and the limit is taken with that held fixed.

    The network is an ``nn.Sequential`` of linear layers, convolutions, activations, average pooling, ``Flatten`` and
    ``kn.Residual``; layers in front without random parameters may be any. Time is O(N³) and memory O(N²), for each
    class with ``labels="laplace"``.

    Args:
        kind: ``"nngp"``: every weight is random, as in a Bayesian network. ``"ntk"``: the network linearised in its
            weights, the limit of which is what gradient descent from many starts explores.
        scales: ``"prior"``: variances are those of the model's prior (a scale within ``EmpiricalBayes`` is learned).
            ``"evidence"``: the scale of each weight and bias is learned, from the prior's on. ``"auto"``: learned where
            the model was given no prior, from 1/√n for weights on.
        labels: What is done with labels. ``"laplace"``: Laplace's approximation of the posterior over logits.
            ``"regression"``: labels are numbers with normal noise, in closed form; scores become probabilities by a
            scale under which each row's label is most probable given all others. That is quicker by far for many
            classes, and not the posterior of the likelihood.
        tuning_rows: Rows, drawn at random, on which a noise or scales are learned.
        max_rows: The largest number N of rows: the kernel is an N by N matrix.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        >>> posterior = kn.InfiniteWidth().fit(kn.Model(net, kn.Gaussian(0.1)), (x, torch.sin(3 * x)))
        >>> posterior.predict(x).std.shape
        torch.Size([20, 1])
    """

    family = "functional"
    summary = "the Gaussian process that the network becomes as its layers grow wide"
    aliases = ("nngp",)
    references = ("lee2018", "matthews2018", "jacot2018")
    supports_row_weights = True

    kind: str = "nngp"
    scales: str = "auto"
    labels: str = "laplace"
    tuning_rows: int = 500
    max_rows: int = 10_000

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("scales", self.scales, ("auto", "prior", "evidence"))
        check_choice("labels", self.labels, ("laplace", "regression"))
        check_count("tuning_rows", self.tuning_rows, at_least=2)
        check_count("max_rows", self.max_rows)

    def _fit(self, job: FitJob) -> WidthPosterior:
        started = time.monotonic()
        model, learned = self._with_scales(job.model)
        kernel = WidthKernel(model)
        targets = targets_of(self, model, kernel.outputs, as_numbers=self.labels == "regression")
        x, y, weights = counted_rows(job, self.max_rows, "fit the network itself (kn.MeanFieldVI)")
        features = kernel.features(x)
        own = {name: value for name, value in model.params().items() if name == _NOISE or name in model.hyper_names}
        start = {**own, **targets.start()}
        best = Maximum({}, 0, True, ())
        if start:
            best = self._best_points(kernel, targets, features, y, weights, start, job.seed)
        points, said = best.points, _doubts(best)
        gram = kernel.between(features, features, self.kind, kernel.variances({**model.params(), **points}))
        found = targets.solve(gram, y, weights, points)
        like = model.params()
        terms = {name: float(value.mean()) for name, value in points.items()} | found.terms
        notes = [f"{self.kind.upper()} kernel of {type(model.net).__name__}, layers infinitely wide.", *found.notes]
        if learned:
            notes.append("The prior's scales were learned by the evidence.")
        if points and len(x) > self.tuning_rows:
            notes.append(f"Noise and scales were learned on {self.tuning_rows:,} of {len(x):,} rows.")
        if found.evidence is not None:
            terms["log_evidence"] = found.evidence
        exact = not points and isinstance(targets, Numbers)
        for sentence in said:
            warnings.warn(f"InfiniteWidth: {sentence}", ConvergenceWarning, stacklevel=2)
        posterior = WidthPosterior(
            model, x, found.slope, found.information, kind=self.kind, scale=found.scale, seed=job.seed,
            points={name: value.to(like[name]) for name, value in points.items() if name in like},
            log_evidence=found.log_evidence("exact" if exact else "estimate"),
            diagnostics=Diagnostics(
                repr(self), terms, converged=found.settled and not said, message=found.message,
                notes=(*notes, *said), seconds=time.monotonic() - started,
            ),
        )  # fmt: skip
        if isinstance(targets, Logits):
            _check_normal_logits(posterior, gram @ found.slope.T)
        return posterior

    def _with_scales(self, model: Model) -> tuple[Model, bool]:
        """The model with scales to be learned, and whether these are its own and not the user's."""
        if self.scales == "prior" or (self.scales == "auto" and model.prior_given):
            return model, False
        params = model.params()
        kernel, priors = WidthKernel(model), {}
        for name, variance in kernel.variances(params).items():
            scale = float(variance.sqrt())
            if self.scales == "auto":
                sums = params[name][0].numel()
                scale = 1 / math.sqrt(sums) if name in kernel.weight_names else 0.5
            priors[name] = EmpiricalBayes(Normal(scale), Normal(1.0, loc=math.log(scale)))
        return model.with_priors(priors, random=model.random_names), True

    def _best_points(
        self, kernel: WidthKernel, targets: Targets, x: Tensor, y: Tensor, weights: Tensor, start: Params, seed: int
    ) -> Maximum:
        """Noise and scales that maximise the evidence times their own prior."""
        if len(x) > self.tuning_rows:
            chosen = torch.randperm(len(x), generator=generator_for(seed, "tuning"))[: self.tuning_rows].to(x.device)
            x, y, weights = x[chosen], y[chosen], weights[chosen]
        model = kernel.model

        def rows(points: Params, some: Tensor) -> Tensor:
            return kernel.between(some, x, self.kind, kernel.variances({**model.params(), **points}))

        def evidence(matrix: Tensor, points: Params) -> Tensor:
            value = targets.evidence(matrix, y, weights, points) + model.prior.log_hyperprior(points)
            if _NOISE in points:
                prior = model.prior.bound(_NOISE, points)
                value = value if prior is None else value + prior.log_prob(points[_NOISE]).sum()
            return value

        hypers = [name for name in start if name in model.hyper_names]
        blocks = x.split(max(1, _NUMBERS_OF_A_GRADIENT // kernel.numbers_of_a_row(x)))
        return maximise_evidence(evidence, rows, blocks, start, hypers)


def _doubts(best: Maximum) -> list[str]:
    said = []
    if not best.settled:
        said.append(f"The evidence was still rising after {best.evaluations} evaluations.")
    if best.at_limit:
        said.append(
            f"The evidence would rise further: {', '.join(best.at_limit)} went as far as the search allows, by a "
            f"factor of {math.exp(FARTHEST):.0f}. Standardise x and y, or begin at other scales: "
            f"kn.Model(..., prior=...)."
        )
    return said


def _check_normal_logits(posterior: WidthPosterior, mode: Tensor) -> None:
    """Warn where the normal approximation of logits predicts other labels than its own centre, the mode.

    The posterior of logits leans away from 0 where the prior's variance is large; a normal distribution around the
    mode then has far too much weight on the other side, and averages over it say little.
    """
    rows = min(_ROWS_CHECKED, len(mode))
    prediction = posterior.predict(posterior.x[:rows])
    if not isinstance(prediction, ClassPrediction):
        return
    likelihood, model = posterior.model.likelihood, posterior.model
    own = model.likelihood_params(model.params())
    outputs = mode[:rows].to(model.dtype).reshape(1, rows, *model.probe(posterior.x[:1]).shape[1:])
    central = likelihood.predict(outputs, own, outputs.new_zeros(1))
    assert isinstance(central, ClassPrediction)
    share = float((prediction.labels != central.labels).double().mean())
    if share > _MOST_DISAGREEMENT:
        warnings.warn(
            f"InfiniteWidth: Laplace's approximation is poor here. Averaged over its logits, {share:.0%} of {rows} "
            f"training rows get another label than at the most probable logits. Give the last weights a smaller prior "
            f"scale, or use labels='regression'.",
            ModelWarning,
            stacklevel=2,
        )


# --- the posterior ---------------------------------------------------------------------------------------------------


class WidthPosterior(FunctionPosterior):
    r"""A Gaussian process with the kernel of an infinitely wide network, given data.

    .. math:: m(x) = k(x)^\top a, \qquad v(x) = k(x, x) - k(x)^\top S\, k(x)

    Args:
        model: The model, at whose prior variances the kernel is taken.
        x: Inputs of the training rows.
        slope: a, ``(outputs, N)``.
        information: What the targets say of the function values there, which gives S.
        kind: The kernel: ``"nngp"`` or ``"ntk"``.
        scale: A factor on function values, where they are scores of labels.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "infinite_width"

    def __init__(
        self, model: Model, x: Tensor, slope: Tensor, information: Information, *, kind: str = "nngp",
        scale: float = 1.0, **common: Any,
    ):  # fmt: skip
        super().__init__(model, **common)
        self.x, self.slope, self.information, self.kind, self.scale = x, slope, information, kind, scale
        self._kernel = WidthKernel(model, self.buffers)
        self._variances = self._kernel.variances({**model.params(), **self.points})
        self._functions = Conditioned(
            lambda a, b: self._kernel.between(a, b, kind, self._variances),
            lambda a: self._kernel.diagonal(a, kind, self._variances),
            self._kernel.features(x), slope, information,
        )  # fmt: skip
        self.row_numbers = 4 * len(x) * len(slope)

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = self._functions.marginal(self._kernel.features(x))
        return self.scale * mean, self.scale**2 * covariance

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = self._functions.joint(self._kernel.features(x))
        return self.scale * mean, self.scale**2 * covariance

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return {"x": self.x, "slope": self.slope.contiguous(), "information": self.information.values.contiguous()}

    def _settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "scale": self.scale, "labels": self.information.labels}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, labels: bool = False, **common: Any
    ) -> WidthPosterior:
        return cls(model, tensors["x"], tensors["slope"], Information(tensors["information"], labels), **common)
