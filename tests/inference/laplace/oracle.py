"""Slow references: Jacobians by ``torch.func``, one row at a time, and dense matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout, Params
from knowable.inference.laplace.expansion import ExpansionPoint, random_weights
from knowable.testing import network_case


def expansion_of(model: kn.Model, data, *, kind: str = "ggn", most: int = 10_000, params: Params | None = None):
    """The model at its start values, or at others, seen with the data."""
    return ExpansionPoint(model, as_data(data, model), params or model.params(), model.buffers(), kind, most, 0)


def case_expansion(name: str, *, rows: int = 5, kind: str = "ggn", most: int = 10_000) -> ExpansionPoint:
    """One of the networks that every method must handle, in double precision."""
    case = network_case(name, rows=rows, dtype=torch.float64)
    return expansion_of(case.model(), case.data, kind=kind, most=most)


def jacobians(expansion: ExpansionPoint) -> Tensor:
    """``(rows, outputs, D)`` in the order of the expansion's layout."""
    model, layout = expansion.model, expansion.layout
    network = model.network_params(expansion.params)

    def outputs(flat: Tensor, row: Tensor) -> Tensor:
        params = {**network, **layout.views(flat)}
        buffers = expansion.buffers
        return functional_call(model.net.eval(), {**params, **buffers}, (row.unsqueeze(0),)).flatten()

    flat = layout.flatten(expansion.params)
    x, _ = expansion.data.tensors
    return torch.stack([jacrev(outputs, chunk_size=1)(flat, row) for row in x]).detach()


def informations(expansion: ExpansionPoint) -> Tensor:
    """Hessians of -log p(y | f) in the outputs, ``(rows, outputs, outputs)``; for natural parameters Fisher's too."""
    model = expansion.model
    x, y = expansion.data.tensors
    own = model.likelihood_params(expansion.params)
    found = []
    for row, target in zip(x, y, strict=True):
        output = model.forward(expansion.params, row.unsqueeze(0), buffers=expansion.buffers).detach()

        def loss(flat: Tensor, shape=output.shape, target=target) -> Tensor:
            return -model.likelihood.log_prob(flat.view(shape), target.unsqueeze(0), own).sum()

        found.append(torch.autograd.functional.hessian(loss, output.flatten()))
    return torch.stack(found)


def dense_ggn(expansion: ExpansionPoint) -> Tensor:
    """Σ Jᵀ Λ J, ``(D, D)``."""
    jacobian = jacobians(expansion)
    return torch.einsum("nod,nop,npe->de", jacobian, informations(expansion), jacobian)


def gradients(expansion: ExpansionPoint) -> Tensor:
    """Gradients of each row's log likelihood, ``(rows, D)``."""
    model, layout = expansion.model, expansion.layout
    found = []
    x, y = expansion.data.tensors
    for row, target in zip(x, y, strict=True):
        flat = layout.flatten(expansion.params).detach().requires_grad_()
        params = {**expansion.params, **layout.views(flat)}
        output = model.forward(params, row.unsqueeze(0), buffers=expansion.buffers)
        found.append(torch.autograd.grad(model.score(output, target.unsqueeze(0), params).sum(), flat)[0])
    return torch.stack(found)


def slow_factors(expansion: ExpansionPoint, net: nn.Module, layer: str, *, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Σ a aᵀ and Σ gᵀ Λ g / M of a linear or convolutional module of ``net``, by perturbing its outputs.

    ``net`` has the function of the expansion's network at its weights, as plain modules.
    """
    module = net.get_submodule(layer)
    x, _ = expansion.data.tensors
    inner, outer, count = 0.0, 0.0, 0
    for row, information in zip(x, informations(expansion), strict=True):
        inputs, outputs = _calls(net, module, row)
        jacobian = jacrev(lambda shifts, row=row: _shifted(net, module, row, shifts), chunk_size=1)(
            tuple(torch.zeros_like(each) for each in outputs)
        )
        for a, g in zip(inputs, jacobian, strict=True):
            a, g = _positions(module, a, g)  # (T, in), (T, outputs, out)
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1) if bias else a
            inner = inner + a.T @ a
            outer = outer + torch.einsum("toi,op,tpj->ij", g, information, g)
            count += len(a)
    return inner.detach(), (outer / count).detach()


def _calls(net: nn.Module, module: nn.Module, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    inputs, outputs = [], []

    def hook(_, given, result):
        inputs.append(given[0].detach())
        outputs.append(result.detach())

    handle = module.register_forward_hook(hook)
    net(row.unsqueeze(0))
    handle.remove()
    return inputs, outputs


def _shifted(net: nn.Module, module: nn.Module, row: Tensor, shifts: tuple[Tensor, ...]) -> Tensor:
    left = list(shifts)
    handle = module.register_forward_hook(lambda _, __, result: result + left.pop(0))
    output = net(row.unsqueeze(0)).flatten()
    handle.remove()
    return output


def _positions(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and gradients at every position."""
    if isinstance(module, nn.Linear):
        return a.flatten(0, -2), g.flatten(1, -2).movedim(0, 1)
    assert isinstance(module, nn.Conv2d)
    padded = F.pad(a, [module.padding[1]] * 2 + [module.padding[0]] * 2)[0]  # (channels, H, W)
    (high, wide), (down, right) = module.kernel_size, module.stride
    patches = [
        padded[:, i * down : i * down + high, j * right : j * right + wide].flatten()
        for i in range(g.shape[-2])
        for j in range(g.shape[-1])
    ]
    return torch.stack(patches), g[:, 0].flatten(2).permute(2, 0, 1)


def random_layout(model: kn.Model) -> Layout:
    """The random weights of a model."""
    start = model.params()
    return Layout.of({name: start[name] for name in random_weights(model)})
