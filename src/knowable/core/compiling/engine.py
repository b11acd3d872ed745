"""The engine: precision of the arithmetic, how gradients are computed, and where independent work is done."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import torch

from knowable.core.compiling.workers import Workers, in_turn, in_worker, on_workers
from knowable.core.support.checks import check_choice, parse_memory
from knowable.core.support.processes import ALONE, Processes
from knowable.core.support.progress import ProgressSetting
from knowable.errors import InvalidArgument, InvalidType

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

MODES = ("auto", "eager", "traced", "compiled")


@dataclass(frozen=True)
class Engine:
    """Precision of the forward pass in training, how gradients are computed, and where independent work is done.

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
        workers: Where independent work is done, such as the members of an ensemble: ``kn.engines.Ray(...)``. None: in
            this process, one piece after the other, with the same bits.
    """

    named: ClassVar[dict[str, type[Engine]]] = {}  # other engines, by the snake_case of their class
    shards: ClassVar[bool] = False  # whether the rows that each of several processes passes to a fit are its own
    fully_shard: ClassVar[bool] = False  # whether weights are divided among processes too

    precision: str = "full"
    mode: str = "auto"
    cache_features: bool | int | str = False
    workers: Workers | None = field(default=None, repr=False)  # the result, and a checkpoint's identity, are the same

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Engine.named[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()] = cls

    def __post_init__(self) -> None:
        if not isinstance(self.cache_features, bool):
            parse_memory(self.cache_features, "cache_features")
        check_choice("precision", self.precision, ("full", "bfloat16"))
        check_choice("mode", self.mode, MODES)
        if self.workers is not None and not isinstance(self.workers, Workers):
            raise InvalidType(f"workers must be such as kn.engines.Ray() or None, got {type(self.workers).__name__}.")

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

    @property
    def elsewhere(self) -> bool:
        """Whether independent work is done on workers, and not here."""
        return self.workers is not None and not in_worker()

    @property
    def at_once(self) -> int:
        """How many pieces of independent work are done at a time, as far as that is known before."""
        return (self.workers.num_workers or 1) if self.workers is not None and self.elsewhere else 1

    def run(
        self,
        work: Callable[[S, Any], R],
        shared: S,
        tasks: Iterable[T],
        *,
        begin: Callable[[T], Any] | None = None,
        label: str = "working",
        progress: ProgressSetting = None,
    ) -> Iterator[tuple[T, R]]:
        """Do independent work, and yield each task with its result as soon as there is one.

        Args:
            work: A function of a module, of ``shared`` and a task. It changes neither.
            shared: What all tasks need; sent to workers once.
            tasks: The tasks. More may be added to a deque while results come in.
            begin: What ``work`` gets for a task, asked when it starts; None leaves the task out.
            label: Text of the bar, where the work is done on workers.
            progress: See :meth:`~knowable.core.method.Method.fit`.

        Returns:
            Tasks and their results: in order where they are done here, elsewhere as they end.
        """
        queue = tasks if isinstance(tasks, deque) else deque(tasks)
        if self.workers is None or in_worker():
            return in_turn(work, shared, queue, begin)
        return on_workers(self.workers, work, shared, queue, begin, label=label, progress=progress)


def as_engine(engine: Engine | Workers | str | None) -> Engine:
    """The default engine where none is given; workers as an engine that uses them; either by its name."""
    if engine is None:
        return Engine()
    if isinstance(engine, str):
        known = {**Engine.named, **Workers.named}
        if engine not in known:
            raise InvalidArgument(f"engine must be an Engine, workers or one of {sorted(known)}, got {engine!r}.")
        engine = known[engine]()
    if isinstance(engine, Workers):
        return Engine(workers=engine)
    if not isinstance(engine, Engine):
        raise InvalidType(
            f"engine must be an Engine, workers such as kn.engines.Ray(), or None, got {type(engine).__name__}."
        )
    return engine
