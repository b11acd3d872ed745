"""The engine: precision of the arithmetic, and how gradients are computed."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from knowable.core.support.checks import check_choice, parse_memory
from knowable.core.support.processes import ALONE, Processes
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

    named: ClassVar[dict[str, type[Engine]]] = {}  # other engines, by the snake_case of their class
    shards: ClassVar[bool] = False  # whether the rows that each of several processes passes to a fit are its own
    fully_shard: ClassVar[bool] = False  # whether weights are divided among processes too

    precision: str = "full"
    mode: str = "auto"
    cache_features: bool | int | str = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Engine.named[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()] = cls

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

    @property
    def processes(self) -> Processes:
        """The processes that make the fit together: by default this one alone."""
        return ALONE

    @property
    def plain(self) -> Self:
        """The same place with the default arithmetic."""
        return replace(self, precision="full", mode="auto", cache_features=False)


def as_engine(engine: Engine | str | None) -> Engine:
    """The engine of that name, or the default one where none is given."""
    if engine is None:
        return Engine()
    if isinstance(engine, str) and engine in Engine.named:
        return Engine.named[engine]()
    if not isinstance(engine, Engine):
        names = f" Names of engines: {', '.join(map(repr, Engine.named))}." if isinstance(engine, str) else ""
        raise InvalidType(f"engine must be an Engine or None, got {type(engine).__name__}.{names}")
    return engine
