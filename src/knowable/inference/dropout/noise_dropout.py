"""What methods that put multiplicative noise on weights have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params, select_names
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.training.loop import TrainingResult
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.sparse_variational_dropout import (
    NoisyWeights,
    noisy_names,
    prior_notes,
    with_log_uniform,
)
from knowable.inference.variational.gaussian_weight import local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, tempering_notes, warmup_notes
from knowable.inference.variational.normals import drawn_and_local, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.priors.log_uniform import divergence_at


@dataclass(frozen=True, repr=False, kw_only=True)
class NoiseMethod(VariationalMethod):
    """Noise on the weights under a log-uniform prior, that the method brings with it; points elsewhere.

    Args:
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
    """

    draws: int = 1
    where: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("draws", self.draws)
        object.__setattr__(self, "where", check_where(self.where))

    def target(self, model: Model) -> Model:
        """The model with the log-uniform prior on the noisy weights, and points elsewhere."""
        return with_log_uniform(model, noisy_names(model, self.where))

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*warmup_notes(self.kl_warmup or 0, result), *prior_notes(model, noisy_names(model, self.where)))


# --- The bound of multiplicative Gaussian noise on the weights, of a strength that is set or learned -----------------

SHARES = ("layer", "neuron", "weight")
_INITIAL_SHARE = 0.25  # of the largest alpha, at which a learned one starts


class NoiseObjective(VariationalObjective):
    r"""-ELBO / N of :math:`w = \theta\, (1 + \sqrt{\alpha}\, \epsilon)` under the log-uniform prior.

    The KL is a function of α alone. A learned α is :math:`\alpha_\max\, \sigma(a)`. Weights of ``zero_mean`` have no θ:
    they are :math:`\mathcal{N}(0, \sigma^2)` with σ learned, whose KL is the same whatever σ is; this is the limit of
    infinite α, where it is 0.

    Args:
        model: The model, with its log-uniform priors.
        x: Rows like those of the data.
        size: Number of training examples N.
        alpha: Strength of the noise, or the largest where it is learned.
        share: What has an α of its own: ``"layer"``, ``"neuron"`` (a weight's first dimension) or ``"weight"``. None:
            α is not learned.
        zero_mean: Names of the weights without a mean.
        common: See :class:`~knowable.inference.variational.objective.VariationalObjective`.

    Attributes:
        theta: Means of the weights that have one, end to end.
        logits: The numbers a of all groups, end to end; empty where α is set.
        log_sigma: Log scales of the weights without a mean, end to end.
    """

    recordable = True

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        alpha: float,
        share: str | None = None,
        zero_mean: tuple[str, ...] = (),
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
        self.alpha, self.share = alpha, share
        first = first_values(model, start)
        parts = [{name: first[name] for name in names} for names in drawn_and_local(model, x, "local")]
        first = {**parts[0], **parts[1]}
        self.drawn, self.local, self.layout = Layout.of(parts[0]), Layout.of(parts[1]), Layout.of(first)
        like = next(iter(first.values()))
        self.with_mean = Layout.of({name: value for name, value in first.items() if name not in zero_mean})
        self.without = Layout.of({name: value for name, value in first.items() if name in zero_mean})
        groups = {name: _group(first[name], share) for name in self.with_mean.names} if share is not None else {}
        self.groups = Layout.of(groups)
        self.theta = nn.Parameter(self.with_mean.flatten(first).to(like))
        self.logits = nn.Parameter(torch.full((self.groups.size,), _logit(_INITIAL_SHARE)).to(like))
        self.log_sigma = nn.Parameter(
            self.without.flatten({k: _log_size(first[k]) for k in self.without.names}).to(like)
        )

    # --- the distribution --------------------------------------------------------------------------------------------

    def log_alphas(self) -> Params:
        """Log α of each weight that has a mean, of a shape that broadcasts to the weight's."""
        if self.share is None:
            fixed = self.theta.new_tensor(math.log(self.alpha))
            return dict.fromkeys(self.with_mean.names, fixed)
        return self.groups.views(math.log(self.alpha) + nn.functional.logsigmoid(self.logits))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        loc, shift = self._loc_and_shift()
        return loc, {name: value.abs() for name, value in shift.items()}

    def _loc_and_shift(self) -> tuple[Params, Params]:
        """Means, and what a standard normal number is multiplied by: √α θ, or σ."""
        log_alphas = self.log_alphas()
        loc = self.with_mean.views(self.theta)
        shift = {name: value * (0.5 * log_alphas[name]).exp() for name, value in loc.items()}
        sigma = self.without.views(self.log_sigma.exp())
        loc = {**loc, **{name: torch.zeros_like(value) for name, value in sigma.items()}}
        return _in_order(self.layout, loc), _in_order(self.layout, {**shift, **sigma})

    def posterior(self, **common: Any) -> NoisyWeights:
        """Independent normals."""
        return NoisyWeights(self.model, *self.loc_and_scale(), **self.shared(common))

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all noisy weights."""
        loc, scale = (self.layout.flatten(each) for each in self.loc_and_scale())
        noise = torch.randn((count, self.layout.size), dtype=loc.dtype, device=loc.device)
        return [self.layout.views(draw) for draw in torch.addcmul(loc, scale, noise)]

    def kl_divergence(self) -> Tensor:
        """KL(q ‖ p), up to the constant of the improper prior."""
        log_alphas = self.log_alphas()
        sizes = zip(self.with_mean.names, self.with_mean.sizes, strict=True)
        each = [divergence_at(log_alphas[name]).mean() * size for name, size in sizes]
        return torch.stack(each).sum() if each else self.theta.new_zeros(())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points = self.point_params()
        like = next(self.parameters())
        noise = standard_noise(self.draws, self.drawn.size, like=like, recording=self.recording)
        kl, thetas = self.draw(noise)
        return negative_elbo(self, expected_log_likelihood(self, x, y, points, thetas), kl, points)

    def draw(self, noise: Tensor) -> tuple[Tensor, list[Params]]:
        """The KL, and draws of all weights; those of local layers are drawn by their outputs."""
        loc, shift = self._loc_and_shift()
        means = {name: loc[name] for name in self.local.names}
        variance = {name: shift[name].square() for name in self.local.names}
        draws = [
            {name: torch.addcmul(loc[name], shift[name], value) for name, value in self.drawn.views(each).items()}
            for each in noise
        ]
        kl = self.kl_divergence()
        return kl, [{**draw, **local_weights(means, variance, local_rule, recording=self.recording)} for draw in draws]

    # --- records -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """The mean α of each weight, where it is learned."""
        if self.share is None:
            return {}
        with torch.no_grad():
            return {f"alpha.{name}": value.exp().mean().item() for name, value in self.log_alphas().items()}


def _group(weight: Tensor, share: str | None) -> Tensor:
    """One number for each α of the weight."""
    if share == "weight":
        return torch.zeros_like(weight)
    shape = [1] * weight.dim()
    if share == "neuron":
        shape[0] = len(weight)
    return weight.new_zeros(shape)


def _log_size(weight: Tensor) -> Tensor:
    """Log of the root mean square of the weight, everywhere; that of a thousandth where it is all zeros."""
    size = weight.square().mean().sqrt().clamp_min(1e-3)
    return size.log().expand(weight.shape)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _in_order(layout: Layout, values: Params) -> Params:
    return {name: values[name] for name in layout.names}


# --- Gaussian dropout (Wang and Manning, 2013; Srivastava et al., 2014; as a posterior: Kingma et al., 2015) ---------


@dataclass(frozen=True, repr=False, kw_only=True)
class GaussianDropout(NoiseMethod):
    r"""Every weight is multiplied by noise of a set strength, in training and in prediction.

    .. math:: w = \theta\, (1 + \sqrt{\alpha}\, \epsilon), \quad \epsilon \sim \mathcal{N}(0, 1), \qquad
        \max_\theta\; E[\log p(D \mid w)]

    Dropout at rate p has the same mean and variance with α = p / (1 - p) (Wang and Manning, 2013). It is the evidence
    lower bound under the log-uniform prior, whose KL does not depend on θ and so is a constant here (Kingma, Salimans
    and Welling, 2015): the method puts that prior on the weights that it makes noisy, whatever the model says of them.
    All other parameters become point estimates under their own prior. How training samples layers, and prediction:
    as :class:`~knowable.inference.dropout.sparse_variational_dropout.SparseVariationalDropout`.

    Args:
        alpha: Variance of the noise; 0.25 is dropout at a rate of 0.2.
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
        beta: Factor on the KL, which is a constant here: it changes nothing.
        kl_warmup: Epochs over which that factor rises to its full value; likewise.
        start: ``"network"``, ``"map"`` (a MAP fit under the model's own priors) or a fitted posterior.
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
        zero_mean: Names or globs of noisy weights that have no mean at all: they are N(0, σ²) with σ learned, and tell
            inputs apart by the variance of what they do to them (variance networks: Neklyudov et al., 2018). Their
            ratio of signal to noise is 0 and says nothing about whether they are needed.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.GaussianDropout(0.1, epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> round(posterior.log_alpha()["2.weight"].exp().mean().item(), 3)
        0.1
    """

    family = "dropout"
    summary = "weights multiplied by Gaussian noise of a set strength, in training and prediction"
    references = ("wang2013", "kingma2015", "neklyudov2018")

    alpha: float = field(default=0.25, kw_only=False)
    zero_mean: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, above=0)
        object.__setattr__(self, "zero_mean", check_where(self.zero_mean, "zero_mean"))

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> NoiseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data; ``model`` is what :meth:`target` gives."""
        chosen = (
            () if self.zero_mean is None else select_names("zero_mean", self.zero_mean, model.random_names, model.net)
        )
        return NoiseObjective(
            model, x, size, alpha=self.alpha, zero_mean=tuple(sorted(chosen)), draws=self.draws, beta=self.beta,
            kl_warmup=self.kl_warmup, start=start,
        )  # fmt: skip


# --- Variational dropout (Kingma, Salimans and Welling, 2015) --------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class VariationalDropout(NoiseMethod):
    r"""Gaussian dropout whose strength is learned with the weights: by layer, by neuron, or by weight.

    .. math:: w = \theta\, (1 + \sqrt{\alpha}\, \epsilon), \qquad
        \max_{\theta, \alpha}\; E[\log p(D \mid w)] - \mathrm{KL}(\alpha), \qquad \alpha \le \alpha_\max

    The KL is that to the log-uniform prior, a function of α alone. The paper used a cubic fit to it, valid up to α = 1,
    and so held α there; here it is the fit of Molchanov et al. (2017), good for all α
    (:class:`~knowable.priors.log_uniform.LogUniform`). The bound on α stays the default, for it keeps the gradient of
    multiplicative noise quiet; where weights are to drown in their noise take
    :class:`~knowable.inference.dropout.sparse_variational_dropout.SparseVariationalDropout`.

    The method puts the log-uniform prior on the weights that it makes noisy, whatever the model says of them. All other
    parameters become point estimates under their own prior. Layers are sampled by local reparameterisation where that
    can be, and prediction uses draws of the weights that all inputs share.

    Args:
        share: What has an α of its own: ``"layer"`` (one for each weight matrix or kernel), ``"neuron"`` (one for each
            output: a weight's first dimension) or ``"weight"``.
        max_alpha: Largest α. 1 is dropout at a rate of one half.
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target.
        start: ``"network"``, ``"map"`` (a MAP fit under the model's own priors) or a fitted posterior.
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.VariationalDropout(epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> sorted(name for name in posterior.diagnostics.terms if name.startswith("alpha"))
        ['alpha.0.weight', 'alpha.2.weight']
    """

    family = "dropout"
    summary = "Gaussian dropout whose strength is learned, by layer, neuron or weight"
    aliases = ("vdo",)
    references = ("kingma2015", "molchanov2017")

    share: str = field(default="layer", kw_only=False)
    max_alpha: float = field(default=1.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("share", self.share, SHARES)
        check_number("max_alpha", self.max_alpha, above=0)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> NoiseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data; ``model`` is what :meth:`target` gives."""
        return NoiseObjective(
            model, x, size, alpha=self.max_alpha, share=self.share, draws=self.draws, beta=self.beta,
            kl_warmup=self.kl_warmup, start=start,
        )  # fmt: skip

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*tempering_notes(self.beta, 1.0), *super()._notes(model, size, result))
