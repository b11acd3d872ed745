"""Gaussian dropout (Wang and Manning, 2013; Srivastava et al., 2014; as a posterior: Kingma et al., 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_number
from knowable.core.model import Model
from knowable.core.params import select_names
from knowable.core.types import Params
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.noise_method import NoiseMethod
from knowable.inference.dropout.noise_objective import NoiseObjective


@dataclass(frozen=True)
class Strength:
    """What Gaussian dropout is told: how much.

    Args:
        alpha: Variance of the noise.
    """

    alpha: float = 0.25


@dataclass(frozen=True, repr=False)
class GaussianDropout(NoiseMethod, Strength):
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
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
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
