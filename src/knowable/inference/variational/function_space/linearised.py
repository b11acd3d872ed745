r"""A network as a linear function of its weights around their means, and the Gaussian process that normal weights make.

.. math:: f(x; \theta) \approx f(x; m) + J(x)(\theta - m), \quad \theta \sim \mathcal{N}(m, \operatorname{diag} s^2)
    \quad\Rightarrow\quad f \sim \mathcal{GP}\big(f(\cdot\,; m),\; J(x) \operatorname{diag}(s^2) J(x')^\top\big)

with the Jacobian J in the weights at m. Everything is differentiable in m and s, J too.

Layers that act once on each row need no Jacobian. If a is the layer's input and g the gradient of an output in what the
layer gives, the derivative in weight kl is :math:`g_k a_l`, so that

.. math:: \sum_{kl} (g_k a_l)(g'_k a'_l)\, s_{kl}^2 = \sum_k g_k g'_k \sum_l s_{kl}^2\, a_l a'_l,

one matrix product over the pairs of rows for all outputs together. The Jacobians in other weights are written out.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows
from knowable.core.network.jacobian import BatchJacobian, unit_directions
from knowable.core.network.layers import NetworkLayers
from knowable.core.network.params import Buffers, Params


class LinearisedNetwork:
    """Moments of a network's outputs under independent normal weights, in evaluation mode."""

    def __init__(self, model: Model):
        self.model = model
        self._layers: NetworkLayers | None = None  # found at the first call
        self._outputs = 0  # for each row, once they have been counted

    def moments(
        self, x: Tensor, loc: Params, variance: Params, *, fixed: Params, buffers: Buffers, only: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Means ``(outputs, n)`` and covariances ``(outputs, n, n)`` of the n rows of ``x``, in double precision."""
        network, params = self.model.network, {**fixed, **loc}
        if self._layers is None:
            self._layers = NetworkLayers.of(network, tuple(loc), params, x, buffers)
        jacobian = BatchJacobian(network, self._layers, params, x, buffers, differentiable=torch.is_grad_enabled())
        mean, directions = jacobian.output.flatten(1).T, unit_directions(jacobian.output)
        if only is not None:
            mean, directions = mean[only], directions[only]
        return mean.double(), _covariance(jacobian, directions, variance)

    def count_outputs(self, x: Tensor, params: Params, buffers: Buffers) -> int:
        """Outputs of the network for a row."""
        if not self._outputs:
            with torch.no_grad():
                self._outputs = self.model.network(params, as_rows(x)[:1], buffers=buffers).numel()
        return self._outputs


def _covariance(jacobian: BatchJacobian, directions: Tensor, variance: Params) -> Tensor:
    """Covariances of all pairs of rows, one for each direction of the outputs: ``(K, n, n)``, in double precision."""
    n, device = len(jacobian.x), directions.device
    rows, columns, place = _pairs(n, device)
    pairs = torch.zeros((len(directions), len(rows)), dtype=torch.float64, device=device)
    total = torch.zeros((len(directions), n, n), dtype=torch.float64, device=device)
    gradients = jacobian.gradients(directions)  # (K, n, positions, out)
    for layer, a, g in zip(jacobian.layers, jacobian.activations, gradients, strict=True):
        spread = layer.matrix(variance)  # (out, in)
        if layer.positions == 1:
            a, g = a[:, 0], g[:, :, 0]
            inner = (a.index_select(0, rows) * a.index_select(0, columns)) @ spread.T  # (pairs, out)
            outer = g.index_select(1, rows) * g.index_select(1, columns)
            pairs = pairs + (outer * inner).sum(-1).double()
        else:
            total = total + _gram((g.mT @ a) * spread.sqrt())
    for name, each in jacobian.others(directions).items():
        total = total + _gram(each * variance[name].sqrt())
    return total + pairs.index_select(1, place).unflatten(1, (n, n))


def _gram(values: Tensor) -> Tensor:
    """``(K, n, ...)`` times itself: ``(K, n, n)``."""
    flat = values.flatten(2).double()
    return flat @ flat.mT


@lru_cache(maxsize=64)
def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and second rows of all pairs of n on and above the diagonal, and which of them each of all n² is."""
    rows, columns = torch.triu_indices(n, n, device=device)
    place = torch.empty((n, n), dtype=torch.long, device=device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=device)
    return rows, columns, place.flatten()
