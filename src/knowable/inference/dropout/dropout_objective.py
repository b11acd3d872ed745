"""The variational bound of dropout, at fixed or learned rates, with masks on activations or on weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.objective import Objective
from knowable.inference.dropout.divergence import Divergence
from knowable.inference.dropout.layer_trace import Site
from knowable.inference.dropout.masked_weights import SiteMasks, masked_params
from knowable.inference.dropout.masks import hard_mask, log_probability, relaxed_mask
from knowable.inference.dropout.placement import Placement

WAYS = ("activations", "weights")
_VALIDATION_DRAWS = 8
_BOUND_ROWS = 200_000  # forward passes of single rows spent on the final estimate of the bound


@dataclass(frozen=True)
class Learning:
    """How rates are learned.

    Attributes:
        estimator: ``"concrete"`` (relaxed masks) or ``"score"`` (hard masks and the log-derivative).
        relaxation: t of the relaxed masks.
    """

    estimator: str = "concrete"
    relaxation: float = 0.1


class DropoutObjective(Objective):
    r"""-ELBO / N of weights that are masked by dropout, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_z\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta(z))\Big] - \mathrm{KL}(q \,\|\, p)

    The two ways to the same expectation: a mask of its own for each example, on the inputs of the layers (less noise in
    the gradient, since the examples' noise averages out), or one draw of the weights for the whole batch.

    Args:
        model: The model.
        size: Number of training examples N.
        placement: Where dropout acts.
        way: ``"activations"`` or ``"weights"``.
        draws: Masks for each example (or draws of the weights) in each step.
        learning: How rates are learned; None leaves them as they are.

    Attributes:
        values: Means of all parameters, in the order of ``names``.
        logits: Logits of the sites' rates.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        placement: Placement,
        *,
        way: str = "activations",
        draws: int = 1,
        learning: Learning | None = None,
    ):
        super().__init__(model, size)
        self.placement, self.way, self.draws, self.learning = placement, way, draws, learning
        start = model.params()
        self.names = list(start)
        self.values = nn.ParameterList([nn.Parameter(value) for value in start.values()])
        rates = torch.tensor([site.rate for site in placement.sites], dtype=torch.float64)
        logits = rates.logit().to(dtype=model.dtype, device=model.device)
        self.logits = nn.Parameter(logits, requires_grad=learning is not None)
        self.network = placement.network(model)
        self._divergence = Divergence(model, placement.sites)
        self._evaluating = placement.network(model, noise=True)

    # --- the variational distribution --------------------------------------------------------------------------------

    def params(self) -> Params:
        """Means of all parameters, by name."""
        return dict(zip(self.names, self.values, strict=True))

    def rates(self) -> list[float]:
        """The sites' rates: those that were set, to the last bit, or those that were learned."""
        if self.learning is None:
            return [site.rate for site in self.placement.sites]
        return torch.sigmoid(self.logits.detach().double()).tolist()

    def divergence(self, params: Params | None = None) -> Tensor:
        """KL(q ‖ p), up to a constant; see :mod:`~knowable.inference.dropout.divergence`."""
        return self._divergence(params or self.params(), self.logits)

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        params = self.params()
        rates = self.rates()  # as numbers, once a step
        found = [self._masked_log_likelihood(x, y, params, rates) for _ in range(self.draws)]
        values = torch.stack([value for value, _ in found])  # (draws, rows)
        log_likelihood = values.mean()
        if self.learning is not None and self.learning.estimator == "score":
            log_likelihood = log_likelihood + score_term(values, torch.stack([log_q for _, log_q in found]))
        kl = self.divergence(params)
        loss = -log_likelihood + kl / self.size
        terms = {"expected_log_likelihood": log_likelihood.detach() * self.size, "kl": kl.detach()}
        if self.model.point_names:
            log_prior = self._log_prior_of_points(params)
            loss, terms["log_prior_of_points"] = loss - log_prior / self.size, log_prior.detach()
        return loss, terms

    def _masked_log_likelihood(self, x: Tensor, y: Tensor, params: Params, rates: list[float]) -> tuple[Tensor, Tensor]:
        """Log likelihood of each row under new masks, and the log probability of the masks it has seen."""
        masks = [self._masks(index, rate) for index, rate in enumerate(rates)]
        given = masked_params(params, masks, by_example=self.way == "activations")
        output = self.network(self.model.network_params(given), x, buffers=self.net_buffers, training=True)
        value = self.model.score(output, y, params)
        return value, self._log_probability(masks, value)

    def _masks(self, index: int, rate: float) -> SiteMasks:
        site, logit, learning = self.placement.sites[index], self.logits[index], self.learning
        scale = 1 / (1 - rate) if learning is None else 1 + torch.exp(logit)  # 1 / (1 - p)
        if learning is not None and learning.estimator == "concrete":
            return SiteMasks(site, lambda rows: relaxed_mask(rows, site.units, logit, learning.relaxation), scale)
        return self._hard_masks(site, rate, scale)

    def _hard_masks(self, site: Site, rate: float, scale: float | Tensor) -> SiteMasks:
        return SiteMasks(site, lambda rows: hard_mask(rows, site.units, rate, like=self.logits), scale)

    def _log_probability(self, masks: list[SiteMasks], like: Tensor) -> Tensor:
        total = torch.zeros_like(like)
        if self.learning is None or self.learning.estimator != "score":
            return total
        for each, logit in zip(masks, self.logits, strict=True):
            if each.mask is not None:
                total = total + log_probability(each.mask, logit)  # one row of masks for all examples, or for each
        return total

    def _log_prior_of_points(self, params: Params) -> Tensor:
        priors = {name: self.model.prior.bound(name, params) for name in self.model.point_names}
        terms = [prior.log_prob(params[name]).sum() for name, prior in priors.items() if prior is not None]
        return torch.stack(terms).sum()

    # --- held-out rows, and the final bound --------------------------------------------------------------------------

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few draws, in evaluation mode."""
        each = [self.log_likelihood_of_draw(x, y) for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def log_likelihood_of_draw(self, x: Tensor, y: Tensor) -> Tensor:
        """Log likelihood of each row with hard masks (of its own where that can be), in evaluation mode."""
        params = self.params()
        sites = zip(self.placement.sites, self.rates(), strict=True)
        masks = [self._hard_masks(site, rate, 1 / (1 - rate)) for site, rate in sites]
        given = masked_params(params, masks, by_example=True)
        output = self._evaluating(self.model.network_params(given), x, buffers=self.net_buffers)
        return self.model.score(output, y, params)

    def final_bound(self, data: Data, seed: int) -> dict[str, float]:
        """The bound over all rows and its terms, up to a constant, with the standard error of Monte Carlo."""
        draws = int(min(256, max(4, _BOUND_ROWS // data.size)))
        with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
            kl = self.divergence().item()
            fits = [sum(self.log_likelihood_of_draw(x, y).sum().item() for x, y in data) for _ in range(draws)]
        fit = sum(fits) / draws
        error = math.sqrt(sum((each - fit) ** 2 for each in fits) / (draws - 1) / draws)
        return {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl, "elbo_standard_error": error}


def score_term(values: Tensor, log_q: Tensor) -> Tensor:
    r"""Nothing in value; in gradient the score-function estimate of how the masks' distribution moves the likelihood.

    .. math:: \frac{1}{K} \sum_k \Big(\ell_k - \frac{1}{K - 1} \sum_{j \neq k} \ell_j\Big) \nabla \log q(z_k)

    for each row, over K draws: the baseline of a draw is the mean of the others for the same row, which does not depend
    on its masks, so the estimate stays unbiased (REINFORCE: Williams, 1992; the baseline: Kool et al., 2019).

    Args:
        values: Log likelihoods ``(draws, rows)``.
        log_q: Log probabilities of the masks they were computed with, of the same shape.
    """
    count = len(values)
    advantage = (values - values.mean(0)).detach() * (count / (count - 1))
    term = (advantage * log_q).mean()
    return term - term.detach()
