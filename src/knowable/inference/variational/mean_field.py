"""Mean-field Gaussian variational inference (Graves, 2011; Blundell et al., 2015; Kingma et al., 2015)."""

from __future__ import annotations

import math
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
from knowable.inference.variational.family import Family, FamilyModule
from knowable.inference.variational.objective import FlatNormalObjective
from knowable.inference.variational.score_function import score_surrogate
from knowable.inference.variational.structured import FamiliesVI, StructuredObjective

_DRAWS = {"score": 16, "local_score": 8}  # where they are not given, and not 1


@dataclass(frozen=True, repr=False)
class MeanFieldVI(FamiliesVI):
    r"""An independent normal distribution for every weight, fitted by maximising the evidence lower bound.

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)

    There is no weight of the KL to set: everything is on the full-data scale and ``beta=1`` is Bayes. Prediction always
    uses weight draws shared by all inputs, whatever the estimator that training used.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which the KL's factor rises to its full value. It changes the path and not the target.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (a MAP fit is; scales of the
            prior that are to be learned wait at their first values meanwhile), or a fitted posterior.
        initial_scale: Standard deviation all weights start with: small, so that training begins as that of a point.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)
        draws: Weight draws per step; None is 1, 16 for ``"score"`` and 8 for ``"local_score"``.
        families: Other families for some of the weights, such as ``{"head.*": FullRank()}``, see
            :class:`~knowable.inference.variational.structured.FamiliesVI`. All weights are then drawn
            (``estimator="weight"``).
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
    summary = "an independent normal for every weight, by maximising the evidence lower bound"
    aliases = ("mfvi", "bbb")
    references = ("graves2011", "blundell2015", "kingma2015", "ranganath2014", "kool2019")

    estimator: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if self.families is not None:
            return self._by_groups(model, size, MeanField(), start=start)
        draws = self.draws or _DRAWS.get(self.estimator, 1)
        return MeanFieldObjective(
            model, x, size, estimator=self.estimator, draws=draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start,
        )  # fmt: skip


# --- The mean-field family: an independent normal for every weight ---------------------------------------------------


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
    """Means and logarithms of scales.

    Attributes:
        loc: Means, ``(D,)``.
        log_scale: Logarithms of the standard deviations, ``(D,)``.
    """

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

    def posterior(self, model: Model, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        views = self.layout.views
        return DiagonalNormal(model, views(self.loc.detach()), views(self.log_scale.detach().exp()), **common)


# --- The evidence lower bound of a mean-field Gaussian, with the gradient estimator of one's choice ------------------

ESTIMATORS = ("auto", "local", "weight", "flipout", "score", "local_score")
BY_SCORE = ("score", "local_score")
"""Estimators that need no gradient of the likelihood."""


class MeanFieldObjective(FlatNormalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big)

    with β and the temperature T both 1 for Bayes.
    """

    recordable = True

    def __init__(self, model: Model, x: Tensor, size: int, *, estimator: str = "auto", **common: Any):
        super().__init__(model, x, size, estimator=estimator, **common)

    def estimate(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
        """Expected log likelihood per example, and KL over the stretches."""
        if self.estimator in BY_SCORE:
            return score_surrogate(self, x, y, points)
        return self.reparameterised(x, y, points)
