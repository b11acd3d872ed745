"""The evidence lower bound of independent Bernoullis and normals, with the gradient estimator of one's choice."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.normal_divergence import entropy_of_normals, fixed_normal, other_divergence, stretches_of
from knowable.core.params import Layout
from knowable.core.types import Params
from knowable.core.variational_objective import VariationalObjective, first_values
from knowable.inference.variational.discrete_posterior import BernoulliNormal
from knowable.inference.variational.score_function import centred

ESTIMATORS = ("score", "local_expectation", "enumerate")
MOST_ENUMERATED = 10
_NEAREST = 0.05  # to 0 or 1 that a probability begins
_PRIOR_DRAWS = 8  # of weights, where their divergence has no closed form


class DiscreteObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(z) q(w)`, Bernoullis and normals, on the full-data scale.

    With one draw of the weights w in each step, the derivative in the logits :math:`l_j` of the probabilities is

    .. math:: \frac{\partial}{\partial l_j} E_q[f(z)] = E_q\big[f(z)\,(z_j - \pi_j)\big]
        = \pi_j (1 - \pi_j)\, E_q\big[f(z_j = 1, z_{-j}) - f(z_j = 0, z_{-j})\big]

    The first form is the score function, whose f(z) is compared with that of the other draws; the second sums over both
    values of one gate at a time; and with few gates the expectation itself can be written out.

    Args:
        model: The model.
        size: Number of training examples N.
        estimator: ``"score"``, ``"local_expectation"`` or ``"enumerate"``.
        draws: Settings of the gates in each step.
        beta: Factor on the divergence; 1 is Bayes.
        temperature: How often the entropy counts; 1 is Bayes.
        kl_warmup: Epochs over which the divergence rises to its full weight.
        initial_scale: Standard deviations of the normals at the beginning.
        initial_probability: Of all gates; None is the start's, and without a start the prior's.
        start: Values to begin at, where they are not the model's own: means of weights, probabilities of gates.

    Attributes:
        logits: Of the probabilities, ``(G,)`` in the order of ``gates``.
        q: Means and log scales of the other random parameters, ``(2, D)`` in the order of ``layout``.
        points: Parameters that are point estimates.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        *,
        estimator: str = "score",
        draws: int = 8,
        beta: float = 1.0,
        temperature: float = 1.0,
        kl_warmup: int | None = 0,
        initial_scale: float = 0.02,
        initial_probability: float | None = None,
        start: Params | None = None,
    ):
        super().__init__(model, size, draws=draws, beta=beta, temperature=temperature, kl_warmup=kl_warmup, start=start)
        self.estimator = estimator
        params, binary = first_values(model, start), set(model.binary_names)
        self.gates = Layout.of({name: params[name] for name in model.random_names if name in binary})
        self.layout = Layout.of({name: params[name] for name in model.random_names if name not in binary})
        like = torch.zeros((), dtype=model.dtype, device=model.device)
        of_one, of_zero = (self._log_prior_of_gates(value).to(like) for value in (1.0, 0.0))
        self.log_prior_of_gates = torch.stack([of_zero, of_one])  # (2, G)
        if initial_probability is None:
            first = of_one.exp() if start is None else self.gates.flatten(params).to(like)
            first = first.clamp(_NEAREST, 1 - _NEAREST)
        else:
            first = torch.full_like(of_one, initial_probability)
        self.logits = nn.Parameter(first.logit(), requires_grad=self.gates.size > 0)
        loc = self.layout.flatten(params).to(like)
        scale = torch.full_like(loc, math.log(initial_scale))
        self.q = nn.Parameter(torch.stack([loc, scale]), requires_grad=self.layout.size > 0)
        self.stretches = stretches_of(self.layout, model)
        self.others = [name for name in self.layout.names if fixed_normal(model.prior.prior_of(name)) is None]

    def _log_prior_of_gates(self, value: float) -> Tensor:
        """Log prior probability that each gate is 0, or 1."""
        start = self.model.params()
        found = [torch.zeros(0)]
        for name in self.gates.names:
            prior = self.model.prior.prior_of(name)
            assert prior is not None  # a binary parameter has a prior of its own
            found.append(prior.log_prob(torch.full_like(start[name], value)).flatten())
        return torch.cat([each.to(found[-1]) for each in found])

    # --- the variational distribution --------------------------------------------------------------------------------

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the normals, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def probabilities(self) -> Params:
        """Probabilities of a 1, by name."""
        return self.gates.views(self.logits.detach().sigmoid())

    def posterior(self, **common: Any) -> BernoulliNormal:
        """Bernoullis and normals."""
        loc, scale = self.loc_and_scale()
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return BernoulliNormal(self.model, self.probabilities(), loc, scale, **about)

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of gates and weights."""
        settings = self.settings(count)
        return [{**self._weights(), **self.gates.views(setting)} for setting in settings]

    def divergence(self) -> Tensor:
        """KL of Bernoullis and normals."""
        return self.divergence_of_gates() + self.divergence_of_weights()

    def entropy(self) -> Tensor:
        """H[q] of Bernoullis and normals, in closed form."""
        log_q = self._log_probabilities()
        return entropy_of_normals(self.q[1]) - (log_q.exp() * log_q).sum()

    def settings(self, count: int) -> Tensor:
        """So many draws of the gates, ``(count, G)``."""
        return torch.bernoulli(self.logits.detach().sigmoid().expand(count, -1))

    def log_probability(self, settings: Tensor) -> Tensor:
        """Log q(z) of settings ``(K, G)``, ``(K,)``, differentiable in the logits."""
        each = F.binary_cross_entropy_with_logits(self.logits.expand_as(settings), settings, reduction="none")
        return -each.sum(1)

    def divergence_of_gates(self) -> Tensor:
        r"""KL of the Bernoullis, in closed form.

        .. math:: \sum_j \pi_j \log \frac{\pi_j}{p_j} + (1 - \pi_j) \log \frac{1 - \pi_j}{1 - p_j}
        """
        log_q = self._log_probabilities()
        return (log_q.exp() * (log_q - self.log_prior_of_gates)).sum()

    def _log_probabilities(self) -> Tensor:
        """Log probabilities of a 0 and of a 1, ``(2, G)``."""
        return torch.stack([F.logsigmoid(-self.logits), F.logsigmoid(self.logits)])

    def divergence_of_weights(self) -> Tensor:
        """KL of the normals, with as little Monte Carlo as the priors allow."""
        flat = self.q[0], self.q[1], self.q[1].exp()
        closed = sum(stretch.value(*flat) for stretch in self.stretches)
        loc, scale = self.loc_and_scale()
        return closed + other_divergence(self.model, self.others, loc, scale, self.point_params(), _PRIOR_DRAWS)

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        params = {**points, **self._weights()}
        log_likelihood = self._expected_score(x, y, params)
        kl, kl_of_gates = self.divergence_of_weights(), self.divergence_of_gates()
        loss, terms = self.loss_and_terms(log_likelihood, kl + kl_of_gates, points)
        return loss, {**terms, "kl_of_gates": kl_of_gates.detach()}

    def _weights(self) -> Params:
        """One reparameterised draw, which all settings of the gates share."""
        return self.layout.views(torch.addcmul(self.q[0], self.q[1].exp(), torch.randn_like(self.q[0])))

    def _expected_score(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Mean log likelihood over rows and settings; its gradient is that of the expectation, or estimates it."""
        if self.gates.size == 0:
            return self._mean_score(x, y, params)
        if self.estimator == "enumerate":
            return self._by_enumeration(x, y, params)
        return self._by_score(x, y, params) if self.estimator == "score" else self._by_differences(x, y, params)

    def _mean_score(self, x: Tensor, y: Tensor, params: Params, setting: Tensor | None = None) -> Tensor:
        """Mean log likelihood of a batch for one setting of the gates."""
        return self.log_likelihood_of(x, y, params if setting is None else {**params, **self.gates.views(setting)})

    def _by_score(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        settings = self.settings(self.draws)
        values = torch.stack([self._mean_score(x, y, params, setting) for setting in settings])
        surrogate = (centred(values.detach()) * self.log_probability(settings)).mean()
        return values.mean() + surrogate - surrogate.detach()

    def _by_differences(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        settings = self.settings(self.draws)
        values = torch.stack([self._mean_score(x, y, params, setting) for setting in settings])
        with torch.no_grad():
            gains = torch.stack([self._gains(x, y, params, *pair) for pair in zip(settings, values, strict=True)])
        surrogate = (self.logits.sigmoid() * gains.mean(0)).sum()
        return values.mean() + surrogate - surrogate.detach()

    def _gains(self, x: Tensor, y: Tensor, params: Params, setting: Tensor, value: Tensor) -> Tensor:
        """What opening each gate adds to the log likelihood, the others as they are, ``(G,)``."""
        flipped = (setting - torch.eye(len(setting), dtype=setting.dtype, device=setting.device)).abs()
        others = torch.stack([self._mean_score(x, y, params, each) for each in flipped])
        return (2 * setting - 1) * (value - others)

    def _by_enumeration(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        settings = all_settings(self.gates.size, like=self.logits)
        values = torch.stack([self._mean_score(x, y, params, setting) for setting in settings])
        return self.log_probability(settings).exp() @ values


def all_settings(count: int, *, like: Tensor) -> Tensor:
    """Every row of ``count`` zeros and ones, ``(2^count, count)``."""
    numbers = torch.arange(2**count, device=like.device).unsqueeze(1)
    return (numbers >> torch.arange(count, device=like.device) & 1).to(like.dtype)
