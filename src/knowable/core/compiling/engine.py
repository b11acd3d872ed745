"""The engine: precision of the arithmetic, and how gradients are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from knowable.core.support.checks import check_choice, parse_memory
from knowable.errors import InvalidType

MODES = ("auto", "eager", "traced", "compiled")


@dataclass(frozen=True)
class Engine:
    """Precision of the forward pass in training, and how gradients are computed.

    The device is the network's own: move it with ``net.to("cuda")`` before building the model.

    Args:
        precision: ``"full"`` (the network's dtype) or ``"bfloat16"`` (autocast; parameters and their updates stay in
            full precision). Of the training alone: ``Model(..., autocast=torch.bfloat16)`` is for predictions too.
        mode: How gradients are computed. ``"eager"``: the network's own code at every step. ``"traced"``: its tensor
            operations, recorded once. ``"compiled"``: the recorded operations fused by torch's compiler, which takes
            some seconds at the beginning and pays in long runs. ``"auto"``: samplers trace, and compile once the run is
            long; ensembles trained in one step trace; networks trained one at a time (``MAP``, ``MeanFieldVI``) run
            their own code. With ``"compiled"`` these also compile loss and gradient where possible: the step is the
            same to rounding (see :mod:`~knowable.core.training.objective`).
        cache_features: Compute once, for the whole fit, what the frozen layers make of every row; the steps run what
            comes after them. The result is the same to rounding. True keeps up to 1 GB of such features in memory, and
            more in a temporary file; bytes (or ``"500MB"``) set another limit. For data in memory: a loader may give
            other rows every time.
    """

    precision: str = "full"
    mode: str = "auto"
    cache_features: bool | int | str = False

    def __post_init__(self) -> None:
        if not isinstance(self.cache_features, bool):
            parse_memory(self.cache_features, "cache_features")
        check_choice("precision", self.precision, ("full", "bfloat16"))
        check_choice("mode", self.mode, MODES)

    def precision_context(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which an objective is evaluated."""
        if self.precision == "full":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


def as_engine(engine: Engine | None) -> Engine:
    """The default engine where none is given."""
    if engine is None:
        return Engine()
    if not isinstance(engine, Engine):
        raise InvalidType(f"engine must be an Engine or None, got {type(engine).__name__}.")
    return engine
