r"""A network as a linear function of its weights around their means, and what normal weights make of it.

.. math:: f(x; \theta) \approx f(x; m) + J(x)(\theta - m), \quad \theta \sim \mathcal{N}(m, \operatorname{diag} s^2)
    \quad\Rightarrow\quad f \sim \mathcal{GP}\big(f(\cdot\,; m),\; J(x) \operatorname{diag}(s^2) J(x')^\top\big)

with the Jacobian J in the weights at m. Everything is differentiable in m and s, J too.

Weights of linear layers that act once on each row need no Jacobian. If a is the layer's input and g the slope of an
output in what the layer gives, the derivative in weight kl is :math:`g_k a_l`, so that

.. math:: \sum_{kl} (g_k a_l)(g'_k a'_l)\, s_{kl}^2 = \sum_k g_k g'_k \sum_l s_{kl}^2\, a_l a'_l,

one matrix product over the pairs of rows for all outputs together. The other weights' Jacobians are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from knowable.core.model.model import Model
from knowable.core.network.layer_operations import LINEAR, METADATA, operands
from knowable.core.network.network import no_hidden_loops
from knowable.core.network.params import Buffers, Params

_ELEMENTS = 2**24  # of the Jacobian that are computed in one batch of rows
_CLOSE, _CLOSE_DOUBLE = 1e-3, 1e-8  # relative difference of two ways to the same covariance, in float32 and float64


class LinearisedNetwork:
    """Moments of a network's outputs under independent normal weights, in evaluation mode.

    Args:
        model: The model.
    """

    def __init__(self, model: Model):
        self.model = model
        self._by_layers: bool | None = None  # whether layers may be taken apart, once that was tried
        self._vectorises = True  # until a module refuses vmap
        self._outputs = 0  # for each row, once they have been counted
        self._only: Tensor | None = None  # those that are looked at now

    def moments(
        self, x: Tensor, loc: Params, variance: Params, *, fixed: Params, buffers: Buffers, only: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Means ``(outputs, n)`` and covariances ``(outputs, n, n)`` of the n rows of ``x``, in double precision.

        Args:
            x: Inputs.
            loc: Means of the network's random weights.
            variance: Their variances.
            fixed: The network's other weights.
            buffers: Its buffers.
            only: Which outputs; None for all.
        """
        if self._by_layers is None:
            self._by_layers = self._try_layers(x[:2], loc, variance, fixed, buffers)
        self._only = only
        try:
            if self._by_layers:
                return self._moments_by_layers(x, loc, variance, fixed, buffers)
            mean = self._run(x, {**fixed, **loc}, buffers)
            return mean.T.double(), self._written_out(x, loc, variance, fixed, buffers)
        finally:
            self._only = None

    def count_outputs(self, x: Tensor, params: Params, buffers: Buffers) -> int:
        """Outputs of the network for a row."""
        if not self._outputs:
            with torch.no_grad():
                self._outputs = self.model.network(params, x[:1], buffers=buffers).numel()
        return self._outputs

    def _try_layers(self, x: Tensor, loc: Params, variance: Params, fixed: Params, buffers: Buffers) -> bool:
        """Whether taking layers apart gives what the Jacobian gives: a weight may be used where nobody sees it."""
        with torch.no_grad():
            expected = self._written_out(x, loc, variance, fixed, buffers)
            found = self._moments_by_layers(x, loc, variance, fixed, buffers)[1]
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        return error.item() <= (_CLOSE_DOUBLE if self.model.dtype == torch.float64 else _CLOSE)

    def _run(self, x: Tensor, params: Params, buffers: Buffers) -> Tensor:
        """The outputs that are looked at, ``(n, outputs)``."""
        with sdpa_kernel(SDPBackend.MATH):  # the one attention whose slopes can be differentiated again
            outputs = self.model.network(params, x, buffers=buffers).reshape(len(x), -1)
        return outputs if self._only is None else outputs[:, self._only]

    # --- layer by layer ----------------------------------------------------------------------------------------------

    def _moments_by_layers(
        self, x: Tensor, loc: Params, variance: Params, fixed: Params, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            params = _differentiable(loc)
            with _Watch(params) as watch:
                outputs = self._run(x, {**fixed, **params}, buffers)
            uses = watch.uses()
            slopes = _slopes(outputs, [use.output for use in uses], further)
        rows, columns, place = _pairs(len(x), outputs.device)
        pairs = torch.zeros((outputs.shape[1], len(rows)), dtype=torch.float64, device=outputs.device)
        for use, slope in zip(uses, slopes, strict=True):
            pairs = pairs + use.covariance(slope, variance, rows, columns).double()
        covariance = pairs.index_select(1, place).unflatten(1, (len(x), len(x)))
        rest = [name for name in loc if not any(name in (use.weight, use.bias) for use in uses)]
        if rest:
            known = {**fixed, **{name: value for name, value in loc.items() if name not in rest}}
            covariance = covariance + self._written_out(x, {name: loc[name] for name in rest}, variance, known, buffers)
        mean = outputs.T.double()
        return (mean, covariance) if further else (mean.detach(), covariance.detach())

    # --- the Jacobian written out ------------------------------------------------------------------------------------

    def _written_out(self, x: Tensor, loc: Params, variance: Params, fixed: Params, buffers: Buffers) -> Tensor:
        total = torch.zeros((1, len(x), len(x)), dtype=torch.float64, device=x.device)
        for name, each in self.jacobian(x, loc, fixed=fixed, buffers=buffers).items():
            rows = (each.flatten(2) * variance[name].sqrt().flatten()).movedim(1, 0).double()  # (outputs, n, elements)
            total = total + rows @ rows.mT
        return total

    def jacobian(self, x: Tensor, loc: Params, *, fixed: Params, buffers: Buffers) -> Params:
        """Derivatives of all outputs in the weights of ``loc``, by name, ``(n, outputs, *shape)``."""
        if self._vectorises:
            try:
                with no_hidden_loops():
                    return self._together(x, loc, fixed, buffers)
            except RuntimeError:
                self._vectorises = False
        return self._one_by_one(x, loc, fixed, buffers)

    def _together(self, x: Tensor, loc: Params, fixed: Params, buffers: Buffers) -> Params:
        def outputs(params: Params, row: Tensor) -> Tensor:
            return self._run(row.unsqueeze(0), {**fixed, **params}, buffers).squeeze(0)

        count = self.count_outputs(x, {**fixed, **loc}, buffers) if self._only is None else len(self._only)
        rows = max(1, _ELEMENTS // (sum(value.numel() for value in loc.values()) * count))
        return vmap(jacrev(outputs), in_dims=(None, 0), chunk_size=rows)(loc, x)

    def _one_by_one(self, x: Tensor, loc: Params, fixed: Params, buffers: Buffers) -> Params:
        """The same with a backward pass for every output of every row, for networks that ``vmap`` cannot handle."""
        further = torch.is_grad_enabled()
        found: dict[str, list[Tensor]] = {name: [] for name in loc}
        with torch.enable_grad():
            params = _differentiable(loc)
            for row in x:
                outputs = self._run(row.unsqueeze(0), {**fixed, **params}, buffers).squeeze(0)
                for output in outputs:
                    slopes = torch.autograd.grad(
                        output, list(params.values()), create_graph=further, retain_graph=True, allow_unused=True
                    )
                    for (name, value), slope in zip(params.items(), slopes, strict=True):
                        found[name].append(torch.zeros_like(value) if slope is None else slope)
        return {name: torch.stack(each).unflatten(0, (len(x), -1)) for name, each in found.items()}


@dataclass(frozen=True)
class LinearUse:
    """A linear layer that acts once on each row.

    Attributes:
        weight: Name of its weight, where that is random.
        bias: Name of its bias, where that is random.
        input: What it took, ``(n, inputs)``.
        output: What it gave, ``(n, outputs of the layer)``.
    """

    weight: str | None
    bias: str | None
    input: Tensor
    output: Tensor

    def covariance(self, slope: Tensor, variance: Params, rows: Tensor, columns: Tensor) -> Tensor:
        """What its weights add to the covariance of pairs of rows ``(outputs, pairs)``.

        Args:
            slope: Derivatives of the network's outputs in the layer's, ``(outputs, n, outputs of the layer)``.
            variance: Variances of all weights.
            rows: The first row of each pair.
            columns: The second.
        """
        inner = torch.zeros((), dtype=slope.dtype, device=slope.device)
        if self.weight is not None:
            inner = (
                inner
                + (self.input.index_select(0, rows) * self.input.index_select(0, columns)) @ variance[self.weight].T
            )
        if self.bias is not None:
            inner = inner + variance[self.bias]
        return (slope.index_select(1, rows) * slope.index_select(1, columns) * inner).sum(-1)


class _Watch(TorchFunctionMode):
    """Looks for linear layers that take rows, and for other uses of their weights."""

    def __init__(self, params: Params):
        super().__init__()
        self._names = {id(value): name for name, value in params.items()}
        self._uses: list[LinearUse] = []
        self._elsewhere: set[str] = set()

    def uses(self) -> list[LinearUse]:
        """The layers, with those weights that do nothing else."""
        found = [replace(use, weight=self._alone(use.weight), bias=self._alone(use.bias)) for use in self._uses]
        return [use for use in found if use.weight is not None or use.bias is not None]

    def _alone(self, name: str | None) -> str | None:
        return None if name in self._elsewhere else name

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ in METADATA and not isinstance(result, Tensor):
            return result
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = [self._names[id(leaf)] for leaf in leaves if id(leaf) in self._names]
        if func is LINEAR and names:
            x, weight, bias, _ = operands(func, args, kwargs)
            seen = {name for use in self._uses for name in (use.weight, use.bias)}
            if x.dim() == 2 and id(x) not in self._names and not seen.intersection(names):
                self._uses.append(LinearUse(self._names.get(id(weight)), self._names.get(id(bias)), x, result))
                return result.clone()  # what follows may change it in place
        self._elsewhere.update(names)
        return result


def _differentiable(params: Params) -> Params:
    return {name: value if value.requires_grad else value.detach().requires_grad_() for name, value in params.items()}


def _slopes(outputs: Tensor, inner: list[Tensor], further: bool) -> list[Tensor]:
    """Derivatives of every output ``(n, outputs)`` in the same row of inner values ``(n, k)``: ``(outputs, n, k)``."""
    if not inner:
        return []
    one_hot = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    which = one_hot.unsqueeze(1).expand(-1, len(outputs), -1)  # (outputs, n, outputs): output o of all rows
    settings: dict[str, Any] = {"create_graph": further, "retain_graph": True, "allow_unused": True}
    try:
        with no_hidden_loops():
            found = torch.autograd.grad(outputs, inner, which, is_grads_batched=True, **settings)
    except RuntimeError:
        each = [torch.autograd.grad(outputs, inner, one, **settings) for one in which]
        found = [None if slopes[0] is None else torch.stack(slopes) for slopes in zip(*each, strict=True)]
    return [
        value.new_zeros((len(which), *value.shape)) if slope is None else slope
        for slope, value in zip(found, inner, strict=True)
    ]


@lru_cache(maxsize=64)
def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and second rows of all pairs of n on and above the diagonal, and which of them each of all n² is."""
    rows, columns = torch.triu_indices(n, n, device=device)
    place = torch.empty((n, n), dtype=torch.long, device=device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=device)
    return rows, columns, place.flatten()
