r"""The score-function (log-derivative, REINFORCE) gradient, with control variates and Rao-Blackwellised by layer.

.. math:: \nabla_\phi E_q[f(w)] = E_q[(f(w) - b)\, \nabla_\phi \log q_\phi(w)]

It needs only values of f; its price is variance. Each of K draws is compared with the mean of the others (leave-one-out
baseline: Mnih and Rezende, 2016; Kool et al., 2019), which leaves the estimate unbiased.

Rao-Blackwellised (Ranganath, Gerrish and Blei, 2014): a layer's weights reach the likelihood of example n only through
the layer's outputs :math:`z_n`, which are normal given its inputs. So draw the outputs, independently for each example,
and multiply each layer's score by that example's likelihood alone:

.. math:: \sum_n \big(\log p(y_n \mid z_n) - b_n\big) \sum_{\text{layers}} \nabla_\phi \log
    \mathcal{N}\big(z_n \mid \mu_n(\phi), v_n(\phi)\big)

This is exact for the layers whose weights act once on each example. The others are drawn as weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.network.params import Params
from knowable.inference.variational.gaussian_weight import GaussianPair, GaussianWeight, local_weights, output_moments
from knowable.inference.variational.normals import standard_noise

if TYPE_CHECKING:
    from knowable.inference.variational.mean_field import MeanFieldObjective

_RANDOM = (GaussianWeight, GaussianPair)


def score_surrogate(
    objective: MeanFieldObjective, x: Tensor, y: Tensor, points: Params, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Expected log likelihood per example, whose gradient is the score-function estimate, and the KL."""
    normals, recording = objective.normals, objective.recording
    noise = standard_noise(objective.draws, normals.drawn.size, like=objective.q, recording=recording)
    standard = noise.clone()
    kl, loc, variance, draws = normals.draw(objective.q, noise, recording=recording)
    values, scores = [], []
    for draw in draws:
        fixed = {name: value.detach() for name, value in draw.items()}  # no gradient passes through
        outputs = DrawnOutputs()
        local = local_weights(loc, variance, outputs, recording=recording)
        values.append(objective.log_likelihood(x, y, {**points, **fixed, **local}, weights))
        scores.append(outputs.score)
    rows = torch.stack(values)  # (draws, rows)
    surrogate = _log_density_gradient(objective.q, standard, centred(rows.detach().mean(1)))
    if loc:
        surrogate = surrogate + (centred(rows.detach()) * torch.stack(scores)).mean()
    return rows.mean() + surrogate - surrogate.detach(), kl


def centred(values: Tensor) -> Tensor:
    """Each value less the mean of the others along the first dimension: K/(K-1) times the distance from the mean."""
    count = values.shape[0]
    return (values - values.mean(0)) * (count / (count - 1))


class DrawnOutputs:
    """A rule for :class:`~knowable.inference.variational.gaussian_weight.GaussianWeight`: draws a layer's outputs.

    No gradient passes through what is drawn to the distribution it was drawn from; to point estimates, in this layer or
    before it, the ordinary one does.

    Attributes:
        score: A number for each row, ``(rows,)``, whose gradient in means and variances of weights is that of the log
            density of all that was drawn for the row.
    """

    def __init__(self) -> None:
        self.score: Any = 0.0

    def __call__(
        self, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
    ) -> Tensor:
        """Draw the result of a linear operation from its own normal distribution.

        As of the weights: d log q / dμ = ε / σ and d log q / d log σ = ε² - 1.
        """
        mean, variance = output_moments(op, x.detach(), _without_points(weight), _without_points(bias), rest)
        std, noise = variance.sqrt(), torch.randn_like(mean)
        score = (noise / std.detach()) * mean + (noise.square() - 1.0) * std.log()
        self.score = self.score + score.flatten(1).sum(1)
        if not any(_leads_to_points(each) for each in (x, weight, bias)):
            return torch.addcmul(mean, std, noise).detach()
        mean, variance = output_moments(op, x, _as_fixed(weight), _as_fixed(bias), rest)
        return torch.addcmul(mean, variance.sqrt(), noise)


def _leads_to_points(value: Any) -> bool:
    return value is not None and not isinstance(value, _RANDOM) and value.requires_grad


def _without_points(value: Any) -> Any:
    """A random weight as it is, any other without its gradient."""
    return value if value is None or isinstance(value, _RANDOM) else value.detach()


def _as_fixed(value: Any) -> Any:
    """A random weight without its gradient, any other as it is."""
    if not isinstance(value, _RANDOM):
        return value
    return type(value)(value.loc.detach(), value.variance.detach(), value.rule)


def _log_density_gradient(q: Tensor, standard: Tensor, advantage: Tensor) -> Tensor:
    """A scalar whose gradient in ``q`` is the mean over draws of advantage times the gradient of log q.

    d log q / d m = ε / s and d log q / d log s = ε² - 1, for the weights that are drawn, the first ones of ``q``.
    """
    weight = advantage / len(advantage)
    loc, log_scale = q[0, : standard.shape[1]], q[1, : standard.shape[1]]
    by_loc = (weight @ standard) / log_scale.detach().exp()
    by_log_scale = weight @ (standard.square() - 1.0)
    return (by_loc * loc).sum() + (by_log_scale * log_scale).sum()
