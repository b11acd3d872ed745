"""Point estimates: a posterior with one atom."""

from knowable.inference.point.point import MAP, MaximumLikelihood

__all__ = [
    "MaximumLikelihood",
    "MAP",
]
