r"""The covariance of a linearised network's outputs under a normal posterior: :math:`J \Sigma J^\top` of each row.

For factored posteriors the Jacobian is never formed: where a layer acts once on a row, its part of the covariance of
outputs o and p is

.. math:: \sum_i \hat g_{oi}\, \hat g_{pi} \sum_j \hat a_j^2 / E_{ij}

with gradients and inputs rotated into the posterior's basis, which costs little more than the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FullCovarianceNormal
from knowable.core.model.structured_normal import DiagonalPlusLowRank, KroneckerBlock
from knowable.core.network.jacobian import BatchJacobian, unit_directions
from knowable.core.network.layers import Layer, NetworkLayers
from knowable.core.network.params import Params

_TOGETHER = 8  # outputs whose gradients in all weights are formed at once
_MOST_IN_A_PLACE = 32  # outputs of a pixel whose covariances are formed
COLUMNS = 512  # of a full covariance's Cholesky factor per block


# --- posteriors made of blocks ---------------------------------------------------------------------------------------


def diagonal_blocks(layers: NetworkLayers, precision: Params) -> list[KroneckerBlock]:
    """Independent weights as blocks without bases, cut along the network's layers."""
    found = [
        KroneckerBlock(each.names, each.shapes, each.matrix(precision), transposed=each.transposed) for each in layers
    ]
    others = [(name, precision[name]) for name in layers.others]
    return found + [KroneckerBlock((name,), (value.shape,), value.reshape(-1, 1)) for name, value in others]


def block_covariance(rows: BatchJacobian, blocks: list[KroneckerBlock]) -> Tensor:
    """Covariance of each row's outputs under independent blocks, ``(rows, outputs, outputs)``."""
    by_names = {block.names: block for block in blocks}
    directions = unit_directions(rows.output)
    total = rows.output.new_zeros((len(rows.x), len(directions), len(directions)))
    for layer, a, g in zip(rows.layers, rows.activations, rows.gradients(directions), strict=True):
        block, g = by_names.get(layer.names), g.movedim(0, 1)
        if block is None:  # of a posterior that was saved before the parameters were seen to be a layer
            alone = layer.params(g.mT @ a.unsqueeze(1))
            total += sum(_covariance_of_one(name, value, by_names) for name, value in alone.items())
        else:
            total += _layer_covariance(g, a, block)
    for name, gradients in rows.others(directions).items():
        total += _covariance_of_one(name, gradients.movedim(0, 1), by_names)
    return total


def _covariance_of_one(name: str, gradients: Tensor, blocks: Mapping[tuple[str, ...], KroneckerBlock]) -> Tensor:
    """A parameter's part, from gradients ``(rows, outputs, ...)``, where it has a block of its own."""
    block = blocks[(name,)]
    return _gram(block.rotate(block.matrix({name: gradients})) * block.precision.rsqrt())


def _layer_covariance(g: Tensor, a: Tensor, block: KroneckerBlock) -> Tensor:
    """A layer's part, from gradients ``(rows, outputs, positions, out)`` and inputs ``(rows, positions, in)``."""
    g = g if block.out_basis is None else g @ block.out_basis
    a = a if block.in_basis is None else a @ block.in_basis
    if a.shape[1] == 1:
        variance = a[:, 0].square() @ block.precision.reciprocal().T  # (rows, out)
        g = g[:, :, 0]
        return (g * variance.unsqueeze(1)) @ g.mT
    return _gram((g.mT @ a.unsqueeze(1)) * block.precision.rsqrt())


def _gram(values: Tensor) -> Tensor:
    """``(rows, outputs, ...)`` times itself: ``(rows, outputs, outputs)``."""
    flat = values.flatten(2)
    return flat @ flat.mT


def head_variance(rows: BatchJacobian, blocks: list[KroneckerBlock]) -> Tensor | None:
    """Variances of the outputs, ``(rows, ...)``, where the one random layer is the output layer; else None.

    Then the outputs' gradients are unit vectors, so that even thousands of outputs need no backward pass.
    """
    layer = _head(rows)
    if layer is None or len(blocks) > 1:
        return None
    (block,) = blocks
    variance = _variance_in_basis(rows, block)
    variance = variance if block.out_basis is None else variance @ block.out_basis.square().T
    channels_first = rows.trace.uses[layer.uses[0]].feature_dim == 1
    return (variance.movedim(-1, 1) if channels_first else variance).reshape(rows.output.shape)


