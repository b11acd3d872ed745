"""Settings and results of the training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.training.schedule import SHAPES
from knowable.errors import InvalidArgument

OPTIMISERS = ("adam", "sgd")
LITTLE_WORK = 2**31
"""Rows times parameters: what may be done before or after training, however short that is."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Further settings of the training loop.

    Args:
        optimiser: ``"adam"`` or ``"sgd"`` (with momentum 0.9).
        clip: Largest norm of the gradient of the loss per example; None does not clip.
        patience: Early stopping on a validation set: how many records (of 100 steps each) may pass without a gain in
            log likelihood.
        on_divergence: When the loss becomes NaN or infinite: ``"halve"`` the learning rate and continue from the last
            good state with a warning, or ``"raise"`` an error.
        accumulate: Batches whose gradients are averaged into one step: large batches in the memory of small ones. Where
            the loss is a mean over rows, the step is that of one batch of so many rows, to rounding. (Layers that look
            at the whole batch, batch normalisation among them, see the small ones.)
    """

    optimiser: str = "adam"
    clip: float | None = None
    patience: int = 20
    on_divergence: str = "halve"
    accumulate: int = 1

    def __post_init__(self) -> None:
        check_choice("optimiser", self.optimiser, OPTIMISERS)
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        check_count("patience", self.patience)
        check_choice("on_divergence", self.on_divergence, ("halve", "raise"))
        check_count("accumulate", self.accumulate)

    def __repr__(self) -> str:
        """The settings that differ from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Training({', '.join(changed)})"


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
        training: Optimiser, gradient clipping, patience, divergence, accumulation.
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
