r"""The score-function (log-derivative, REINFORCE) gradient, with a control variate.

.. math:: \nabla_\phi E_q[f(w)] = E_q[(f(w) - b)\, \nabla_\phi \log q_\phi(w)]

It needs only values of f, so it also serves where f has no gradient; its price is variance. With K draws, each is
compared with the mean of the others (leave-one-out baseline: Mnih and Rezende, 2016; Kool et al., 2019), which is
independent of it and so leaves the estimate unbiased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knowable.core.types import Params
from knowable.inference.variational.reparameterise import DrawAndDivergence

if TYPE_CHECKING:
    from knowable.inference.variational.mean_field_objective import MeanFieldObjective


def score_surrogate(
    objective: MeanFieldObjective, x: Tensor, y: Tensor, points: Params, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Expected log likelihood per example, whose gradient is the score-function estimate, and the KL.

    Args:
        objective: Holds ``q``; every random parameter is drawn.
        x: Inputs of the batch.
        y: Targets.
        points: Point estimates, which get the ordinary gradient at the drawn weights.
        noise: Standard normal noise ``(K, D)`` with K >= 2.
    """
    standard = noise.clone()
    plan = objective.plan
    kl, _, _, draws = plan.named(DrawAndDivergence.apply(objective.q, noise, plan), len(noise))
    draws = [{name: value.detach() for name, value in draw.items()} for draw in draws]  # no gradient passes through
    values = torch.stack([objective.log_likelihood_of(x, y, {**points, **draw}) for draw in draws])
    value = values.mean()
    surrogate = _log_density_gradient(objective.q, standard, centred(values.detach()))
    return value + surrogate - surrogate.detach(), kl


def centred(values: Tensor) -> Tensor:
    """Each value less the mean of the others: K/(K-1) times the distance from the mean of all."""
    count = values.shape[0]
    return (values - values.mean()) * (count / (count - 1))


def _log_density_gradient(q: Tensor, standard: Tensor, advantage: Tensor) -> Tensor:
    """A scalar whose gradient in ``q`` is the mean over draws of advantage times the gradient of log q.

    d log q / d m = ε / s and d log q / d log s = ε² - 1.
    """
    weight = advantage / len(advantage)
    by_loc = (weight @ standard) / q[1].detach().exp()
    by_log_scale = weight @ (standard.square() - 1.0)
    return (by_loc * q[0]).sum() + (by_log_scale * q[1]).sum()
