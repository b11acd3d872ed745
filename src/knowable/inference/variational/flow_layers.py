r"""The layers of a normalising flow: invertible maps of one flat vector, with the log determinant of their Jacobian.

A draw pushed through a map :math:`y = f(z)` has the density

.. math:: \log q(y) = \log p(z) - \log\left|\det \frac{\partial f}{\partial z}\right|

- :class:`PlanarLayer` and :class:`RadialLayer` (Rezende and Mohamed, 2015) bend space at a plane or around a point: a
  few numbers for each weight, so that they suit many weights; each changes little.
- :class:`CouplingLayer` (Dinh et al., 2017: real NVP) scales and shifts one half of the numbers by a function of the
  other half.

All start as the identity, with random directions: equal layers would stay copies of each other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_FLOOR = 1.0 - 1e-3  # how near to folding space over itself a layer may come
_SHIFT = math.log(math.expm1(_FLOOR))  # then no change is no change: see above_minus_one
_STEEPEST = 2.0  # a coupling layer scales by at most exp(2)
_BISECTIONS = 64


class Bijection(nn.Module, ABC):
    """An invertible map of vectors of ``size`` numbers, whose parameters are trained.

    Attributes:
        kind: Its name.
        strengths: Names of the parameters that are zero where it is the identity, as at the start.
    """

    kind: ClassVar[str]
    strengths: ClassVar[tuple[str, ...]] = ("push",)

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    @abstractmethod
    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Images of ``z`` ``(n, D)``, and the log determinant of the Jacobian at each, ``(n,)``."""

    @abstractmethod
    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Preimages of ``y`` ``(n, D)``, and the log determinant of the *forward* map there, ``(n,)``."""

    @torch.no_grad()
    def become_identity(self) -> None:
        """Change nothing, as at the start."""
        for name in self.strengths:
            self.get_parameter(name).zero_()


class PlanarLayer(Bijection):
    r"""Moves all points along one direction, by how far they are on one side of a plane.

    .. math:: f(z) = z + \hat u \tanh(w^\top z + b), \qquad
        \log\det = \log\big(1 + (1 - \tanh^2(w^\top z + b))\, w^\top \hat u\big)

    It is invertible where :math:`w^\top \hat u > -1`; so only the part of u across the plane is free, and the part
    along w is bent to stay above. The inverse is found along w, where the map is an increasing function of one number.
    """

    kind = "planar"

    def __init__(self, size: int, *, like: Tensor):
        super().__init__(size)
        made = {"dtype": like.dtype, "device": like.device}
        self.direction = nn.Parameter(torch.randn(size, **made))  # √D w: then its elements are as large as others'
        self.push = nn.Parameter(torch.zeros(size, **made))  # u
        self.offset = nn.Parameter(torch.randn((), **made))  # b

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        w, push, along = self._plane()
        bend = torch.tanh(z @ w + self.offset)  # (n,)
        return torch.addcmul(z, bend.unsqueeze(-1), push), self._log_det(bend, along)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        w, push, along = self._plane()
        bend = torch.tanh(solve_bend(y @ w + self.offset, along))
        return torch.addcmul(y, bend.unsqueeze(-1), push, value=-1), self._log_det(bend, along)

    def _plane(self) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors w and û, and w · û."""
        w = self.direction / math.sqrt(self.size)
        free = w @ self.push
        along = above_minus_one(free)
        return w, self.push + (along - free) / (w @ w).clamp_min(1e-12) * w, along

    @staticmethod
    def _log_det(bend: Tensor, along: Tensor) -> Tensor:
        return torch.log1p((1 - bend.square()) * along)


class RadialLayer(Bijection):
    r"""Draws points towards a centre, or pushes them away from it.

    .. math:: f(z) = z + \frac{\beta}{\alpha + r} (z - c), \quad r = \|z - c\|, \qquad
        \log\det = (D - 1) \log\Big(1 + \frac{\beta}{\alpha + r}\Big)
        + \log\Big(1 + \frac{\alpha\beta}{(\alpha + r)^2}\Big)

    It is invertible where :math:`\beta > -\alpha`. The distance of the image is :math:`R = r + \beta r / (\alpha + r)`,
    which is a quadratic equation for r: the inverse is in closed form.
    """

    kind = "radial"

    def __init__(self, size: int, *, like: Tensor):
        super().__init__(size)
        made = {"dtype": like.dtype, "device": like.device}
        self.centre = nn.Parameter(torch.randn(size, **made))
        # a standard normal is about √(2 D) away from a centre that is drawn as it is
        self.log_reach = nn.Parameter(torch.full((), 0.5 * math.log(2 * size), **made))  # log α
        self.push = nn.Parameter(torch.zeros((), **made))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        away = z - self.centre
        reach, push = self._strength()
        distance = away.norm(dim=-1)  # (n,)
        factor = push / (reach + distance)
        return torch.addcmul(z, factor.unsqueeze(-1), away), self._log_det(distance, reach, push)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        away = y - self.centre
        reach, push = self._strength()
        image = away.norm(dim=-1)
        linear = reach + push - image  # r² + linear r - image α = 0, and r > 0
        root = (linear.square() + 4 * image * reach).sqrt()
        distance = torch.where(linear > 0, 2 * image * reach / (root + linear), 0.5 * (root - linear))
        shrink = 1 / (1 + push / (reach + distance))
        return self.centre + shrink.unsqueeze(-1) * away, self._log_det(distance, reach, push)

    def _strength(self) -> tuple[Tensor, Tensor]:
        """α, and β above -α."""
        reach = self.log_reach.exp()
        return reach, reach * above_minus_one(self.push)

    def _log_det(self, distance: Tensor, reach: Tensor, push: Tensor) -> Tensor:
        near = 1 / (reach + distance)
        return (self.size - 1) * torch.log1p(push * near) + torch.log1p(push * reach * near.square())


