"""Low-rank Gaussian variational inference (Ong, Nott and Smith, 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_count
from knowable.inference.variational.low_rank_family import LowRank
from knowable.inference.variational.structured import StructuredVI


@dataclass(frozen=True)
class Rank:
    """What comes first among the knobs of :class:`LowRankVI`.

    Args:
        rank: Number of directions of the covariance beside its diagonal.
    """

    rank: int = LowRank.rank


@dataclass(frozen=True, repr=False)
class LowRankVI(StructuredVI, Rank):
    r"""One normal distribution over all weights, whose covariance is diagonal plus low rank.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, \mathrm{diag}(s^2) + F F^\top)

    with a factor F of ``rank`` columns: mean field, and the few directions in which weights move together most. With
    D - 1 directions every covariance of D weights has this form.

    Args:
        rank: Number of columns of F. Time and memory of a step grow with it.
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of :class:`~knowable.inference.variational.structured.StructuredVI` and of what
            it builds on, :class:`~knowable.inference.variational.structured.FamiliesVI`,
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod`, say what is maximised, how
            and from where.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> kn.LowRankVI(rank=1, epochs=300).fit(model, (x, 2 * x)).rank
        1
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank)

    @property
    def own_family(self) -> LowRank:
        """A diagonal and ``rank`` directions."""
        return LowRank(self.rank)
