"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational import families
from knowable.inference.variational.full_rank import FullRankVI
from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.low_rank import LowRankVI
from knowable.inference.variational.matrix_normal import MatrixNormalVI
from knowable.inference.variational.mean_field import MeanFieldVI

__all__ = ["MeanFieldVI", "LowRankVI", "FullRankVI", "MatrixNormalVI", "families", "gradient_variance"]
