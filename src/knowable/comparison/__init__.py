"""Comparison: methods side by side on one's own data, fold by fold, with standard errors.

One function, :func:`~knowable.comparison.compare.compare`, and what it gives back, a
:class:`~knowable.comparison.comparison.Comparison`. :func:`~knowable.comparison.select.select`
puts models side by side, and not methods, by their evidence.
"""

from knowable.comparison.compare import compare
from knowable.comparison.comparison import Comparison
from knowable.comparison.select import Selection, select

__all__ = ["Comparison", "Selection", "compare", "select"]
