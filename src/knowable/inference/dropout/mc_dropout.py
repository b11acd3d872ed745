"""Monte Carlo dropout (Gal and Ghahramani, 2016), and dropout whose rates are learned (Gal, Hron and Kendall, 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Batch, Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, fast_keep, own_randomness
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Trained
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.dropout.dropout_divergence import DropoutDivergence, check_priors
from knowable.inference.dropout.masked_weights import PREDICTIONS, MaskedWeights, SiteMasks, masked_params
from knowable.inference.dropout.placement import Placement, place_dropout
from knowable.inference.point.point import training_diagnostics
from knowable.inference.variational.method import estimates_of_all_rows, mean_and_error

WAYS = ("activations", "weights")
ESTIMATORS = ("concrete", "score")
_SCORE_DRAWS = 2
_VALIDATION_DRAWS = 8
_SMALLEST = 1e-7  # distance of the uniform numbers of relaxed masks from 0 and 1


@dataclass(frozen=True, repr=False, kw_only=True)
class MCDropout(Trained, Method):
    r"""Dropout in training and in prediction: a distribution over weights whose columns are dropped at random.

    .. math:: W = M \operatorname{diag}\Big(\frac{z}{1 - p}\Big), \quad z_j \sim \mathrm{Bernoulli}(1 - p), \qquad
        \max_M\; E_z[\log p(D \mid W)] - \frac{\|M\|^2}{2 s^2 (1 - p)} + \mathrm{const}

    for the prior N(0, s²): the evidence lower bound (ELBO) of a mixture of two narrow normals for every column, one of
    them at zero, on the full-data scale (Gal and Ghahramani, 2016). There is no weight decay to set: it follows from
    rate, prior and number of rows. The ELBO in the diagnostics (``"elbo"``) lacks the entropy of the narrow normals, so
    it is no estimate of the evidence; what is approximate in it:
    :mod:`~knowable.inference.dropout.dropout_divergence`.

    Networks need no change. Where they have dropout layers, those are used; where they have none, inputs of all layers
    but the first are dropped: features of linear layers, channels of convolutions (spatial dropout), columns of input
    and hidden weights of recurrent layers with one mask for a sequence (Gal and Ghahramani, 2016b). Prediction uses
    draws of the weights that all inputs share, as with every other method.

    Args:
        rate: Probability of dropping an input. None: the network's own dropout layers at their own rates; 0.1 where it
            has none.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        way: How training draws. ``"activations"``: a mask for each example on the inputs of the layers, as ordinary
            dropout does (recurrent and attention weights, which have no such input, get one mask for each step).
            ``"weights"``: one draw of the masked weights for each step. Both estimate the same ELBO, the first with
            less variance. (Batch normalisation is an exception: its statistics are those of the batch, masks and all.)
        where: Names or globs of the weights whose inputs are dropped; the network's own dropout layers are then off.
            None: the network's own layers, or all but the first.
        prediction: ``"monte_carlo"``, or ``"weight_scaling"``: one pass with the mean weights (dropout off), which is
            cheap and has no epistemic uncertainty (Hinton et al., 2012).
        draws: Masks for each example, or draws of the weights, in each step.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.MCDropout(0.2, epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> posterior.rates
        {'2.weight': 0.2}
    """

    family = "dropout"
    summary = "dropout in training and prediction: weights whose columns are dropped at random"
    aliases = ("dropout", "mcdropout")
    references = ("gal2016", "ghahramani2016", "hinton2012", "tompson2015")
    supports_row_weights = True

    rate: float | None = field(default=None, kw_only=False)
    way: str = "activations"
    where: str | tuple[str, ...] | None = None
    prediction: str = "monte_carlo"
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_settings(self)
        check_count("draws", self.draws)

    def _fit(self, job: FitJob) -> MaskedWeights:
        return _fit_dropout(self, job, draws=self.draws)


@dataclass(frozen=True, repr=False, kw_only=True)
class ConcreteDropout(Trained, Method):
    r"""Dropout with a rate for every layer, learned with the weights by maximising the evidence lower bound (ELBO).

    .. math:: \max_{M, p}\; E_z[\log p(D \mid W)] - \sum_l \Big(\frac{\|M_l\|^2}{2 s^2 (1 - p_l)} - K_l H(p_l)\Big),
        \qquad W_l = M_l \operatorname{diag}\Big(\frac{z}{1 - p_l}\Big)

    with :math:`K_l` inputs of layer l. The entropy H of the masks asks for rates near ½, the data for small ones: the
    more data, the smaller the rates. (What the ELBO is: :class:`~knowable.inference.dropout.mc_dropout.MCDropout`.)

    Args:
        rate: Initial value of the rates; None is the rate of the network's own dropout layers, or 0.1.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        estimator: How the ELBO is differentiated in the rates.
            ``"concrete"``: masks are relaxed to numbers between 0 and 1 (Gal, Hron and Kendall, 2017). Low variance,
            and a bias that vanishes with ``relaxation``.
            ``"score"``: hard masks and the score function (REINFORCE), each draw compared with the others. No bias, and
            more variance.
        relaxation: Temperature t of the relaxed masks; 0 would be hard masks, whose gradient is zero almost everywhere.
        way: How training draws: ``"activations"`` (a mask for each example on the inputs of the layers) or
            ``"weights"`` (one draw of the masked weights for each step). Both estimate the same ELBO, the first with
            less variance.
        where: Names or globs of the weights whose inputs are dropped; the network's own dropout layers are then off.
            None: the network's own layers, or all but the first.
        prediction: ``"monte_carlo"``, or ``"weight_scaling"``: one pass with the mean weights, dropout off.
        draws: Masks for each example, or draws of the weights, in each step; None is 1, and 2 for ``"score"``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.ConcreteDropout(epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> 0 < posterior.rates["2.weight"] < 1
        True
    """

    family = "dropout"
    summary = "dropout with a rate for every layer, learned with the weights"
    references = ("gal2017", "maddison2017", "williams1992")
    supports_row_weights = True

    rate: float | None = field(default=None, kw_only=False)
    estimator: str = "concrete"
    relaxation: float = 0.1
    way: str = "activations"
    where: str | tuple[str, ...] | None = None
    prediction: str = "monte_carlo"
    draws: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_settings(self)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_number("relaxation", self.relaxation, above=0)
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator == "score" and self.draws == 1:
            raise InvalidArgument("draws must be >= 2 with estimator='score': each draw is compared with the others.")

    def _fit(self, job: FitJob) -> MaskedWeights:
        draws = self.draws or (_SCORE_DRAWS if self.estimator == "score" else 1)
        return _fit_dropout(self, job, draws=draws, estimator=self.estimator, relaxation=self.relaxation)


def check_where(where: Any, argument: str = "where") -> str | tuple[str, ...] | None:
    """Return ``where`` as a name or a tuple of names, or raise; ``argument`` is what messages call it."""
    if where is None or isinstance(where, str):
        return where
    names = tuple(where) if isinstance(where, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidType(f"{argument} must be None, a name, a glob or several of these; got {where!r}.")
    return names


def _check_settings(method: MCDropout | ConcreteDropout) -> None:
    if method.rate is not None:
        check_number("rate", method.rate, above=0, below=1)
    check_choice("way", method.way, WAYS)
    object.__setattr__(method, "where", check_where(method.where))
    check_choice("prediction", method.prediction, PREDICTIONS)


def _fit_dropout(method: MCDropout | ConcreteDropout, job: FitJob, **settings: Any) -> MaskedWeights:
    """Decide where dropout acts, maximise the ELBO, and return the distribution over weights."""
    model, rows, seed = job.model, job.rows, job.seed
    with own_randomness(derive_seed(seed, "start")):
        first, learned = rows.first[0], isinstance(method, ConcreteDropout)
        placement = place_dropout(model, first, rate=method.rate, where=method.where, learned=learned)
    check_priors(model, placement.sites)
    objective = DropoutObjective(model, rows.size, placement, way=method.way, **settings)
    result = train(objective, rows, method.training_settings(), **job.options)
    params = {name: value.detach() for name, value in objective.params().items()}
    found = objective.present_placement()
    terms = objective.final_elbo(rows, seed, result.epochs) | {f"rate.{site.name}": site.rate for site in found.sites}
    notes = (*_notes(placement), *rows.sample_notes)
    diagnostics = training_diagnostics(method, model, result, params, terms, notes)
    return objective.posterior(params, found, prediction=method.prediction, seed=seed, diagnostics=diagnostics)


def _notes(placement: Placement) -> tuple[str, ...]:
    if not placement.noisy:
        return ()
    left = [path for path, rate in placement.own_rates.items() if rate > 0]
    which = f"of {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}" if left else "in the network's own code"
    return (f"Dropout {which} is no distribution over weights: it is random in predictions, but not in sample().",)


# --- the ELBO --------------------------------------------------------------------------------------------------------


class DropoutObjective(Objective):
    r"""-ELBO / N of weights that are masked by dropout, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_z\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta(z))\Big] - \mathrm{KL}(q \,\|\, p)

    The two ways to the same expectation: a mask of its own for each example, on the inputs of the layers (less variance
    of the gradient, since the examples' noise averages out), or one draw of the weights for the whole batch. Settings
    are those of the methods; ``estimator=None`` leaves the rates as they are.

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
        estimator: str | None = None,
        relaxation: float = 0.1,
    ):
        super().__init__(model, size)
        self.placement, self.way, self.draws = placement, way, draws
        self.estimator, self.relaxation = estimator, relaxation
        start = model.params()
        self.names = list(start)
        self.values = nn.ParameterList([nn.Parameter(value) for value in start.values()])
        rates = torch.tensor([site.rate for site in placement.sites], dtype=torch.float64)
        logits = rates.logit().to(dtype=model.dtype, device=model.device)
        self.logits = nn.Parameter(logits, requires_grad=estimator is not None)
        self.network = placement.network(model)
        self._divergence = DropoutDivergence(model, placement.sites)
        self._evaluating = placement.network(model, noise=True)

    def params(self) -> Params:
        """Means of all parameters, by name."""
        return dict(zip(self.names, self.values, strict=True))

    def present_placement(self) -> Placement:
        """Where dropout acts, with the rates as they are."""
        sites = zip(self.placement.sites, self.rates(), strict=True)
        return replace(self.placement, sites=tuple(replace(site, rate=rate) for site, rate in sites))

    def posterior(self, params: Params, placement: Placement, **common: Any) -> MaskedWeights:
        """Masked weights with these means."""
        points = {name: params[name] for name in self.model.point_names}
        return MaskedWeights(self.model, params, placement, points=points, buffers=self.net_buffers, **common)

    def present_posterior(self) -> MaskedWeights:
        """The distribution as it is."""
        params = {name: value.detach().clone() for name, value in self.params().items()}
        return self.posterior(params, self.present_placement())

    def rates(self) -> list[float]:
        """The sites' rates: those that were set, to the last bit, or those that were learned."""
        if self.estimator is None:
            return [site.rate for site in self.placement.sites]
        return torch.sigmoid(self.logits.detach().double()).tolist()

    def divergence(self, params: Params | None = None) -> Tensor:
        """KL(q ‖ p), up to a constant; see :mod:`~knowable.inference.dropout.dropout_divergence`."""
        return self._divergence(params or self.params(), self.logits)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        params = self.params()
        rates = self.rates()  # as numbers, once a step
        found = [self._masked_log_likelihood(x, y, weights, params, rates) for _ in range(self.draws)]
        values = torch.stack([value for value, _ in found])  # (draws, rows)
        log_likelihood = values.mean()
        if self.estimator == "score":
            log_likelihood = log_likelihood + score_term(values, torch.stack([log_q for _, log_q in found]))
        kl = self.divergence(params)
        loss = -log_likelihood + kl / self.size
        terms = {"expected_log_likelihood": log_likelihood.detach() * self.size, "kl": kl.detach()}
        if self.model.point_names:
            log_prior = self._log_prior_of_points(params)
            loss, terms["log_prior_of_points"] = loss - log_prior / self.size, log_prior.detach()
        return loss, terms

    def _masked_log_likelihood(
        self, x: Tensor, y: Tensor, weights: Tensor | None, params: Params, rates: list[float]
    ) -> tuple[Tensor, Tensor]:
        """Log likelihood of each row under new masks, and the log probability of these masks (for the score)."""
        masks = [self._relaxed(k) if self.estimator == "concrete" else self._hard(k, p) for k, p in enumerate(rates)]
        given = masked_params(params, masks, by_example=self.way == "activations")
        output = self.network(self.model.network_params(given), x, buffers=self.net_buffers, training=True)
        value = self.model.score(output, y, params, weights)
        log_q = torch.zeros_like(value)
        for each, logit in zip(masks, self.logits, strict=True):
            if self.estimator == "score" and each.mask is not None:
                log_q = log_q + log_probability(each.mask, logit)  # one row of masks for all examples, or for each
        return value, log_q

    def _relaxed(self, index: int) -> SiteMasks:
        site, logit = self.placement.sites[index], self.logits[index]
        scale = 1 + torch.exp(logit)  # 1 / (1 - p)
        return SiteMasks(site, lambda rows: relaxed_mask(rows, site.units, logit, self.relaxation), scale)

    def _hard(self, index: int, rate: float, *, training: bool = True) -> SiteMasks:
        site = self.placement.sites[index]
        learned = training and self.estimator is not None
        scale = 1 + torch.exp(self.logits[index]) if learned else 1 / (1 - rate)
        return SiteMasks(site, lambda rows: fast_keep(rows, site.units, rate, like=self.logits), scale)

    def _log_prior_of_points(self, params: Params) -> Tensor:
        priors = {name: self.model.prior.bound(name, params) for name in self.model.point_names}
        terms = [prior.log_prob(params[name]).sum() for name, prior in priors.items() if prior is not None]
        return torch.stack(terms).sum()

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few draws, in evaluation mode."""
        each = [self.log_likelihood_of_draw(x, y) for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def log_likelihood_of_draw(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Log likelihood of each row with hard masks (of its own where that can be), in evaluation mode."""
        params = self.params()
        masks = [self._hard(index, rate, training=False) for index, rate in enumerate(self.rates())]
        given = masked_params(params, masks, by_example=True)
        output = self._evaluating(self.model.network_params(given), x, buffers=self.net_buffers)
        return self.model.score(output, y, params, weights)

    def final_elbo(self, data: Data, seed: int, epochs: float = math.inf) -> dict[str, float]:
        """The ELBO over all rows and its terms, up to a constant, with the standard error of Monte Carlo."""

        def total(batches: Iterable[Batch]) -> float:
            return sum(self.log_likelihood_of_draw(*batch).sum().item() for batch in batches)

        with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
            kl = self.divergence().item()
            fit, error = mean_and_error(estimates_of_all_rows(total, data, seed, epochs, self.dimension))
        return {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl, "elbo_standard_error": error}


