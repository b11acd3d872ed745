"""Comparison: methods side by side on one's own data, fold by fold, with standard errors.

One function, :func:`~knowable.comparison.compare_methods.compare`, and what it gives back, a
:class:`~knowable.comparison.comparison.Comparison`.
"""

from knowable.comparison.compare_methods import compare
from knowable.comparison.comparison import Comparison

__all__ = ["Comparison", "compare"]
