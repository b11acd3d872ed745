"""The Bayesian bootstrap (Rubin, 1981) of a network (Newton and Raftery, 1994)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.posterior.particles import Particles
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.settings import Trained
from knowable.inference.ensembles.members import Members


@dataclass(frozen=True, repr=False, kw_only=True)
class BayesianBootstrap(Trained, Method):
    r"""Networks trained on the same rows, each with its own random weights on them.

    .. math:: \hat\theta_k = \arg\max_\theta \sum_n w_{kn} \log p(y_n \mid x_n, \theta) + \log p(\theta), \qquad
        \tfrac1N w_k \sim \mathrm{Dirichlet}(1, \ldots, 1)

    Rubin's posterior over the distribution that the data came from, carried over to the weights of the network: it
    does not need the likelihood to be right, only the rows to be independent. For the mean of n numbers, with a flat
    prior, its draws have mean :math:`\bar y` and variance :math:`\sum_n (y_n - \bar y)^2 / (n (n + 1))`. The prior
    keeps its full weight in every member; with ``Flat()`` this is the weighted likelihood bootstrap.

    Members are trained in one batched step where the network allows it, see
    :class:`~knowable.inference.ensembles.deep_ensemble.DeepEnsemble`. All rows are held in memory.

    Args:
        members: How many networks: as many draws from the posterior.
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.
        vectorise: Train all members in one step (True) or in turn (False). None: as in
            :class:`~knowable.inference.ensembles.deep_ensemble.DeepEnsemble`.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.BayesianBootstrap(members=20, epochs=200).fit(model, (x, 2 * x))
        >>> posterior.predict(x).samples.shape
        torch.Size([20, 40, 1])
    """

    family = "ensembles"
    summary = "networks trained with random weights on the rows"
    aliases = ("bootstrap",)
    references = ("rubin1981", "newton1994")
    supports_row_weights = True

    members: int = field(default=50, kw_only=False)
    vectorise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("members", self.members)
        if self.vectorise is not None:
            check_type("vectorise", self.vectorise, bool, "True, False or None")

    def _divides(self, job: FitJob) -> bool:
        return True

    def _fit(self, job: FitJob) -> Particles:
        """Draw the weights of the rows, then train the members with them."""
        rows, model = job.rows, job.model
        if not rows.in_memory:
            with own_randomness(derive_seed(job.seed, "reading")):  # a loader may shuffle
                x, y = rows.tensors
            rows = Data((x, y), len(x))
        counts = torch.ones(rows.size, dtype=model.dtype) if rows.weights is None else rows.weights.cpu()
        with own_randomness(derive_seed(job.seed, "bootstrap")):
            weights = dirichlet_weights(counts, self.members).to(device=model.device, dtype=model.dtype)
        job = replace(job, rows=replace(rows, weights=weights))
        return Members(job, self.training_settings(), self.members, self.vectorise).fit()


def dirichlet_weights(counts: Tensor, members: int) -> Tensor:
    """Weights ``(N, members)`` on N rows: Dirichlet draws with concentration ``counts``, times the sum of ``counts``.

    They are drawn from the global generator, in double precision.
    """
    counts = counts.double().unsqueeze(1).expand(-1, members)
    gamma = torch.distributions.Gamma(counts.clamp_min(1e-300), torch.ones_like(counts))
    draws = gamma.sample() * (counts > 0)
    return draws / draws.sum(0) * counts.sum(0)
