"""Sparse variational Gaussian processes (Titsias, 2009; Hensman et al., 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knowable.core.method import FitJob, Method
from knowable.core.support.checks import check_choice, check_count
from knowable.core.training.settings import Trained
from knowable.inference.functional.inducing_fit import fit_inducing
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.functional.kernels import check_kernel


@dataclass(frozen=True, repr=False, kw_only=True)
class SparseGaussianProcess(Trained, Method):
    r"""A Gaussian process known by its values at M inducing points: for any number of rows, and any likelihood.

    .. math:: \mathrm{ELBO} = \sum_n E_{q(f_n)}[\log p(y_n \mid f_n)] - \mathrm{KL}(q(u) \,\|\, p(u))

    Inducing points, kernel, mean and noise are trained with it; :mod:`knowable.inference.functional.inducing` has the
    formulas. With normal noise the best q(u) is known in closed form: up to 2,048 rows it is taken at every step, and
    beyond it at the end. A step is O(B M² + M³) for a batch of B rows. The network has no part in it but to say how
    many outputs there are.

    Args:
        kernel: As for ``GaussianProcess``: a name, for which inputs and targets are standardised inside, or a kernel of
            GPyTorch.
        mean: The mean of functions before any data: ``"constant"``, learned, or ``"zero"``.
        inducing: Number M of inducing points, at first the centres of clusters of the inputs; all rows, where they are
            fewer.
        epochs: Passes over the data; None stops when the ELBO has converged.
        learning_rate: Step size of Adam; None: 0.01.
        batch_size: Rows per step; None takes all up to 2,048, and 1,000 of more.
        training: Further settings of the training loop.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian())
        >>> posterior = kn.SparseGaussianProcess(inducing=10, epochs=5).fit(model, (x, torch.sin(3 * x)))
        >>> posterior.log_evidence.kind
        'bound'
    """

    family = "functional"
    summary = "a Gaussian process known at inducing points: any number of rows, any likelihood"
    aliases = ("svgp",)
    references = ("titsias2009", "hensman2015", "gardner2018")
    supports_row_weights = True
    fits_network = False

    kernel: Any = "rbf"
    mean: str = "constant"
    inducing: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        check_choice("mean", self.mean, ("constant", "zero"))
        check_count("inducing", self.inducing)

    def _fit(self, job: FitJob) -> InducingPosterior:
        return fit_inducing(job, self, kernel=self.kernel, inducing=self.inducing, mean=self.mean)
