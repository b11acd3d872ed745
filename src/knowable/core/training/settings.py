"""Settings and results of the training loop."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.training.schedule import SHAPES
from knowable.errors import InvalidArgument, InvalidType, Unsupported

OPTIMISERS = ("adam", "sgd")
LITTLE_WORK = 2**31
"""Rows times parameters: what may be done before or after training, however short that is."""
MakesOptimiser = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Further settings of the training loop.

    Args:
        optimiser: ``"adam"``, ``"sgd"`` (with momentum 0.9), a class such as ``torch.optim.NAdam``, or a function that
            makes an optimiser of a list of parameters, ``lambda params: torch.optim.SGD(params, lr=0.1)``. A class gets
            the learning rate and no weight decay; what a function makes has its own rate, and ``learning_rate`` does
            not count. Weight decay is refused, since the prior is one. Parameters are those of the objective, which
            may hold several of the network's in one tensor.
        scheduler: A function that makes a ``torch.optim.lr_scheduler`` of the optimiser, as
            ``lambda optimiser: OneCycleLR(optimiser, 0.1, total_steps=1000)``. It takes the place of the rate's fall at
            the end. Without ``epochs`` training ends once the loss has converged.
        scheduler_every: When the scheduler steps: after each ``"step"`` of the optimiser, or after each ``"epoch"``.
        warmup: Steps over which the learning rate rises in equal parts, from 1 / warmup of its value to all of it.
        clip: Largest norm of the gradient of the loss per example; None does not clip.
        patience: Early stopping on a validation set: how many records (of 100 steps each) may pass without a gain in
            log likelihood.
        on_divergence: When the loss becomes NaN or infinite: ``"halve"`` the learning rate and continue from the last
            good state with a warning, or ``"raise"`` an error.
        accumulate: Batches whose gradients are averaged into one step: large batches in the memory of small ones. Where
            the loss is a mean over rows, the step is that of one batch of so many rows, to rounding. (Layers that look
            at the whole batch, batch normalisation among them, see the small ones.)
    """

    optimiser: str | type[torch.optim.Optimizer] | MakesOptimiser = "adam"
    scheduler: Callable[[Any], Any] | None = None
    scheduler_every: str = "step"
    warmup: int = 0
    clip: float | None = None
    patience: int = 20
    on_divergence: str = "halve"
    accumulate: int = 1

    def __post_init__(self) -> None:
        if not callable(self.optimiser):
            check_choice("optimiser", self.optimiser, OPTIMISERS)
        if self.optimiser is torch.optim.LBFGS:
            raise Unsupported("optimiser=LBFGS takes the loss several times in a step, which this loop does not do.")
        if isinstance(self.optimiser, type) and not issubclass(self.optimiser, torch.optim.Optimizer):
            raise InvalidType(f"optimiser must be a class of torch.optim, got {self.optimiser.__name__}.")
        if self.scheduler is not None and (isinstance(self.scheduler, type) or not callable(self.scheduler)):
            raise InvalidType(
                "scheduler must be a function that makes one of the optimiser, as lambda optimiser: "
                "torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.99)."
            )
        check_choice("scheduler_every", self.scheduler_every, ("step", "epoch"))
        check_count("warmup", self.warmup, at_least=0)
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        check_count("patience", self.patience)
        check_choice("on_divergence", self.on_divergence, ("halve", "raise"))
        check_count("accumulate", self.accumulate)

    def __repr__(self) -> str:
        """The settings that differ from the defaults; the same in another process."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        each = [f"{name}={getattr(value, '__qualname__', repr(value))}" for name, value in changed.items()]
        return f"Training({', '.join(each)})"


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of one run of the training loop: those of :class:`Trained`, and the learning-rate schedule."""

    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    training: Training = Training()
    schedule: str = "fall"  # the learning rate is constant, then falls to zero along a cosine; or "constant"
    cycles: int = 1  # how often it falls; with several and a number of epochs, all along (Huang et al., 2017)

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SHAPES)
        check_count("cycles", self.cycles)
        if self.training.scheduler is not None and self.cycles > 1:
            raise InvalidArgument(
                "scheduler cannot be given here: the rate falls in cycles, which belong to the method."
            )
        if self.cycles > 1 and self.schedule == "constant":
            raise InvalidArgument("cycles must be 1 with schedule='constant': the rate never falls.")
        if self.epochs is not None and self.cycles > self.epochs:
            raise InvalidArgument(f"cycles must be at most epochs={self.epochs}, got {self.cycles}.")

    def rows_per_step(self, size: int) -> int:
        """The batch size for N rows."""
        return min(size, self.batch_size or (size if size <= 1024 else 128))

    def step_size(self, dimension: int) -> float:
        """The learning rate for D parameters."""
        return self.learning_rate or min(1e-2, max(1e-3, 1.0 / math.sqrt(max(1, dimension))))


