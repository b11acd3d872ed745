"""Exact inference, where it exists."""

from knowable.inference.exact.linear import ExactLinear
from knowable.inference.exact.linear_normal import LinearNormal

__all__ = ["ExactLinear", "LinearNormal"]
