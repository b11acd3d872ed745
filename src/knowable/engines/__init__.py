"""Engines beyond this process: where the independent work of a fit or of a comparison is done."""

from knowable.core.compiling.workers import Counts, Workers
from knowable.engines.ray import Ray

__all__ = ["Counts", "Ray", "Workers"]
