"""Variational dropout (Kingma, Salimans and Welling, 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_choice, check_number
from knowable.core.model import Model
from knowable.core.target_notes import tempering_notes
from knowable.core.training import TrainingResult
from knowable.core.types import Params
from knowable.inference.dropout.noise_method import NoiseMethod
from knowable.inference.dropout.noise_objective import SHARES, NoiseObjective


@dataclass(frozen=True)
class Learned:
    """What variational dropout is told: what has a strength of its own, and how much it may be.

    Args:
        share: ``"layer"``, ``"neuron"`` or ``"weight"``.
        max_alpha: Largest variance of the noise.
    """

    share: str = "layer"
    max_alpha: float = 1.0


@dataclass(frozen=True, repr=False)
class VariationalDropout(NoiseMethod, Learned):
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
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
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
