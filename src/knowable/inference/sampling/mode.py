r"""A proposal that is like the target: a Student t around the mode, as wide as the curvature there says.

The mode is found by L-BFGS and made exact by Newton steps; the scale is the inverse Hessian; heavy tails keep
importance weights bounded where the target is not normal. Weighted draws then show how the target differs, and the
proposal is refitted to them a few times (population Monte Carlo: Cappé, Guillin, Marin and Robert, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.target import ModelTarget, NormalDensity, Target
from knowable.inference.laplace.hessian import hessian
from knowable.inference.sampling.importance_weights import effective_sample_size, smooth_weights

_SEARCH = 1000  # steps of L-BFGS
_POLISH = 20  # Newton steps for small problems, fewer for large ones
_SMALL = 200  # parameters
_SOFTEST = 1e-6  # least curvature in any direction, in units of the coordinates' own
_REFIT_BELOW = 101  # parameters; for more of them no pilot is large enough
_PILOT = 1000  # draws of one round of refitting
_WIDER = 1.5  # than the weighted draws, which have not seen the tails
_COLUMNS = 64  # of the Hessian computed together


@dataclass(frozen=True)
class StudentTProposal:
    r"""A multivariate Student t over flat positions.

    .. math:: \theta = m + A z \sqrt{\nu / u}, \qquad z \sim N(0, I),\; u \sim \chi^2_\nu
    """

    loc: Tensor  # centre m, (D,), in double precision
    factor: Tensor  # A, (D, D); the scale matrix is A Aᵀ
    df: float  # degrees of freedom ν

    @property
    def device(self) -> torch.device:
        """Where draws are made."""
        return self.loc.device

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions ``(count, D)`` and their log densities ``(count,)``, in double precision."""
        shape, device = (count, len(self.loc)), self.loc.device
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        half = torch.full((count,), 0.5 * self.df, dtype=torch.float64, device=device)
        gamma = torch._standard_gamma(half, generator=generator)  # type: ignore[reportPrivateImportUsage]  # χ²/2
        standard = noise * (half / gamma).sqrt().unsqueeze(-1)
        return self.loc + standard @ self.factor.T, self._log_density(standard)

    def log_prob(self, position: Tensor) -> Tensor:
        """Log densities of positions ``(n, D)``."""
        standard = torch.linalg.solve(self.factor, (position.double() - self.loc).T).T
        return self._log_density(standard)

    def _log_density(self, standard: Tensor) -> Tensor:
        d, df = standard.shape[1], self.df
        constant = math.lgamma(0.5 * (df + d)) - math.lgamma(0.5 * df) - 0.5 * d * math.log(df * math.pi)
        log_det = torch.linalg.slogdet(self.factor).logabsdet
        return constant - log_det - 0.5 * (df + d) * torch.log1p(standard.square().sum(-1) / df)


def laplace_proposal(target: Target, start: Tensor, *, df: float, search: int = _SEARCH) -> StudentTProposal:
    """A Student t at the best mode found from ``start`` ``(n, D)``; the target is asked in the dtype of ``start``."""
    hill = _Hill(target, start.dtype)
    modes = [climb(target, each, search) for each in start]
    best = max(modes, key=lambda mode: hill(mode)[0].item())
    return StudentTProposal(*_newton(hill, best), df)


