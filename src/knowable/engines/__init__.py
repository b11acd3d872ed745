"""Engines beyond this process, where independent work is done; and trackers, by which it is watched."""

from knowable.core.compiling.workers import Counts, Workers
from knowable.engines.ray import Ray
from knowable.engines.tracking import MLflow, TensorBoard

__all__ = ["Counts", "MLflow", "Ray", "TensorBoard", "Workers"]
