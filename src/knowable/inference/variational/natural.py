"""Natural-gradient variational inference: variational online Newton (Khan et al., 2018; Shen et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.inference.variational.natural_objective import NaturalObjective

ESTIMATORS = ("weight", "auto", "local", "flipout")


@dataclass(frozen=True, repr=False)
class NaturalVI(BoundMethod):
    r"""An independent normal for every weight, fitted along the natural gradient of the bound: IVON.

    The target is that of :class:`~knowable.inference.variational.mean_field.MeanFieldVI`. The way there is Newton's:
    the gradient at one draw of the weights, :math:`\theta = m + s\epsilon`, is also an estimate of the curvature,
    :math:`\hat h = \hat g\, \epsilon / s`, from which the scales follow and by which the means step. With full-data
    gradients and a prior of precision π for every weight,

    .. math:: \frac{1}{s^2} \leftarrow \frac{1}{s^2}\Big(1 + v + \tfrac{1}{2} v^2\Big), \quad
        v = \rho\,\big(s^2 (\hat h + \pi) - 1\big), \qquad
        m \leftarrow m - \eta\, \mathrm{clip}\Big(\frac{s^2}{r} \nabla,\ \pm 1\Big),

    where :math:`\nabla` averages the gradients of the last steps. A step costs a gradient of the plain network, noise
    for every weight and a dozen passes over one buffer.

    The prior's precision is each parameter's own, and N that of the data: there is no weight decay and no effective
    sample size to set. Priors that are not normal enter by the gradient of their KL. Point estimates move by
    ``optimiser``.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
            ``learning_rate`` is the longest move η of a mean in one step, as it is for Adam.
        beta: This and the other fields of
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod` say what is maximised, from
            where.
        draws: Weight draws per step.
        estimator: ``"weight"`` (one draw for the whole batch, the paper's), or another of
            :class:`~knowable.inference.variational.mean_field.MeanFieldVI` with less noise and a costlier step.
        momentum: Share of the gradients' average that is kept from step to step.
        curvature_rate: Share ρ of each new estimate of the curvature, such as the paper's 1e-5. None: for every weight
            twice the learning rate over the root mean square of its estimates, so that noisy ones count for less and
            all come to rest as the rate falls.
        radius: Length r of a Newton step up to which means make η / r of it; along longer ones they move by η.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.NaturalVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.predict(x).mean.shape
        torch.Size([40, 1])
    """

    draws: int = 1
    estimator: str = "weight"
    momentum: float = 0.9
    curvature_rate: float | None = None
    radius: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("draws", self.draws)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_number("momentum", self.momentum, at_least=0, below=1)
        if self.curvature_rate is not None:
            check_number("curvature_rate", self.curvature_rate, above=0, at_most=1)
        check_number("radius", self.radius, above=0)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> NaturalObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        return NaturalObjective(
            model, x, size, estimator=self.estimator, draws=self.draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start, momentum=self.momentum,
            curvature_rate=self.curvature_rate, radius=self.radius,
        )  # fmt: skip