# --- the mode --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hill:
    """A log density at single positions, in double precision outside and the target's own inside."""

    target: Target
    dtype: torch.dtype

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient at one position ``(D,)``."""
        with self.target.function.uncompiled():
            value, gradient = self.target.value_and_grad(position.to(self.dtype).unsqueeze(0))
        return value[0].double(), gradient[0].double()


def climb(target: Target, start: Tensor, search: int = _SEARCH) -> Tensor:
    """Uphill from one position ``(D,)`` by L-BFGS, until a tenth of all steps gain nothing to speak of."""
    hill, start = _Hill(target, start.dtype), start.double()
    position = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [position], max_iter=search // 10, history_size=20, tolerance_grad=1e-8, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    best, highest = start, -math.inf

    def loss() -> Tensor:
        nonlocal best, highest
        value, gradient = hill(position.detach())
        position.grad = -gradient.nan_to_num(0.0, 0.0, 0.0)
        if torch.isfinite(value) and value > highest:
            best, highest = position.detach().clone(), value.item()
        return -value.nan_to_num(-1e30, 1e30, -1e30)

    for _ in range(10):
        before = highest
        optimiser.step(loss)
        if not highest - before > 1e-2:
            break
    return best


def _newton(hill: _Hill, mode: Tensor) -> tuple[Tensor, Tensor]:
    r"""Damped Newton steps to the mode, and the factor A of the inverse curvature there: :math:`A A^\top = H^{-1}`."""
    enough = 1e-8 if hill.dtype == torch.float64 else 1e-3
    value, gradient = hill(mode)
    factor = inverse_root(negative_hessian(hill.target, mode.to(hill.dtype)))
    for _ in range(_POLISH if len(mode) <= _SMALL else 3):
        step = factor @ (factor.T @ gradient)
        gain = (gradient @ step).item()  # twice what the step promises, in nats
        if not gain > enough:
            break
        length = 1.0
        while length > 1e-6:
            found, slope = hill(mode + length * step)
            if found >= value + 1e-4 * length * gain and torch.isfinite(slope).all():
                break
            length /= 2
        else:
            break
        mode, value, gradient = mode + length * step, found, slope
        factor = inverse_root(negative_hessian(hill.target, mode.to(hill.dtype)))
    return mode, factor


def inverse_root(precision: Tensor) -> Tensor:
    r"""A with :math:`A A^\top = |H|^{-1}`: negative curvature counts as positive, flat directions are kept short.

    The coordinates are brought to their own scales first, so that units do not matter.
    """
    diagonal = precision.diagonal().abs()
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    return scale[:, None] * vectors * values.abs().clamp_min(_SOFTEST).rsqrt()


def negative_hessian(target: Target, flat: Tensor) -> Tensor:
    """At one position ``(D,)``: ``(D, D)``, symmetric, in double precision."""
    try:
        found = _exact(target, flat)
    except RuntimeError:  # an operation of the user's own that can be differentiated once only
        return _from_differences(target, flat)
    usable = torch.isfinite(found).all() and found.any()  # zero where autograd has lost the second derivative
    return found if usable else _from_differences(target, flat)


def _exact(target: Target, flat: Tensor) -> Tensor:
    if not isinstance(target, ModelTarget):
        return -hessian(target.function.function, flat)
    total = torch.zeros((len(flat), len(flat)), dtype=torch.float64, device=flat.device)
    for batch in target.rows(1):
        total -= hessian(target.function.function, flat, *batch)
    target.processes.add(total)
    prior = NormalDensity.of(target.model, target.layout)
    return total if prior is None else total + prior.precision.double().diag()


def _from_differences(target: Target, flat: Tensor) -> Tensor:
    """From gradients nearby, where a second derivative is not a number (some of torch's own are not)."""
    step = torch.finfo(flat.dtype).eps ** (1 / 3) * flat.abs().clamp_min(1.0)
    found = torch.cat([
        (target.value_and_grad(flat - some)[1] - target.value_and_grad(flat + some)[1]).double()
        for some in step.diag().split(_COLUMNS)
    ]) / (2 * step.double().unsqueeze(1))  # fmt: skip
    found = found.nan_to_num(0.0, 0.0, 0.0)
    return 0.5 * (found + found.T)


# --- refitting -------------------------------------------------------------------------------------------------------


def refitted(
    proposal: StudentTProposal, log_target: Callable[[Tensor], Tensor], *, rounds: int, generator: torch.Generator
) -> StudentTProposal:
    """The proposal moved to the weighted mean and covariance of its own draws, as long as that makes it better.

    Weights that a few draws dominate are flattened (raised to a power below one) until their effective sample size is
    enough for a covariance.
    """
    dimension = len(proposal.loc)
    if rounds == 0 or dimension >= _REFIT_BELOW:
        return proposal
    pilot = max(_PILOT, 20 * dimension)
    best, most = proposal, (False, -1.0)
    for number in range(rounds + 1):
        position, log_q = proposal.draw(pilot, generator)
        log_weights = (log_target(position) - log_q).nan_to_num(-math.inf, -math.inf, -math.inf)
        if log_weights.max() == -math.inf:
            break
        smoothed, k = smooth_weights(log_weights)
        quality = (k <= 0.7, effective_sample_size(smoothed) * (0.5 if number == 0 else 1.0))
        if quality > most:  # the first one counts half: a narrow proposal looks good until its tails are seen
            best, most = proposal, quality
        if k < 0.2 and quality[1] > 0.1 * pilot:
            break
        weights = _flattened(log_weights, max(0.1 * pilot, 5.0 * dimension))
        loc = weights @ position
        away = (position - loc) * weights.sqrt().unsqueeze(-1)
        factor, failed = torch.linalg.cholesky_ex(away.T @ away)
        if failed:
            break
        proposal = StudentTProposal(loc, _WIDER * factor, proposal.df)
    return best


def _flattened(log_weights: Tensor, wanted: float) -> Tensor:
    """Normalised weights, raised to the largest power up to one at which their effective sample size is as wanted."""
    power, low = 1.0, 0.0
    if effective_sample_size(log_weights) < wanted:
        finite = log_weights.clamp_min(log_weights[torch.isfinite(log_weights)].min())
        high = 1.0
        for _ in range(40):
            power = 0.5 * (low + high)
            low, high = (power, high) if effective_sample_size(power * finite) > wanted else (low, power)
        power = low
    return (power * log_weights).nan_to_num(-math.inf, -math.inf, -math.inf).softmax(0)
