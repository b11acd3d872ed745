"""Deterministic variational inference by moment propagation (Hernández-Lobato and Adams, 2015; Wu et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knowable.core.checks import check_choice, check_count
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.inference.variational.moment_objective import MomentObjective
from knowable.inference.variational.moment_posterior import PREDICTIONS, MomentNormal


@dataclass(frozen=True, repr=False)
class MomentVI(BoundMethod):
    r"""An independent normal for every weight, fitted and used without sampling.

    Means and variances of the weights become means and variances of each layer's outputs, up to the network's own. The
    outputs f of a row are taken to be normal, and the bound

    .. math:: \sum_n E_{f_n \sim \mathcal{N}(m_n, S_n)}[\log p(y_n \mid f_n)] - \mathrm{KL}(q \,\|\, p)

    has no noise: not in its gradient, and with ``prediction="moments"`` not in predictions, which take one pass through
    the network.

    What is approximate: results of non-linear layers are treated as normal; so are those of max pooling, two by two
    (Clark, 1961); positions of a convolution, tokens of a linear layer, and outputs of linear layers wider than
    ``covariance_limit``, as independent. It is exact for a linear model. Layers without a rule are refused by name,
    and so are weights used twice and sums of two random results (residual connections).

    ``log_evidence`` is estimated from weight draws: it is the bound of the fitted normals, whatever was approximate.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod` say what is maximised, from
            where.
        covariance_limit: Number of outputs up to which the covariances of a linear layer's outputs are followed in
            training; they cost its square for every row. In prediction it is 256 at the least.
        prediction: ``"moments"``, or ``"sampling"``: the network at drawn weights, as for any other posterior.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MomentVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.output_moments(x).variance.shape
        torch.Size([40, 1])
    """

    covariance_limit: int = 64
    prediction: str = "moments"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("covariance_limit", self.covariance_limit, at_least=0)
        check_choice("prediction", self.prediction, PREDICTIONS)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MomentObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        return MomentObjective(
            model, x, size, beta=self.beta, temperature=self.temperature, kl_warmup=self.kl_warmup,
            initial_scale=self.initial_scale, start=start, limit=self.covariance_limit,
        )  # fmt: skip

    def _posterior(self, objective: MomentObjective, **common: Any) -> MomentNormal:
        return objective.posterior(prediction=self.prediction, **common)
