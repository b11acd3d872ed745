"""Exact Bayesian inference for models that are linear in their parameters (MacKay, 1992; Bishop, 2006, chapter 3)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.joint_normal import FullCovarianceNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.monte_carlo import predict_outputs
from knowable.core.posterior.normal import NormalPosterior
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.point.own_parameters import integral_over
from knowable.likelihoods import Gaussian

_NOISE = "likelihood.log_noise"


@dataclass(frozen=True, repr=False, kw_only=True)
class ExactLinear(Method):
    r"""The exact posterior, predictive distribution and evidence of a linear model with Gaussian noise.

    .. math:: P = \Lambda_0 + \tfrac{1}{\sigma^2} J^\top J, \qquad
        m = P^{-1}\big(\Lambda_0 m_0 + \tfrac{1}{\sigma^2} J^\top (y - f_0)\big)

    for any network whose output is :math:`f_0 + J\theta` in its random parameters: a linear layer, a linear layer on
    frozen features, a polynomial. The prior must be normal (or flat, where the data determine the weights by
    themselves). Cost: O(N D² + D³) time and O(D²) memory.

    A noise or prior scale (``EmpiricalBayes``) that is learned is set to the maximum of the evidence times its own
    prior: the posterior is exact given that value. ``log_evidence`` is integrated over the noise, by Laplace's method
    in its logarithm, and the largest over prior scales; it is then called an estimate.

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

    def _fit(self, job: FitJob) -> LinearNormal:
        started, model = time.monotonic(), job.model
        layout = self._check(model)
        design = Design(model, layout, model.buffers())
        with own_randomness(job.seed):  # a loader may draw
            statistics = _Statistics.gather(design, job.rows, model)
        points = _choose_points(model, layout, statistics)
        prior, noise = _prior(model, layout, points), _noise(model, points, len(statistics.square))
        loc, scale_tril = statistics.posterior(*prior, noise)
        value, notes = _log_evidence(model, layout, statistics, points)
        evidence = None if value is None else LogEvidence(value.item(), "estimate" if points else "exact")
        terms = {name: point.mean().item() for name, point in points.items()}
        if evidence is not None:
            terms["log_evidence"] = float(evidence)
        like = model.params()
        return LinearNormal(
            model, layout, loc.to(model.dtype), scale_tril.to(model.dtype), seed=job.seed, log_evidence=evidence,
            points={name: point.to(like[name]) for name, point in points.items()},
            diagnostics=Diagnostics(
                repr(self), terms, converged=True, message="solved in closed form", seconds=time.monotonic() - started,
                notes=notes,
            ),
        )  # fmt: skip

    def _check(self, model: Model) -> Layout:
        if not isinstance(model.likelihood, Gaussian):
            raise Unsupported(f"ExactLinear needs a Gaussian likelihood, got {model.likelihood!r}.")
        if model.likelihood.missing:
            raise Unsupported("ExactLinear does not take missing targets. Use Laplace, which is exact here too.")
        unfit = [name for name in model.point_names if name not in (_NOISE, *model.hyper_names)]
        if unfit:
            raise Unsupported(
                f"ExactLinear cannot fit the point parameters {', '.join(unfit[:5])}: freeze them with frozen=, or "
                f"make them random."
            )
        params = model.params()
        layout = Layout.of({name: params[name] for name in model.random_names if name != _NOISE})
        if layout.size > self.max_parameters:
            raise InvalidArgument(
                f"ExactLinear would need a {layout.size:,} x {layout.size:,} matrix; max_parameters is "
                f"{self.max_parameters:,}. Raise max_parameters, or make fewer parameters random."
            )
        return layout


