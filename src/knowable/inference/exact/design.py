"""Networks that are linear in their parameters: the design matrix, and the proof that there is one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.types import Buffers, Params
from knowable.errors import Unsupported

_BLOCK = 256  # columns of the design matrix computed in one call
_CHUNK_VALUES = 20_000_000  # elements of a design matrix held at once


class Design:
    r"""The affine map :math:`f(\theta) = f_0 + J\theta` of a network that is linear in its random parameters.

    Everything is in double precision. Since f is affine, column d of J is :math:`f(e_d) - f(0)`: exact, and possible
    for any module that can be run.
    """

    def __init__(self, model: Model, layout: Layout, buffers: Buffers):
        self.model, self.layout = model, layout
        own = model.network.params()
        self._fixed: Params = {name: value.double() for name, value in own.items() if name not in layout.names}
        self._buffers = {k: v.double() if v.is_floating_point() else v for k, v in buffers.items()}

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(f0, J)`` for a chunk of rows: ``(rows, outputs)`` and ``(rows, outputs, D)``."""
        size = self.layout.size
        zero = self._outputs(torch.zeros((1, size), dtype=torch.float64, device=x.device), x)[0]
        columns = [
            self._outputs(torch.eye(size, dtype=torch.float64, device=x.device)[start : start + _BLOCK], x) - zero
            for start in range(0, size, _BLOCK)
        ]
        return zero, torch.cat(columns).movedim(0, -1)

    def chunks(self, x: Tensor) -> Iterator[Tensor]:
        """Rows of ``x`` in chunks whose design matrix fits in memory."""
        outputs = self.model.network.probe(x, self.model.network_params(self.model.params()), self.model.buffers())[
            0
        ].numel()
        yield from x.split(max(1, _CHUNK_VALUES // (outputs * self.layout.size)))

    def check_linear(self, x: Tensor) -> None:
        """Compare the network with its affine map at random parameters, near and far."""
        rows = x[:8]
        offset, design = self(rows)
        generator = torch.Generator(device=x.device).manual_seed(0)
        for scale in (1.0, 30.0):
            theta = scale * torch.randn(
                (1, self.layout.size), generator=generator, dtype=torch.float64, device=x.device
            )
            actual = self._outputs(theta, rows)[0]
            error = (actual - offset - design @ theta[0]).abs().max() / actual.abs().max().clamp_min(1e-12)
            if not error < 1e-8:
                raise Unsupported(
                    f"ExactLinear needs a network whose output is linear in its random parameters; this one departs "
                    f"from that by {error:.1%}. Keep only the last layer random and freeze the others: Model(..., "
                    f"random='last_layer', frozen=[...])."
                )

    def _outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Network outputs ``(draws, rows, outputs)``, flattened behind the rows."""
        stack = self.layout.views(theta)
        fixed = {name: value.expand(len(theta), *value.shape) for name, value in self._fixed.items()}
        inputs = x.double() if x.is_floating_point() else x
        with torch.no_grad():
            return self.model.network.over_draws(
                {**fixed, **stack}, inputs, buffers=self._buffers, vectorise=True
            ).flatten(2)
