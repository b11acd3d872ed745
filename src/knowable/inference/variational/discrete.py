"""Variational inference with parameters that are 0 or 1, by the score function (Williams, 1992; Kool et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.model.data import Batch, Data
from knowable.core.model.joint_normal import check_has
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Layout, Params, without_prefix
from knowable.core.posterior.diagnostics import LogEvidence
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.variational.divergence import entropy_of_normals, prior_segments, remaining_kl
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.objective import VariationalObjective, first_values, negative_elbo
from knowable.inference.variational.score_function import centred

_SCORE_DRAWS = 8
_BY_DIFFERENCES = 16  # most gates for which "auto" is "local_expectation"


@dataclass(frozen=True, repr=False, kw_only=True)
class DiscreteVI(VariationalMethod):
    r"""An independent Bernoulli for every parameter that is 0 or 1, an independent normal for every other.

    .. math:: q(z, w) = \prod_j \pi_j^{z_j} (1 - \pi_j)^{1 - z_j} \prod_d \mathcal{N}(w_d \mid m_d, s_d^2), \qquad
        \max_{\pi, m, s}\; E_q[\log p(D \mid z, w)] - \mathrm{KL}(q(z) \,\|\, p(z)) - \mathrm{KL}(q(w) \,\|\, p(w))

    Binary parameters are those with a :class:`~knowable.priors.bernoulli.BernoulliPrior`: gates on units or layers
    (:func:`~knowable.core.network.gates.gated` puts them into any network), or whatever a network of your own makes of
    zeros and ones. The normals are fitted through reparameterised draws. The Bernoullis have no such gradient: theirs
    is estimated from values of the likelihood, at the same draw of the weights for all settings that are compared.

    A factorised q leaves one thing out by design: of two units that do the same, either may be closed but not both, and
    independent gates cannot say so. They settle on one of the two.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means) or a fitted posterior. There is no
            ``"map"`` for zeros and ones.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        estimator: How the ELBO is differentiated in the probabilities.
            ``"auto"``: ``"local_expectation"`` up to 16 gates, ``"score"`` beyond.
            ``"score"``: log-derivative with a leave-one-out baseline; ``draws`` forward passes a step. A gate that is
            hardly ever closed is hardly ever compared: such probabilities stay a little away from 0 and 1.
            ``"local_expectation"``: for every gate in turn the difference between open and closed, the others as drawn
            (Rao-Blackwellised; Titsias and Lázaro-Gredilla, 2015). Far less noise, and a forward pass for every gate.
            ``"enumerate"``: all settings, each with its probability: exact, for up to ten gates.
        draws: Settings drawn in each step; None is 8 for ``"score"`` and 1 for the others.
        initial_probability: What all gates start with; None is their prior's, or what they are in ``start`` (but 0.05
            to 0.95).

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> prior = {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)}
        >>> model = kn.Model(kn.gated(net, "0"), kn.Gaussian(0.1), prior)
        >>> posterior = kn.DiscreteVI(epochs=100).fit(model, (x, x.abs()))
        >>> posterior.probabilities["0.1.gate"].shape
        torch.Size([8])
    """

    family = "variational"
    summary = "gates and other parameters that are 0 or 1, by the score function, with normals for the weights"
    references = ("williams1992", "mnih2016", "kool2019", "titsias2015")
    supports_binary = True

    initial_scale: float = 0.02
    temperature: float = 1.0
    estimator: str = "auto"
    draws: int | None = None
    initial_probability: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_choice("estimator", self.estimator, ("auto", *ESTIMATORS))
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator == "score" and self.draws == 1:
            raise InvalidArgument("draws must be >= 2 with estimator='score': each draw is compared with the others.")
        if isinstance(self.start, str) and self.start == "map":
            raise InvalidArgument(
                "start must be 'network' or a posterior, got 'map': there is no gradient by which to find the most "
                "probable zeros and ones."
            )
        if self.initial_probability is not None:
            check_number("initial_probability", self.initial_probability, above=0, below=1)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> DiscreteObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        known = model.params()
        gates = sum(known[name].numel() for name in model.binary_names)
        estimator = self.estimator
        if estimator == "auto":
            estimator = "local_expectation" if gates <= _BY_DIFFERENCES else "score"
        if estimator == "enumerate" and gates > MOST_ENUMERATED:
            raise Unsupported(
                f"estimator='enumerate' goes through all 2^{gates} settings of the model's {gates} binary parameters; "
                f"it does so for up to {MOST_ENUMERATED}. Use 'score' or 'local_expectation'."
            )
        draws = self.draws or (_SCORE_DRAWS if estimator == "score" else 1)
        return DiscreteObjective(
            model, size, estimator=estimator, draws=max(2, draws) if estimator == "score" else draws,
            initial_probability=self.initial_probability, **self.elbo_settings(start),
        )  # fmt: skip

    def _evidence(
        self, objective: DiscreteObjective, rows: Data, seed: int, epochs: float
    ) -> tuple[LogEvidence | None, dict[str, float]]:
        evidence, terms = super()._evidence(objective, rows, seed, epochs)
        return evidence, {**terms, "kl_of_gates": objective.kl_of_gates().item()}


ESTIMATORS = ("score", "local_expectation", "enumerate")
MOST_ENUMERATED = 10
_NEAREST = 0.05  # to 0 or 1 that a probability begins
_PRIOR_DRAWS = 8  # of weights, for a KL without a closed form


class DiscreteObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(z) q(w)`, Bernoullis and normals, on the full-data scale.

    With one draw of the weights w in each step, the derivative in the logits :math:`l_j` of the probabilities is

    .. math:: \frac{\partial}{\partial l_j} E_q[f(z)] = E_q\big[f(z)\,(z_j - \pi_j)\big]
        = \pi_j (1 - \pi_j)\, E_q\big[f(z_j = 1, z_{-j}) - f(z_j = 0, z_{-j})\big]

    The first form is the score function, whose f(z) is compared with that of the other draws; the second sums over both
    values of one gate at a time; and with few gates the expectation itself can be written out.

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
        initial_scale: float = 0.02,
        initial_probability: float | None = None,
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, draws=draws, start=start, **common)
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
        self.segments, self.others = prior_segments(self.layout, model)

    def _log_prior_of_gates(self, value: float) -> Tensor:
        """Log prior probability that each gate is 0, or 1."""
        start = self.model.params()
        found = [torch.zeros(0)]
        for name in self.gates.names:
            prior = self.model.prior.prior_of(name)
            assert prior is not None  # a binary parameter has a prior of its own
            found.append(prior.log_prob(torch.full_like(start[name], value)).flatten())
        return torch.cat([each.to(found[-1]) for each in found])

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the normals, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def probabilities(self) -> Params:
        """Probabilities of a 1, by name."""
        return self.gates.views(self.logits.detach().sigmoid())

    def posterior(self, **common: Any) -> BernoulliNormal:
        """Bernoullis and normals."""
        return BernoulliNormal(self.model, self.probabilities(), *self.loc_and_scale(), **self.shared(common))

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of gates and weights."""
        return [{**self._weights(), **self.gates.views(setting)} for setting in self.settings(count)]

    def kl_divergence(self) -> Tensor:
        """KL of Bernoullis and normals."""
        return self.kl_of_gates() + self.kl_of_weights()

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

    def kl_of_gates(self) -> Tensor:
        r"""KL of the Bernoullis, in closed form.

        .. math:: \sum_j \pi_j \log \frac{\pi_j}{p_j} + (1 - \pi_j) \log \frac{1 - \pi_j}{1 - p_j}
        """
        log_q = self._log_probabilities()
        return (log_q.exp() * (log_q - self.log_prior_of_gates)).sum()

    def _log_probabilities(self) -> Tensor:
        """Log probabilities of a 0 and of a 1, ``(2, G)``."""
        return torch.stack([F.logsigmoid(-self.logits), F.logsigmoid(self.logits)])

    def kl_of_weights(self) -> Tensor:
        """KL of the normals, with as little Monte Carlo as the priors allow."""
        flat = self.q[0], self.q[1], self.q[1].exp()
        closed = sum(segment.value(*flat) for segment in self.segments)
        return closed + remaining_kl(self.model, self.others, *self.loc_and_scale(), self.point_params(), _PRIOR_DRAWS)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        params = {**points, **self._weights()}
        log_likelihood = self._expected_score((x, y) if weights is None else (x, y, weights), params)
        kl, kl_of_gates = self.kl_of_weights(), self.kl_of_gates()
        loss, terms = negative_elbo(self, log_likelihood, kl + kl_of_gates, points)
        return loss, {**terms, "kl_of_gates": kl_of_gates.detach()}

    def _weights(self) -> Params:
        """One reparameterised draw, which all settings of the gates share."""
        return self.layout.views(torch.addcmul(self.q[0], self.q[1].exp(), torch.randn_like(self.q[0])))

    def _expected_score(self, batch: Batch, params: Params) -> Tensor:
        """Mean log likelihood over rows and settings; its gradient is that of the expectation, or estimates it."""
        if self.gates.size == 0:
            return self._mean_score(batch, params)
        if self.estimator == "enumerate":
            return self._by_enumeration(batch, params)
        return self._by_score(batch, params) if self.estimator == "score" else self._by_differences(batch, params)

    def _mean_score(self, batch: Batch, params: Params, setting: Tensor | None = None) -> Tensor:
        """Mean log likelihood of a batch for one setting of the gates."""
        own = {} if setting is None else self.gates.views(setting)
        x, y, *weights = batch
        return self.log_likelihood(x, y, {**params, **own}, *weights).mean()

    def _by_score(self, batch: Batch, params: Params) -> Tensor:
        settings = self.settings(self.draws)
        values = torch.stack([self._mean_score(batch, params, setting) for setting in settings])
        surrogate = (centred(values.detach()) * self.log_probability(settings)).mean()
        return values.mean() + surrogate - surrogate.detach()

    def _by_differences(self, batch: Batch, params: Params) -> Tensor:
        settings = self.settings(self.draws)
        values = torch.stack([self._mean_score(batch, params, setting) for setting in settings])
        with torch.no_grad():
            gains = torch.stack([self._gains(batch, params, *pair) for pair in zip(settings, values, strict=True)])
        surrogate = (self.logits.sigmoid() * gains.mean(0)).sum()
        return values.mean() + surrogate - surrogate.detach()

    def _gains(self, batch: Batch, params: Params, setting: Tensor, value: Tensor) -> Tensor:
        """What opening each gate adds to the log likelihood, the others as they are, ``(G,)``."""
        flipped = (setting - torch.eye(len(setting), dtype=setting.dtype, device=setting.device)).abs()
        others = torch.stack([self._mean_score(batch, params, each) for each in flipped])
        return (2 * setting - 1) * (value - others)

    def _by_enumeration(self, batch: Batch, params: Params) -> Tensor:
        settings = all_settings(self.gates.size, like=self.logits)
        values = torch.stack([self._mean_score(batch, params, setting) for setting in settings])
        return self.log_probability(settings).exp() @ values