@dataclass(frozen=True, kw_only=True, repr=False)
class Trained:
    """The settings of every method that trains by gradient.

    Args:
        epochs: Passes over the data, or None to stop when the objective has converged.
        learning_rate: Step size, or None to choose it from the number of parameters (0.01 up to 10,000, then falling as
            1/√D to 0.001).
        batch_size: Rows per step, or None for all rows up to 1,024 and 128 beyond.
        training: Optimiser, schedule of the rate, gradient clipping, patience, divergence, accumulation.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    training: Training = Training()

    moved: ClassVar[Mapping[str, str]] = {f.name: f"training=kn.Training({f.name}=...)" for f in fields(Training)}

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_count("epochs", self.epochs)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, above=0)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_type("training", self.training, Training, "kn.Training(...)")

    def training_settings(self, **changes: Any) -> TrainingSettings:
        """Settings for the training loop."""
        own = TrainingSettings(self.epochs, self.learning_rate, self.batch_size, self.training)
        return replace(own, **changes)


@dataclass
class TrainingResult:
    """How a run went."""

    history: list[dict[str, float]]  # a record per 100 steps: step, epoch, rate, mean loss and terms, validation score
    steps: int
    epochs: float
    converged: bool | None  # whether the loss had settled at the end (None if the run was too short to tell)
    interrupted: bool
    message: str  # how the run ended, in a sentence
    seconds: float
    out_of_time: bool = False  # whether a time limit ended it


def optimiser_of(wanted: Any, params: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """The optimiser that a setting asks for."""
    if wanted == "sgd":
        return torch.optim.SGD(params, lr=rate, momentum=0.9, fused=True)
    if wanted == "adam":
        return torch.optim.Adam(params, lr=rate, fused=True)
    if isinstance(wanted, type):
        decays = "weight_decay" in inspect.signature(wanted).parameters
        made = wanted(params, lr=rate, **({"weight_decay": 0.0} if decays else {}))
    else:
        made = wanted(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidType(f"optimiser must make a torch.optim.Optimizer, got {type(made).__name__}.")
    if isinstance(made, torch.optim.LBFGS):
        raise Unsupported("optimiser=LBFGS takes the loss several times in a step, which this loop does not do.")
    if {id(each) for group in made.param_groups for each in group["params"]} != {id(each) for each in params}:
        raise InvalidArgument("optimiser must take all the parameters it is given, and no others.")
    decay = max(group.get("weight_decay", 0.0) for group in made.param_groups)
    if decay:
        raise InvalidArgument(
            f"optimiser has weight_decay={decay:g}, and the prior is a weight decay: it would count twice. Set it to 0 "
            f"and the prior's scale to what you want; of a loss that is a mean over N rows, a decay w is "
            f"Normal((w N) ** -0.5)."
        )
    return made


def scheduler_of(wanted: Callable[[Any], Any] | None, optimiser: torch.optim.Optimizer) -> Any:
    """The scheduler that a setting asks for."""
    made = None if wanted is None else wanted(optimiser)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise Unsupported("scheduler=ReduceLROnPlateau needs a score at every step. Pass validation= to stop in time.")
    if made is not None and not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
        raise InvalidType(f"scheduler must make a torch.optim.lr_scheduler, got {type(made).__name__}.")
    return made
