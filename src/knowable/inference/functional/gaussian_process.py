"""Exact Gaussian process regression with GPyTorch's kernels (Rasmussen and Williams, 2006)."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from knowable.core.method import FitJob, Method
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.params import Params, with_prefix, without_prefix
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.progress import progress_bar
from knowable.core.support.randomness import generator_for
from knowable.errors import ConvergenceWarning
from knowable.inference.functional.kernel_inputs import Body, Units, numbers_of
from knowable.inference.functional.kernels import Covariance, check_kernel, gpytorch
from knowable.inference.functional.normal_functions import Conditioned, Information
from knowable.inference.functional.targets import MEAN, Numbers, Targets, counted_rows, maximise_evidence, targets_of

NOISE = f"{LIKELIHOOD_PREFIX}log_noise"
FIRST_NOISE = 0.3  # of the spread of the targets
_EVALUATIONS = 300  # of the evidence
_FARTHEST = 12.0  # that the logarithm of a hyperparameter may move
_NUMBERS_OF_A_BLOCK = 2**22  # of a kernel whose gradient is taken


@dataclass(frozen=True, repr=False, kw_only=True)
class GaussianProcess(Method):
    r"""A Gaussian process in place of the network: the exact posterior over functions.

    .. math:: f \mid D \sim \mathcal{GP}\big(m + k^\top (K + \sigma^2 I)^{-1} (y - m),\;
        k_{**} - k^\top (K + \sigma^2 I)^{-1} k\big)

    The network has no part in it but to say how many outputs there are; they are independent and share the kernel.
    Kernel, mean and a noise that is not known are those under which the targets are most probable (the evidence), times
    their weak priors, found by L-BFGS. Labels and counts are fitted by Laplace's approximation. Everything is in double
    precision. Time is O(N³) and memory O(N²).

    A kernel given by its name sees standardised inputs and targets, so that data may be in any units. A kernel of
    GPyTorch sees the data as they are: its hyperparameters begin at their values, have the priors that it brings, and
    those with ``requires_grad=False`` stay.

    Args:
        kernel: ``"rbf"``, ``"matern12"``, ``"matern32"``, ``"matern52"``, each with a length scale for every input (one
            for all beyond 100 inputs), ``"linear"``, or a kernel of GPyTorch.
        mean: The mean of functions before any data: ``"constant"``, learned, or ``"zero"``. Logits have mean 0.
        tuning_rows: Rows, drawn at random, on which hyperparameters are learned.
        max_rows: The largest number N of rows: the kernel is an N by N matrix. ``SparseGaussianProcess`` takes any.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian())
        >>> posterior = kn.GaussianProcess().fit(model, (x, torch.sin(3 * x)))
        >>> posterior.predict(x).std.shape
        torch.Size([30, 1])
    """

    family = "functional"
    summary = "a Gaussian process in place of the network: the exact posterior over functions"
    aliases = ("gp",)
    references = ("rasmussen2006", "gardner2018")
    supports_row_weights = True
    fits_network = False

    kernel: Any = "rbf"
    mean: str = "constant"
    tuning_rows: int = 2_000
    max_rows: int = 10_000

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        check_choice("mean", self.mean, ("constant", "zero"))
        check_count("tuning_rows", self.tuning_rows, at_least=2)
        check_count("max_rows", self.max_rows)

    def _fit(self, job: FitJob) -> GaussianProcessPosterior:
        started, model = time.monotonic(), job.model
        gpytorch()
        x, y, counts = counted_rows(job, self.max_rows, "use kn.SparseGaussianProcess, which takes any number")
        rows, outputs = numbers_of(x, type(self).__name__), model.probe(x).shape[1:].numel()
        named = isinstance(self.kernel, str)
        units = Units.of(rows, y, counts, model, outputs, standardise=named, centre=self.mean == "constant")
        seen, covariance = units.seen(rows), Covariance.of(self.kernel, rows.shape[1]).to(rows.device)
        targets = targets_of(self, model, outputs, shift=units.y_shift, scale=units.y_scale)
        start = {**covariance.learned(), **own_points(model, units, y)}
        if self.mean == "constant" and isinstance(targets, Numbers):
            start[MEAN] = torch.zeros(outputs, dtype=torch.float64, device=seen.device)
        best, settled, message = self._best(job, covariance, targets, units, (seen, y, counts), start)
        covariance.load_state_dict({n: best[n] for n in covariance.learned()}, strict=False)
        with torch.no_grad():
            found = targets.solve(covariance(seen), y, counts, best)
        like = model.params()
        terms = {**covariance.terms(), **{n: float(v.mean()) for n, v in best.items() if n in like}}
        terms |= {} if found.evidence is None else {"log_evidence": found.evidence}
        notes = list(found.notes)
        if start and len(seen) > self.tuning_rows:
            notes.append(f"Hyperparameters were learned on {self.tuning_rows:,} of {len(seen):,} rows.")
        exact = not start and isinstance(targets, Numbers)
        return GaussianProcessPosterior(
            model, covariance, units, seen, found.slope, found.information, best.get(MEAN), seed=job.seed,
            points={name: best[name].to(like[name]) for name in best if name in like},
            log_evidence=found.log_evidence("exact" if exact else "estimate"),
            diagnostics=Diagnostics(
                repr(self), terms, converged=settled and found.settled, message=f"{message}{found.message}",
                notes=tuple(notes), seconds=time.monotonic() - started,
            ),
        )  # fmt: skip

    def _best(
        self, job: FitJob, covariance: Covariance, targets: Targets, units: Units,
        rows: tuple[Tensor, Tensor, Tensor], start: Params,
    ) -> tuple[Params, bool, str]:  # fmt: skip
        """Hyperparameters that maximise the evidence times their priors, whether they do, and a few words."""
        if not start:
            return {}, True, ""
        seen, y, counts = rows
        if len(seen) > self.tuning_rows:
            order = torch.randperm(len(seen), generator=generator_for(job.seed, "tuning"))
            chosen = order[: self.tuning_rows].to(seen.device)
            seen, y, counts = seen[chosen], y[chosen], counts[chosen]
        hypers = list(covariance.learned())

        def kernel(points: Params, some: Tensor) -> Tensor:
            return functional_call(covariance, {name: points[name] for name in hypers}, (some, seen))

        def evidence(matrix: Tensor, points: Params) -> Tensor:
            prior = functional_call(covariance, {name: points[name] for name in hypers}, ())
            value = targets.evidence(matrix, y, counts, points) + prior
            return value + log_prior_of_noise(job.model, points, units)

        blocks = seen.split(max(1, _NUMBERS_OF_A_BLOCK // len(seen)))
        with progress_bar(job.label or type(self).__name__, job.progress) as bar:
            found = maximise_evidence(
                evidence, kernel, blocks, start, hypers, evaluations=_EVALUATIONS, farthest=_FARTHEST,
                note=lambda count, value: bar.update(count, _EVALUATIONS, f"log evidence {value:.5g}"),
            )  # fmt: skip
        if not found.settled:
            warnings.warn(
                f"The evidence was still rising after {found.evaluations} evaluations. Standardise the inputs, remove "
                f"columns that say nothing, or choose a kernel with fewer hyperparameters.",
                ConvergenceWarning,
                stacklevel=5,
            )
        word = "settled" if found.settled else "still rising"
        return found.points, found.settled, f"evidence {word} after {found.evaluations} evaluations, "


def own_points(model: Model, units: Units, y: Tensor) -> Params:
    """The likelihood's own parameters in double precision; a noise begins at a share of the targets' spread."""
    own = {name: v.double() for name, v in model.params().items() if name.startswith(LIKELIHOOD_PREFIX)}
    if NOISE in own:
        values = y.double().reshape(len(y), -1)
        spread = values.nan_to_num().std(0, correction=0)
        size = torch.where(spread > 0, spread, torch.ones_like(spread))
        first = (FIRST_NOISE * (size if own[NOISE].dim() else size.log().mean().exp())).log()
        own[NOISE] = first.expand(own[NOISE].shape).clone()
    return own


def log_prior_of_noise(model: Model, points: Params, units: Units) -> Tensor:
    """Log priors of the likelihood's own parameters; that of a noise is of its size beside the targets' spread."""
    total = torch.zeros((), dtype=torch.float64, device=units.y_scale.device)
    for name, value in points.items():
        prior = model.prior.bound(name, points) if name.startswith(LIKELIHOOD_PREFIX) else None
        if prior is not None:
            total = total + prior.log_prob(value - units.y_scale.log().mean() if name == NOISE else value).sum()
    return total


class GaussianProcessPosterior(FunctionPosterior):
    r"""A Gaussian process given data.

    .. math:: m(x) = m_0 + k(x)^\top a, \qquad v(x) = k(x, x) - k(x)^\top S\, k(x)

    Args:
        model: The model.
        covariance: The kernel.
        units: In which the kernel sees features, and functions are.
        seen: What the kernel sees of the training rows, ``(N, d)``.
        slope: a, ``(outputs, N)``.
        information: What the targets say of the function values there, which gives S.
        constant: m_0, ``(outputs,)``; None is 0.
        body: The network that makes features; None: the inputs are the features.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "gaussian_process"

    def __init__(
        self, model: Model, covariance: Covariance, units: Units, seen: Tensor, slope: Tensor,
        information: Information, constant: Tensor | None = None, body: Body | None = None, **common: Any,
    ):  # fmt: skip
        super().__init__(model, **common)
        self.covariance, self.units, self.body = covariance.requires_grad_(False), units, body
        self.constant = units.y_shift.new_zeros(len(units.y_shift)) if constant is None else constant.detach()
        self.functions = Conditioned(covariance, covariance.diagonal, seen, slope, information)
        self.row_numbers = 4 * len(seen) * len(slope)

    def seen(self, x: Tensor) -> Tensor:
        """What the kernel sees of inputs."""
        return seen_by(self.body, self.units, self.points, self.buffers, x)

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = self.functions.marginal(self.seen(x))
        scale = self.units.y_scale
        return self.units.functions(self.constant + mean), covariance * scale * scale.unsqueeze(1)

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.joint_of(self.seen(x))

    def joint_of(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., rows, outputs)`` and covariances ``(..., outputs, rows, rows)`` at what the kernel sees."""
        mean, covariance = self.functions.joint(seen)
        scale = self.units.y_scale
        if covariance.shape[-3] == len(scale):  # of labels, all in one matrix, the scale is 1
            covariance = covariance * scale.square().view(-1, 1, 1)
        return self.units.functions(self.constant + mean), covariance

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        known = self.functions
        own = {
            "seen": known.x,
            "slope": known.slope,
            "information": known.information.values,
            "constant": self.constant,
        }
        return contiguous({**own, **self.units.tensors(), **with_prefix("kernel.", self.covariance.tensors())})

    def _settings(self) -> dict[str, Any]:
        return {
            "labels": self.functions.information.labels, "kernel": self.covariance.described(),
            "features": None if self.body is None else self.body.described(),
        }  # fmt: skip

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, labels: bool = False, kernel: Any = None,
        features: Any = None, **common: Any,
    ) -> GaussianProcessPosterior:  # fmt: skip
        covariance = Covariance.built(kernel, without_prefix("kernel.", tensors))
        units = Units(**{name: tensors[name] for name in ("x_shift", "x_scale", "y_shift", "y_scale")})
        information = Information(tensors["information"], labels)
        return cls(
            model, covariance, units, tensors["seen"], tensors["slope"], information, tensors["constant"],
            Body.built(features, model), **common,
        )  # fmt: skip


def seen_by(body: Body | None, units: Units, params: Params, buffers: Params, x: Tensor) -> Tensor:
    """What the kernel sees of inputs: their features, in its units."""
    rows = numbers_of(x, "A Gaussian process") if body is None else body(params, x, buffers)
    return units.seen(rows)


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies with memory of their own, as a file takes them."""
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
