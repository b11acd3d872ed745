"""Sparse variational dropout (Molchanov, Ashukha and Vetrov, 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_count
from knowable.core.model import Model
from knowable.core.training import TrainingResult
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.noisy_model import noisy_names, prior_notes, with_log_uniform
from knowable.inference.dropout.sparse_objective import SparseObjective


@dataclass(frozen=True, repr=False)
class SparseVariationalDropout(BoundMethod):
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
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
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

    kl_warmup: int | None = None
    initial_scale: float = 0.01
    draws: int = 1
    where: str | tuple[str, ...] | None = None
    watch: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return SparseObjective(
            model, x, size, watch=self.watch, draws=self.draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start,
        )  # fmt: skip

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*super()._notes(model, size, result), *prior_notes(model, noisy_names(model, self.where)))
