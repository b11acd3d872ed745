"""Multiplicative Gaussian noise on the weights: Gaussian dropout (variance set), variational dropout (learned)."""

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
from knowable.inference.dropout.sparse_variational_dropout import NoisyWeights, noise_notes, with_log_uniform
from knowable.inference.variational.gaussian_weight import local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, tempering_notes
from knowable.inference.variational.normals import drawn_and_local, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.priors.log_uniform import divergence_at

SHARES = ("layer", "neuron", "weight")
_INITIAL_LOGIT = math.log(0.25 / 0.75)  # a learned alpha starts at a quarter of its upper limit


@dataclass(frozen=True, repr=False, kw_only=True)
class GaussianDropout(VariationalMethod):
    r"""Every weight is multiplied by Gaussian noise of a set variance, in training and in prediction.

    .. math:: w = \theta\, (1 + \sqrt{\alpha}\, \epsilon), \quad \epsilon \sim \mathcal{N}(0, 1), \qquad
        \max_\theta\; E[\log p(D \mid w)]

    Dropout at rate p has the same mean and variance with α = p / (1 - p) (Wang and Manning, 2013; Srivastava et al.,
    2014). The objective is the evidence lower bound under the log-uniform prior, whose KL does not depend on θ and so
    is a constant here (Kingma, Salimans and Welling, 2015): the method replaces the model's prior of the noisy weights
    by the log-uniform one. All other parameters become point estimates under their own prior. Training samples layers,
    and prediction draws weights, as in
    :class:`~knowable.inference.dropout.sparse_variational_dropout.SparseVariationalDropout`.

    Args:
        alpha: Variance of the noise; 0.25 is dropout at a rate of 0.2.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        beta: Factor on the KL, which is a constant here: no effect.
        kl_warmup: Epochs over which that factor rises to its full value: no effect, as the KL is a constant.
        start: ``"network"``, ``"map"`` (a MAP fit under the model's own priors) or a fitted posterior.
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
        zero_mean: Names or globs of noisy weights that have no mean: they are N(0, σ²) with σ learned, and encode
            information in the variance of their outputs (variance networks: Neklyudov et al., 2018). Their
            signal-to-noise ratio is 0 and is no criterion for pruning them.

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
    summary = "weights multiplied by Gaussian noise of a set variance, in training and prediction"
    references = ("wang2013", "kingma2015", "neklyudov2018")

    alpha: float = field(default=0.25, kw_only=False)
    draws: int = 1
    where: str | tuple[str, ...] | None = None
    zero_mean: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, above=0)
        check_count("draws", self.draws)
        object.__setattr__(self, "where", check_where(self.where))
        object.__setattr__(self, "zero_mean", check_where(self.zero_mean, "zero_mean"))

    def target(self, model: Model) -> Model:
        """The model with log-uniform priors on the noisy weights; all other parameters are point estimates."""
        return with_log_uniform(model, self.where)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> NoiseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data; ``model`` is what :meth:`target` gives."""
        names = select_names("zero_mean", self.zero_mean, model.random_names, model.net) if self.zero_mean else ()
        common = {"zero_mean": tuple(sorted(names)), "draws": self.draws, **self.elbo_settings(start)}
        return NoiseObjective(model, x, size, alpha=self.alpha, **common)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return noise_notes(self, model, result)


