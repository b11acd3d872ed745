"""The objective of variational inference in function space: likelihood of the data, less a divergence of functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.model import Model
from knowable.core.normal_divergence import NormalStretch, fixed_normal, stretches_of
from knowable.core.params import Layout
from knowable.core.types import Params
from knowable.errors import Unsupported
from knowable.inference.variational.function_priors import PriorValues
from knowable.inference.variational.linearised import LinearisedNetwork
from knowable.inference.variational.mean_field_objective import MeanFieldObjective


class FunctionSpaceObjective(MeanFieldObjective):
    r"""- (1/N) of the objective in function space, on the full-data scale.

    .. math:: E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, E_C\Big[\sum_o \mathrm{KL}\big(\tilde q(f_o(C)) \,\|\, p(f_o(C))\big)\Big]
        - \beta\, \mathrm{KL}\big(q(\eta) \,\|\, p(\eta)\big)

    with q independent normals, :math:`\tilde q` the process of the network linearised in its weights at their means, C
    a few points of the pool drawn anew in every step, o the outputs, and η the likelihood's own parameters, whose prior
    is that of the model. Of many outputs a step takes a few at random, and their part for the whole: that has the same
    mean.

    Args:
        model: The model.
        x: A few rows of data.
        size: Number of training examples N.
        prior: The prior at the points of the pool.
        pool: The points, ``(P, ...)``.
        context_points: How many of them are drawn in each step.
        context_outputs: How many outputs are drawn in each step.
        jitter: See :func:`process_divergence`.
        draws: Weight draws for the likelihood in each step.
        beta: Factor on the divergences.
        kl_warmup: Epochs over which that factor rises to its full value.
        initial_scale: Standard deviation all weights start with.
        start: Where means start, or None for the model's start values.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        prior: PriorValues,
        pool: Tensor,
        context_points: int,
        context_outputs: int,
        jitter: float,
        draws: int = 1,
        beta: float = 1.0,
        kl_warmup: int | None = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
    ):
        super().__init__(
            model, x, size, draws=draws, beta=beta, kl_warmup=kl_warmup, initial_scale=initial_scale, start=start
        )
        self.prior, self.pool, self.jitter = prior, pool, jitter
        self.context_points, self.context_outputs = min(context_points, len(pool)), context_outputs
        self.network_names = list(model.network_params(dict.fromkeys(self.layout.names, x)))
        own = [name for name in self.layout.names if name not in self.network_names]
        # weights have no prior of their own here: their stretches are empty
        self.plan = replace(self.plan, stretches=tuple(_stretches(self.layout, model, own)))
        self.others = [name for name in own if fixed_normal(model.prior.prior_of(name)) is None]
        self._at_hand: tuple[Params, Params] | None = None  # means and variances of local weights, within a step
        self.linearised = LinearisedNetwork(model)
        self.outputs = self.linearised.count_outputs(x, model.network_params(model.params()), self.net_buffers)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        loss, terms = super().forward(x, y)  # the divergence in it is that of the likelihood's own parameters
        index = torch.randperm(len(self.pool))[: self.context_points].to(self.pool.device)
        with torch.autocast(x.device.type, enabled=False):
            divergence = self.function_divergence(index, self._some_outputs())
        self._at_hand = None
        loss = loss + (self.beta * self.warmth() / self.size) * divergence.to(loss.dtype)
        value = divergence.detach().to(loss.dtype)
        return loss, {**terms, "kl": terms["kl"] + value, "function_kl": value}

    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        """Also keeps means and variances of local weights for the divergence of the same step."""
        drawn = super().draw(noise)
        self._at_hand = drawn[1], drawn[2]
        return drawn

    def _moments(self) -> tuple[Params, Params]:
        """Means and variances of the network's random weights: those of this step, as far as they are at hand."""
        loc, variance = self._at_hand or ({}, {})
        if any(name not in loc for name in self.network_names):
            means, scales = self.loc_and_scale()
            loc = {**means, **loc}
            variance = {name: variance[name] if name in variance else scales[name].square() for name in loc}
        return {name: loc[name] for name in self.network_names}, variance

    def _some_outputs(self) -> Tensor | None:
        """Those that this step looks at; None for all."""
        if self.outputs <= self.context_outputs:
            return None
        return torch.randperm(self.outputs)[: self.context_outputs].to(self.pool.device)

    def function_divergence(self, index: Tensor, only: Tensor | None = None) -> Tensor:
        """The divergence of function values at some points of the pool, summed over outputs.

        Args:
            index: The points.
            only: Outputs that stand for all; None for all themselves.
        """
        loc, variance = self._moments()
        fixed = self.model.network_params(self.point_params())
        mean, covariance = self.linearised.moments(
            self.pool[index], loc, variance, fixed=fixed, buffers=self.net_buffers, only=only
        )
        each = process_divergence(mean, covariance, *self.prior.moments(index, only), jitter=self.jitter)
        return each.sum() if only is None else each.mean() * self.outputs


