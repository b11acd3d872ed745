"""The bound of independent normals, climbed along its natural gradient: variational online Newton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.types import Params
from knowable.inference.variational.mean_field_objective import MeanFieldObjective

_FIRST_SHARE, _FORGETTING = 0.1, 3.0  # of a new estimate of the curvature: 0.1 at first, later 3 / t


class NaturalObjective(MeanFieldObjective):
    """-ELBO / N of independent normals, whose means and scales move along the natural gradient.

    Point estimates and the prior's hyperparameters move by the loop's own optimiser.

    Args:
        model: The model.
        x: Inputs that look like the data.
        size: Number of training examples N.
        estimator: Of the gradient, see :class:`~knowable.inference.variational.mean_field.MeanFieldVI`.
        draws: Weight draws per step.
        beta: Factor on the KL.
        kl_warmup: Epochs over which that factor rises to its full value.
        initial_scale: Standard deviation all weights start with.
        start: First means.
        momentum: How much of the last gradient's average is kept in the next.
        curvature_rate: Share of each new estimate of the curvature; None: a tenth at first, and 3 / t at step t.
        radius: Length of a Newton step above which a weight moves by the learning rate and no further.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        estimator: str = "weight",
        draws: int = 1,
        beta: float = 1.0,
        kl_warmup: int = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
        momentum: float = 0.9,
        curvature_rate: float | None = None,
        radius: float = 0.1,
    ):
        super().__init__(
            model, x, size, estimator=estimator, draws=draws, beta=beta, kl_warmup=kl_warmup,
            initial_scale=initial_scale, start=start,
        )  # fmt: skip
        self.momentum, self.curvature_rate, self.radius = momentum, curvature_rate, radius

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """A natural step of the normals, and the optimiser's own of the points; all memory is in its state."""
        gradient = self.q.grad
        assert gradient is not None
        state = optimiser.state[self.q]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum"] = torch.zeros_like(self.q[0])
        step = int(state["step"].item())
        natural_step(
            self.q.detach(), gradient, state["momentum"], step=step, scale=self.size / (self.beta * self._warmth()),
            rate=optimiser.param_groups[0]["lr"], decay=self.momentum, share=self._share(step), radius=self.radius,
        )  # fmt: skip
        state["step"] += 1
        self.q.grad = None  # so that the optimiser leaves them alone
        if len(self.points):
            optimiser.step()

    def _share(self, step: int) -> float:
        """How much a new estimate of the curvature counts: long memory once there is something to remember."""
        return self.curvature_rate or _FORGETTING / (step + _FORGETTING / _FIRST_SHARE)


def natural_step(
    q: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    step: int,
    scale: float,
    rate: float,
    decay: float,
    share: float,
    radius: float,
) -> None:
    r"""One step along the natural gradient, in place, in as few passes over memory as there can be.

    With k the derivative of the full-data loss in the log scales (which for a draw :math:`m + s\epsilon` is
    :math:`\hat g\, s \epsilon + s^2 \pi - 1`: the reparameterised estimate of the curvature, times the variance) and
    precision :math:`P = s^{-2}`,

    .. math:: v = \rho k, \quad P \leftarrow P\,(1 + v + \tfrac12 v^2), \qquad
        g \leftarrow \beta_1 g + (1 - \beta_1) \hat g, \quad
        m \leftarrow m - \eta\, \mathrm{clip}\Big(\frac{s^2}{r}\, \frac{g}{1 - \beta_1^t},\ \pm 1\Big)

    The precision at least halves and never becomes negative, whatever the noise (Lin, Schmidt and Khan, 2020).

    Args:
        q: Means and log scales, ``(2, D)``; changed.
        gradient: Of the loss in them, ``(2, D)``; used up.
        momentum: Running mean of the gradient in the means, ``(D,)``; changed.
        step: How many steps were made before.
        scale: What turns the loss into one on the full-data scale whose entropy counts once: N / β.
        rate: Learning rate η, the longest move of a mean.
        decay: β₁.
        share: ρ.
        radius: r; moves shorter than η are η / r of a Newton step.
    """
    loc, log_scale = q[0], q[1]
    change = gradient[1].mul_(share * scale)
    change.addcmul_(change, change, value=0.5).log1p_()
    log_scale.sub_(change, alpha=0.5)
    momentum.lerp_(gradient[0], 1.0 - decay)
    factor = torch.full((), math.log(scale / (radius * (1.0 - decay ** (step + 1)))), dtype=q.dtype, device=q.device)
    move = torch.add(factor, log_scale, alpha=2.0).exp_()  # s² over the radius, for a loss per example
    move.mul_(momentum).clamp_(-1.0, 1.0)
    loc.sub_(move, alpha=rate)