@dataclass(frozen=True, repr=False, kw_only=True)
class VariationalDropout(VariationalMethod):
    r"""Gaussian dropout whose variance is learned with the weights: by layer, by neuron, or by weight.

    .. math:: w = \theta\, (1 + \sqrt{\alpha}\, \epsilon), \qquad
        \max_{\theta, \alpha}\; E[\log p(D \mid w)] - \mathrm{KL}(\alpha), \qquad \alpha \le \alpha_\max

    The KL divergence from the log-uniform prior is a function of α alone. Kingma, Salimans and Welling (2015) used a
    cubic fit to it, valid up to α = 1, and so held α there; here it is the fit of Molchanov et al. (2017), valid for
    all α (:class:`~knowable.priors.log_uniform.LogUniform`). The upper limit of α stays the default, because it keeps
    the variance of the gradient low; to prune weights with large α use
    :class:`~knowable.inference.dropout.sparse_variational_dropout.SparseVariationalDropout`.

    The method replaces the model's prior of the noisy weights by the log-uniform one. All other parameters become point
    estimates under their own prior. Layers are sampled by local reparameterisation where possible, and prediction uses
    draws of the weights that all inputs share.

    Args:
        share: What has an α of its own: ``"layer"`` (one for each weight matrix or kernel), ``"neuron"`` (one for each
            output: a weight's first dimension) or ``"weight"``.
        max_alpha: Upper limit of α. 1 is dropout at a rate of one half.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target. None:
            about 2,000 steps, at most a third of the epochs.
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
    summary = "Gaussian dropout whose variance is learned, by layer, neuron or weight"
    aliases = ("vdo",)
    references = ("kingma2015", "molchanov2017")

    share: str = field(default="layer", kw_only=False)
    max_alpha: float = field(default=1.0, kw_only=False)
    draws: int = 1
    where: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("share", self.share, SHARES)
        check_number("max_alpha", self.max_alpha, above=0)
        check_count("draws", self.draws)
        object.__setattr__(self, "where", check_where(self.where))

    def target(self, model: Model) -> Model:
        """The model with log-uniform priors on the noisy weights; all other parameters are point estimates."""
        return with_log_uniform(model, self.where)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> NoiseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data; ``model`` is what :meth:`target` gives."""
        common = {"share": self.share, "draws": self.draws, **self.elbo_settings(start)}
        return NoiseObjective(model, x, size, alpha=self.max_alpha, **common)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*tempering_notes(self.beta, 1.0), *noise_notes(self, model, result))


# --- the objective ---------------------------------------------------------------------------------------------------


class NoiseObjective(VariationalObjective):
    r"""-ELBO / N of :math:`w = \theta\, (1 + \sqrt{\alpha}\, \epsilon)` under the log-uniform prior.

    The KL is a function of α alone. A learned α is :math:`\alpha_\max\, \sigma(a)`. Weights of ``zero_mean`` have no θ:
    they are :math:`\mathcal{N}(0, \sigma^2)` with σ learned. Their KL does not depend on σ: it is the limit of infinite
    α, where it is 0. ``alpha`` is the variance of the noise, or its upper limit where it is learned (``share``).

    Attributes:
        theta: Means of the weights that have one, concatenated.
        logits: The numbers a of all groups, concatenated; empty where α is set.
        log_sigma: Log scales of the weights without a mean, concatenated.
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
        self.logits = nn.Parameter(torch.full((self.groups.size,), _INITIAL_LOGIT).to(like))
        self.log_sigma = nn.Parameter(
            self.without.flatten({k: _log_size(first[k]) for k in self.without.names}).to(like)
        )

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points, like = self.point_params(), next(self.parameters())
        noise = standard_noise(self.draws, self.drawn.size, like=like, recording=self.recording)
        thetas, kl = self.draw(noise), self.kl_divergence()
        return negative_elbo(self, expected_log_likelihood(self, x, y, points, thetas, weights), kl, points)

    def draw(self, noise: Tensor) -> list[Params]:
        """Draws of all weights; those of local layers are drawn by their outputs."""
        loc, factor = self._loc_and_factor()
        means = {name: loc[name] for name in self.local.names}
        variance = {name: factor[name].square() for name in self.local.names}
        return [
            {
                **{name: torch.addcmul(loc[name], factor[name], e) for name, e in self.drawn.views(each).items()},
                **local_weights(means, variance, local_rule, recording=self.recording),
            }
            for each in noise
        ]

    def log_alphas(self) -> Params:
        """Log α of each weight that has a mean, of a shape that broadcasts to the weight's."""
        if self.share is None:
            return dict.fromkeys(self.with_mean.names, self.theta.new_tensor(math.log(self.alpha)))
        return self.groups.views(math.log(self.alpha) + nn.functional.logsigmoid(self.logits))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        loc, factor = self._loc_and_factor()
        return loc, {name: value.abs() for name, value in factor.items()}

    def _loc_and_factor(self) -> tuple[Params, Params]:
        """Means, and the factors on standard normal noise: √α θ, or σ."""
        log_alphas = self.log_alphas()
        loc = self.with_mean.views(self.theta)
        factor = {name: value * (0.5 * log_alphas[name]).exp() for name, value in loc.items()}
        sigma = self.without.views(self.log_sigma.exp())
        loc = {**loc, **{name: torch.zeros_like(value) for name, value in sigma.items()}}
        factor = {**factor, **sigma}
        return {name: loc[name] for name in self.layout.names}, {name: factor[name] for name in self.layout.names}

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
    """Log root mean square of the weight, at least log 0.001, in the weight's shape."""
    size = weight.square().mean().sqrt().clamp_min(1e-3)
    return size.log().expand(weight.shape)
