r"""How much a label would tell: acquisition functions of joint draws, for labels and for numbers.

Draws are joint: draw k of every row is made with the same weights, so that what one label would tell about another is
known. Labels come as the draws' probabilities ``(K, rows, classes)``, numbers as the draws' means ``(K, rows)`` and a
noise variance. All are in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.prediction.prediction import RegressionPrediction
from knowable.core.support.randomness import generator_for

_CONFIGURATIONS = 2_048  # joint outcomes of a batch that are followed: all of them, or so many draws
_BLOCK, _GROUPS = 32, 64  # rows looked at first, and groups of outcomes
_AT_ONCE = 2**22  # numbers


# --- labels ----------------------------------------------------------------------------------------------------------


def entropy(probs: Tensor, weights: Tensor) -> Tensor:
    r"""Entropy of the averaged probabilities, :math:`H[\bar p]`, ``(rows,)``."""
    return _entropy(_averaged(probs, weights))


def mutual_information(probs: Tensor, weights: Tensor) -> Tensor:
    r"""BALD (Houlsby et al., 2011): what the label would tell about the weights, ``(rows,)``.

    .. math:: I(y; w) = H[\bar p] - E_w H[p_w]
    """
    return entropy(probs, weights) - torch.tensordot(weights.to(probs), _entropy(probs), dims=1)


def margin(probs: Tensor, weights: Tensor) -> Tensor:
    """1 less the lead of the most probable label over the second, ``(rows,)``."""
    first, second = _averaged(probs, weights).topk(2, dim=-1).values.unbind(-1)
    return 1.0 - (first - second)


def variation_ratio(probs: Tensor, weights: Tensor) -> Tensor:
    """Share of the draws (by weight) whose label is not the most frequent one, ``(rows,)`` (Freeman, 1965)."""
    votes = torch.zeros(probs.shape[1:], dtype=weights.dtype, device=probs.device)
    for weight, draw in zip(weights, probs, strict=True):
        votes.scatter_add_(1, draw.argmax(-1, keepdim=True), weight.expand(len(votes), 1).to(votes))
    return 1.0 - votes.max(-1).values


def epig(probs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    r"""Expected predictive information gain (Bickford Smith et al., 2023): about labels of other rows, ``(rows,)``.

    .. math:: E_{x_*} I(y; y_* \mid x, x_*), \qquad p(y, y_*) = E_w\, p_w(y)\, p_w(y_*)

    Args:
        probs: ``(K, rows, classes)``.
        targets: The same draws at inputs of the kind that will be predicted, ``(K, others, classes)``.
        weights: Of the draws, ``(K,)``.
    """
    count, others, classes = targets.shape
    flat = targets.reshape(count, -1)
    own = _entropy(_averaged(targets, weights)).mean()
    found = []
    for part in probs.split(max(1, _AT_ONCE // (others * classes**2)), 1):
        weighted = part * weights.to(part).view(-1, 1, 1)
        joint = torch.einsum("kic,km->icm", weighted, flat).clamp_min(0.0)
        together = -torch.special.xlogy(joint, joint).sum((1, 2)) / others
        found.append(_entropy(_averaged(part, weights)) + own - together)
    return torch.cat(found)


def batch_mutual_information(probs: Tensor, weights: Tensor, count: int, *, seed: int = 0) -> tuple[list[int], float]:
    r"""BatchBALD (Kirsch et al., 2019): rows whose labels together tell most about the weights, greedily.

    .. math:: I(y_1, \dots, y_b; w) = H[E_w \prod_i p_w(y_i)] - \sum_i E_w H[p_w(y_i)]

    The gain of a row can only fall as others are chosen, and its BALD score is the gain of the first step. So a row is
    looked at again only while the last gain that is known of it is above the best of the step (lazy greedy; Minoux,
    1978), and in full only if that also holds for its gain given less than the outcomes: the groups they are in. The
    choice is that of the full search, at the cost of some dozen rows a step.

    Args:
        probs: ``(K, rows, classes)``.
        weights: Of the draws, ``(K,)``.
        count: Number of rows to choose.
        seed: Of the joint outcomes that are drawn where all are too many.

    Returns:
        The rows in the order of their choice, and the information of all their labels together.
    """
    weights = weights.to(probs)
    noise = torch.tensordot(weights, _entropy(probs), dims=1)  # E_w H[p_w], (rows,)
    gains = mutual_information(probs, weights)  # the most that is possible
    row = int(gains.argmax())
    chosen, information = [row], gains[row].item()
    outcomes = _Outcomes(weights, probs[:, row], seed)
    gains[row] = -torch.inf
    while len(chosen) < min(count, probs.shape[1]):
        known = torch.zeros_like(gains, dtype=torch.bool)
        row, best, block = -1, -torch.inf, _BLOCK
        while (unknown := ((gains > best) & ~known).nonzero().flatten()).numel():
            if block == 2 * _BLOCK:  # what is best is roughly known
                gains[unknown] = torch.minimum(gains[unknown], outcomes.at_most(probs[:, unknown]) - noise[unknown])
            rows = unknown[gains[unknown].topk(min(block, len(unknown))).indices]
            gains[rows] = outcomes.entropy_of(probs[:, rows]) - noise[rows]
            known[rows] = True
            first = int(rows[gains[rows].argmax()])
            if gains[first] > best:
                row, best = first, gains[first].item()
            block *= 2
        chosen.append(row)
        information += best
        outcomes = outcomes.with_row(probs[:, row])
        gains[row] = -torch.inf
    return chosen, information


class _Outcomes:
    """Joint outcomes of the rows chosen so far: all of them, or draws from their predictive distribution.

    Attributes:
        likelihood: Probability of each outcome under each draw of the weights, ``(M, K)``.
        mass: How often each comes, ``(M,)``.
        posterior: Probability of each draw of the weights given the outcome, ``(M, K)``.
    """

    def __init__(
        self, weights: Tensor, probs: Tensor, seed: int, likelihood: Tensor | None = None, drawn: Tensor | None = None
    ):
        self.weights, self.seed = weights, seed
        classes = probs.shape[1]
        if likelihood is None:
            likelihood, self.drawn = probs.T, None
        elif drawn is None and len(likelihood) * classes <= _CONFIGURATIONS:
            likelihood, self.drawn = (likelihood.unsqueeze(1) * probs.T).flatten(0, 1), None
        else:
            likelihood, self.drawn = self._draw(likelihood, drawn, probs)
        self.likelihood = likelihood
        marginal = (likelihood @ weights).clamp_min(torch.finfo(weights.dtype).tiny)
        self.posterior = likelihood * weights / marginal.unsqueeze(1)
        self.mass = marginal if self.drawn is None else torch.full_like(marginal, 1.0 / len(marginal))

    def _draw(self, likelihood: Tensor, drawn: Tensor | None, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Outcomes of the rows before (drawn already, or drawn now from all of them), and one of the new row to each.

        A draw of the weights makes each outcome, which is then one of their joint predictive distribution.
        """
        generator = generator_for(self.seed, "outcomes", device=likelihood.device)
        if drawn is None:
            drawn = torch.multinomial(self.weights, _CONFIGURATIONS, replacement=True, generator=generator)
            places = torch.multinomial(likelihood.T[drawn], 1, generator=generator).squeeze(1)
            likelihood = likelihood[places]
        labels = torch.multinomial(probs[drawn], 1, generator=generator).squeeze(1)
        return likelihood * probs.T[labels], drawn

    def with_row(self, probs: Tensor) -> _Outcomes:
        """Those with one row more."""
        return _Outcomes(self.weights, probs, self.seed + 1, self.likelihood, self.drawn)

    def entropy_of(self, probs: Tensor) -> Tensor:
        """Entropy of the label of each of some rows ``(K, rows, classes)`` given the outcome, ``(rows,)``."""
        return _entropy_given(self.posterior, self.mass, probs)

    def at_most(self, probs: Tensor) -> Tensor:
        """Not less than :meth:`entropy_of`, and quicker: given only the group that the outcome is in."""
        first, place = self.posterior.max(1)
        order = (place + first).argsort()  # those that speak for the same draw, as clearly, are together
        group = torch.empty_like(order)
        group[order] = torch.arange(len(order), device=order.device) * _GROUPS // len(order)
        mass = torch.zeros(_GROUPS).to(self.mass).index_add_(0, group, self.mass)
        joint = torch.zeros(_GROUPS, self.posterior.shape[1]).to(self.mass)
        joint.index_add_(0, group, self.posterior * self.mass.unsqueeze(1))
        return _entropy_given(joint / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(1), mass, probs)


