"""The engine: precision of the arithmetic, and how gradients are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from knowable.core.support.checks import check_choice
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
    """

    precision: str = "full"
    mode: str = "auto"

    def __post_init__(self) -> None:
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
