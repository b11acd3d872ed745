"""Sparse variational dropout (Molchanov, Ashukha and Vetrov, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Params, select_names
from knowable.core.posterior.normal import NormalPosterior, in_order
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count
from knowable.core.training.loop import TrainingResult
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.variational.divergence import entropy_of_normals
from knowable.inference.variational.gaussian_weight import local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.normals import FlatNormals, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.priors.log_uniform import LogUniform


@dataclass(frozen=True, repr=False, kw_only=True)
class SparseVariationalDropout(VariationalMethod):
    r"""Gaussian noise of its own for every weight, learned under a log-uniform prior: most weights drown in it.

    .. math:: q(w) = \prod_d \mathcal{N}(w_d \mid \theta_d, \sigma_d^2), \qquad p(w_d) \propto \frac{1}{|w_d|}, \qquad
        \alpha_d = \frac{\sigma_d^2}{\theta_d^2}

    The prior does not change when a weight is rescaled, so that the KL is a function of α alone and falls as α grows
    (:class:`~knowable.priors.log_uniform.LogUniform`). Weights that the data does not need end with log α above 3,
    noise more than four times their size: they can be set to zero, which is what ``knowable.compress`` does. The
    parameters are θ and log σ (the paper's additive noise), which keeps the gradient quiet where α is large.

    The method puts the log-uniform prior on the weights that it makes noisy, whatever the model says of them. All other
    parameters (biases, scales of normalisation, noise of the likelihood) become point estimates under their own prior.

    Linear layers and convolutions are sampled by local reparameterisation, as in the paper; for convolutions and other
    weights that act several times on an example that is an approximation, with independent noise at each place. All
    other weights (recurrent, attention, embeddings, those used twice) are drawn once a step (Lobacheva, Chirkova and
    Vetrov, 2017). Prediction uses draws of the weights that all inputs share.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target, and
            without it a network that begins at random weights may drown before it has learned anything. None: about
            2,000 steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means: also the way to begin at a trained one),
            ``"map"`` (a MAP fit under the model's own priors is), or a fitted posterior.
        initial_scale: Standard deviation all weights start with; the default is log σ² = -9.2.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers.
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
        watch: Name of one noisy weight whose means and log α are kept after every epoch, in ``posterior.frames``.

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
    summary = "noise of its own for every weight under a log-uniform prior, in which most weights drown"
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
        """The model with the log-uniform prior on the noisy weights, and points elsewhere."""
        names = noisy_names(model, self.where)
        if self.watch is not None and self.watch not in names:
            raise InvalidArgument(f"watch={self.watch!r} is not among the noisy weights: {', '.join(names[:12])}.")
        return with_log_uniform(model, names)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> SparseObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``.

        ``model`` is what :meth:`target` makes of the user's.
        """
        return SparseObjective(model, x, size, watch=self.watch, draws=self.draws, **self.elbo_settings(start))

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*super()._notes(model, size, result), *prior_notes(model, noisy_names(model, self.where)))


# --- The bound of sparse variational dropout, what it records of sparsity, and the frames it keeps of one weight -----


class SparseObjective(VariationalObjective):
    """-ELBO / N of independent normals under log-uniform priors.

    Args:
        model: The model, with its log-uniform priors.
        x: Rows like those of the data.
        size: Number of training examples N.
        watch: A weight whose mean and log alpha are kept after every epoch; None for none.
        initial_scale: Standard deviation of all weights at the start.
        start: First means, where they are not the model's own.
        common: See :class:`~knowable.inference.variational.objective.VariationalObjective`.

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
        self.normals = FlatNormals.of(model, x, first, "local")
        self.layout = self.normals.layout
        self.q = nn.Parameter(self.normals.initial(first, initial_scale))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points = self.point_params()
        noise = standard_noise(self.draws, self.normals.drawn.size, like=self.q, recording=self.recording)
        kl, loc, variance, draws = self.normals.draw(self.q, noise, recording=self.recording)
        local = [local_weights(loc, variance, local_rule, recording=self.recording) for _ in draws]
        thetas = [{**draw, **own} for draw, own in zip(draws, local, strict=True)]
        return negative_elbo(self, expected_log_likelihood(self, x, y, points, thetas), kl, points)

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the noisy weights, by name, differentiable."""
        return self.normals.loc_and_scale(self.q)

    def kl_divergence(self) -> Tensor:
        """KL(q ‖ p), up to the constant of the improper prior."""
        return self.normals.kl_divergence(self.q, self.model, self.point_params(), max(8, self.draws))

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return entropy_of_normals(self.q[1])

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all noisy weights."""
        return self.normals.sample(self.q, count)

    def posterior(self, **common: Any) -> NoisyWeights:
        """Independent normals, and the frames."""
        frames = self.frames()
        return NoisyWeights(
            self.model, *self.loc_and_scale(), watched=self.watch, frames=frames, **self.shared(common)
        )  # fmt: skip

    def summary(self) -> dict[str, float]:
        """The share of each weight's elements that are drowned in noise."""
        gone = (self.log_alpha() > Posterior.log_alpha_threshold).to(self.q.dtype)
        return {f"sparsity.{name}": part.mean().item() for name, part in self.layout.views(gone).items()}

    def log_alpha(self) -> Tensor:
        """Log of noise over signal of all weights, ``(D,)``."""
        loc, log_scale = self.q.detach()
        return 2.0 * (log_scale - loc.abs().log())

    def end_of_epoch(self) -> None:
        """Keep a frame of the weight that is watched."""
        if self.watch is not None:
            loc = self.layout.views(self.q.detach()[0])[self.watch]
            log_alpha = self.layout.views(self.log_alpha())[self.watch]
            self.snapshots.append(torch.stack([loc, log_alpha]).to(torch.float16))  # infinite where it leaves the range

    def frames(self) -> Tensor | None:
        """All frames, ``(epochs, 2, *shape)``: means and log alphas."""
        return torch.stack(self.snapshots) if self.snapshots else None


# --- The posterior of dropout by noise: independent normals, and what was seen of one of them during training --------


class NoisyWeights(NormalPosterior):
    r"""Independent normals :math:`\mathcal{N}(\theta, \alpha \theta^2)` over the weights that have noise.

    Args:
        model: The model, with the log-uniform priors that the method put on those weights.
        loc: Means θ.
        scale: Standard deviations.
        watched: The weight that was watched.
        frames: Its means and log alphas after every epoch, ``(epochs, 2, *shape)`` in float16. They are saved with the
            rest.
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


# --- The model that dropout by noise is the inference of: log-uniform priors on the noisy weights, points elsewhere --


def noisy_names(model: Model, where: str | tuple[str, ...] | None) -> list[str]:
    """Which weights are to be noisy: those that ``where`` names among the random ones, or all of two dimensions."""
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


def with_log_uniform(model: Model, names: list[str]) -> Model:
    """The same model, log-uniform in the ``names``, all else that is not frozen a point under its own prior."""
    try:
        target = model.believing({name: LogUniform() for name in names}, random=names)
    except Unsupported:
        raise Unsupported(
            "model has a posterior as its prior, which dropout by noise would replace by the log-uniform prior. Give "
            "the model an ordinary prior, and the posterior to the method as start=."
        ) from None
    if target.hyper_names:
        raise Unsupported(
            f"model has parameters that would be point estimates under a prior whose scale is learned "
            f"({target.hyper_names[0]}): the joint density grows without bound as both shrink together. Give biases "
            f"and other such parameters a prior with a fixed scale."
        )
    return target


def prior_notes(model: Model, names: list[str]) -> tuple[str, ...]:
    """Which priors of the model were replaced."""
    replaced = [name for name in names if not isinstance(model.prior.prior_of(name), LogUniform)]
    if not replaced:
        return ()
    which = f"{', '.join(replaced[:5])}{', ...' if len(replaced) > 5 else ''}"
    return (f"The prior of {which} is log-uniform here, whatever the model says of them.",)
