"""The evidence lower bound of independent Bernoullis and normals, with the gradient estimator of one's choice."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.model import Model
from knowable.core.objective import Objective
from knowable.core.params import Layout
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.types import Params
from knowable.inference.variational.divergence import fixed_normal, other_divergence, stretches_of
from knowable.inference.variational.score_function import centred

ESTIMATORS = ("score", "local_expectation", "enumerate")
MOST_ENUMERATED = 10
_NEAREST = 0.05  # to 0 or 1 that a probability begins
_VALIDATION_DRAWS = 8
_PRIOR_DRAWS = 8  # of weights, where their divergence has no closed form
_BOUND_ROWS = 200_000  # forward passes of single rows spent on the final estimate of the bound


class DiscreteObjective(Objective):
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
        kl_warmup: Epochs over which the divergence rises to its full weight.
        initial_scale: Standard deviations of the normals at the beginning.
        initial_probability: Of all gates; None is the prior's.

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
        kl_warmup: int = 0,
        initial_scale: float = 0.02,
        initial_probability: float | None = None,
    ):
        super().__init__(model, size)
        self.estimator, self.draws, self.kl_warmup = estimator, draws, kl_warmup
        params, binary = model.params(), set(model.binary_names)
        self.gates = Layout.of({name: params[name] for name in model.random_names if name in binary})
        self.layout = Layout.of({name: params[name] for name in model.random_names if name not in binary})
        like = torch.zeros((), dtype=model.dtype, device=model.device)
        of_one, of_zero = (self._log_prior_of_gates(value).to(like) for value in (1.0, 0.0))
        self.log_prior_of_gates = torch.stack([of_zero, of_one])  # (2, G)
        if initial_probability is None:
            start = of_one.exp().clamp(_NEAREST, 1 - _NEAREST)
        else:
            start = torch.full_like(of_one, initial_probability)
        self.logits = nn.Parameter(start.logit(), requires_grad=self.gates.size > 0)
        loc = self.layout.flatten(params).to(like)
        scale = torch.full_like(loc, math.log(initial_scale))
        self.q = nn.Parameter(torch.stack([loc, scale]), requires_grad=self.layout.size > 0)
        self.point_names = model.point_names
        self.points = nn.ParameterList([nn.Parameter(params[name]) for name in self.point_names])
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

    @property
    def settles_from(self) -> float:
        """The end of the divergence's warm-up."""
        return float(self.kl_warmup)

    # --- the variational distribution --------------------------------------------------------------------------------

    def point_params(self) -> Params:
        """The point estimates, by name."""
        return dict(zip(self.point_names, self.points, strict=True))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the normals, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def probabilities(self) -> Params:
        """Probabilities of a 1, by name."""
        return self.gates.views(self.logits.detach().sigmoid())

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
        log_q = torch.stack([F.logsigmoid(-self.logits), F.logsigmoid(self.logits)])
        return (log_q.exp() * (log_q - self.log_prior_of_gates)).sum()

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
        loss = -log_likelihood + (self._warmth() / self.size) * (kl + kl_of_gates)
        terms = {
            "expected_log_likelihood": log_likelihood.detach() * self.size,
            "kl": (kl + kl_of_gates).detach(),
            "kl_of_gates": kl_of_gates.detach(),
        }
        if points:
            log_prior = self._log_prior_of_points(points)
            loss, terms["log_prior_of_points"] = loss - log_prior / self.size, log_prior.detach()
        return loss, terms

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
        given = params if setting is None else {**params, **self.gates.views(setting)}
        output = self.model.forward(given, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, given).mean()

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

    def _log_prior_of_points(self, points: Params) -> Tensor:
        total = torch.zeros((), dtype=self.q.dtype, device=self.q.device) + self.model.prior.log_hyperprior(points)
        for name, value in points.items():
            prior = None if name in self.model.hyper_names else self.model.prior.bound(name, points)
            total = total if prior is None else total + prior.log_prob(value).sum()
        return total

    def _warmth(self) -> float:
        return min(1.0, (self.epoch + 1.0) / (self.kl_warmup + 1.0)) if self.kl_warmup else 1.0

    # --- held-out rows, and the final bound --------------------------------------------------------------------------

    def draw(self) -> Params:
        """One draw of everything."""
        gates = self.gates.views(self.settings(1)[0]) if self.gates.size else {}
        return {**self.point_params(), **self._weights(), **gates}

    def _scores(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        return self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params)

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few draws, in evaluation mode."""
        each = [self._scores(x, y, self.draw()) for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def final_bound(self, data: Data, seed: int) -> tuple[LogEvidence | None, dict[str, float]]:
        """The bound over all rows with its standard error, and its terms."""
        draws = int(min(256, max(4, _BOUND_ROWS // data.size)))
        with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
            gates = self.divergence_of_gates().item()
            kl, kl_error = _mean_and_error([gates + self.divergence_of_weights().item() for _ in range(draws)])
            fit, error = _mean_and_error([self._full_log_likelihood(data) for _ in range(draws)])
        terms = {"expected_log_likelihood": fit, "kl": kl, "kl_of_gates": gates, "elbo": fit - kl}
        priors = [self.model.prior.prior_of(name) for name in self.layout.names]
        if any(prior is not None and not prior.proper for prior in priors):
            return None, terms  # the constant of an improper prior is arbitrary: there is no evidence to bound
        return LogEvidence(fit - kl, "bound", math.hypot(error, kl_error)), terms

    def _full_log_likelihood(self, data: Data) -> float:
        params = self.draw()
        return sum(self._scores(x, y, params).sum().item() for x, y in data)


def all_settings(count: int, *, like: Tensor) -> Tensor:
    """Every row of ``count`` zeros and ones, ``(2^count, count)``."""
    numbers = torch.arange(2**count, device=like.device).unsqueeze(1)
    return (numbers >> torch.arange(count, device=like.device) & 1).to(like.dtype)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
