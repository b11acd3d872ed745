"""Where a fit runs beyond this process: ``fit(..., engine=kn.engines.TorchDistributed())``."""

from knowable.engines.torch_distributed import TorchDistributed

__all__ = ["TorchDistributed"]
