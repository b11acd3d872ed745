"""Low-rank Gaussian variational inference (Ong, Nott and Smith, 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from knowable.core.model.model import Model
from knowable.core.model.structured_normal import directions
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import LowRankNormal
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import fast_randn
from knowable.inference.variational.divergence import HALF_LOG_TWO_PI_E
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.structured import (
    Drawn,
    Family,
    FamilyModule,
    StructuredObjective,
    check_groups,
    group_weights,
)

_FIRST_FACTOR = 0.1  # standard deviation of U at the start, where zero would be a saddle point


@dataclass(frozen=True)
class LowRank(Family):
    r"""One normal over a group of weights, whose covariance is diagonal plus low rank.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, \mathrm{diag}(s^2) + F F^\top)

    Args:
        rank: Number of columns of F; at most the number of weights.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> LowRankModule:
        """See :meth:`Family.build`."""
        return LowRankModule(layout, loc, initial_scale, min(self.rank, layout.size))


class LowRankModule(FamilyModule):
    r"""Mean, scales and directions.

    .. math:: \theta = m + s \odot (\epsilon + U^\top z), \qquad
        \Sigma = \mathrm{diag}(s)\,(I + U^\top U)\,\mathrm{diag}(s), \qquad z \sim \mathcal{N}(0, I_k)

    which is diag(s²) + F Fᵀ with F = diag(s) Uᵀ. Written like this U has no unit, and one step size suits it and log s.
    """

    normal_marginals: ClassVar[bool] = True

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float, rank: int):
        super().__init__(layout)
        factor = _FIRST_FACTOR * torch.randn((rank, len(loc)), dtype=loc.dtype, device=loc.device)
        spread = 1.0 + factor.square().sum(0)
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(math.log(initial_scale) - 0.5 * spread.log())
        self.factor = nn.Parameter(factor)

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        return self._draw(count, self._along(count) @ self.factor), None

    def entropy(self) -> Tensor:
        """From the determinant of the covariance."""
        return self._entropy(torch.logdet(_inner(self.factor)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and diagonal of the covariance."""
        return self.loc, self._variances(self.factor.square().sum(0))

    def draw_with_terms(self, count: int) -> Drawn:
        """All from one pass over the factor, and one back."""
        shift, squares, log_det = FactorTerms.apply(self.factor, self._along(count))
        return Drawn(self._draw(count, shift), None, self._entropy(log_det), (self.loc, self._variances(squares)))

    def _draw(self, count: int, shift: Tensor) -> Tensor:
        noise = fast_randn(count, len(self.loc), like=self.loc)
        return torch.addcmul(self.loc, self.log_scale.exp(), noise + shift)

    def _along(self, count: int) -> Tensor:
        """Noise along the directions, z ``(K, k)``."""
        return torch.randn((count, len(self.factor)), dtype=self.loc.dtype, device=self.loc.device)

    def _entropy(self, log_det: Tensor) -> Tensor:
        return self.log_scale.sum() + 0.5 * log_det + HALF_LOG_TWO_PI_E * len(self.loc)

    def _variances(self, squares: Tensor) -> Tensor:
        return (2.0 * self.log_scale).exp() * (1.0 + squares)

    def held_log_density(self, values: Tensor) -> Tensor:
        """By the Woodbury identity; see :meth:`FamilyModule.held_log_density`."""
        standard = (values - self.loc.detach()) / self.log_scale.detach().exp()
        factor = self.factor.detach()
        along = standard @ factor.T  # (K, k)
        inner = torch.cholesky_solve(along.T, torch.linalg.cholesky(_inner(factor)))
        return -0.5 * (standard.square().sum(-1) - (along * inner.T).sum(-1))

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """See :func:`nearest_low_rank`."""
        log_scale, factor = nearest_low_rank(precision, len(self.factor))
        self.loc.copy_(mean)
        self.log_scale.copy_(log_scale)
        self.factor.copy_(factor)

    def posterior(self, model: Model, **common: Any) -> LowRankNormal:
        """A normal with a diagonal and a few directions."""
        basis, excess = directions(self.factor.detach().T)
        scale = self.log_scale.detach().exp()
        return LowRankNormal(model, self.layout, self.loc, scale, basis, 1.0 + excess, **common)


_ALTERNATIONS = 300  # between scales and directions


def nearest_low_rank(precision: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    r"""Log scales ``(D,)`` and directions U ``(k, D)`` of the member nearest to a normal with precision P.

    Given s, the best U are the k eigenvectors of diag(s) P diag(s) with the smallest eigenvalues μ below one, of length
    :math:`\sqrt{1/\mu - 1}`. Given F = diag(s) Uᵀ, the best scales solve :math:`P_{dd} = (\Sigma^{-1})_{dd}`.
    """
    scale = precision.diagonal().rsqrt()
    factor = precision.new_zeros(rank, len(precision))
    for _ in range(_ALTERNATIONS):
        values, vectors = torch.linalg.eigh(scale * precision * scale.unsqueeze(1))
        lengths = (values[:rank].clamp_min(1e-14).reciprocal() - 1.0).clamp_min(0.0).sqrt()
        factor = lengths.unsqueeze(1) * vectors[:, :rank].T
        explained = (factor * torch.linalg.solve(_inner(factor), factor)).sum(0)  # 1 - s² (Σ⁻¹)_dd
        new = (precision.diagonal() + explained / scale.square()).rsqrt()
        done = (new / scale - 1.0).abs().max() < 1e-6
        scale, factor = new, factor * (scale / new)
        if done:
            break
    return scale.log(), factor


class FactorTerms(torch.autograd.Function):
    """What is needed of U: z U, the sums of its squares over directions, and log det(I + U Uᵀ).

    Its gradient is written in three passes over one buffer, where autograd would make and add four.
    """

    @staticmethod
    def forward(ctx, factor: Tensor, along: Tensor):
        """From U ``(k, D)`` and z ``(K, k)``."""
        inner = _inner(factor)
        ctx.save_for_backward(factor, along, inner)
        return along @ factor, factor.square().sum(0), torch.logdet(inner)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_shift: Tensor, grad_squares: Tensor, grad_log_det: Tensor):
        """Chain rule: the determinant's is 2 (I + U Uᵀ)⁻¹ U."""
        factor, along, inner = ctx.saved_tensors
        gradient = factor * (2.0 * grad_squares)
        gradient.addmm_(torch.linalg.inv(inner) * (2.0 * grad_log_det), factor)
        return gradient.addmm_(along.T, grad_shift), None


def _inner(factor: Tensor) -> Tensor:
    """I + U Uᵀ, ``(k, k)``."""
    inner = factor @ factor.T
    inner.diagonal().add_(1.0)
    return inner


@dataclass(frozen=True, repr=False, kw_only=True)
class LowRankVI(VariationalMethod):
    r"""One normal distribution over all weights, whose covariance is diagonal plus low rank.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, \mathrm{diag}(s^2) + F F^\top)

    with a factor F of ``rank`` columns: mean field, and the few directions in which weights move together most. With
    D - 1 directions every covariance of D weights has this form.

    Args:
        rank: Number of columns of F. Time and memory of a step grow with it.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        draws: Weight draws per step; None is one.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as
            ``{"head.*": kn.families.FullRank()}``; the first match wins. All other weights have the method's own.
        kl_gradient: ``"closed"``: from the closed form of the KL, where there is one. ``"path"``: along the draws that
            the likelihood is given (Roeder et al., 2017), whose noise cancels as q approaches the posterior.
            ``"auto"``: ``"path"`` for a full covariance, or a radial or real NVP flow, of up to 300 weights. All aim at
            the same optimum.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> kn.LowRankVI(rank=1, epochs=300).fit(model, (x, 2 * x)).rank
        1
    """

    family = "variational"
    says_rise = True
    summary = "one normal whose covariance is a diagonal and a few directions"
    aliases = ("lrvi",)
    references = ("ong2018",)

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int | None = None
    families: Mapping[str, Family] | None = None
    kl_gradient: str = "auto"
    rank: int = field(default=LowRank.rank, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_groups(self.draws, self.families, self.kl_gradient)
        check_count("rank", self.rank)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        groups = group_weights(self.families or {}, LowRank(self.rank), model)
        return StructuredObjective(
            model, size, groups, kl_gradient=self.kl_gradient, draws=self.draws or 1, **self.elbo_settings(start)
        )