def all_settings(count: int, *, like: Tensor) -> Tensor:
    """Every row of ``count`` zeros and ones, ``(2^count, count)``."""
    numbers = torch.arange(2**count, device=like.device).unsqueeze(1)
    return (numbers >> torch.arange(count, device=like.device) & 1).to(like.dtype)


class BernoulliNormal(Posterior):
    r"""Zeros and ones with a probability each, and normals, all independent.

    .. math:: q(z, w) = \prod_j \pi_j^{z_j} (1 - \pi_j)^{1 - z_j} \prod_d \mathcal{N}(w_d \mid m_d, s_d^2)

    Args:
        model: The model.
        probabilities: Of a 1, for the binary parameters.
        loc: Means of the other random parameters.
        scale: Their standard deviations.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "bernoulli_normal"

    def __init__(self, model: Model, probabilities: Params, loc: Params, scale: Params, **common: Any):
        super().__init__(model, **common)
        self.probabilities = {k: probabilities[k].detach().clone() for k in model.random_names if k in probabilities}
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.scale = {name: scale[name].detach().clone() for name in self.loc}
        self._gates, self._layout = Layout.of(self.probabilities), Layout.of(self.loc)
        parts = (self._gates, self.probabilities), (self._layout, self.loc), (self._layout, self.scale)
        self._flat = [layout.flatten(values).to(device=model.device, dtype=model.dtype) for layout, values in parts]

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        probability, loc, scale = self._flat
        like: Any = {"generator": generator, "dtype": loc.dtype, "device": loc.device}
        uniform, noise = torch.rand((n, len(probability)), **like), torch.randn((n, len(loc)), **like)
        gates = self._gates.views((uniform < probability).to(loc.dtype))
        return {**gates, **self._layout.views(torch.addcmul(loc, scale, noise))}

    def _mean_random(self) -> Params:
        """Means: of a binary parameter its probability of being 1."""
        return {name: value.clone() for name, value in {**self.probabilities, **self.loc}.items()}

    def _std_random(self) -> Params:
        gates = {name: (value * (1 - value)).sqrt() for name, value in self.probabilities.items()}
        return {**gates, **{name: value.clone() for name, value in self.scale.items()}}

    def log_prob(self, params: Params) -> Tensor:
        """Log probability of what is binary plus log density of the rest: a scalar, or ``(n,)`` for a stack."""
        check_has(params, (*self._gates.names, *self._layout.names))
        probability, loc, scale = self._flat
        total = torch.zeros((), dtype=loc.dtype, device=loc.device)
        if self._layout.names:
            standard = (self._layout.flatten(params) - loc) / scale
            constant = scale.log().sum() + 0.5 * len(loc) * math.log(2 * math.pi)
            total = total - 0.5 * (standard**2).sum(-1) - constant
        if self._gates.names:
            gates = self._gates.flatten(params)
            chance = torch.where(gates == 1, probability, torch.where(gates == 0, 1 - probability, 0.0))
            total = total + chance.log().sum(-1)
        return total

    def as_prior(self) -> JointPrior:
        """Not there yet: a prior that is part Bernoulli with probabilities of its own, part normal."""
        raise Unsupported(
            "BernoulliNormal cannot be a prior. Freeze the gates at their likelier values and fit MeanFieldVI, whose "
            "posterior can."
        )

    def _tensors(self) -> dict[str, Tensor]:
        parts = ("probabilities", "loc", "scale")
        return {f"{part}.{name}": value for part in parts for name, value in getattr(self, part).items()}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> BernoulliNormal:
        parts = (without_prefix(part, tensors) for part in ("probabilities.", "loc.", "scale."))
        return cls(model, *parts, **common)
