"""Exact inference, where it exists."""

from knowable.inference.exact.linear import ExactLinear, LinearNormal

__all__ = ["ExactLinear", "LinearNormal"]
