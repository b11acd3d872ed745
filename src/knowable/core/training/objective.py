"""What the training loop needs of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Buffers


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
        recordable: Whether a step may be recorded as a graph and run again: all its random numbers come from torch's
            generator, and nothing in it changes from step to step but parameters and batch, once :attr:`settles_from`
            is past. Every class says it for itself: it is not inherited.
        album: What is to be seen of training afterwards, one tensor after another, none of them changed once it is
            here. The loop saves them with the rest.
        remedy: What a user may do about steps that diverge.
        recording: Whether the loss is being recorded just now: no number may be taken out of a tensor.
    """

    recordable: ClassVar[bool] = False
    remedy: ClassVar[str] = (
        "Standardise the data, lower learning_rate, or clip the gradient: training=kn.Training(clip=1.0)."
    )

    def __init__(self, model: Model, size: int):
        super().__init__()
        self.model = model
        self.size = size
        self.epoch = 0.0
        self.recording = False
        self.album: list[Tensor] = []
        self.net_buffers: Buffers = model.buffers()

    @property
    def settles_from(self) -> float:
        """The epoch before which the loss cannot have settled, because it is still being changed (a warm-up)."""
        return 0.0

    @property
    def dimension(self) -> int:
        """How many numbers are trained, from which the learning rate is chosen where it is not given."""
        return sum(value.numel() for value in self.parameters() if value.requires_grad)

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch (a scalar), and its named terms on the full-data scale.

        An objective that heeds weights on rows takes them as a third argument.
        """

    @abstractmethod
    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log predictive density of held-out rows, ``(batch,)``, for early stopping."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name; the loop copies values out of these and back into them."""
        return {
            **{f"parameter.{name}": value for name, value in self.named_parameters()},
            **{f"buffer.{name}": value for name, value in self.net_buffers.items()},
        }

    # --- what the loop calls where there is something to do ----------------------------------------------------------

    def end_of_epoch(self) -> None:
        """Called after the last step of every epoch; whatever it changes is in :meth:`tensors` or :attr:`album`."""

    def end_of_cycle(self) -> None:
        """Called whenever the learning rate has fallen to its end; whatever it changes is in :meth:`tensors`."""

    def summary(self) -> dict[str, float]:
        """What a record of the history says beside the means of the terms: called once for each record."""
        return {}

    def fault(self, record: dict[str, float]) -> str:
        """What went wrong in the steps of a record, in words; empty where nothing did.

        The loop then goes back to the record before with half the learning rate, as it does from numbers that are not
        finite.
        """
        return ""

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient to a norm of at most ``most``."""
        nn.utils.clip_grad_norm_(self.parameters(), most)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """Move the parameters, whose gradients are there: by the optimiser's own step, unless there is a better one.

        What another way of stepping remembers belongs into the optimiser's state of the parameter, which the loop saves
        and restores.
        """
        optimiser.step()

    def whole_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Gradient and update in one go, where there is a quicker way than autograd; None where there is not.

        It reads the learning rate from the optimiser and keeps the optimiser's state up to date.
        """
        return None


def loss_with_gradients(loss: Tensor, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """``loss`` for ``backward()``, where the gradient in each parameter is already known."""
    return _KnownGradients.apply(loss, *gradients, *params)


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *gradients_and_params: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients_and_params[: len(gradients_and_params) // 2])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return None, *(None for _ in gradients), *(slopes[0] * each for each in gradients)
