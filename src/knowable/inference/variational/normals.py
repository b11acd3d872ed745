r"""Independent normals in one flat buffer: draws and KL divergence, with a hand-written gradient.

One call makes the weight draws :math:`w = m + s \epsilon`, the variances that local reparameterisation needs, and the
KL; one backward pass writes all gradients into one buffer, where autograd would walk the memory several times more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.support.randomness import fast_randn
from knowable.inference.variational.divergence import PriorSegment, entropy_of_normals, prior_segments, remaining_kl
from knowable.inference.variational.gaussian_weight import Usage, trace_usage

DRAWS_WEIGHTS = ("weight", "score")
"""Estimators that draw every weight."""


@dataclass(frozen=True)
class FlatNormals:
    r"""Where the parameters of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)` are in the buffer ``q`` ``(2, D)``.

    Attributes:
        drawn: The parameters that are drawn as weights: the first part of the buffer.
        local: The parameters whose layers draw their outputs (local reparameterisation, flipout): the second part.
        segments: The priors over the buffer.
        others: Names of the parameters whose prior has no segment.
    """

    drawn: Layout
    local: Layout
    segments: tuple[PriorSegment, ...]
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model, x: Tensor, first: Params, estimator: str) -> FlatNormals:
        """The buffer for the random parameters of a model, whose network is traced on a few rows of ``x``."""
        drawn, local = (Layout.of({name: first[name] for name in n}) for n in drawn_and_local(model, x, estimator))
        segments, others = prior_segments(_joined(drawn, local), model)
        return cls(drawn, local, tuple(segments), tuple(others))

    @cached_property
    def layout(self) -> Layout:
        """All parameters, in the order of the buffer."""
        return _joined(self.drawn, self.local)

    def initial(self, first: Params, scale: float) -> Tensor:
        """The buffer at the means ``first`` and one standard deviation."""
        loc = self.layout.flatten(first)
        return torch.stack([loc, torch.full_like(loc, math.log(scale))])

    def loc_and_scale(self, q: Tensor) -> tuple[Params, Params]:
        """Means and standard deviations by name, differentiable."""
        return self.layout.views(q[0]), self.layout.views(q[1].exp())

    def sample(self, q: Tensor, count: int) -> list[Params]:
        """Draws of all parameters, by name, from the global generator."""
        noise = torch.randn((count, self.layout.size), dtype=q.dtype, device=q.device)
        return [self.layout.views(draw) for draw in torch.addcmul(q[0], q[1].exp(), noise)]

    def kl_divergence(self, q: Tensor, model: Model, points: Params, draws: int) -> Tensor:
        """KL(q ‖ p), with ``draws`` Monte Carlo draws for the priors without a closed form."""
        flat = q[0], q[1], q[1].exp()
        return self.remaining_kl(q, model, points, draws) + sum(segment.value(*flat) for segment in self.segments)

    def remaining_kl(self, q: Tensor, model: Model, points: Params, draws: int) -> Tensor:
        """The part of the KL that :meth:`draw` leaves out: parameters whose prior has no segment."""
        return remaining_kl(model, self.others, *self.loc_and_scale(q), points, draws)

    def draw(self, q: Tensor, noise: Tensor, *, recording: bool = False) -> tuple[Tensor, Params, Params, list[Params]]:
        """KL over the segments, means and variances of local parameters, and draws of the others.

        Args:
            q: The buffer.
            noise: Standard normal noise ``(draws, drawn weights)``, overwritten.
            recording: Use autograd, for graphs that are recorded: no number may be taken out of a tensor.
        """
        kl, *rest = (draw_by_autograd if recording else DrawAndKL.apply)(q, noise, self)
        cut, names = len(self.local.names), self.drawn.names
        loc, variance = (dict(zip(self.local.names, rest[i * cut : (i + 1) * cut], strict=True)) for i in (0, 1))
        drawn = rest[2 * cut :]
        draws = [dict(zip(names, drawn[k * len(names) : (k + 1) * len(names)], strict=True)) for k in range(len(noise))]
        return kl, loc, variance, draws


class FlatNormalDistribution:
    """The distribution of the objectives whose q is :class:`FlatNormals`, put before ``VariationalObjective``."""

    symmetric = True
    diagonal = True
    stretches = True
    normals: FlatNormals
    q: nn.Parameter  # means and log scales of all random parameters, (2, D)

    def hold(self, normals: FlatNormals, first: Params, initial_scale: float) -> None:
        """Start at the means ``first`` and one standard deviation."""
        self.normals, self.layout = normals, normals.layout
        self.q = nn.Parameter(normals.initial(first, initial_scale))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        return self.normals.loc_and_scale(self.q)

    def fit_normal(self: Any, mean: Tensor, precision: Tensor) -> None:
        """The same mean, and for each weight its precision given all others: s = Λ_dd^-1/2."""
        first = self.model.params()
        whole = Layout.of({name: first[name] for name in self.model.random_names})
        places = whole.places_of(self.layout.names)
        self.q.copy_(torch.stack([mean, -0.5 * precision.diagonal().log()])[:, places])

    def kl_divergence(self: Any) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        return self.normals.kl_divergence(self.q, self.model, self.point_params(), max(8, self.draws))

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return entropy_of_normals(self.q[1])

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all random parameters, whatever the estimator."""
        return self.normals.sample(self.q, count)


def standard_noise(draws: int, size: int, *, like: Tensor, recording: bool = False) -> Tensor:
    """Standard normal noise ``(draws, size)``; while recording from torch's own generator, which a graph can call."""
    if recording:
        return torch.randn((draws, size), dtype=like.dtype, device=like.device)
    return fast_randn(draws, size, like=like)


def drawn_and_local(model: Model, x: Tensor, estimator: str) -> tuple[list[str], list[str]]:
    """Which parameters are drawn as weights and which by their layer's outputs, equal priors side by side."""
    usage = Usage() if estimator in DRAWS_WEIGHTS else trace_usage(model, x)
    wanted = "auto" if estimator == "local_score" else estimator  # only where it is exact
    local = [name for name in model.random_names if usage.suits(name, wanted)]
    drawn = [name for name in model.random_names if name not in set(local)]
    return _by_prior(drawn, model), _by_prior(local, model)


def _by_prior(names: Sequence[str], model: Model) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(repr(model.prior.prior_of(name)), []).append(name)
    return [name for group in groups.values() for name in group]


def _joined(first: Layout, second: Layout) -> Layout:
    return Layout((*first.names, *second.names), (*first.shapes, *second.shapes))


class DrawAndKL(torch.autograd.Function):
    """The KL over the segments, then one output for every parameter: local means, local variances, and the draws.

    One output for each parameter rather than one for all spares the backward pass a copy of the whole gradient.
    """

    @staticmethod
    def forward(ctx, q: Tensor, noise: Tensor, normals: FlatNormals):
        """Compute from ``q`` ``(2, D)`` and standard normal ``noise`` ``(draws, drawn weights)``, overwritten."""
        loc, log_scale = q[0], q[1]
        split = normals.drawn.size
        scale = log_scale.exp()
        shift = noise.mul_(scale[:split])  # s ε: what is added to the mean, and dw / d log s
        variance = scale[split:].square()
        found = [segment.value_and_slopes(loc, log_scale, scale) for segment in normals.segments]
        kl = torch.stack([value for value, _ in found]).sum()
        ctx.normals, ctx.slopes = normals, [slopes for _, slopes in found]
        ctx.save_for_backward(q, scale, shift, variance)
        drawn = [view for each in shift for view in normals.drawn.views(each + loc[:split]).values()]
        return kl, *normals.local.views(loc[split:]).values(), *normals.local.views(variance).values(), *drawn

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_kl: Tensor, *grads: Tensor):
        """Chain rule for all outputs, written into one buffer."""
        q, scale, shift, variance = ctx.saved_tensors
        normals: FlatNormals = ctx.normals
        gradient = torch.empty_like(q)
        weight = grad_kl.item()
        for segment, slopes in zip(normals.segments, ctx.slopes, strict=True):
            segment.write_gradient(gradient, q[0], scale, weight, slopes)
        flat = [grad.reshape(-1) for grad in grads]
        split, cut, sizes = normals.drawn.size, len(normals.local.names), normals.drawn.sizes
        drawn, local = gradient[:, :split], gradient[:, split:]
        if cut:
            _add(local[0], normals.local.sizes, flat[:cut])
            _add(local[1], normals.local.sizes, flat[cut : 2 * cut], variance, value=2.0)  # dv / d log s = 2 v
        for k, moved in enumerate(shift) if sizes else ():
            each = flat[2 * cut + k * len(sizes) : 2 * cut + (k + 1) * len(sizes)]
            _add(drawn[0], sizes, each)
            _add(drawn[1], sizes, each, moved)  # dw / d log s = s ε
        return gradient, None, None


def draw_by_autograd(q: Tensor, noise: Tensor, normals: FlatNormals) -> tuple[Tensor, ...]:
    """The outputs of :class:`DrawAndKL` with a gradient by autograd: no number is taken out of a tensor.

    For graphs that are recorded, where a compiler fuses the passes over memory.
    """
    loc, log_scale = q[0], q[1]
    split = normals.drawn.size
    scale = log_scale.exp()
    variance = scale[split:].square()
    kl = torch.stack([segment.value(loc, log_scale, scale) for segment in normals.segments]).sum()
    drawn = [view for each in noise * scale[:split] for view in normals.drawn.views(each + loc[:split]).values()]
    return (kl, *normals.local.views(loc[split:]).values(), *normals.local.views(variance).values(), *drawn)


def _add(
    target: Tensor, sizes: Sequence[int], parts: list[Tensor], factor: Tensor | None = None, *, value: float = 1.0
) -> None:
    """Add ``parts``, laid end to end (times ``factor`` times ``value``), to ``target``, in place."""
    if factor is None:
        torch._foreach_add_(target.split(sizes), parts)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_addcmul_(  # pyright: ignore[reportPrivateImportUsage]
            target.split(sizes), parts, factor.split(sizes), value=value
        )