@dataclass(frozen=True)
class _Statistics:
    """Sums over the data from which everything follows; one set per output, so that each may have its own noise."""

    gram: Tensor  # (outputs, D, D): Jᵀ J
    cross: Tensor  # (outputs, D): Jᵀ (y - f0)
    square: Tensor  # (outputs,): |y - f0|²
    rows: float  # the sum of their weights, times the outputs where these share a noise

    @classmethod
    def gather(cls, design: Design, data: Data, model: Model) -> _Statistics:
        separate = isinstance(model.likelihood, Gaussian) and model.likelihood.outputs > 1
        total: list[Tensor] | None = None
        rows = 0.0
        for x, y, *weights in data:
            if total is None:
                design.check_linear(x)
            chunks = design.chunks(x)
            counts = (weights[0] if weights else torch.ones(len(x), device=x.device)).double()
            sizes = [len(each) for each in chunks]
            for part, target, count in zip(chunks, y.split(sizes), counts.split(sizes), strict=True):
                offset, matrix = design(part)  # (rows, outputs), (rows, outputs, D)
                residual = target.double().flatten(1) - offset
                sums = [
                    torch.einsum("b,bod,boe->ode", count, matrix, matrix),
                    torch.einsum("b,bod,bo->od", count, matrix, residual),
                    count @ residual.square(),
                ]
                if not separate:
                    sums = [each.sum(0, keepdim=True) for each in sums]
                rows += count.sum().item() * (1 if separate else residual.shape[1])
                total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
        assert total is not None
        return cls(*total, rows=rows)

    def posterior(self, mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and Cholesky factor of the covariance."""
        chol, rhs = self._solve(mean, precision, noise)
        loc = torch.cholesky_solve(rhs.unsqueeze(-1), chol).squeeze(-1)
        covariance = torch.cholesky_inverse(chol)
        return loc, torch.linalg.cholesky((covariance + covariance.T) / 2)

    def _solve(self, mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Cholesky factor of the posterior precision, and precision times posterior mean."""
        weight = noise**-2  # (outputs,)
        total = torch.einsum("o,ode->de", weight, self.gram) + precision
        chol, failed = torch.linalg.cholesky_ex(total)
        improper, scale = (precision.diagonal() == 0).any(), total.diagonal().clamp_min(1e-300).rsqrt()
        if failed or (improper and torch.linalg.eigvalsh(total * scale * scale[:, None])[0] < 1e-12):
            raise InvalidArgument(
                "The data do not determine all weights under a flat prior. Give the weights a Normal prior."
                if improper
                else "The noise is so small that the weights cannot be told apart from it. Fix it: Gaussian(noise=...)."
            )
        return chol, precision @ mean + torch.einsum("o,od->d", weight, self.cross)

    def log_evidence(self, mean: Tensor, precision: Tensor, noise: Tensor) -> Tensor | None:
        r"""The log marginal likelihood, by the determinant and inversion lemmas; None if the prior is improper.

        .. math:: \log \mathcal{N}\big(y \mid f_0 + J m_0,\; J \Lambda_0^{-1} J^\top + \sigma^2 I\big)
        """
        prior_chol, improper = torch.linalg.cholesky_ex(precision)
        if improper:
            return None
        chol, rhs = self._solve(mean, precision, noise)
        loc = torch.cholesky_solve(rhs.unsqueeze(-1), chol).squeeze(-1)
        log_det = 2 * (chol.diagonal().log().sum() - prior_chol.diagonal().log().sum())
        quadratic = noise**-2 @ self._residuals(loc) + (loc - mean) @ precision @ (loc - mean)
        noise_terms = self.rows * (2 * noise.log() + math.log(2 * math.pi))
        return -0.5 * (log_det + quadratic + noise_terms.sum())

    def _residuals(self, loc: Tensor) -> Tensor:
        """Sum of squared residuals at ``loc`` for each output, no smaller than what double precision can tell."""
        fitted = torch.einsum("d,ode,e->o", loc, self.gram, loc) - 2 * self.cross @ loc
        return torch.maximum(self.square + fitted, 1e-14 * self.square)


def _prior(model: Model, layout: Layout, points: Params) -> tuple[Tensor, Tensor]:
    """Mean ``(D,)`` and precision ``(D, D)`` of the prior over the flat parameters."""
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
    return torch.cat(means), torch.cat(precisions).diag()


def _noise(model: Model, points: Params, outputs: int) -> Tensor:
    own = {name: value.double() for name, value in model.likelihood_params(points).items()}
    like = torch.zeros((), dtype=torch.float64, device=model.device)
    scale = model.likelihood.noise_scale(own, like=like)  # type: ignore[attr-defined]
    return scale.double().reshape(-1).repeat(outputs // max(1, scale.numel()))  # the last dimension runs fastest


def _log_evidence(
    model: Model, layout: Layout, statistics: _Statistics, points: Params
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The log evidence, integrated over a learned noise, and a note where it is not; None if the prior is improper."""

    def at(noise: Params) -> Tensor | None:
        known = {**points, **noise}
        return statistics.log_evidence(*_prior(model, layout, known), _noise(model, known, len(statistics.square)))

    value = at({})
    if value is None or _NOISE not in points:
        return value, ()
    value, note = integral_over(model, _NOISE, lambda noise: at({_NOISE: noise}), points[_NOISE])  # type: ignore[arg-type]
    return value, (note,) if note else ()


def _choose_points(model: Model, layout: Layout, statistics: _Statistics) -> Params:
    """Noise and prior scales that maximise the evidence times their own prior, by L-BFGS (empty if there are none)."""
    start = model.params()
    names = [name for name in start if name == _NOISE or name in model.hyper_names]
    if not names:
        return {}
    points = {name: start[name].double().clone().requires_grad_() for name in names}
    options = {"max_iter": 200, "tolerance_grad": 1e-9, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS(list(points.values()), **options)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = statistics.log_evidence(*_prior(model, layout, points), _noise(model, points, len(statistics.square)))
        if value is None:
            raise Unsupported(
                "Learning the noise or the prior's scale needs a proper prior on every weight: a flat one has no "
                "evidence."
            )
        if _NOISE in points:
            prior = model.prior.bound(_NOISE, points)
            assert prior is not None  # the likelihood's parameters have priors of their own
            value = value + prior.log_prob(points[_NOISE]).sum()
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
    loc: Tensor
    scale_tril: Tensor

    def __init__(self, model: Model, layout: Layout, loc: Tensor, scale_tril: Tensor, **common: Any):
        super().__init__(model, FullCovarianceNormal(layout, loc, scale_tril), **common)

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        """The exact predictive distribution; ``samples`` functions are drawn as well, for ``prediction.samples``."""
        draws, _, _ = predict_outputs(self, x, samples, seed, memory)
        design = Design(self.model, self.layout, self.buffers)
        pieces = [self._moments(design, part) for part in design.chunks(x)]
        shape, dtype = draws.shape[1:], draws.dtype
        mean = torch.cat([piece[0] for piece in pieces]).reshape(shape).to(dtype)
        covariance = torch.cat([piece[1] for piece in pieces])  # (rows, outputs, outputs)
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(shape).to(dtype)
        own = self.model.likelihood_params(self.points)
        return self.model.likelihood.predict_normal(NormalOutputs(mean, variance, covariance, draws), own)

    def _moments(self, design: Design, x: Tensor) -> tuple[Tensor, Tensor]:
        offset, matrix = design(x)
        spread = matrix @ self.scale_tril.double()
        return offset + matrix @ self.loc.double(), spread @ spread.mT


# --- The design matrix of a network that is linear in its parameters, and the check that it is -----------------------

_BLOCK = 256  # columns of the design matrix computed in one call
_CHUNK_VALUES = 20_000_000  # elements of a design matrix held at once


class Design:
    r"""The affine map :math:`f(\theta) = f_0 + J\theta` of a network that is linear in its random parameters.

    Everything is in double precision. Since f is affine, column d of J is :math:`f(e_d) - f(0)`: exact, and possible
    for any module that can be run.
    """

    def __init__(self, model: Model, layout: Layout, buffers: Buffers):
        self.model, self.layout = model, layout
        own = model.network.params()
        self._fixed: Params = {name: value.double() for name, value in own.items() if name not in layout.names}
        self._buffers = {k: v.double() if v.is_floating_point() else v for k, v in buffers.items()}

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(f0, J)`` for a chunk of rows: ``(rows, outputs)`` and ``(rows, outputs, D)``."""
        unit = torch.eye(self.layout.size, dtype=torch.float64, device=x.device)
        zero = self._outputs(torch.zeros_like(unit[:1]), x)[0]
        return zero, torch.cat([self._outputs(some, x) - zero for some in unit.split(_BLOCK)]).movedim(0, -1)

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows of ``x`` in chunks whose design matrix fits in memory."""
        params = self.model.network_params(self.model.params())
        outputs = self.model.network.probe(x, params, self.model.buffers())[0].numel()
        return x.split(max(1, _CHUNK_VALUES // (outputs * self.layout.size)))

    def check_linear(self, x: Tensor) -> None:
        """Compare the network with its affine map at random parameters, near and far."""
        rows = x[:8]
        offset, design = self(rows)
        generator = torch.Generator(device=x.device).manual_seed(0)
        like = {"generator": generator, "dtype": torch.float64, "device": x.device}
        for scale in (1.0, 30.0):
            theta = scale * torch.randn((1, self.layout.size), **like)
            actual = self._outputs(theta, rows)[0]
            error = (actual - offset - design @ theta[0]).abs().max() / actual.abs().max().clamp_min(1e-12)
            if not error < 1e-8:
                raise Unsupported(
                    f"ExactLinear needs a network whose output is linear in its random parameters; this one departs "
                    f"from that by {error:.1%}. Keep only the last layer random and freeze the others: Model(..., "
                    f"random='last_layer', frozen=[...])."
                )

    def _outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Network outputs ``(draws, rows, outputs)``, flattened behind the rows."""
        stack = self.layout.views(theta)
        fixed = {name: value.expand(len(theta), *value.shape) for name, value in self._fixed.items()}
        inputs = x.double() if x.is_floating_point() else x
        with torch.set_grad_enabled(inputs.requires_grad):
            outputs = self.model.network.over_draws({**fixed, **stack}, inputs, buffers=self._buffers, vectorise=True)
        return outputs.flatten(2)
