"""Exact Bayesian inference for models that are linear in their parameters (MacKay, 1992; Bishop, 2006, chapter 3)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.joint_normal import FullCovarianceNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.monte_carlo import predict_outputs
from knowable.core.posterior.normal import NormalPosterior
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.exact.design import Design, output_moments
from knowable.inference.exact.statistics import Statistics
from knowable.inference.exact.student_t import LinearStudentT
from knowable.inference.point.own_parameters import integral_over
from knowable.likelihoods import Gaussian
from knowable.priors.normal_inverse_gamma import NOISE, NormalInverseGamma

_KEPT = 2**20  # bytes of a loader's rows: the sums are all that is needed of them


@dataclass(frozen=True, repr=False, kw_only=True)
class ExactLinear(Method):
    r"""The exact posterior, predictive distribution and evidence of a linear model with Gaussian noise.

    .. math:: P = \Lambda_0 + \tfrac{1}{\sigma^2} J^\top J, \qquad
        m = P^{-1}\big(\Lambda_0 m_0 + \tfrac{1}{\sigma^2} J^\top (y - f_0)\big)

    for any network whose output is :math:`f_0 + J\theta` in its random parameters: a linear layer, a linear layer on
    frozen features or on a feature map (``kn.features``). The prior must be normal (or flat, where the data determine
    the weights by themselves). Data are read once, so a loader may give any number of rows. Cost: O(N D² + D³) time and
    O(D²) memory; the outputs of a last layer share the first term, which is then that of one output.

    A noise that is not known is integrated out under a ``NormalInverseGamma`` prior: predictions are then Student-t
    distributions, and everything is exact. Under any other prior, a noise or prior scale (``EmpiricalBayes``) that is
    learned is set to the maximum of the evidence times its own prior: the posterior is exact given that value.
    ``log_evidence`` is integrated over the noise, by Laplace's method in its logarithm, and the largest over prior
    scales; it is then called an estimate.

    Args:
        max_parameters: The largest number D of random parameters: the covariance is a D by D matrix.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> kn.ExactLinear().fit(model, (x, 2 * x)).log_evidence.kind
        'exact'
    """

    family = "exact"
    summary = "closed-form posterior, prediction and evidence where the network is linear in its weights"
    aliases = ("exact", "blr")
    references = ("mackay1992", "bishop2006")
    supports_row_weights = True

    max_parameters: int = 5_000

    def __post_init__(self) -> None:
        check_count("max_parameters", self.max_parameters)

    def _fit(self, job: FitJob) -> LinearNormal | LinearStudentT:
        started, model = time.monotonic(), job.model
        layout = self._check(model)
        design = Design(model, layout, model.buffers())
        job.rows.keep_at_most(_KEPT)
        with own_randomness(job.seed):  # a loader may draw
            statistics = Statistics.gather(design, job.rows, apart=model.likelihood.outputs > 1)  # type: ignore[attr-defined]
        if isinstance(model.prior, NormalInverseGamma):
            made = _integrated_over_noise(model, layout, statistics, job.seed)
        else:
            made = _at_best_points(model, layout, statistics, job.seed)
        evidence = made.log_evidence
        terms = {name: point.mean().item() for name, point in made.points.items()}
        terms |= {} if evidence is None else {"log_evidence": float(evidence)}
        made.diagnostics = Diagnostics(
            repr(self), terms, converged=True, message="solved in closed form", seconds=time.monotonic() - started,
            notes=made.diagnostics.notes,
        )  # fmt: skip
        return made

    def _check(self, model: Model) -> Layout:
        if not isinstance(model.likelihood, Gaussian):
            raise Unsupported(f"ExactLinear needs a Gaussian likelihood, got {model.likelihood!r}.")
        if model.likelihood.missing:
            raise Unsupported("ExactLinear does not take missing targets. Use Laplace, which is exact here too.")
        if isinstance(model.prior, NormalInverseGamma) and (NOISE not in model.names or model.likelihood.outputs > 1):
            raise Unsupported(
                f"NormalInverseGamma is a prior of one noise that is not known: use it with Gaussian(), got "
                f"{model.likelihood!r}."
            )
        unfit = [name for name in model.point_names if name not in (NOISE, *model.hyper_names)]
        if unfit:
            raise Unsupported(
                f"ExactLinear cannot fit the point parameters {', '.join(unfit[:5])}: freeze them with frozen=, or "
                f"make them random."
            )
        params = model.params()
        layout = Layout.of({name: params[name] for name in model.random_names if name != NOISE})
        if layout.size > self.max_parameters:
            raise InvalidArgument(
                f"ExactLinear would need a {layout.size:,} x {layout.size:,} matrix; max_parameters is "
                f"{self.max_parameters:,}. Raise max_parameters, or make fewer parameters random."
            )
        return layout


def _at_best_points(model: Model, layout: Layout, statistics: Statistics, seed: int) -> LinearNormal:
    """The posterior of the weights; a noise or prior scale that is learned is at its best value."""
    points = _choose_points(model, layout, statistics)
    loc, scale_tril = statistics.posterior(*_prior(model, layout, points), _noise(model, points, statistics.groups))
    value, notes = _log_evidence(model, layout, statistics, points)
    like = model.params()
    return LinearNormal(
        model, layout, loc.to(model.dtype), scale_tril.to(model.dtype), seed=seed,
        log_evidence=None if value is None else LogEvidence(value.item(), "estimate" if points else "exact"),
        points={name: point.to(like[name]) for name, point in points.items()}, diagnostics=Diagnostics(notes=notes),
    )  # fmt: skip


def _integrated_over_noise(model: Model, layout: Layout, statistics: Statistics, seed: int) -> LinearStudentT:
    r"""The posterior of weights and noise under a normal-inverse-gamma prior.

    .. math:: a_N = a + \tfrac{N}{2}, \quad b_N = b + \tfrac12 \big(|y - f_0 - J m|^2
        + (m - m_0)^\top V_0^{-1} (m - m_0)\big), \quad
        p(D) = \frac{\Gamma(a_N)\, b^a\, |V|^{1/2}}{\Gamma(a)\, b_N^{a_N}\, |V_0|^{1/2}\, (2\pi)^{N/2}}
    """
    prior = model.prior
    assert isinstance(prior, NormalInverseGamma)
    mean, precision = (each.to(model.device) for each in prior.weight_moments(layout))
    unit = torch.ones(statistics.groups, dtype=torch.float64, device=model.device)
    loc, scale_tril = statistics.posterior(mean, precision, unit)
    found = statistics.volume_and_residual(mean, precision, unit)
    assert found is not None  # its weights are normal
    log_det, residual = (each.item() for each in found)
    count = statistics.rows * statistics.groups
    shape, rate = prior.shape + 0.5 * count, prior.rate + 0.5 * residual
    value = math.lgamma(shape) - math.lgamma(prior.shape) + prior.shape * math.log(prior.rate) - shape * math.log(rate)
    value -= 0.5 * (log_det + count * math.log(2 * math.pi))
    return LinearStudentT(
        model, layout, loc.to(model.dtype), scale_tril.to(model.dtype), shape, rate, seed=seed,
        log_evidence=LogEvidence(value, "exact"),
    )  # fmt: skip


def _prior(model: Model, layout: Layout, points: Params) -> tuple[Tensor, Tensor]:
    """Mean ``(D,)`` of the prior over the flat parameters, and its precision: ``(D,)``, or ``(D, D)`` if correlated."""
    joint = model.prior.joint_normal(layout)
    if joint is not None:
        return joint[0].double(), joint[1].double()
    means, precisions = [], []
    for name, size in zip(layout.names, layout.sizes, strict=True):
        prior = model.prior.bound(name, points)
        moments = None if prior is None else prior.normal_moments()
        if moments is None:
            raise Unsupported(f"ExactLinear needs a normal prior on {name!r}, got {prior!r}.")
        for found, value in zip((means, precisions), moments, strict=True):
            found.append(torch.as_tensor(value, dtype=torch.float64, device=model.device).flatten().expand(size))
    return torch.cat(means), torch.cat(precisions)


def _noise(model: Model, points: Params, outputs: int) -> Tensor:
    own = {name: value.double() for name, value in model.likelihood_params(points).items()}
    like = torch.zeros((), dtype=torch.float64, device=model.device)
    scale = model.likelihood.noise_scale(own, like=like)  # type: ignore[attr-defined]
    return scale.double().reshape(-1).repeat(outputs // max(1, scale.numel()))  # the last dimension runs fastest


def _log_evidence(
    model: Model, layout: Layout, statistics: Statistics, points: Params
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The log evidence, integrated over a learned noise, and a note where it is not; None if the prior is improper."""

    def at(noise: Params) -> Tensor | None:
        known = {**points, **noise}
        return statistics.log_evidence(*_prior(model, layout, known), _noise(model, known, statistics.groups))

    value = at({})
    if value is None or NOISE not in points:
        return value, ()
    value, note = integral_over(model, NOISE, lambda noise: at({NOISE: noise}), points[NOISE])  # type: ignore[arg-type]
    return value, (note,) if note else ()


