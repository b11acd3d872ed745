"""Mean-field Gaussian variational inference (Graves, 2011; Blundell et al., 2015; Kingma et al., 2015)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.support.checks import check_choice
from knowable.core.support.randomness import fast_randn
from knowable.errors import InvalidArgument
from knowable.inference.variational.divergence import entropy_of_normals
from knowable.inference.variational.gaussian_weight import flipout_rule, local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.normals import FlatNormalDistribution, FlatNormals, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.inference.variational.score_function import score_surrogate
from knowable.inference.variational.structured import (
    Family,
    FamilyModule,
    StructuredObjective,
    check_groups,
    group_weights,
)

_DRAWS = {"score": 16, "local_score": 8}  # where they are not given, and not 1


@dataclass(frozen=True, repr=False, kw_only=True)
class MeanFieldVI(VariationalMethod):
    r"""An independent normal distribution for every weight, fitted by maximising the evidence lower bound.

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)

    There is no KL weight to tune: everything is on the full-data scale and ``beta=1`` is Bayes. Prediction always uses
    weight draws shared by all inputs, whatever the estimator that training used.

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
        initial_scale: Standard deviation of all weights at the start: small, so that training begins like that of a
            point estimate.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)
        draws: Weight draws per step; None is 1, 16 for ``"score"`` and 8 for ``"local_score"``.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as
            ``{"head.*": kn.families.FullRank()}``; the first match wins, and groups are independent. All other weights
            are independent normals. With families every weight is drawn (``estimator="weight"``).
        estimator: How the gradient is estimated.
            ``"auto"``: local reparameterisation for linear layers whose weights act once per example, weight draws
            elsewhere: exact and quick.
            ``"local"``: local reparameterisation for every linear layer and convolution (independent noise at each
            position: an approximation).
            ``"weight"``: one draw of all weights per step (Bayes by backprop).
            ``"flipout"``: as ``"weight"``, with pseudo-independent perturbations for each example.
            ``"score"``: log-derivative with a leave-one-out baseline; needs no gradient of the likelihood, and many
            more draws.
            ``"local_score"``: the same, Rao-Blackwellised by layer: the outputs of linear layers are drawn for each
            example, and their scores multiplied by that example's likelihood alone.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MeanFieldVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.predict(x).mean.shape
        torch.Size([40, 1])
    """

    family = "variational"
    says_rise = True
    summary = "an independent normal for every weight, by maximising the evidence lower bound"
    aliases = ("mfvi", "bbb")
    references = ("graves2011", "blundell2015", "kingma2015", "ranganath2014", "kool2019")

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int | None = None
    families: Mapping[str, Family] | None = None
    estimator: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_groups(self.draws, self.families)
        check_choice("estimator", self.estimator, ESTIMATORS)
        if self.estimator in BY_SCORE and self.draws == 1:
            raise InvalidArgument(
                f"draws must be >= 2 with estimator={self.estimator!r}: each draw is compared with the others."
            )
        if self.families is not None and self.estimator not in ("auto", "weight"):
            raise InvalidArgument(
                f"estimator must be 'auto' or 'weight' with families, which draw weights; got {self.estimator!r}."
            )

    def objective(
        self, model: Model, x: Tensor, size: int, *, start: Params | None = None
    ) -> MeanFieldObjective | StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        common = self.elbo_settings(start)
        if self.families is not None:
            groups = group_weights(self.families, MeanField(), model)
            return StructuredObjective(model, size, groups, draws=self.draws or 1, **common)
        draws = self.draws or _DRAWS.get(self.estimator, 1)
        return MeanFieldObjective(model, x, size, estimator=self.estimator, draws=draws, **common)


ESTIMATORS = ("auto", "local", "weight", "flipout", "score", "local_score")
BY_SCORE = ("score", "local_score")
"""Estimators that need no gradient of the likelihood."""


class MeanFieldObjective(FlatNormalDistribution, VariationalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`; see :func:`negative_elbo` for the formula."""

    recordable = True

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        estimator: str = "auto",
        initial_scale: float = 0.02,
        start: Params | None = None,
        step: Callable[[MeanFieldObjective, torch.optim.Optimizer], None] | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
        self.estimator, self.step = estimator, step
        first = first_values(model, start)
        self.hold(FlatNormals.of(model, x, first, estimator), first, initial_scale)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points = self.point_params()
        if self.estimator in BY_SCORE:
            log_likelihood, kl = score_surrogate(self, x, y, points, weights)
        else:
            kl, thetas = self.draw()
            log_likelihood = expected_log_likelihood(self, x, y, points, thetas, weights)
        if self.normals.others:
            kl = kl + self.normals.remaining_kl(self.q, self.model, points, self.draws)
        return negative_elbo(self, log_likelihood, kl, points)

    def draw(self) -> tuple[Tensor, list[Params]]:
        """The KL in closed form, and draws of all weights; those of local layers are drawn by their outputs."""
        noise = standard_noise(self.draws, self.normals.drawn.size, like=self.q, recording=self.recording)
        kl, loc, variance, draws = self.normals.draw(self.q, noise, recording=self.recording)
        rule = flipout_rule if self.estimator == "flipout" else local_rule
        return kl, [{**draw, **local_weights(loc, variance, rule, recording=self.recording)} for draw in draws]

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step, or that of ``step``, a function of this objective and the optimiser."""
        if self.step is None:
            optimiser.step()
        else:
            self.step(self, optimiser)

    def posterior(self, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        return DiagonalNormal(self.model, *self.loc_and_scale(), **self.shared(common))


@dataclass(frozen=True)
class MeanField(Family):
    r"""Independent normals.

    .. math:: q(\theta) = \prod_d \mathcal{N}(\theta_d \mid m_d, s_d^2)

    Beside other families, weights are drawn. By itself, :class:`~knowable.inference.variational.mean_field.MeanFieldVI`
    has quieter gradients.
    """

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> MeanFieldModule:
        """See :meth:`Family.build`."""
        return MeanFieldModule(layout, loc, initial_scale)


class MeanFieldModule(FamilyModule):
    """Means and logarithms of scales."""

    normal_marginals: ClassVar[bool] = True

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float):
        super().__init__(layout)
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(torch.full_like(self.loc, math.log(initial_scale)))

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        noise = fast_randn(count, len(self.loc), like=self.loc)
        return torch.addcmul(self.loc, self.log_scale.exp(), noise), None

    def entropy(self) -> Tensor:
        """Sum of those of the weights."""
        return entropy_of_normals(self.log_scale)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances."""
        return self.loc, (2.0 * self.log_scale).exp()

    def held_log_density(self, values: Tensor) -> Tensor:
        """See :meth:`FamilyModule.held_log_density`."""
        return -0.5 * ((values - self.loc.detach()) / self.log_scale.detach().exp()).square().sum(-1)

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """For each weight its precision given all others."""
        self.loc.copy_(mean)
        self.log_scale.copy_(-0.5 * precision.diagonal().log())

    def posterior(self, model: Model, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        views = self.layout.views
        return DiagonalNormal(model, views(self.loc.detach()), views(self.log_scale.detach().exp()), **common)
