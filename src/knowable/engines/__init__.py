"""Engines beyond this process: Ray for independent work, torchrun for one fit; and trackers, by which it is watched."""

from knowable.core.compiling.workers import Counts, Workers
from knowable.engines.ray import Ray
from knowable.engines.torch_distributed import TorchDistributed
from knowable.engines.tracking import MLflow, TensorBoard

__all__ = ["Counts", "MLflow", "Ray", "TensorBoard", "TorchDistributed", "Workers"]
