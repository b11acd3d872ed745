"""The families of distributions that ``families=`` gives to groups of weights: ``kn.families.FullRank()``."""

from knowable.inference.variational.flow import Flow
from knowable.inference.variational.full_rank import FullRank
from knowable.inference.variational.low_rank import LowRank
from knowable.inference.variational.matrix_normal import MatrixNormal
from knowable.inference.variational.mean_field import MeanField
from knowable.inference.variational.structured import Family

__all__ = ["Family", "MeanField", "FullRank", "LowRank", "MatrixNormal", "Flow"]