class CouplingLayer(Bijection):
    r"""Scales and shifts every second number by a function of the others, which stay as they are.

    .. math:: y_a = z_a, \qquad y_b = z_b\, e^{s(z_a)} + t(z_a), \qquad \log\det = \sum s(z_a)

    s and t come from one small network with a hidden layer; s stays between -2 and 2. Layers take turns in which half
    moves. A single number has no other half: it is scaled and shifted by constants.
    """

    kind = "real_nvp"
    strengths = ("outward", "outward_bias")

    def __init__(self, size: int, *, hidden: int, odd: bool, like: Tensor):
        super().__init__(size)
        self.odd, self.hidden = odd, hidden
        moved = size // 2 if odd else size - size // 2
        made = {"dtype": like.dtype, "device": like.device}
        self.inward = nn.Parameter(torch.randn((size - moved, hidden), **made))
        self.inward_bias = nn.Parameter(torch.randn(hidden, **made))
        self.outward = nn.Parameter(torch.zeros((2, hidden, moved), **made))  # s, then t
        self.outward_bias = nn.Parameter(torch.zeros((2, 1, moved), **made))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        held, moved = self._halves(z)
        log_scale, shift = self._moves(held)
        return self._whole(held, torch.addcmul(shift, moved, log_scale.exp())), log_scale.sum(-1)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Bijection`."""
        held, moved = self._halves(y)
        log_scale, shift = self._moves(held)
        return self._whole(held, (moved - shift) * (-log_scale).exp()), log_scale.sum(-1)

    def _moves(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """The log scales s and shifts t, each ``(n, moved)``."""
        inward = self.inward / math.sqrt(max(1, len(self.inward)))
        features = torch.tanh(held @ inward + self.inward_bias) / math.sqrt(self.hidden)  # (n, hidden)
        raw, shift = features @ self.outward + self.outward_bias
        return _STEEPEST * torch.tanh(raw / _STEEPEST), shift

    def _halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = values[..., 0::2], values[..., 1::2]
        return (even, odd) if self.odd else (odd, even)

    def _whole(self, held: Tensor, moved: Tensor) -> Tensor:
        even, odd = (held, moved) if self.odd else (moved, held)
        paired = torch.stack([even[..., : odd.shape[-1]], odd], dim=-1).flatten(-2)
        return paired if even.shape[-1] == odd.shape[-1] else torch.cat([paired, even[..., -1:]], dim=-1)


KINDS = (PlanarLayer.kind, RadialLayer.kind, CouplingLayer.kind)


def make_layers(kind: str, size: int, count: int, *, hidden: int, like: Tensor) -> list[Bijection]:
    """``count`` new layers of one kind for vectors of ``size`` numbers, drawn from the global generator.

    ``hidden`` is for coupling layers alone.
    """
    if kind == CouplingLayer.kind:
        return [CouplingLayer(size, hidden=hidden, odd=index % 2 == 0, like=like) for index in range(count)]
    if kind == RadialLayer.kind:
        return [RadialLayer(size, like=like) for _ in range(count)]
    layers = [PlanarLayer(size, like=like) for _ in range(count)]
    _lay_side_by_side([*(layer.direction for layer in layers), *(layer.push for layer in layers)])
    return list(layers)


def _lay_side_by_side(params: list[nn.Parameter]) -> None:
    """Move parameters of one length into neighbouring memory, where all of them together are one matrix."""
    for param, row in zip(params, torch.stack([each.detach() for each in params]).unbind(), strict=True):
        param.data = row


def solve_bend(target: Tensor, slope: Tensor) -> Tensor:
    """The number a with ``a + slope tanh(a) = target``, elementwise; ``slope`` is above -1, so there is one.

    Bisection, since Newton's steps may run away where the left side is nearly flat. One step of Newton at the end is
    differentiable, and gives the derivative of the solution.
    """
    with torch.no_grad():
        low, high = target - slope.abs(), target + slope.abs()  # |tanh| < 1
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = middle + slope * torch.tanh(middle) < target
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        found = 0.5 * (low + high)
        bend = torch.tanh(found)
    return found - (found + slope * bend - target) / (1 + slope * (1 - bend.square()))


def above_minus_one(free: Tensor) -> Tensor:
    """Any number to one above -1 (by a margin), increasing, with 0 to 0."""
    return F.softplus(free + _SHIFT) - _FLOOR


# --- all planar layers of a flow in one autograd function ------------------------------------------------------------
#
# A planar layer adds a multiple of one vector: :math:`z_l = z_{l-1} + h_l \hat u_l` with :math:`h_l = \tanh(w_l^\top
# z_{l-1} + b_l)`. So the numbers h depend on nothing but inner products of the vectors and of the noise with them,
#
# .. math:: w_l^\top z_{l-1} = w_l^\top \epsilon + \sum_{k<l} h_k\, w_l^\top \hat u_k, \qquad
#     z_L = \epsilon + \sum_l h_l \hat u_l,
#
# and the long vectors are read three times in all, and written once with their gradient, whatever the number of layers.
# Layer by layer it takes autograd some thirty passes over memory for each of them.

_BLOCK = 8_192  # columns that are written at a time


def through_planes(noise: Tensor, layers: Sequence[PlanarLayer]) -> tuple[Tensor, Tensor]:
    """Images ``(n, D)`` of ``noise`` under all layers, first to last, and the log determinants, ``(n,)``.

    What the layers give one after the other; derivatives are first ones only.
    """
    offsets = torch.stack([layer.offset for layer in layers])
    vectors = [*(layer.direction for layer in layers), *(layer.push for layer in layers)]
    return _Planes.apply(noise, offsets, *vectors)  # type: ignore[no-any-return]


def neighbours(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors of equal length as the rows of one matrix: without a copy where they lie in memory as its rows would."""
    first, size = vectors[0], len(vectors[0])
    storage = first.untyped_storage().data_ptr()
    for number, each in enumerate(vectors):
        together = each.untyped_storage().data_ptr() == storage and each.is_contiguous()
        if not together or each.storage_offset() != first.storage_offset() + number * size:
            return torch.stack(list(vectors))
    return first.as_strided((len(vectors), size), (size, 1))


class _Planes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, noise: Tensor, offsets: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        rows = neighbours(vectors)
        products = torch.cat([rows @ rows.T, rows @ noise.T], dim=1)
        with torch.enable_grad():
            small = [each.detach().requires_grad_() for each in (products, offsets)]
            found = _coefficients(small[0], small[1], noise.shape[1])
        ctx.small, ctx.found = small, found
        ctx.save_for_backward(noise, *vectors)
        coefficients, log_det = (each.detach() for each in found)
        return torch.addmm(noise, coefficients, rows), log_det

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, ...]:
        noise, *vectors = ctx.saved_tensors
        rows = neighbours(vectors)
        slopes = grad @ rows.T, grad_log_det
        by_products, by_offsets = torch.autograd.grad(ctx.found, ctx.small, slopes, retain_graph=True)
        own, with_noise = by_products.split([len(rows), len(noise)], dim=1)
        by_noise = torch.addmm(grad, with_noise.T, rows) if ctx.needs_input_grad[0] else None
        others = torch.cat([noise, grad])
        factors = torch.cat([with_noise, ctx.found[0].detach().T], dim=1)
        return by_noise, by_offsets, *_two_products(own + own.T, rows, factors, others).unbind()


def _two_products(one: Tensor, rows: Tensor, other: Tensor, others: Tensor) -> Tensor:
    """``one @ rows + other @ others``, written in blocks that stay in the cache between the two."""
    found = rows.new_empty((len(one), rows.shape[1]))
    for first in range(0, rows.shape[1], _BLOCK):
        block = slice(first, first + _BLOCK)
        torch.mm(one, rows[:, block], out=found[:, block]).addmm_(other, others[:, block])
    return found


def _coefficients(products: Tensor, offsets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What is added of each vector, ``(n, 2 L)``, and the log determinants, ``(n,)``.

    Args:
        products: Inner products of the 2 L vectors, √D w and then u, with each other and with n rows of noise,
            ``(2 L, 2 L + n)``.
        offsets: b, ``(L,)``.
        size: D.
    """
    layers = len(offsets)
    root = math.sqrt(size)
    squares = products[:layers, :layers] / size  # w · w
    mixed = products[:layers, layers : 2 * layers] / root  # w · u
    free = mixed.diagonal()
    along = above_minus_one(free)
    bent = (along - free) / squares.diagonal().clamp_min(1e-12)  # û = u + bent w
    across = torch.addcmul(mixed, squares, bent)  # w_l · û_k
    reach = (products[:layers, 2 * layers :] / root).T + offsets  # (n, L)
    bends: list[Tensor] = []
    for layer in range(layers):
        before = torch.stack(bends, 1) @ across[layer, :layer] if bends else 0.0
        bends.append(torch.tanh(reach[:, layer] + before))
    bend = torch.stack(bends, 1)  # h, (n, L)
    log_det = torch.log1p((1.0 - bend.square()) * along).sum(1)
    return torch.cat([bend * bent / root, bend], dim=1), log_det
