"""Sparse variational dropout (Molchanov, Ashukha and Vetrov, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Params, select_names
from knowable.core.posterior.normal import NormalPosterior, in_order
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count
from knowable.core.training.loop import TrainingResult
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.variational.gaussian_weight import local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, check_normals, tempering_notes, warmup_notes
from knowable.inference.variational.normals import FlatNormalDistribution, FlatNormals, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.priors.log_uniform import LogUniform


@dataclass(frozen=True, repr=False, kw_only=True)
class SparseVariationalDropout(VariationalMethod):
    r"""Gaussian noise of learned variance on every weight, under a log-uniform prior that makes most weights noise.

    .. math:: q(w) = \prod_d \mathcal{N}(w_d \mid \theta_d, \sigma_d^2), \qquad p(w_d) \propto \frac{1}{|w_d|}, \qquad
        \alpha_d = \frac{\sigma_d^2}{\theta_d^2}

    The prior is scale-invariant, so that the KL is a function of α alone, which falls as α grows
    (:class:`~knowable.priors.log_uniform.LogUniform`). Weights that the data does not need end with log α above 3
    (noise of more than four times their size) and can be set to zero, as ``knowable.compress`` does. The parameters are
    θ and log σ (additive noise), which keeps the variance of the gradient low where α is large.

    The method replaces the model's prior of the noisy weights by the log-uniform one. All other parameters (biases,
    scales of normalisation, noise of the likelihood) become point estimates under their own prior.

    Linear layers and convolutions are sampled by local reparameterisation, as in the paper; for convolutions and other
    weights that act several times on an example that is an approximation, with independent noise at each position. All
    other weights (recurrent, attention, embeddings, those used twice) are drawn once a step (Lobacheva, Chirkova and
    Vetrov, 2017). Prediction uses draws of the weights that all inputs share.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target;
            without it a network with random initial weights may prune them all before it has learned anything. None:
            about 2,000 steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means, also those of a trained network), ``"map"``
            (those of a MAP fit under the model's own priors), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start; the default is log σ² = -9.2.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior.
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
        watch: Name of one noisy weight whose means and log α are recorded after every epoch, in ``posterior.frames``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
        >>> model = kn.Model(torch.nn.Linear(10, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.SparseVariationalDropout(epochs=1500).fit(model, (x, 2 * x[:, :1]))
        >>> posterior.log_alpha()["weight"][0] > 3  # only the first input matters
        tensor([False,  True,  True,  True,  True,  True,  True,  True,  True,  True])
    """

    family = "dropout"
    summary = "noise of learned variance on every weight under a log-uniform prior: most weights can be pruned"
    aliases = ("svdo", "sparse_vd")
    references = ("molchanov2017", "kingma2015", "lobacheva2017")

    kl_warmup: int | None = None
    initial_scale: float = 0.01
    temperature: float = 1.0
    draws: int = 1
    where: str | tuple[str, ...] | None = None
    watch: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_count("draws", self.draws)
        object.__setattr__(self, "where", check_where(self.where))
        if self.watch is not None and not isinstance(self.watch, str):
            raise InvalidType(f"watch must be the name of one weight or None, got {self.watch!r}.")

    def target(self, model: Model) -> Model:
        """The model with log-uniform priors on the noisy weights; all other parameters are point estimates."""
        target = with_log_uniform(model, self.where)
        if self.watch is not None and self.watch not in target.random_names:
            names = ", ".join(target.random_names[:12])
            raise InvalidArgument(f"watch={self.watch!r} is not among the noisy weights: {names}.")
        return target

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> SparseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data; ``model`` is what :meth:`target` gives."""
        return SparseObjective(model, x, size, watch=self.watch, draws=self.draws, **self.elbo_settings(start))

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*tempering_notes(self.beta, self.temperature), *noise_notes(self, model, result))


# --- the objective ---------------------------------------------------------------------------------------------------


class SparseObjective(FlatNormalDistribution, VariationalObjective):
    """-ELBO / N of independent normals under log-uniform priors; settings as in the method.

    Attributes:
        normals: How the random parameters are laid out in ``q``.
        q: Means and log scales of all random parameters, ``(2, D)``.
    """

    recordable = True

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        watch: str | None = None,
        initial_scale: float = 0.02,
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
        self.watch = watch
        first = first_values(model, start)
        self.hold(FlatNormals.of(model, x, first, "local"), first, initial_scale)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points = self.point_params()
        noise = standard_noise(self.draws, self.normals.drawn.size, like=self.q, recording=self.recording)
        kl, loc, variance, draws = self.normals.draw(self.q, noise, recording=self.recording)
        thetas = [{**draw, **local_weights(loc, variance, local_rule, recording=self.recording)} for draw in draws]
        return negative_elbo(self, expected_log_likelihood(self, x, y, points, thetas, weights), kl, points)

    def posterior(self, **common: Any) -> NoisyWeights:
        """Independent normals, and the frames."""
        own = {"watched": self.watch, "frames": torch.stack(self.snapshots) if self.snapshots else None}
        return NoisyWeights(self.model, *self.loc_and_scale(), **own, **self.shared(common))

    def summary(self) -> dict[str, float]:
        """The share of each weight's elements whose log α is above the pruning threshold."""
        gone = (self.log_alpha() > Posterior.log_alpha_threshold).to(self.q.dtype)
        return {f"sparsity.{name}": part.mean().item() for name, part in self.layout.views(gone).items()}

    def log_alpha(self) -> Tensor:
        """Log α of all weights, ``(D,)``."""
        loc, log_scale = self.q.detach()
        return 2.0 * (log_scale - loc.abs().log())

    def end_of_epoch(self) -> None:
        """Record a frame of the watched weight."""
        if self.watch is not None:
            loc = self.layout.views(self.q.detach()[0])[self.watch]
            log_alpha = self.layout.views(self.log_alpha())[self.watch]
            self.snapshots.append(torch.stack([loc, log_alpha]).to(torch.float16))  # overflows to inf


# --- the posterior ---------------------------------------------------------------------------------------------------


class NoisyWeights(NormalPosterior):
    r"""Independent normals :math:`\mathcal{N}(\theta, \alpha \theta^2)` over the weights that have noise.

    Args:
        model: The model, with the log-uniform priors of the method on these weights.
        loc: Means θ.
        scale: Standard deviations.
        watched: Name of the weight that ``frames`` shows.
        frames: Its means and log alphas after every epoch, ``(epochs, 2, *shape)`` in float16, saved with the rest.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "noisy_weights"
    loc: Params
    scale: Params

    def __init__(
        self,
        model: Model,
        loc: Params,
        scale: Params,
        *,
        watched: str | None = None,
        frames: Tensor | None = None,
        **common: Any,
    ):
        super().__init__(model, IndependentNormal(in_order(model, loc), in_order(model, scale)), **common)
        self.watched, self.frames = watched, frames

    def sparsity(self) -> dict[str, float]:
        """The share of each weight's elements whose log alpha is above :attr:`log_alpha_threshold`."""
        gone = {name: value > self.log_alpha_threshold for name, value in self.log_alpha().items()}
        return {name: value.double().mean().item() for name, value in gone.items()}

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "watched": self.watched}

    def _tensors(self) -> dict[str, Tensor]:
        return {**super()._tensors(), **({} if self.frames is None else {"frames": self.frames})}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> NoisyWeights:
        return super()._from_tensors(model, tensors, frames=tensors.get("frames"), **common)  # type: ignore[return-value]


# --- log-uniform priors on the noisy weights -------------------------------------------------------------------------


def noisy_names(model: Model, where: str | tuple[str, ...] | None) -> list[str]:
    """The random weights of the network that ``where`` names; by default all with two dimensions or more."""
    start = model.params()
    weights = [name for name in model.network_params(start) if name in model.random_names]
    if where is not None:
        chosen = select_names("where", where, weights, model.net)
        return [name for name in weights if name in chosen]
    found = [name for name in weights if start[name].dim() >= 2]
    if not found:
        raise InvalidArgument(
            "model has no random weight matrix or kernel to put noise on. Name the weights in where=, or make them "
            "random."
        )
    return found


def with_log_uniform(model: Model, where: str | tuple[str, ...] | None) -> Model:
    """The same model with log-uniform priors on the noisy weights; all other parameters are point estimates."""
    names = noisy_names(model, where)
    try:
        target = model.with_priors({name: LogUniform() for name in names}, random=names)
    except Unsupported:
        raise Unsupported(
            "model has a posterior as its prior, which this method would replace by the log-uniform prior. Give the "
            "model an ordinary prior, and the posterior to the method as start=."
        ) from None
    if target.hyper_names:
        raise Unsupported(
            f"model has parameters that would be point estimates under a prior whose scale is learned "
            f"({target.hyper_names[0]}): the joint density grows without bound as both shrink together. Give biases "
            f"and other such parameters a prior with a fixed scale."
        )
    return target


def noise_notes(method: Any, model: Model, result: TrainingResult) -> tuple[str, ...]:
    """Notes on the KL warm-up, and on which priors of the user's model were replaced."""
    notes = warmup_notes(method.kl_warmup or 0, result)
    names = noisy_names(model, method.where)
    replaced = [name for name in names if not isinstance(model.prior.prior_of(name), LogUniform)]
    if not replaced:
        return notes
    which = f"{', '.join(replaced[:5])}{', ...' if len(replaced) > 5 else ''}"
    return (*notes, f"The method replaced the prior of {which} by the log-uniform prior.")
