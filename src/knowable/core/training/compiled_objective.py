"""A loss and its gradient as one compiled graph.

The network's own code runs once, to be recorded; from then on a step is a call of what the compiler made of the
recording. That takes some seconds at the beginning, and again for every new shape of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from knowable.core.compiling.recorder import compiled, unchecked_distributions
from knowable.core.support.randomness import own_randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from knowable.core.training.objective import Objective


def may_be_recorded(objective: Objective) -> bool:
    """Whether the objective's own class says that it is recordable."""
    return bool(vars(type(objective)).get("recordable", False))


class RecordedObjective:
    """Calls an objective, as a compiled graph where that can be.

    It cannot where training changes buffers of the network (running statistics), where the loss itself is still being
    changed (a warm-up), where code looks at the values of tensors, and where there is no compiler: there the objective
    is called as it is. Random numbers come from torch's generator either way.

    Args:
        objective: An objective that says that it is recordable.
    """

    def __init__(self, objective: Objective):
        self.objective = objective
        self._graphs: dict[Any, Callable[..., Any] | None] = {}  # None: it cannot be recorded
        self._terms: list[str] = []  # their names, in the order in which a graph gives them

    def __call__(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch, to be differentiated in the objective's parameters, and its terms."""
        if self.objective.epoch < self.objective.settles_from:
            return self.objective(*batch)
        key = (torch.is_autocast_enabled(batch[0].device.type), *((each.shape, each.dtype) for each in batch))
        if key not in self._graphs:
            self._graphs[key] = self._record(*batch)
        graph = self._graphs[key]
        return self.objective(*batch) if graph is None else self._run(graph, *batch)

    def _run(self, graph: Callable[..., Any], *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        params = [value for value in self.objective.parameters() if value.requires_grad]
        with torch.no_grad():
            loss, *rest = graph(*(value.detach() for value in params), *(each.contiguous() for each in batch))
        gradients, terms = rest[: len(params)], rest[len(params) :]
        return _WithGradients.apply(loss, *gradients, *params), dict(zip(self._terms, terms, strict=True))

    def _record(self, *batch: Tensor) -> Callable[..., Any] | None:
        objective = self.objective
        names = [name for name, value in objective.named_parameters() if value.requires_grad]
        values = [value.detach() for value in objective.parameters() if value.requires_grad]
        if self._changes_buffers(*batch):
            return None

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            params = {name: value.detach().requires_grad_() for name, value in zip(names, tensors, strict=False)}
            with torch.enable_grad(), unchecked_distributions():
                loss, terms = functional_call(objective, params, tensors[len(names) :])
                gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
            self._terms = list(terms)
            return loss.detach(), *(each.contiguous() for each in gradients), *terms.values()

        try:
            with own_randomness(0), _recording(objective), _torch_random_numbers():  # the run's own stream stays put
                return compiled(step, *values, *(each.contiguous() for each in batch))
        except RuntimeError:  # a number is taken out of a tensor
            return None

    def _changes_buffers(self, *batch: Tensor) -> bool:
        """Whether a step leaves the network's buffers other than it found them; tried, and undone."""
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


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients, one for each parameter, are already known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *gradients_and_params: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients_and_params[: len(gradients_and_params) // 2])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return None, *(None for _ in gradients), *(slopes[0] * each for each in gradients)


@contextmanager
def _recording(objective: Objective) -> Iterator[None]:
    objective.recording = True
    try:
        yield
    finally:
        objective.recording = False


@contextmanager
def _torch_random_numbers() -> Iterator[None]:
    """Let the compiler leave random numbers to torch's own generator: those of the step that is not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler's own modules say of each other
        from torch._inductor import config
    with config.patch(fallback_random=True):
        yield
