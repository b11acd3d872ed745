"""The families of distributions that ``families=`` gives to groups of weights: ``kn.families.FullRank()``."""

from knowable.inference.variational.family import Family
from knowable.inference.variational.flow_family import Flow
from knowable.inference.variational.full_rank_family import FullRank
from knowable.inference.variational.low_rank_family import LowRank
from knowable.inference.variational.matrix_normal_family import MatrixNormal
from knowable.inference.variational.mean_field_family import MeanField

__all__ = ["Family", "MeanField", "FullRank", "LowRank", "MatrixNormal", "Flow"]