def process_divergence(
    mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, *, jitter: float = 0.0
) -> Tensor:
    r"""KL of two normal distributions of n function values, for each output, ``(outputs,)``.

    .. math:: \tfrac12 \Big(\operatorname{tr}(K^{-1} S) + (\mu - m)^\top K^{-1} (\mu - m) - n
        + \log\frac{\det K}{\det S}\Big)

    Here, and nowhere else, is the jitter: both covariances get ``jitter`` times the prior's mean variance on their
    diagonal, as if function values were seen with a little independent noise. What is computed is then the KL of the
    noisy values, which is never more than that of the values themselves, and directions in which both processes are
    stiffer than the noise count for nothing.

    Args:
        mean: μ, ``(outputs, n)``, in double precision like the rest.
        covariance: S, ``(outputs, n, n)``.
        prior_mean: m, ``(outputs, n)`` or ``(1, n)`` for all outputs.
        prior_covariance: K, ``(outputs, n, n)`` or ``(1, n, n)``.
        jitter: The noise's variance as a share of the prior's.

    Returns:
        Not a number, rather than an error, where a covariance is not positive definite: a fit then goes back a step.
    """
    return _ProcessDivergence.apply(mean, covariance, prior_mean, prior_covariance, jitter)  # type: ignore[no-any-return]


class _ProcessDivergence(torch.autograd.Function):
    """See :func:`process_divergence`; derivatives in μ and S alone, which are K⁻¹ (μ - m) and (K⁻¹ - S⁻¹) / 2."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, jitter: float
    ) -> Tensor:
        noise = jitter * prior_covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # (outputs or 1, 1)
        prior_root, root = _cholesky(prior_covariance, noise), _cholesky(covariance, noise)
        log_ratio = (prior_root.diagonal(dim1=-2, dim2=-1).log() - root.diagonal(dim1=-2, dim2=-1).log()).sum(-1)
        prior_root = prior_root.expand_as(root)
        both = torch.cat([root, (mean - prior_mean).unsqueeze(-1)], -1)
        both = torch.linalg.solve_triangular(prior_root, both, upper=False)
        ctx.save_for_backward(root, prior_root, both[..., -1:])
        return 0.5 * (both.square().sum((-2, -1)) - mean.shape[-1]) + log_ratio

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        root, prior_root, shift = ctx.saved_tensors
        by_mean = torch.linalg.solve_triangular(prior_root.mT, shift, upper=True).squeeze(-1)
        by_covariance = torch.cholesky_inverse(prior_root) - torch.cholesky_inverse(root)
        return grad.unsqueeze(-1) * by_mean, (0.5 * grad)[:, None, None] * by_covariance, None, None, None


def _cholesky(covariance: Tensor, noise: Tensor) -> Tensor:
    """The root of a covariance with noise on its diagonal; not a number where there is none."""
    covariance = covariance.clone()
    covariance.diagonal(dim1=-2, dim2=-1).add_(noise)
    root, info = torch.linalg.cholesky_ex(covariance)
    return torch.where((info == 0)[:, None, None], root, torch.nan)


def _stretches(layout: Layout, model: Model, own: list[str]) -> list[NormalStretch]:
    """Closed-form divergences of the parameters in ``own``, and nothing for all others."""
    found, start = [], 0
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        (stretch,) = stretches_of(Layout((name,), (shape,)), model) if name in own else [NormalStretch(0, size)]
        found.append(replace(stretch, start=start, stop=start + size))
        start += size
    return found


def check_model(model: Model) -> None:
    """Refuse what has no meaning where the prior is over functions."""
    if model.hyper_names:
        raise Unsupported(
            "FunctionSpaceVI has no use for a prior over weights whose scale is learned: its prior is over functions. "
            "Give the model a prior of fixed scale, or use MeanFieldVI."
        )
    own = [name for name in model.random_names if name not in model.network_params(model.params())]
    if len(own) == len(model.random_names):
        raise Unsupported("FunctionSpaceVI needs random weights in the network: its functions would not vary.")
    if any(model.prior.prior_of(name) is None for name in own):
        raise Unsupported(
            f"The model's prior has correlations between {own[0]!r} and the weights, which FunctionSpaceVI has no "
            f"prior for. Fix the noise, or give it a prior of its own."
        )
