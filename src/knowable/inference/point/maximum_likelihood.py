"""Maximum likelihood: ordinary training, without a prior."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.method import Method
from knowable.core.particles import Particles
from knowable.core.point_estimate import fit_point
from knowable.core.training import Training


@dataclass(frozen=True, repr=False)
class MaximumLikelihood(Method, Training):
    r"""The weights under which the data is most probable. The prior is ignored.

    .. math:: \hat\theta = \arg\max_\theta \sum_n \log p(y_n \mid x_n, \theta)

    The baseline every Bayesian method is compared with. Networks with many weights overfit by it: pass ``validation``
    to stop early.

    Args:
        epochs: See :class:`~knowable.core.training.Training`, whose fields these all are.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> kn.MaximumLikelihood(epochs=200).fit(model, (x, x.sum(1))).diagnostics.message
        'ended after 200 steps'
    """

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Particles:
        """Train to the maximum; see :meth:`knowable.core.method.Method.fit`."""
        return fit_point(
            self, model, data, training=self, use_prior=False, validation=validation, seed=seed, progress=progress,
            checkpoint=checkpoint, engine=engine,
        )  # fmt: skip
