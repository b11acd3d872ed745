"""The interface between an objective and the training loop, and a loss with its gradient as one compiled graph.

Of a compiled objective the network's own code runs once, to be recorded; from then on a step is a call of the compiled
graph. Compiling takes some seconds, and again for every new shape of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from knowable.core.compiling.recorder import Recorded, unchecked_distributions
from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows
from knowable.core.network.params import Buffers
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import own_randomness


class Objective(nn.Module, ABC):
    """A loss to be minimised, with its terms named.

    The loss is the negative objective divided by N, so that its size, and with it the optimiser's settings, does not
    depend on how much data there is. The terms are on the full-data scale.

    Attributes:
        model: The model.
        size: Number of training examples N.
        epoch: Training progress in epochs, set by the loop; schedules inside the objective (a KL warm-up) may read it.
        net_buffers: The fit's own copies of the network's buffers, updated by training.
        recordable: Whether the loss may be recorded as a graph and run again: all its random numbers come from torch's
            generator, and only parameters and batch change from step to step, once :attr:`settles_from` is past. It is
            not inherited: every class sets it for itself.
        snapshots: Tensors that the objective appends during training and does not change afterwards, such as the
            weights at some epochs. The loop saves them in checkpoints.
        remedy: What the error about a diverged loss advises.
        divides_weights: Whether each process has a part of the weights (FSDP): all compute together whatever they
            compute, and gradients come as sums over the processes.
        recording: Whether the loss is being recorded: no value may be read out of a tensor.
    """

    recordable: ClassVar[bool] = False
    divides_weights: ClassVar[bool] = False
    remedy: ClassVar[str] = (
        "Standardise the data, lower learning_rate, or clip the gradient: training=kn.Training(clip=1.0)."
    )

    def __init__(self, model: Model, size: int):
        super().__init__()
        self.model = model
        self.size = size
        self.epoch = 0.0
        self.recording = False
        self.snapshots: list[Tensor] = []
        self.net_buffers: Buffers = model.buffers()

    @property
    def settles_from(self) -> float:
        """The epoch before which the loss cannot have converged, because its definition still changes (a warm-up)."""
        return 0.0

    @property
    def dimension(self) -> int:
        """The number of trained parameters, from which the default learning rate is chosen."""
        return sum(value.numel() for value in self.parameters() if value.requires_grad)

    def __call__(self, x: Any, *rest: Any, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`forward`; several inputs may be a tuple or a dict."""
        return super().__call__(x if isinstance(x, Tensor) else as_rows(x), *rest, **named)

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch (a scalar), and its named terms on the full-data scale; ``weights`` are the rows'."""

    @abstractmethod
    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log predictive density of held-out rows, ``(batch,)``, for early stopping."""

    def is_smooth(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> bool:
        """Whether the loss of these rows is a smooth function of the parameters, the same at every call.

        It may then be minimised by second-order methods.
        """
        return False

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name; the loop saves them, and restores them in place."""
        return {
            **{f"parameter.{name}": value for name, value in self.named_parameters()},
            **{f"buffer.{name}": value for name, value in self.net_buffers.items()},
        }

    def present_posterior(self) -> Posterior | None:
        """The posterior as the parameters are now, for those who look on; None where there is none before the end."""
        return None

    # --- hooks of the loop -------------------------------------------------------------------------------------------

    def end_of_epoch(self) -> None:
        """Called after the last step of every epoch; changes only :meth:`tensors` and :attr:`snapshots`."""

    def changes_at_minimum(self) -> bool:
        """Called where the loss is at a minimum: change what else it depends on, and say whether it was much."""
        return False

    def end_of_cycle(self) -> None:
        """Called at the end of every cycle of the learning rate; changes only :meth:`tensors`."""

    def summary(self) -> dict[str, float]:
        """Further values for a record of the history, beside the means of the terms."""
        return {}

    def fault(self, record: dict[str, float]) -> str:
        """Why the steps of a record must be undone; empty if they are fine.

        The loop then goes back to the previous record with half the learning rate, as it does when the loss becomes NaN
        or infinite.
        """
        return ""

    def clip_gradient(self, most: float) -> None:
        """Scale the gradient down to a norm of at most ``most``."""
        nn.utils.clip_grad_norm_(self.parameters(), most)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """Update the parameters from their gradients: the optimiser's step, unless overridden.

        An override keeps its state in the optimiser's state of the parameter, which the loop saves and restores.
        """
        optimiser.step()

    def whole_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Loss, gradient and update in one call, where there is a faster way than autograd; None where there is not.

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


# --- compiled -------------------------------------------------------------------------------------------------------


def may_be_compiled(objective: Objective) -> bool:
    """Whether the objective's own class says that it is recordable."""
    return bool(vars(type(objective)).get("recordable", False))


class CompiledObjective:
    """Calls an objective as a compiled graph.

    The objective's own code runs where training updates buffers of the network (running statistics), where the loss
    still changes from step to step (a KL warm-up), where code reads values out of tensors, and where there is no
    compiler. Random numbers come from torch's generator either way.

    Args:
        objective: An objective that is recordable.
    """

    def __init__(self, objective: Objective):
        self.objective = objective
        self._names = [name for name, value in objective.named_parameters() if value.requires_grad]
        self._params = [value for value in objective.parameters() if value.requires_grad]
        self._terms: list[str] = []  # their names, in the order in which the graph returns them
        step = partial(self._loss_gradients_terms, False)
        self._step = Recorded(step, "compiled", record=partial(self._loss_gradients_terms, True))
        self._updates_buffers: bool | None = None  # None: not yet tried

    def __call__(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch, to be differentiated in the objective's parameters, and its terms."""
        if self.objective.epoch < self.objective.settles_from:
            return self.objective(*batch)
        if self._updates_buffers is None:
            self._updates_buffers = self._try_buffers(*batch)
        if self._updates_buffers:
            return self.objective(*batch)
        loss, *rest = self._step(*(value.detach() for value in self._params), *batch)
        gradients, terms = rest[: len(self._params)], rest[len(self._params) :]
        return loss_with_gradients(loss, self._params, gradients), dict(zip(self._terms, terms, strict=True))

    def _loss_gradients_terms(self, recording: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss, its gradient in each parameter, and its terms; ``tensors`` are the parameters and the batch."""
        params = {name: value.detach().requires_grad_() for name, value in zip(self._names, tensors, strict=False)}
        self.objective.recording = recording
        try:
            with torch.enable_grad(), unchecked_distributions():
                loss, terms = functional_call(self.objective, params, tensors[len(params) :])
                gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        finally:
            self.objective.recording = False
        self._terms = list(terms)
        return loss.detach(), *(each.contiguous() for each in gradients), *terms.values()

    def _try_buffers(self, *batch: Tensor) -> bool:
        """Whether a step updates the network's buffers; they are put back."""
        buffers = self.objective.net_buffers
        before = {name: value.clone() for name, value in buffers.items()}
        if not before:
            return False
        with torch.no_grad(), own_randomness(0):
            self.objective(*batch)
        changed = [name for name, value in before.items() if not torch.equal(value, buffers[name])]
        buffers |= {name: before[name] for name in changed}
        return bool(changed)
