r"""A network as a linear function of its weights around their means, and what normal weights make of it.

.. math:: f(x; \theta) \approx f(x; m) + J(x)(\theta - m), \quad \theta \sim \mathcal{N}(m, \operatorname{diag} s^2)
    \quad\Rightarrow\quad f \sim \mathcal{GP}\big(f(\cdot\,; m),\; J(x) \operatorname{diag}(s^2) J(x')^\top\big)

with the Jacobian J in the weights at m. Everything is differentiable in m and s, J too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from knowable.core.model import Model
from knowable.core.network import no_hidden_loops
from knowable.core.types import Buffers, Params

_ELEMENTS = 2**24  # of the Jacobian that are computed in one batch of rows


class LinearisedNetwork:
    """Moments of a network's outputs under independent normal weights, by its Jacobian, in evaluation mode.

    Args:
        model: The model.
    """

    def __init__(self, model: Model):
        self.model = model
        self._vectorises = True  # until a module refuses vmap
        self._outputs = 0  # for each row, once they have been counted

    def moments(
        self, x: Tensor, loc: Params, scale: Params, *, fixed: Params, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Means ``(outputs, n)`` and covariances ``(outputs, n, n)`` of the n rows of ``x``, in double precision.

        Args:
            x: Inputs.
            loc: Means of the network's random weights.
            scale: Their standard deviations.
            fixed: The network's other weights.
            buffers: Its buffers.
        """
        mean = self._run(x, {**fixed, **loc}, buffers).reshape(len(x), -1)
        covariance = torch.zeros((mean.shape[1], len(x), len(x)), dtype=torch.float64, device=mean.device)
        for name, each in self.jacobian(x, loc, fixed=fixed, buffers=buffers).items():
            rows = (each.flatten(2) * scale[name].flatten()).movedim(1, 0).double()  # (outputs, n, elements)
            covariance = covariance + rows @ rows.mT
        return mean.T.double(), covariance

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
            return self._run(row.unsqueeze(0), {**fixed, **params}, buffers).reshape(-1)

        return vmap(jacrev(outputs), in_dims=(None, 0), chunk_size=self._rows(x, loc, fixed, buffers))(loc, x)

    def _rows(self, x: Tensor, loc: Params, fixed: Params, buffers: Buffers) -> int:
        """Rows whose Jacobians are computed together."""
        if not self._outputs:
            with torch.no_grad():
                self._outputs = self._run(x[:1], {**fixed, **loc}, buffers).numel()
        weights = sum(value.numel() for value in loc.values())
        return max(1, _ELEMENTS // (weights * self._outputs))

    def _one_by_one(self, x: Tensor, loc: Params, fixed: Params, buffers: Buffers) -> Params:
        """The same with a backward pass for every output of every row, for networks that ``vmap`` cannot handle."""
        further = torch.is_grad_enabled()
        found: dict[str, list[Tensor]] = {name: [] for name in loc}
        with torch.enable_grad():
            params = {
                name: value if value.requires_grad else value.detach().requires_grad_() for name, value in loc.items()
            }
            for row in x:
                outputs = self._run(row.unsqueeze(0), {**fixed, **params}, buffers).reshape(-1)
                for output in outputs:
                    slopes = torch.autograd.grad(
                        output, list(params.values()), create_graph=further, retain_graph=True, allow_unused=True
                    )
                    for (name, value), slope in zip(params.items(), slopes, strict=True):
                        found[name].append(torch.zeros_like(value) if slope is None else slope)
        return {name: torch.stack(each).unflatten(0, (len(x), -1)) for name, each in found.items()}

    def _run(self, x: Tensor, params: Params, buffers: Buffers) -> Tensor:
        return self.model.network(params, x, buffers=buffers)
