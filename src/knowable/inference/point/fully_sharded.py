r"""A point estimate whose weights are divided among processes: for networks too large for one device (FSDP2).

``torch.distributed.fsdp.fully_shard`` keeps of every weight, of its gradient and of the optimiser's state the part of
this process, and puts a layer together while it computes. Its gradients come as sums over the processes,

.. math:: \sum_r \frac{m_r}{M} \nabla \Big(-\tfrac{1}{m_r} \sum_{n \in r} \log p(y_n \mid x_n, \theta)\Big)

and each process adds that of the prior to the part it has, so that the prior counts once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from knowable.core.model.model import Model
from knowable.core.model.prior import fixed_normal
from knowable.core.network.inputs import call
from knowable.core.network.network import copy_module
from knowable.core.network.outputs import picked
from knowable.core.network.params import Params
from knowable.core.support.processes import Processes
from knowable.core.training.objective import Objective
from knowable.errors import Unsupported


class ShardedPointObjective(Objective):
    """-log p(D, θ) / N of weights that are divided among processes.

    Args:
        model: The model; its parameters are those of the network alone.
        size: Number of training examples N.
        processes: The processes of the fit.
        use_prior: Whether log p(θ) is part of it.
    """

    divides_weights = True

    def __init__(self, model: Model, size: int, processes: Processes, *, use_prior: bool):
        super().__init__(model, size)
        self.processes = processes
        self.priors = _normal_priors(model) if use_prior else {}
        self.net = copy_module(model.net)
        start = model.params()
        with torch.no_grad():
            for name, value in self.net.named_parameters():
                value.requires_grad_(name in start).copy_(start.get(name, value))
        mesh = init_device_mesh(model.device.type, (processes.count,))
        for layer in (*_layers(self.net), self.net):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # also after a pass without a gradient
        for module in self.net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: the loss has the process's share of the rows
        self.net_buffers = dict(self.net.named_buffers())

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms; the gradient of the prior is added in :meth:`update`."""
        log_likelihood = self.model.score(self._output(x, training=True), y, {}, weights).mean()
        log_prior = self._log_prior()
        terms = {"log_likelihood": log_likelihood.detach() * self.size}
        if self.priors:
            terms["log_prior"] = log_prior
        return -log_likelihood - log_prior / self.size, terms

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows; all processes compute it together."""
        return self.model.score(self._output(x, training=False), y, {})

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step, with the gradient of the prior."""
        for name, value in self.net.named_parameters():
            if name in self.priors:
                mean, precision = self.priors[name]
                slope = (value.detach() - mean) * (precision / self.size)
                value.grad = slope if value.grad is None else value.grad.add_(slope)
        optimiser.step()

    def params(self) -> Params:
        """Every weight in full, on the CPU."""
        return {
            name: value.full_tensor().detach().cpu() if isinstance(value, DTensor) else value.detach()
            for name, value in self.net.named_parameters()
            if value.requires_grad
        }

    def _output(self, x: Tensor, *, training: bool) -> Tensor:
        found = call(self.net.train(training), x)
        return found if self.model.network.output is None else picked(found, self.model.network.output)

    def _log_prior(self) -> Tensor:
        total = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
        for name, value in self.net.named_parameters():
            mean, precision = self.priors.get(name, (0.0, 0.0))
            if precision:
                own = value.to_local() if isinstance(value, DTensor) else value
                squares = (own.detach() - mean).square().sum()
                total -= 0.5 * (precision * squares - own.numel() * math.log(precision / (2 * math.pi)))
        self.processes.add(total)
        return total


def _layers(net: nn.Module) -> list[nn.Module]:
    """What is put together at a time: the elements of lists and sequences of layers, those inside others first."""
    found = []
    for module in net.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            found += [each for each in module if any(True for _ in each.parameters())]
    return list(dict.fromkeys(reversed(found)))


def _normal_priors(model: Model) -> Mapping[str, tuple[float, float]]:
    """Mean and precision of every weight's prior, which must be one normal for all elements."""
    found: dict[str, Any] = {}
    for name in model.params():
        moments = fixed_normal(model.prior.prior_of(name))
        if moments is None or any(isinstance(each, Tensor) and each.numel() > 1 for each in moments):
            raise Unsupported(
                f"fully_shard=True needs normal or flat priors, and that of {name!r} is another one. Leave it out."
            )
        found[name] = float(moments[0]), float(moments[1])
    return found
