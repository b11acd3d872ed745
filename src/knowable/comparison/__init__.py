"""Comparison: methods side by side on one's own data, fold by fold, with standard errors.

One function, :func:`~knowable.comparison.compare.compare`, and what it gives back, a
:class:`~knowable.comparison.comparison.Comparison`.
"""

from knowable.comparison.compare import compare
from knowable.comparison.comparison import Comparison

__all__ = ["Comparison", "compare"]
