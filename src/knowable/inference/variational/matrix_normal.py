"""Matrix-normal variational inference (Louizos and Welling, 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_count
from knowable.inference.variational.matrix_normal_family import MatrixNormal
from knowable.inference.variational.structured import StructuredVI


@dataclass(frozen=True, repr=False)
class MatrixNormalVI(StructuredVI):
    r"""A matrix normal distribution for every weight matrix: correlated rows and correlated columns.

    .. math:: q(W) = \mathcal{MN}(W \mid M, U, V), \qquad \mathrm{Cov}[\mathrm{vec}\, W] = U \otimes V

    One covariance U between the outputs of a layer and one V between its inputs, instead of one between all weights.
    Layers are independent of each other, and biases and other vectors, which are not matrices, are independent
    normals. It is exact where the posterior is of that form: a linear layer with equal noise on all outputs.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of :class:`~knowable.inference.variational.structured.StructuredVI` and of what
            it builds on, :class:`~knowable.inference.variational.structured.FamiliesVI`,
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod`, say what is maximised, how
            and from where.
        full_up_to: A matrix with more rows (or columns) than this has a diagonal U (or V).

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> posterior = kn.MatrixNormalVI(epochs=200).fit(kn.Model(net, kn.Gaussian(noise=0.1)), (x, x.sin()))
        >>> len(posterior.blocks)
        4
    """

    full_up_to: int = MatrixNormal.full_up_to

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("full_up_to", self.full_up_to)

    @property
    def own_family(self) -> MatrixNormal:
        """Two factors for each matrix."""
        return MatrixNormal(self.full_up_to)