# --- learned rates ---------------------------------------------------------------------------------------------------


def relaxed_mask(rows: int, units: int, logit: Tensor, relaxation: float) -> Tensor:
    r"""Masks ``(rows, units)`` with entries between 0 and 1, differentiable in the logit of the rate p.

    .. math:: \tilde z = \mathrm{sigmoid}\Big(\frac1t \Big(\log\frac{1-p}{p} + \log\frac{u}{1-u}\Big)\Big), \quad
        u \sim \mathrm{Uniform}(0, 1)

    The Concrete relaxation (Maddison et al., 2017; Jang et al., 2017; for dropout Gal, Hron and Kendall, 2017) falls on
    the same side of ½ as the hard mask z would, and becomes z as t goes to 0.
    """
    uniform = torch.rand((rows, units), dtype=logit.dtype, device=logit.device)
    return torch.sigmoid((uniform.logit(eps=_SMALLEST) - logit) / relaxation)


def log_probability(mask: Tensor, logit: Tensor) -> Tensor:
    """Log probability of hard masks ``(..., units)``, summed over units, as a function of the logit of the rate."""
    kept = mask.sum(-1)
    return -F.softplus(logit) * kept - F.softplus(-logit) * (mask.shape[-1] - kept)


def score_term(values: Tensor, log_q: Tensor) -> Tensor:
    r"""Zero in value; its gradient is the score-function estimate of how the rates move the expected log likelihood.

    .. math:: \frac{1}{K} \sum_k \Big(\ell_k - \frac{1}{K - 1} \sum_{j \neq k} \ell_j\Big) \nabla \log q(z_k)

    for each row, over K draws: the baseline of a draw is the mean of the others for the same row, which does not depend
    on its masks, so the estimate stays unbiased (REINFORCE: Williams, 1992; the baseline: Kool et al., 2019).
    ``values`` are log likelihoods ``(draws, rows)``, ``log_q`` the log probabilities of their masks.
    """
    count = len(values)
    advantage = (values - values.mean(0)).detach() * (count / (count - 1))
    term = (advantage * log_q).mean()
    return term - term.detach()
