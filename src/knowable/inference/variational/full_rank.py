"""Full-rank Gaussian variational inference (Titsias and Lázaro-Gredilla, 2014; Kucukelbir et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_count
from knowable.inference.variational.full_rank_family import FullRank
from knowable.inference.variational.structured import StructuredVI


@dataclass(frozen=True, repr=False)
class FullRankVI(StructuredVI):
    r"""One normal distribution over all weights, with all their correlations.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)

    with a lower triangular L. Where the posterior is normal, this is the posterior: for a Gaussian likelihood and
    ``random="last_layer"`` it is Bayesian linear regression on the features.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of :class:`~knowable.inference.variational.structured.StructuredVI` and of what
            it builds on, :class:`~knowable.inference.variational.structured.FamiliesVI`,
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod`, say what is maximised, how
            and from where.
        max_parameters: Refuse a group of more weights: L is a D by D matrix, and training keeps some six of that size.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.FullRankVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.covariance.shape
        torch.Size([2, 2])
    """

    max_parameters: int = FullRank.max_parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_parameters", self.max_parameters)

    @property
    def own_family(self) -> FullRank:
        """A full covariance."""
        return FullRank(self.max_parameters)
