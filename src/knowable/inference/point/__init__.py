"""Point estimates: a posterior with one atom."""

from knowable.inference.point.map import MAP
from knowable.inference.point.maximum_likelihood import MaximumLikelihood

__all__ = ["MAP", "MaximumLikelihood"]