def place_covariance(rows: BatchJacobian, posterior: list[KroneckerBlock] | FullCovarianceNormal) -> Tensor | None:
    """Covariances of the outputs at each place, ``(rows, places, outputs, outputs)``, of a head over pixels; else None.

    A head over pixels is one random layer, the output layer, with its outputs in dimension 1 and not too many of them.
    Its covariance at a pixel is a quadratic form of the pixel's features.
    """
    layer = _head(rows)
    over_pixels = rows.output.dim() > 2 and layer is not None and rows.trace.uses[layer.uses[0]].feature_dim == 1
    if layer is None or not over_pixels or layer.out > _MOST_IN_A_PLACE:
        return None
    if isinstance(posterior, FullCovarianceNormal):
        a = rows.activations[0]  # (rows, places, in)
        found = _head_covariance(a.flatten(0, 1), _numbers(layer, posterior), posterior.scale_tril)
        return found.unflatten(0, a.shape[:2])
    if len(posterior) > 1:
        return None
    (block,) = posterior
    variance = _variance_in_basis(rows, block)
    if block.out_basis is None:
        return variance.diag_embed()
    return (block.out_basis * variance.unsqueeze(-2)) @ block.out_basis.T


def _head(rows: BatchJacobian) -> Layer | None:
    """The one random layer, if it is the output layer."""
    layer = rows.layers.only
    found = layer is not None and rows.is_head(layer) and rows.layers.axes[layer.uses[0]].dim == 0
    return layer if found else None


def _variance_in_basis(rows: BatchJacobian, block: KroneckerBlock) -> Tensor:
    """Variances of a head's outputs in the basis of its block, ``(rows, places, out)``."""
    a = rows.activations[0]  # (rows, places, in)
    a = a if block.in_basis is None else a @ block.in_basis
    return a.square() @ block.precision.reciprocal().T


def block_row_bytes(layers: NetworkLayers, outputs: int, params: Params, itemsize: int) -> int:
    """Working memory of :func:`block_covariance` for one row."""
    numbers = outputs * sum(params[name].numel() for name in layers.others)
    for layer in layers:
        formed = outputs * layer.out * layer.width if layer.positions > 1 else 0
        numbers += layer.positions * (outputs * layer.out + layer.width) + formed
    return 2 * itemsize * numbers


# --- posteriors over one flat vector ---------------------------------------------------------------------------------


def full_covariance(rows: BatchJacobian, normal: FullCovarianceNormal) -> Tensor:
    """Covariance of each row's outputs under correlations between all weights, ``(rows, outputs, outputs)``."""
    layers, layout = rows.layers, normal.layout
    layer = layers.only
    if layer is None or layer.positions > 1 or not rows.is_head(layer):
        jacobian = rows.flat(unit_directions(rows.output), layout).movedim(0, 1)  # (rows, outputs, D)
        return _gram(jacobian @ normal.scale_tril)
    a = rows.activations[0][:, 0]  # (rows, in): an output's gradient in its own weights, and zero in the others
    return _head_covariance(a, _numbers(layer, normal), normal.scale_tril)


def _numbers(layer: Layer, normal: FullCovarianceNormal) -> Tensor:
    """Where the weights of each output are in the flat vector, ``(out, in)``."""
    numbers = torch.arange(normal.layout.size, device=normal.scale_tril.device)
    return layer.matrix(normal.layout.views(numbers))


def _head_covariance(a: Tensor, places: Tensor, scale_tril: Tensor) -> Tensor:
    """Covariance of a head's outputs, from its inputs and the ``places`` (out, in) of its weights in the flat vector.

    By blocks of columns: that takes little memory, and rows above a block's diagonal are zero and left out.
    """
    total = a.new_zeros(len(a), len(places), len(places))
    for first in range(0, len(scale_tril), COLUMNS):
        columns = scale_tril[:, first : first + COLUMNS]
        each = [a[:, own >= first] @ columns[own[own >= first]] for own in places]
        total += _gram(torch.stack(each, dim=1))
    return total


def full_row_bytes(outputs: int, size: int, itemsize: int) -> int:
    """Working memory of :func:`full_covariance` for one row."""
    return 3 * outputs * size * itemsize


def low_rank_covariance(rows: BatchJacobian, normal: DiagonalPlusLowRank) -> Tensor:
    """The same under a diagonal-plus-low-rank covariance; the Jacobian is formed a few outputs at a time."""
    layout = normal.layout
    blocks = diagonal_blocks(rows.layers, layout.views(normal.scale**-2))
    basis = normal.basis * normal.scale.unsqueeze(1)
    along = torch.cat(
        [rows.flat(some, layout) @ basis for some in unit_directions(rows.output).split(_TOGETHER)]
    ).movedim(0, 1)
    return block_covariance(rows, blocks) + (along * (normal.basis_variance - 1.0)) @ along.mT


def low_rank_row_bytes(layers: NetworkLayers, outputs: int, params: Params, itemsize: int) -> int:
    """Working memory of :func:`low_rank_covariance` for one row."""
    size = sum(value.numel() for value in params.values())
    return full_row_bytes(min(outputs, _TOGETHER), size, itemsize) + block_row_bytes(layers, outputs, params, itemsize)
