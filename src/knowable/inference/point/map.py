"""Maximum a posteriori: the mode of the posterior."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.method import Method
from knowable.core.particles import Particles
from knowable.core.point_estimate import fit_point
from knowable.core.training import Training


@dataclass(frozen=True, repr=False)
class MAP(Method, Training):
    r"""The most probable weights: ordinary training, with the prior as its regulariser.

    .. math:: \hat\theta = \arg\max_\theta \; \log p(D \mid \theta) + \log p(\theta)

    With ``Normal(s)`` as prior this is weight decay of strength 1/s² on the full-data scale. The answer is a posterior
    with one atom: it says nothing about how sure the weights are (see MacKay, 1992, for why that matters).

    Args:
        epochs: See :class:`~knowable.core.training.Training`, whose fields these all are.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MAP(epochs=200).fit(model, (x, x.sum(1)))
        >>> len(posterior)
        1
    """

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Particles:
        """Train to the mode; see :meth:`knowable.core.method.Method.fit`."""
        return fit_point(
            self, model, data, training=self, use_prior=True, validation=validation, seed=seed, progress=progress,
            checkpoint=checkpoint, engine=engine,
        )  # fmt: skip