def _choose_points(model: Model, layout: Layout, statistics: Statistics) -> Params:
    """Noise and prior scales that maximise the evidence times their own prior, by L-BFGS (empty if there are none)."""
    start = model.params()
    names = [name for name in start if name == NOISE or name in model.hyper_names]
    if not names:
        return {}
    points = {name: start[name].double().clone().requires_grad_() for name in names}
    options = {"max_iter": 200, "tolerance_grad": 1e-9, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS(list(points.values()), **options)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = statistics.log_evidence(*_prior(model, layout, points), _noise(model, points, statistics.groups))
        if value is None:
            raise Unsupported(
                "Learning the noise or the prior's scale needs a proper prior on every weight: a flat one has no "
                "evidence."
            )
        if NOISE in points:
            prior = model.prior.bound(NOISE, points)
            assert prior is not None  # the likelihood's parameters have priors of their own
            value = value + prior.log_prob(points[NOISE]).sum()
        negative = -(value + model.prior.log_hyperprior(points))
        negative.backward()
        return negative

    optimiser.step(loss)
    return {name: value.detach() for name, value in points.items()}


# --- The exact posterior of a linear model, whose predictions are exact too: weights integrated out in closed form ---


class LinearNormal(NormalPosterior):
    r"""A normal posterior over weights in which the network is linear.

    .. math:: p(y \mid x, D) = \mathcal{N}\big(f_0(x) + J(x) m,\; J(x) \Sigma J(x)^\top + \sigma^2\big)

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean m, ``(D,)``.
        scale_tril: Lower Cholesky factor of the covariance Σ, ``(D, D)``.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "linear_normal"
    layout: Layout
    normal: FullCovarianceNormal
    loc: Tensor
    scale_tril: Tensor

    def __init__(self, model: Model, layout: Layout, loc: Tensor, scale_tril: Tensor, **common: Any):
        super().__init__(model, FullCovarianceNormal(layout, loc, scale_tril), **common)

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        """The exact predictive distribution; ``samples`` functions are drawn as well, for ``prediction.samples``."""
        draws, _, _ = predict_outputs(self, x, samples, seed, memory)
        shape, dtype = draws.shape[1:], draws.dtype
        moments = output_moments(self.model, self.normal, self.buffers, x)
        mean = moments[0].reshape(shape).to(dtype)
        variance = moments[1].diagonal(dim1=-2, dim2=-1).reshape(shape).to(dtype)
        own = self.model.likelihood_params(self.points)
        return self.model.likelihood.predict_normal(NormalOutputs(mean, variance, moments[1], draws), own)
