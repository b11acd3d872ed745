r"""E[log p(y | f)] for normal outputs f: the expected log likelihood of the ELBO from moments alone.

- Gaussian noise, known, learned (its logarithm is normal) or given by the network: closed form.
- Labels: the log-sum-exp of normal logits has a tight upper bound (Knowles and Minka, 2011). For any weights a,

  .. math:: E\Big[\log \sum_c e^{f_c}\Big] \le \tfrac12 a^\top S a
      + \log \sum_c \exp\Big(m_c + \tfrac12 S_{cc} - (S a)_c\Big),

  least where a are the softmax probabilities inside the logarithm. This makes the ELBO a little lower.
- Counts: closed form.
- Yes or no, and noise with heavy tails: quadrature, one output at a time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from knowable.core.model.likelihood import Likelihood
from knowable.core.prediction.prediction import sum_over_event
from knowable.errors import Unsupported
from knowable.inference.variational.moment.algebra import Moments, quadrature
from knowable.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_OWN_NODES = 5  # of Gauss-Hermite quadrature over a likelihood's own parameter
_ROUNDS = 12  # of the search for the best weights of the log-sum-exp bound
_KNOWN = (Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson, StudentT)


def check_likelihood(likelihood: Likelihood) -> None:
    """Refuse a likelihood whose expectation is not known."""
    if not isinstance(likelihood, _KNOWN):
        raise Unsupported(
            f"The expected log likelihood of {type(likelihood).__name__} under normal outputs is not known. There are "
            f"rules for {', '.join(each.__name__ for each in _KNOWN)}; MeanFieldVI takes any likelihood."
        )
    if getattr(likelihood, "missing", False) or getattr(likelihood, "ignore_index", None) is not None:
        raise Unsupported(f"MomentVI needs all targets, and {likelihood!r} leaves some out. Use MeanFieldVI.")


def expected_log_likelihood(likelihood: Likelihood, output: Moments, y: Tensor, own: dict[str, Moments]) -> Tensor:
    """Expected log likelihood of each row, ``(batch,)``."""
    if isinstance(likelihood, Gaussian):
        return gaussian(likelihood, output, y, own)
    if isinstance(likelihood, HeteroscedasticGaussian):
        return heteroscedastic(output, y)
    if isinstance(likelihood, Categorical):
        return categorical(output, y)
    if isinstance(likelihood, Poisson):
        return poisson(output, y)
    return by_quadrature(likelihood, output, y, own)


def gaussian(likelihood: Gaussian, output: Moments, y: Tensor, own: dict[str, Moments]) -> Tensor:
    r"""Noise σ whose logarithm is known or :math:`\mathcal{N}(l, c)`: then :math:`E[\sigma^{-2}] = e^{2c - 2l}`."""
    if likelihood.noise is None:
        log_noise = own["log_noise"].mean
        precision = torch.exp(2.0 * own["log_noise"].spread - 2.0 * log_noise)
    else:
        noise = likelihood.noise_scale({}, like=output.mean)
        log_noise, precision = noise.log(), noise.pow(-2.0)
    squares = (y - output.mean).square() + output.spread
    return sum_over_event(-0.5 * squares * precision - log_noise - HALF_LOG_TWO_PI)


def heteroscedastic(output: Moments, y: Tensor) -> Tensor:
    r"""Mean f and log scale g from the network, with covariance c between them.

    .. math:: E\big[(y - f)^2 e^{-2g}\big] = \big((y - m_f + 2c)^2 + v_f\big)\, e^{2 v_g - 2 m_g}
    """
    (mean, log_scale), (variance, log_variance) = output.mean.chunk(2, -1), output.spread.chunk(2, -1)
    residual = y - mean
    if output.covariance is not None and output.mean.dim() == 2:
        residual = residual + 2.0 * output.covariance.diagonal(offset=mean.shape[1], dim1=-2, dim2=-1)
    squares = (residual.square() + variance) * torch.exp(2.0 * log_variance - 2.0 * log_scale)
    return sum_over_event(-0.5 * squares - log_scale - HALF_LOG_TWO_PI)


def categorical(output: Moments, y: Tensor) -> Tensor:
    """A lower bound, for labels; classes are in dimension 1."""
    chosen = output.mean.gather(1, y.unsqueeze(1)).squeeze(1)
    return sum_over_event(chosen - log_sum_exp_bound(output))


def log_sum_exp_bound(logits: Moments) -> Tensor:
    """The upper bound of E[log Σ exp f] over dimension 1."""
    raised = logits.mean + 0.5 * logits.spread
    with torch.no_grad():  # at the best weights the bound does not change with them
        weights = _best_weights(logits, raised)
    product = _times(logits, weights)
    return 0.5 * (weights * product).sum(1) + (raised - product).logsumexp(1)


def _best_weights(logits: Moments, raised: Tensor) -> Tensor:
    """By steps towards the softmax inside the logarithm, each short enough not to overshoot; classes in dimension 1."""
    weights, aim = logits.mean.movedim(1, 0).softmax(0), raised.movedim(1, 0).contiguous()  # classes first: quicker
    step = (1.0 / (1.0 + 0.5 * _largest(logits))).movedim(1, 0)
    followed = logits.covariance if logits.mean.dim() == 2 else None
    spread = logits.spread.movedim(1, 0) if followed is None else followed.permute(1, 2, 0).contiguous()
    for _ in range(_ROUNDS):
        product = spread * weights
        weights.lerp_((aim - (product if followed is None else product.sum(1))).softmax(0), step)
    return weights.movedim(0, 1)


def _times(logits: Moments, weights: Tensor) -> Tensor:
    """S a: covariance times weights."""
    if logits.covariance is None or logits.mean.dim() > 2:
        return logits.spread * weights
    return (logits.covariance @ weights.unsqueeze(-1)).squeeze(-1)


def _largest(logits: Moments) -> Tensor:
    """No less than the largest eigenvalue of S, for each row: what says how far a step may go without overshooting."""
    if logits.covariance is None or logits.mean.dim() > 2:
        return logits.spread.amax(1, keepdim=True)
    return logits.covariance.norm(dim=(-2, -1)).unsqueeze(1)


def poisson(output: Moments, y: Tensor) -> Tensor:
    """Counts with log rate f, of which E[exp f] is known."""
    rate = torch.exp(output.mean + 0.5 * output.spread)
    return sum_over_event(y * output.mean - rate - torch.lgamma(y + 1.0))


def by_quadrature(likelihood: Likelihood, output: Moments, y: Tensor, own: dict[str, Moments]) -> Tensor:
    """Any log likelihood that is a sum over outputs, each of which depends on its own output alone."""
    nodes, weights = quadrature(output.mean)
    values = torch.addcmul(output.mean, output.std, nodes.view(-1, *(1,) * output.mean.dim()))  # (nodes, batch, ...)
    rows, targets = values.flatten(0, 1), y.expand(len(nodes), *y.shape).flatten(0, 1)
    known = all(each.variance is None for each in own.values())
    places, shares = np.polynomial.hermite_e.hermegauss(1 if known else _OWN_NODES)
    total = torch.zeros(len(y), dtype=output.mean.dtype, device=output.mean.device)
    for place, share in zip(places.tolist(), (shares / shares.sum()).tolist(), strict=True):
        params = {name: each.mean if known else each.mean + place * each.std for name, each in own.items()}
        each = likelihood.log_prob(rows, targets, params).view(len(nodes), -1)
        total = total + share * (weights @ each)
    return total
