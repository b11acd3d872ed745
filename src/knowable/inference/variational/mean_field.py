"""Mean-field Gaussian variational inference (Graves, 2011; Blundell et al., 2015; Kingma et al., 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_choice
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.errors import InvalidArgument
from knowable.inference.variational.mean_field_family import MeanField
from knowable.inference.variational.mean_field_objective import BY_SCORE, ESTIMATORS, MeanFieldObjective
from knowable.inference.variational.structured import FamiliesVI
from knowable.inference.variational.structured_objective import StructuredObjective

_DRAWS = {"score": 16, "local_score": 8}  # where they are not given, and not 1


@dataclass(frozen=True, repr=False)
class MeanFieldVI(FamiliesVI):
    r"""An independent normal distribution for every weight, fitted by maximising the evidence lower bound.

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)

    There is no weight of the KL to set: everything is on the full-data scale and ``beta=1`` is Bayes. Prediction always
    uses weight draws shared by all inputs, whatever the estimator that training used.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
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
