"""A posterior that is a normalising flow: draws that no normal distribution makes, with a density."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import generator_for, own_randomness
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.variational.flow.layers import (
    Bijection,
    CouplingLayer,
    PlanarLayer,
    make_layers,
    through_planes,
)

_MOST_DRAWS, _FEWEST_DRAWS = 16_384, 256  # for the moments
_VALUES = 2**24  # numbers drawn for the moments, where that is enough draws
_BLOCK = 2**22  # numbers in memory at a time


class FlowPosterior(Posterior):
    """A standard normal pushed through invertible maps, see :class:`NormalisingFlow`.

    The density of any weights is found by going back through the maps, in double precision: in closed form for real
    NVP and radial layers, by solving an increasing equation for one number in planar ones. Means and standard
    deviations have no closed form: they are those of some thousand fixed draws (16,384 up to 1,024 weights, fewer
    beyond), in pairs of opposite noise, and so carry an error of less than one hundredth of a standard deviation up to
    1,024 weights.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        flow: The distribution of the flat vector; it is copied.
        common: See :class:`Posterior`.
    """

    family = "flow"

    def __init__(self, model: Model, layout: Layout, flow: NormalisingFlow, **common: Any):
        super().__init__(model, **common)
        self.layout = layout
        self.flow = copy.deepcopy(flow).requires_grad_(False)
        self._exact: NormalisingFlow | None = None  # in double precision, made when a density is first asked for
        self._moments: tuple[Tensor, Tensor] | None = None  # made when they are first asked for

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return self.layout.views(self._draws(n, generator)[0])

    def _draws(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        loc = self.flow.loc
        noise = torch.randn((n, len(loc)), generator=generator, dtype=loc.dtype, device=loc.device)
        return self.flow(noise)

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        lacking = [name for name in self.layout.names if name not in params]
        if lacking:
            raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
        if self._exact is None:
            self._exact = copy.deepcopy(self.flow).double()
        values = self.layout.flatten(params)
        stack = values.double().reshape(-1, values.shape[-1])
        return self._exact.inverse(stack)[1].reshape(values.shape[:-1]).to(values.dtype)

    def as_prior(self) -> JointPrior:
        """Refused: priors that were posteriors are normal."""
        raise Unsupported(
            "A FlowPosterior cannot be the prior of the next data set: only normal posteriors can. Fit MeanFieldVI or "
            "Laplace for that."
        )

    # --- moments -----------------------------------------------------------------------------------------------------

    def _mean_random(self) -> Params:
        return self.layout.views(self._mean_and_std()[0].clone())

    def _std_random(self) -> Params:
        return self.layout.views(self._mean_and_std()[1].clone())

    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            self._moments = _moments_of(self.flow)
        return self._moments

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.flow.state_dict())

    def _settings(self) -> dict[str, Any]:
        layers = self.flow.layers
        hidden = [layer.hidden for layer in layers if isinstance(layer, CouplingLayer)]
        return {
            "names": list(self.layout.names),
            "kind": str(layers[0].kind),
            "layers": len(layers),
            "hidden": hidden[0] if hidden else 1,
        }

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, names: list[str], kind: str, layers: int, hidden: int,
        **common: Any,
    ) -> FlowPosterior:  # fmt: skip
        start = model.params()
        layout = Layout.of({name: start[name] for name in names})
        loc = tensors["loc"]
        with own_randomness(0):  # new layers are drawn at random, and then given their saved values
            made = make_layers(kind, layout.size, layers, hidden=hidden, like=loc)
        flow = NormalisingFlow(loc, torch.ones_like(loc), made)
        flow.load_state_dict(tensors)
        return cls(model, layout, flow, **common)


def _moments_of(flow: NormalisingFlow) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation ``(D,)`` over fixed draws, each with its mirror image: what is odd cancels."""
    size, loc = flow.size, flow.loc
    pairs = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _VALUES // size)) // 2
    block = max(1, min(pairs, _BLOCK // (2 * size)))
    generator = generator_for(0, "moments of a flow", device=loc.device)
    total = torch.zeros(size, dtype=torch.float64, device=loc.device)
    squares = torch.zeros_like(total)
    for first in range(0, pairs, block):
        noise = torch.randn((min(block, pairs - first), size), generator=generator, dtype=loc.dtype, device=loc.device)
        away = flow(torch.cat([noise, -noise]))[0].double() - loc.double()  # small numbers: no cancellation
        total += away.sum(0)
        squares += away.square().sum(0)
    mean = total / (2 * pairs)
    variance = (squares / (2 * pairs) - mean.square()).clamp_min(0.0)
    return (loc.double() + mean).to(loc.dtype), variance.sqrt().to(loc.dtype)


# --- A normalising flow: a standard normal, pushed through invertible layers and then scaled and moved to its place --


class NormalisingFlow(nn.Module):
    r"""The distribution of :math:`\theta = m + s \odot f_L(\cdots f_1(\epsilon))`, with ε standard normal.

    .. math:: \log q(\theta) = \log N(\epsilon \mid 0, I) - \sum_l \log\det f_l - \sum_d \log s_d

    The layers act on numbers of about size one, whatever the weights' own scale is. Without layers it is a mean-field
    normal, and with new ones too: they begin as the identity.

    Args:
        loc: m, ``(D,)``.
        scale: s, ``(D,)``.
        layers: The maps, first to last.
    """

    def __init__(self, loc: Tensor, scale: Tensor, layers: Sequence[Bijection]):
        super().__init__()
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(scale.detach().log())
        self.layers: Sequence[Bijection] = nn.ModuleList(layers)  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Length of the vectors, D."""
        return len(self.loc)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(n, D)`` made of standard normal ``noise`` ``(n, D)``, and their log densities ``(n,)``."""
        values, log_det = noise, noise.new_zeros(())
        for layer in self.layers:
            values, change = layer(values)
            log_det = log_det + change
        return self._placed(noise, values, log_det)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same as calling it, in fewer passes over memory where there are; its gradient has no further one."""
        planes = [layer for layer in self.layers if isinstance(layer, PlanarLayer)]
        if not planes or len(planes) < len(self.layers):
            return self(noise)
        return self._placed(noise, *through_planes(noise, planes))

    def _placed(self, noise: Tensor, values: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        """Draws at their own place and scale, and their log densities."""
        placed = torch.addcmul(self.loc, values, self.log_scale.exp())
        return placed, _standard_normal(noise) - log_det - self.log_scale.sum()

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The noise ``(n, D)`` that ``values`` ``(n, D)`` are made of, and their log densities ``(n,)``."""
        noise, log_det = (values - self.loc) * (-self.log_scale).exp(), self.log_scale.sum()
        for layer in reversed(self.layers):
            noise, change = layer.inverse(noise)
            log_det = log_det + change
        return noise, _standard_normal(noise) - log_det


def _standard_normal(noise: Tensor) -> Tensor:
    """Log density of each row."""
    return -0.5 * noise.square().sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
