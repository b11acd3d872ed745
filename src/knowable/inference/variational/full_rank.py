"""Full-rank Gaussian variational inference (Titsias and Lázaro-Gredilla, 2014; Kucukelbir et al., 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import FullNormal
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import fast_randn
from knowable.errors import Unsupported
from knowable.inference.variational.divergence import HALF_LOG_TWO_PI_E
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.structured import (
    Family,
    FamilyModule,
    StructuredObjective,
    check_groups,
    group_weights,
    lower_factor,
)

_WHITENED_UP_TO = 300  # weights
_STEPS_OF_A_BASE = 10  # after which B absorbs what was learned


@dataclass(frozen=True)
class FullRank(Family):
    r"""One normal over a group of weights, with all their correlations.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)

    Args:
        max_parameters: Refuse larger groups: L is a D by D matrix, and training keeps some six of that size. 3,000
            weights take 220 MB.
    """

    max_parameters: int = 3_000

    def __post_init__(self) -> None:
        check_count("max_parameters", self.max_parameters)

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FullRankModule:
        """See :meth:`Family.build`."""
        if layout.size > self.max_parameters:
            raise Unsupported(
                f"A full-rank normal over {layout.size:,} weights would need a {layout.size:,} x {layout.size:,} "
                f"matrix; max_parameters is {self.max_parameters:,}. Raise it, make fewer weights random "
                f"(random='last_layer'), give only some of them this family (families={{'head.*': FullRank()}}), or "
                f"use LowRankVI."
            )
        return FullRankModule(layout, loc, initial_scale, whitened=layout.size <= _WHITENED_UP_TO)


class FullRankModule(FamilyModule):
    r"""Mean and Cholesky factor.

    .. math:: \theta = m + B\,(u + s \odot (\epsilon + R\,\epsilon)), \qquad
        \Sigma = L L^\top, \quad L = B\, \mathrm{diag}(s)\,(I + R)

    with a strictly lower triangular R. What is trained is m, u, log s and R; the lower triangular B is fixed for some
    steps and then absorbs what was learned, so that steps are taken in units of the distribution itself (whitened
    coordinates): the condition number of the posterior then makes no difference to the number of steps. There R is a
    matrix of trained numbers over √D: a step changes half of D² of them at once, each by as much as a mean, and where
    gradients are mostly noise q would otherwise drift. For many weights, where products of matrices are expensive, B
    is the identity: s is the scale of each weight given the noise of those before.

    Attributes:
        loc: m, ``(D,)``.
        drift: u, ``(D,)``.
        log_scale: Logarithms of s, ``(D,)``.
        mix: R, or √D R in whitened coordinates, ``(D, D)``, of which only what is below the diagonal counts.
        base: B, ``(D, D)``, or None for the identity.
        age: Steps made.
    """

    normal_marginals: ClassVar[bool] = True
    stretches: ClassVar[bool] = True
    base: Tensor | None
    age: Tensor

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float, *, whitened: bool):
        super().__init__(layout)
        size = len(loc)
        first = 0.0 if whitened else math.log(initial_scale)
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(torch.full_like(self.loc, first))
        self.mix = nn.Parameter(loc.new_zeros(size, size))
        self.drift = nn.Parameter(torch.zeros_like(self.loc)) if whitened else None
        self._step = 1.0 / math.sqrt(size) if whitened else 1.0
        self.register_buffer("base", loc.new_full((size,), initial_scale).diag() if whitened else None)
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))

    @property
    def prefers_path(self) -> bool:
        """Up to some hundred weights: q can then be the posterior itself, where the noise of the gradient vanishes."""
        return self.base is not None

    def after_step(self) -> None:
        """Every ten steps, let B absorb what was learned; the distribution stays the same."""
        self.age += 1
        if self.base is None or self.drift is None or self.age % _STEPS_OF_A_BASE:
            return
        self.loc.add_(self.base @ self.drift)
        self.base.copy_(self.scale_tril())
        for value in (self.drift, self.log_scale, self.mix):
            value.zero_()

    def mean(self) -> Tensor:
        """The mean, ``(D,)``."""
        return self.loc if self.base is None or self.drift is None else self.loc + self.base @ self.drift

    def scale_tril(self) -> Tensor:
        """The Cholesky factor L, ``(D, D)``."""
        scale = self.log_scale.exp()
        factor = scale.unsqueeze(1) * self._lower() + scale.diag()
        return factor if self.base is None else self.base @ factor

    def _lower(self) -> Tensor:
        """R, ``(D, D)``."""
        lower = self.mix.tril(-1)
        return lower if self.base is None else self._step * lower

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        noise = fast_randn(count, len(self.loc), like=self.loc)
        shift = (noise + noise @ self._lower().T) * self.log_scale.exp()
        if self.base is not None and self.drift is not None:
            shift = (shift + self.drift) @ self.base.T
        return self.loc + shift, None

    def entropy(self) -> Tensor:
        """From the determinant of L."""
        half_log_det = self.log_scale.sum()
        half_log_det = half_log_det if self.base is None else half_log_det + self.base.diagonal().log().sum()
        return half_log_det + HALF_LOG_TWO_PI_E * len(self.loc)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and diagonal of the covariance."""
        return self.mean(), self.scale_tril().square().sum(1)

    def held_log_density(self, values: Tensor) -> Tensor:
        """See :meth:`FamilyModule.held_log_density`; only what is below the diagonal of R is read."""
        standard = (values - self.loc.detach()).T
        if self.base is not None and self.drift is not None:
            standard = torch.linalg.solve_triangular(self.base, standard, upper=False)
            standard = standard - self.drift.detach().unsqueeze(1)
        standard = standard / self.log_scale.detach().exp().unsqueeze(1)
        noise = torch.linalg.solve_triangular(self._lower().detach(), standard, upper=False, unitriangular=True)
        return -0.5 * noise.square().sum(0)

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """The normal itself."""
        factor = lower_factor(precision)
        self.loc.copy_(mean)
        if self.base is None or self.drift is None:
            scale = factor.diagonal()
            self.log_scale.copy_(scale.log())
            self.mix.copy_((factor / scale.unsqueeze(1)).tril(-1))
            return
        self.base.copy_(factor)
        for value in (self.drift, self.log_scale, self.mix):
            value.zero_()

    def posterior(self, model: Model, **common: Any) -> FullNormal:
        """A normal with a full covariance."""
        return FullNormal(model, self.layout, self.mean(), self.scale_tril(), **common)


@dataclass(frozen=True, repr=False, kw_only=True)
class FullRankVI(VariationalMethod):
    r"""One normal distribution over all weights, with all their correlations.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)

    with a lower triangular L. Where the posterior is normal, this is the posterior: for a Gaussian likelihood and
    ``random="last_layer"`` it is Bayesian linear regression on the features.

    Args:
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
        max_parameters: Refuse a group of more weights: L is a D by D matrix, and training keeps some six of that size.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.FullRankVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.covariance.shape
        torch.Size([2, 2])
    """

    family = "variational"
    says_rise = True
    summary = "one normal with all correlations between the weights"
    aliases = ("frvi",)
    references = ("opper2009", "titsias2014", "kucukelbir2017", "roeder2017")

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int | None = None
    families: Mapping[str, Family] | None = None
    kl_gradient: str = "auto"
    max_parameters: int = FullRank.max_parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_groups(self.draws, self.families, self.kl_gradient)
        check_count("max_parameters", self.max_parameters)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        groups = group_weights(self.families or {}, FullRank(self.max_parameters), model)
        return StructuredObjective(
            model, size, groups, kl_gradient=self.kl_gradient, draws=self.draws or 1, **self.elbo_settings(start)
        )
