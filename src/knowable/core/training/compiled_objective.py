"""A training loss and its gradient as one compiled graph.

The network's own code runs once, to be recorded; from then on a step is a call of the compiled graph. Compiling takes
some seconds, and again for every new shape of a batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from knowable.core.compiling.recorder import Recorded, unchecked_distributions
from knowable.core.support.randomness import own_randomness
from knowable.core.training.objective import Objective, loss_with_gradients


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
        for name in changed:
            buffers[name].copy_(before[name])
        return bool(changed)
