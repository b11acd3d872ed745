"""What the training loop needs of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.types import Buffers


class Objective(nn.Module, ABC):
    """A loss to be minimised, with its terms named.

    The loss is the negative objective divided by N, so that its size, and with it the optimiser's settings, does not
    depend on how much data there is. The terms are on the full-data scale.

    Attributes:
        model: The model.
        size: Number of training examples N.
        epoch: How far training is, in epochs; the loop keeps it, schedules inside the objective (a KL warm-up) may read
            it.
        net_buffers: The fit's own copies of the network's buffers, updated by training.
    """

    def __init__(self, model: Model, size: int):
        super().__init__()
        self.model = model
        self.size = size
        self.epoch = 0.0
        self.net_buffers: Buffers = model.buffers()

    @property
    def settles_from(self) -> float:
        """The epoch before which the loss cannot have settled, because it is still being changed (a warm-up)."""
        return 0.0

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch (a scalar), and its named terms on the full-data scale."""

    @abstractmethod
    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log predictive density of held-out rows, ``(batch,)``, for early stopping."""

    def end_of_epoch(self) -> None:
        """Called by the loop when an epoch is over; whatever it changes is in :meth:`tensors`."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name; the loop copies values out of these and back into them."""
        return {
            **{f"parameter.{name}": value for name, value in self.named_parameters()},
            **{f"buffer.{name}": value for name, value in self.net_buffers.items()},
        }
