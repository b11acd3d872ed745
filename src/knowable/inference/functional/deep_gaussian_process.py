"""Deep Gaussian processes by doubly stochastic variational inference (Salimbeni and Deisenroth, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knowable.core.method import FitJob, Method
from knowable.core.support.checks import check_count
from knowable.core.training.settings import Trained
from knowable.inference.functional.inducing_fit import fit_inducing
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.functional.kernels import check_kernel


@dataclass(frozen=True, repr=False, kw_only=True)
class DeepGaussianProcess(Trained, Method):
    r"""Gaussian processes in a row, each a function of the one before: functions that a single one finds hard.

    .. math:: \mathrm{ELBO} = \sum_n E_{q(f^1_n, \ldots, f^L_n)}[\log p(y_n \mid f^L_n)]
        - \sum_l \mathrm{KL}(q(u^l) \,\|\, p(u^l))

    Each layer is known at its own inducing points (:mod:`knowable.inference.functional.inducing`), and takes draws of
    the one before. Layers in between begin as their mean with hardly any variance: the identity, or the main directions
    where they are narrower, so that training begins at a sparse Gaussian process. Predictions are mixtures of normals,
    one for each draw. The network has no part in it but to say how many outputs there are.

    Args:
        layers: Number of layers; one is a ``SparseGaussianProcess``.
        width: Functions of a layer in between; None: as many as there are inputs, and 30 at most.
        kernel: Of all layers: a name as for ``GaussianProcess``, or a kernel of GPyTorch. Inputs and targets are
            standardised inside.
        inducing: Number of inducing points of each layer.
        draws: Of the layers in between, for each row of a batch.
        epochs: Passes over the data; None stops when the ELBO has converged.
        learning_rate: Step size of Adam; None: 0.01.
        batch_size: Rows per step; None: 1,000.
        training: Further settings of the training loop.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian())
        >>> method = kn.DeepGaussianProcess(inducing=10, epochs=5)
        >>> method.fit(model, (x, (x > 0).float())).predict(x).std.shape
        torch.Size([30, 1])
    """

    family = "functional"
    summary = "Gaussian processes in a row, each a function of the one before"
    aliases = ("dgp",)
    references = ("salimbeni2017", "damianou2013", "gardner2018")
    supports_row_weights = True
    fits_network = False

    layers: int = 2
    width: int | None = None
    kernel: Any = "rbf"
    inducing: int = 100
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("layers", self.layers)
        if self.width is not None:
            check_count("width", self.width)
        check_kernel(self.kernel)
        check_count("inducing", self.inducing)
        check_count("draws", self.draws)

    def _fit(self, job: FitJob) -> InducingPosterior:
        return fit_inducing(
            job, self, kernel=self.kernel, inducing=self.inducing, layers=self.layers, width=self.width,
            draws=self.draws,
        )  # fmt: skip
