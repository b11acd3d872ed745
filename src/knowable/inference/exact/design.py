"""The design matrix of a network that is linear in its random parameters, and the check that it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FullCovarianceNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.network.weight_uses import WeightTracer
from knowable.errors import Unsupported

_BLOCK = 256  # columns of the design matrix computed in one call
_CHUNK_VALUES = 20_000_000  # elements of a design matrix held at once
PROBED = 8  # rows on which it is found out what the network is


class Design:
    r"""The affine map :math:`f(\theta) = f_0 + J\theta` of a network that is linear in its random parameters.

    Everything is in double precision. Where the random parameters are one linear layer at the end, J is made of its
    inputs (:class:`Head`). Elsewhere, since f is affine, column d of J is :math:`f(e_d) - f(0)`: exact, and possible
    for any module that can be run.
    """

    def __init__(self, model: Model, layout: Layout, buffers: Buffers):
        self.model, self.layout = model, layout
        own = model.network.params()
        self._fixed: Params = {name: value.double() for name, value in own.items() if name not in layout.names}
        self._buffers = {k: v.double() if v.is_floating_point() else v for k, v in buffers.items()}
        zero = torch.zeros(layout.size, dtype=torch.float64, device=model.device)
        self._at_zero = {**self._fixed, **layout.views(zero)}

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(f0, J)`` for a chunk of rows: ``(rows, outputs)`` and ``(rows, outputs, D)``."""
        head = self.head(x)
        if head is not None:
            return head.offset.flatten(1), head.matrix.flatten(1, -2)
        unit = torch.eye(self.layout.size, dtype=torch.float64, device=x.device)
        zero = self._outputs(torch.zeros_like(unit[:1]), x)[0]
        return zero, torch.cat([self._outputs(some, x) - zero for some in unit.split(_BLOCK)]).movedim(0, -1)

    def head(self, x: Tensor) -> Head | None:
        """The last layer on these rows, if it has all random parameters, once, and its output is the network's."""
        inputs = x.double() if x.is_floating_point() else x
        weights = {name: self._at_zero[name] for name in self.layout.names}
        with torch.set_grad_enabled(inputs.requires_grad), WeightTracer(weights) as tracer:
            output = self.model.network(self._at_zero, inputs, buffers=self._buffers)
        use = tracer.uses[0] if len(tracer.uses) == 1 else None
        if use is None or use.kind != "linear" or use.weight is None or set(use.names) != set(self.layout.names):
            return None
        once_a_row = output.dim() > 1 and use.rows_first(len(x)) and len(output) == len(x)
        if use.output is not output or not once_a_row or use.inputs.dtype != torch.float64:
            return None
        weight = self.layout.places_of([use.weight]).view(output.shape[-1], -1)
        if use.bias is None:
            return Head(use.inputs, output, weight.to(x.device))
        bias = self.layout.places_of([use.bias]).view(-1, 1)
        features = torch.nn.functional.pad(use.inputs, (0, 1), value=1.0)
        return Head(features, output, torch.cat([weight, bias], dim=1).to(x.device))

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows of ``x`` in chunks whose design matrix fits in memory."""
        params = self.model.network_params(self.model.params())
        outputs = self.model.network.probe(x, params, self.model.buffers())[0].numel()
        return x.split(max(1, _CHUNK_VALUES // (outputs * self.layout.size)))

    def check_linear(self, x: Tensor) -> None:
        """Compare the network with its affine map at random parameters, near and far."""
        rows = x[:PROBED]
        offset, design = self(rows)
        generator = torch.Generator(device=x.device).manual_seed(0)
        like = {"generator": generator, "dtype": torch.float64, "device": x.device}
        for scale in (1.0, 30.0):
            theta = scale * torch.randn((1, self.layout.size), **like)
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
        with torch.set_grad_enabled(inputs.requires_grad):
            outputs = self.model.network.over_draws({**fixed, **stack}, inputs, buffers=self._buffers, vectorise=True)
        return outputs.flatten(2)


@dataclass(frozen=True)
class Head:
    r"""A last layer on some rows: output o is :math:`f_{0,o} + \phi^\top \theta_o`, with weights of its own.

    Attributes:
        features: Inputs φ of the layer, with a one for the bias, ``(rows, ..., p)``.
        offset: The output where the weights are zero, ``(rows, ..., outputs)``.
        places: Where the weights of each output are in the flat vector, ``(outputs, p)``.
    """

    features: Tensor
    offset: Tensor
    places: Tensor

    @property
    def matrix(self) -> Tensor:
        """J, ``(rows, ..., outputs, D)``."""
        outputs, width = self.places.shape
        order = self.places.flatten().argsort()
        owner = order // width == torch.arange(outputs, device=order.device).unsqueeze(1)
        return self.features[..., order % width].unsqueeze(-2) * owner


def output_moments(model: Model, normal: FullCovarianceNormal, buffers: Buffers, x: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``(rows, outputs)`` and covariances ``(rows, outputs, outputs)`` of the outputs, for normal parameters."""
    design = Design(model, normal.layout, buffers)
    loc, scale_tril = normal.loc.double(), normal.scale_tril.double()
    means, covariances = [], []
    for part in design.chunks(x):
        offset, matrix = design(part)
        spread = matrix @ scale_tril
        means.append(offset + matrix @ loc)
        covariances.append(spread @ spread.mT)
    return torch.cat(means), torch.cat(covariances)