def _entropy_given(posterior: Tensor, mass: Tensor, probs: Tensor) -> Tensor:
    """Mean entropy of labels, by the mass of outcomes ``(M,)`` and the draws' probabilities given them, ``(M, K)``."""
    found = []
    for part in probs.split(max(1, _AT_ONCE // (len(mass) * probs.shape[2])), 1):
        given = torch.einsum("mk,kic->imc", posterior, part)
        terms = given.clamp_min(torch.finfo(given.dtype).tiny).log_().mul_(given)  # quicker than xlogy
        found.append(-(terms.sum(2) @ mass))
    return torch.cat(found)


def _averaged(probs: Tensor, weights: Tensor) -> Tensor:
    return torch.tensordot(weights.to(probs), probs, dims=1)


def _entropy(probs: Tensor) -> Tensor:
    return -torch.special.xlogy(probs, probs).sum(-1)


# --- numbers: the draws' means as a normal over functions, with noise -------------------------------------------------


def normal_information(means: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
    r"""What a number would tell about the function, :math:`\tfrac12 \log(1 + \mathrm{Var}[f] / \sigma^2)`, ``(rows,)``.

    Args:
        means: Draws of the mean, ``(K, rows)``.
        noise: Variance of the noise, ``(rows,)``.
        weights: Of the draws, ``(K,)``.
    """
    return 0.5 * torch.log1p(_centred(means, weights).square().sum(0) / noise)


def batch_normal_information(means: Tensor, noise: Tensor, weights: Tensor, count: int) -> tuple[list[int], float]:
    r"""Rows whose numbers together tell most about the function, greedily: BatchBALD for normal outcomes.

    .. math:: \tfrac12 \log\det(I + D^{-1/2} \Sigma D^{-1/2}), \qquad D = \mathrm{diag}(\sigma^2)

    Each choice conditions the covariance of all other rows on it, so a near copy of a chosen row gains little.
    """
    factor = _centred(means, weights).double()  # (K, rows): covariance = factorᵀ factor
    noise = noise.double()
    taken = torch.zeros(factor.shape[1], dtype=torch.bool, device=factor.device)
    chosen, information = [], 0.0
    for _ in range(min(count, factor.shape[1])):
        variance = factor.square().sum(0)
        gain = (0.5 * torch.log1p(variance / noise)).masked_fill(taken, -torch.inf)
        row = int(gain.argmax())
        chosen.append(row)
        taken[row] = True
        information += gain[row].item()
        along = factor[:, row].clone()
        total = variance[row] + noise[row]  # given y there: factor (I - c u uᵀ) with c so that 1 - c|u|² is the square
        shrink = (1.0 - (noise[row] / total).sqrt()) / variance[row].clamp_min(torch.finfo(torch.float64).tiny)
        factor = factor - shrink * torch.outer(along, along @ factor)
    return chosen, information


def normal_epig(means: Tensor, noise: Tensor, targets: Tensor, target_noise: Tensor, weights: Tensor) -> Tensor:
    r"""Expected predictive information gain for normal outcomes, :math:`-\tfrac12 E_{x_*} \log(1 - \rho^2)`."""
    own, other = _centred(means, weights), _centred(targets, weights)
    covariance = own.T @ other
    total = (own.square().sum(0) + noise).unsqueeze(1) * (other.square().sum(0) + target_noise)
    return -0.5 * torch.log1p(-(covariance.square() / total).clamp_max(1.0 - 1e-7)).mean(1)


def variance_reduction(means: Tensor, noise: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    r"""How much a number would lower the variance of the function elsewhere, on average (Cohn et al., 1996).

    .. math:: E_{x_*} \frac{\mathrm{Cov}(f(x), f(x_*))^2}{\mathrm{Var}[f(x)] + \sigma^2}
    """
    own, other = _centred(means, weights), _centred(targets, weights)
    return (own.T @ other).square().mean(1) / (own.square().sum(0) + noise)


def upper_confidence_bound(prediction: RegressionPrediction, beta: float = 2.0) -> Tensor:
    r"""Where a function may be large, :math:`m(x) + \beta\, \sigma(x)`, with its epistemic sd, ``(rows,)``."""
    return (prediction.mean + beta * prediction.epistemic.clamp_min(0.0).sqrt()).flatten()


def _centred(means: Tensor, weights: Tensor) -> Tensor:
    """Deviations of the draws from their mean, times the square roots of their weights."""
    weights = weights.to(means)
    return (means - torch.tensordot(weights, means, dims=1)) * weights.sqrt().unsqueeze(1)
