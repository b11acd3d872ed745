"""The leading eigenvectors of the curvature matrix, found by products with it (Tropp et al., 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.model.likelihood import OutputInformation
from knowable.core.model.structured_normal import DiagonalPlusLowRank
from knowable.core.network.jacobian import jacobian_vector_products, vector_jacobian_product
from knowable.core.network.params import Params
from knowable.core.support.randomness import generator_for
from knowable.inference.laplace.curvature import Curvature, PriorPrecision, undetermined
from knowable.inference.laplace.expansion import ExpansionPoint

_EXTRA = 10  # directions beyond the rank, which make the leading ones precise (oversampling)
_PASSES = 3  # over the data: subspace iterations
_VECTORISE_BELOW = 20_000  # weights; beyond it directions go through the network one by one


class LowRankCurvature(Curvature):
    r"""A factor F of k columns for each noise: :math:`H_o \approx F_o F_o^\top`."""

    def __init__(self, factors: Tensor):
        self.factors = factors  # (groups, D, k), in double precision

    @classmethod
    def of(cls, expansion: ExpansionPoint, *, rank: int) -> LowRankCurvature:
        """By a randomised Nyström approximation."""
        return cls(torch.stack([_leading(expansion, group, rank) for group in range(expansion.groups)]))

    def parts(self, prior: PriorPrecision, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonal ``(D,)`` and factor ``(D, groups * k)`` of P; a low-rank prior brings its own columns."""
        factor = (self.factors * weights.sqrt().view(-1, 1, 1)).movedim(0, 1).flatten(1)
        if not isinstance(prior.joint, DiagonalPlusLowRank):
            return prior.flat, factor
        diagonal, own, signs = prior.joint.precision_parts(prior.layout)
        if (signs < 0).any():  # a precision below its diagonal: no factor of ours
            return prior.flat, factor
        return diagonal.double(), torch.cat([factor, own.double()], dim=1)

    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """By the matrix determinant lemma: log det(I + Fᵀ Λ₀⁻¹ F) + log det Λ₀."""
        diagonal, factor = self.parts(prior, weights)
        if not (diagonal > 0).all():
            raise undetermined()
        inner = factor.T @ (factor / diagonal.unsqueeze(1))
        identity = torch.eye(inner.shape[0], dtype=inner.dtype, device=inner.device)
        return torch.linalg.slogdet(identity + inner).logabsdet + diagonal.log().sum()

    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """By the Woodbury identity."""
        diagonal, factor = self.parts(prior, weights)
        scaled = factor / diagonal.unsqueeze(1)
        inner = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device) + factor.T @ scaled
        first = vector / diagonal
        return first - scaled @ torch.linalg.solve(inner, factor.T @ first)

    def normal(self, expansion: ExpansionPoint, prior: PriorPrecision, weights: Tensor) -> DiagonalPlusLowRank:
        """The prior's diagonal, and the leading eigenvectors."""
        diagonal, factor = (part.to(expansion.model.dtype) for part in self.parts(prior, weights))
        if not (diagonal > 0).all():
            raise undetermined()
        flat = expansion.layout.flatten(expansion.weights)
        return DiagonalPlusLowRank.of_precision(expansion.layout, flat, diagonal, factor)


def _leading(expansion: ExpansionPoint, group: int, rank: int) -> Tensor:
    r"""F with :math:`F F^\top` the best approximation of H from the span of a few products with it.

    .. math:: H \approx Y (\Omega^\top Y)^{-1} Y^\top, \qquad Y = H \Omega

    with orthonormal Ω, which after the first product is the basis of the last one (subspace iteration).
    """
    size = expansion.layout.size
    count = min(size, rank + _EXTRA)
    generator = generator_for(expansion.seed, "directions", group, device=expansion.model.device)
    like = {"dtype": torch.float64, "device": expansion.model.device}
    product = torch.randn((size, count), generator=generator, **like)
    for _ in range(_PASSES):
        omega = torch.linalg.qr(product)[0]
        product = _times(expansion, group, omega)
    core = omega.T @ product
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    known = values > 10 * torch.finfo(expansion.model.dtype).eps * values.max()
    half = product @ (vectors[:, known] * values[known].rsqrt())  # half halfᵀ is the approximation
    leading, lengths, _ = torch.linalg.svd(half, full_matrices=False)
    found = torch.zeros((size, min(rank, size)), **like)
    count = min(len(lengths), found.shape[1])
    found[:, :count] = leading[:, :count] * lengths[:count]
    return found


def _times(expansion: ExpansionPoint, group: int, directions: Tensor) -> Tensor:
    """H times some directions ``(D, k)``: Σ over rows of Jᵀ Λ J v."""
    layout, total = expansion.layout, torch.zeros_like(directions)
    vectorise = layout.size < _VECTORISE_BELOW
    stack = layout.views(directions.T.to(expansion.model.dtype).contiguous())
    for x, y, *weights in expansion.batches():
        network = expansion.model.network_params(expansion.params)
        at = {name: network[name] for name in layout.names}

        def outputs(weights: Params, x: Tensor = x, network: Params = network) -> Tensor:
            return expansion.model.network({**network, **weights}, x, buffers=expansion.buffers)

        with torch.no_grad():
            output = outputs(at)
            pushed = jacobian_vector_products(outputs, at, stack, vectorise=vectorise)  # (k, rows, ...)
        information: OutputInformation = expansion.informations(output, y, *weights)[group]
        for k, each in enumerate(pushed):
            total[:, k] += layout.flatten(vector_jacobian_product(outputs, at, information.times(each))).double()
    return total
