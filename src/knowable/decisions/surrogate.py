"""The surrogate that Bayesian optimisation fits where it is given none: linear regression on random features."""

from __future__ import annotations

import math

import torch
from scipy.optimize import minimize
from scipy.special import gammaincinv
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed
from knowable.inference.exact.linear import ExactLinear
from knowable.likelihoods import Gaussian
from knowable.priors import Normal

_PAIRS, _MOST_PAIRS = 256, 1_000  # of a cosine and a sine: as many as values, within these bounds
_FREEDOM = 5.0  # degrees of freedom of the frequencies: those of a Matérn 5/2 kernel
_MANY = 6  # inputs, of more than which few will count
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1.0  # standard deviation, in units of that of the values


class FourierFeatures(nn.Module):
    r"""Random Fourier features of a Matérn 5/2 kernel (Rahimi and Recht, 2007), with a length scale for each input.

    .. math:: \phi(x) = F^{-1/2} \big(\cos \omega_f^\top (x / \ell),\ \sin \omega_f^\top (x / \ell)\big)_{f=1..F}

    so that a linear layer on them with independent weights of variance s² is a draw from (nearly) a Gaussian process.

    Args:
        width: Number of inputs.
        pairs: Number F of frequencies.
        seed: Fixes them.
    """

    def __init__(self, width: int, pairs: int = _PAIRS, *, seed: int = 0):
        super().__init__()
        engine = torch.quasirandom.SobolEngine(width + 1, scramble=True, seed=seed % 2**31)
        u = engine.draw(pairs, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        normal = math.sqrt(2.0) * torch.erfinv(2 * u[:, :width] - 1)
        chi = 2.0 * torch.from_numpy(gammaincinv(_FREEDOM / 2, u[:, width].numpy()))
        self.register_buffer("frequencies", normal * (_FREEDOM / chi).sqrt().unsqueeze(1))
        self.register_buffer("lengths", torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(rows, 2 F)``, whose squares sum to one."""
        angle = (x / self.lengths) @ self.frequencies.T  # type: ignore[operator]
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(angle.shape[-1])


def fit_surrogate(x: Tensor, y: Tensor, *, noise: float | None = None, seed: int = 0) -> Posterior:
    r"""The exact posterior of a linear model on random Fourier features, whose scales maximise the evidence.

    Length scales, signal and noise maximise :math:`\log p(y \mid \ell, s, \sigma) + \log p(\ell)`, with the log-normal
    prior of Hvarfner et al. (2024) on length scales, whose mode grows with the square root of the dimension; beyond six
    inputs it grows faster, since of many inputs few count, and those of which the values say nothing should not.

    Args:
        x: Inputs between 0 and 1, ``(N, d)``.
        y: Standardised values, ``(N,)``.
        noise: Standard deviation of the noise in the same units; None is learned.
        seed: Fixes the features.
    """
    pairs = min(max(_PAIRS, len(x)), _MOST_PAIRS)
    features = FourierFeatures(x.shape[1], pairs, seed=derive_seed(seed, "features"))
    lengths, signal, noise = best_scales(features, x, y, noise)
    features.lengths = lengths
    head = nn.Linear(2 * pairs, 1, bias=False).double()
    model = Model(nn.Sequential(features, head), Gaussian(noise=noise), Normal(signal), random="last_layer")
    return ExactLinear().fit(model, (x, y.unsqueeze(1)), progress=False)


def best_scales(features: FourierFeatures, x: Tensor, y: Tensor, noise: float | None) -> tuple[Tensor, float, float]:
    """Length scales ``(d,)``, signal and noise of the largest evidence, the best of several starts."""
    d, rows = x.shape[1], torch.eye(len(x), dtype=torch.float64)
    mode = math.sqrt(2.0) - 3.0 + 0.5 * math.log(d) + math.log(max(d, _MANY) / _MANY)  # logarithm of a length scale
    fixed = None if noise is None else math.log(min(max(noise, _LEAST_NOISE), _MOST_NOISE))

    def loss(flat: Tensor) -> Tensor:
        log_noise = flat[d + 1] if fixed is None else torch.tensor(fixed, dtype=torch.float64)
        features.lengths = flat[:d].exp()
        phi = features(x) * flat[d].exp()
        factor = torch.linalg.cholesky(phi @ phi.T + (2 * log_noise).exp() * rows)
        solved = torch.linalg.solve_triangular(factor, y.unsqueeze(1), upper=False)
        evidence = -0.5 * solved.square().sum() - factor.diagonal().log().sum()
        prior = -0.5 * ((flat[:d] - mode) / math.sqrt(3.0)).square().sum() - 2.0 * flat[d].square()
        prior = prior - 0.5 * ((log_noise + 4.0) / 2.0).square()
        return -(evidence + prior)

    def with_gradient(values):
        flat = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = loss(flat)
            (slope,) = torch.autograd.grad(value, flat)
        return value.item(), slope.numpy()

    size = d + 2 if fixed is None else d + 1
    bounds = [(math.log(0.02), math.log(100.0))] * d + [(math.log(0.05), math.log(20.0))]
    bounds += [(math.log(_LEAST_NOISE), math.log(_MOST_NOISE))] * (size - d - 1)
    starts = [[math.log(length * math.sqrt(d))] * d + [0.0, math.log(0.05)][: size - d] for length in (0.2, 0.6, 2.0)]
    options = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": {"maxiter": 100}}
    found = [minimize(with_gradient, start, **options) for start in starts]
    best = min(found, key=lambda each: each.fun).x
    values = torch.tensor(best).exp()
    features.lengths = values[:d]
    return values[:d], values[d].item(), values[d + 1].item() if fixed is None else math.exp(fixed)
