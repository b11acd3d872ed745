"""Compress a posterior: prune its mean by the signal-to-noise ratio, and rewrite the network without dead units."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.data import Data, as_data, as_input
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Params, select_names
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.decisions.compress.compressed import (
    Change,
    Compressed,
    CompressedLayer,
    count_parameters,
    latencies,
    multiply_adds,
)
from knowable.decisions.compress.rewrite import Rewritten, largest_difference, rewrite
from knowable.decisions.compress.saving import dense_bytes, encode_weights, sparse_bytes
from knowable.decisions.compress.sparse_code import SparseCode, check_bits, choose_grids
from knowable.errors import InvalidArgument, Unsupported
from knowable.evaluation.scores import accuracy, nll, rmse

_ROWS = 64  # of the data, where no example is given
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}  # of outputs that should be the same, relative to the largest
_COARSE = 1e-2  # half precision


def compress(
    posterior: Posterior,
    *,
    threshold: float | None = None,
    by: str = "log_alpha",
    where: str | Iterable[str] | None = None,
    example: Any = None,
    data: Any = None,
    bits: str | int | None = None,
    repeats: int = 20,
) -> Compressed:
    r"""Compress a posterior to one small network: its mean, without the weights that are mostly noise.

    Weights whose :math:`\log \alpha = \log \sigma^2 / \mu^2` is above a threshold become zero (Molchanov, Ashukha and
    Vetrov, 2017). Then the network is rewritten: units that nothing reads, and units that are the same for every input,
    are removed from all layers they run through, through sums and concatenations too. The rewritten network computes
    the same as the network with zeros, in ordinary dense layers. With ``bits``, weights are quantised to the precision
    that their posterior standard deviations allow (Louizos, Ullrich and Welling, 2017).

    Args:
        posterior: Any posterior with means and standard deviations; those of sparse methods have much to prune.
        threshold: Pruning threshold on log α or the signal-to-noise ratio; None is ``posterior.log_alpha_threshold``, 3
            for most posteriors.
        by: ``"log_alpha"``: prune weights above the threshold. ``"snr"``: prune weights with \|mean\| / sd below it.
        where: Names or globs of the weights that may be pruned; None is all matrices and kernels.
        example: A batch of inputs, for shapes, multiply-adds, latency and a final check; None takes it from ``data``.
        data: ``(x, y)``, a Dataset or a DataLoader, to score the network before and after.
        bits: None leaves weights as they are. ``"posterior"`` quantises each tensor with a step no finer than its
            average standard deviation (:func:`knowable.decisions.compress.sparse_code.bits_needed`). A number from 2 to
            16 is the bits of every weight.
        repeats: Forward passes of each network to measure latency; 0 does not measure.

    Raises:
        InvalidArgument: If neither ``example`` nor ``data`` is given, or an argument is out of range.

    Example:
        >>> import knowable as kn
        >>> net = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> model = kn.Model(net, kn.Gaussian(0.1), frozen="*.bias")
        >>> mean = {name: torch.zeros_like(value) for name, value in model.params().items()}
        >>> mean["0.weight"][3] = mean["2.weight"][:, 3] = 1.0  # one unit of nine is known not to be zero
        >>> posterior = kn.DiagonalNormal(model, mean, {name: 0.1 + 0 * value for name, value in mean.items()})
        >>> compress(posterior, example=torch.randn(5, 2)).net
        Sequential(
          (0): Linear(in_features=2, out_features=1, bias=True)
          (1): ReLU()
          (2): Linear(in_features=1, out_features=1, bias=True)
        )
    """
    check_type("posterior", posterior, Posterior, "a fitted posterior")
    if posterior.model.network.output is not None:
        raise Unsupported("compress takes networks that return one tensor; wrap net in a module that picks it.")
    bits = check_bits(bits)
    check_count("repeats", repeats, at_least=0)
    rows = None if data is None else as_data(data, posterior.model)
    inputs = _example(example, rows, posterior)
    masks = find_masks(posterior, threshold=threshold, by=by, where=where)
    params = mean_params(posterior)
    grids = choose_grids(params, masks, posterior.std(), bits)
    original = network_at(posterior.model, params, posterior.buffers)
    rounded = {name: grids[name].rounded(params[name]) if name in grids else params[name] for name in masks}
    pruned = {name: rounded[name].where(mask, 0.0) for name, mask in masks.items()}
    masked = network_at(posterior.model, {**params, **pruned}, posterior.buffers)
    small, difference = _rewritten(masked, inputs, merge_constants=not grids)
    codes = encode_weights(small.net, small.plan, grids)
    times = latencies((original, small.net), inputs, repeats) if repeats else None
    return Compressed(
        net=small.net,
        masked=masked,
        layers=_table(masked, small, masks, codes),
        parameters=Change(count_parameters(original), count_parameters(small.net)),
        multiply_adds=Change(multiply_adds(original, inputs), multiply_adds(small.net, inputs)),
        bytes_dense=Change(dense_bytes(original), dense_bytes(small.net)),
        bytes_sparse=sparse_bytes(small.net, original=masked, plan=small.plan, codes=codes),
        latency=None if times is None else Change(*times),
        scores={} if rows is None else _scores(original, small.net, posterior, rows),
        difference=difference,
        value_bits=8 * next(masked.parameters()).dtype.itemsize,
        notes=tuple(small.notes),
        _example=inputs,
        _plan=small.plan,
        _codes=codes,
    )


def _example(example: Any, rows: Data | None, posterior: Posterior) -> Tensor:
    model = posterior.model
    if example is not None:
        inputs = as_input(example, model, name="example")
        model.network.probe(inputs, model.network_params(posterior.mean()), posterior.buffers)
        return model.network.own_input(inputs)
    if rows is None:
        raise InvalidArgument("compress needs a batch of inputs to trace the network: give example= or data=.")
    return model.network.own_input(rows.first[0][:_ROWS])


def _rewritten(masked: nn.Module, inputs: Tensor, *, merge_constants: bool) -> tuple[Rewritten, float]:
    """The smaller network, or the one with zeros if on the example the two should differ."""
    found = rewrite(masked, inputs, merge_constants=merge_constants)
    found.net.requires_grad_(False)
    difference = largest_difference(masked, found.net, inputs)
    if difference <= _TOLERANCE.get(inputs.dtype if inputs.is_floating_point() else torch.float32, _COARSE):
        return found, difference
    note = f"the rewritten network differed by {difference:.1e} on the example, so no unit was removed"
    return Rewritten(masked, notes=[*found.notes, note]), 0.0


def _scores(original: nn.Module, net: nn.Module, posterior: Posterior, rows: Data) -> dict[str, Change]:
    before, after = score(original, posterior, rows), score(net, posterior, rows)
    return {name: Change(before[name], after[name]) for name in before}


def _table(
    masked: nn.Module, small: Rewritten, masks: Mapping[str, Tensor], codes: Mapping[str, tuple[SparseCode, Tensor]]
) -> tuple[CompressedLayer, ...]:
    left, values = dict(small.net.named_parameters()), dict(masked.named_parameters())
    rows = []
    for name in masks:
        new = small.plan.new_name(name)
        after = tuple(left[new].shape) if new in left else None
        value = values[name]
        code = codes[new][0] if new in codes else None
        stored = code.total_bits if code else 0 if after is None else 8 * value.element_size() * left[new].numel()
        bits = code.value_bits if code else 8 * value.element_size()
        nonzero = int(value.count_nonzero())
        rows.append(CompressedLayer(name, value.numel(), nonzero, tuple(value.shape), after, bits, stored))
    return tuple(rows)


# --- which weights are pruned ----------------------------------------------------------------------------------------


def prunable_names(posterior: Posterior, where: str | Iterable[str] | None = None) -> list[str]:
    """Weights that may be pruned: random ones that ``where`` names, by default all matrices and kernels."""
    model = posterior.model
    shapes = {name: value.shape for name, value in model.network_params(posterior.signal_to_noise()).items()}
    if where is None:
        chosen = {name for name, shape in shapes.items() if len(shape) >= 2}
    else:
        chosen = select_names("where", where, list(shapes), model.net)
    if not chosen:
        raise InvalidArgument("posterior has no random weight matrix or kernel to prune. Name others by where=.")
    return [name for name in shapes if name in chosen]


def find_masks(
    posterior: Posterior,
    *,
    threshold: float | None = None,
    by: str = "log_alpha",
    where: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    r"""Pruning masks, True for the weights that stay; arguments as in :func:`compress`.

    With :math:`\alpha = \sigma^2 / \mu^2` (Molchanov, Ashukha and Vetrov, 2017), a weight is pruned if
    :math:`\log \alpha = -2 \log(|\mu| / \sigma)` is above the threshold.
    """
    check_choice("by", by, ("log_alpha", "snr"))
    if threshold is None:
        log_alpha = float(posterior.log_alpha_threshold)
        threshold = log_alpha if by == "log_alpha" else math.exp(-log_alpha / 2)
    threshold = check_number("threshold", threshold, at_least=0.0 if by == "snr" else None)
    ratios = posterior.signal_to_noise()
    names = prunable_names(posterior, where)
    if by == "snr":
        return {name: ratios[name] >= threshold for name in names}
    return {name: -2 * ratios[name].log() <= threshold for name in names}


def mean_params(posterior: Posterior) -> Params:
    """The network's parameters at the posterior mean, frozen ones included."""
    model = posterior.model
    return {**model.frozen_params(), **model.network_params(posterior.mean())}


def network_at(model: Model, params: Params, buffers: Buffers) -> nn.Module:
    """A copy of the model's network with these values, in evaluation mode."""
    made = copy.deepcopy(model.net).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name in params:
                value.copy_(params[name])
        for name, value in made.named_buffers():
            if name in buffers:
                value.copy_(buffers[name])
    return made.requires_grad_(False)


@torch.no_grad()
def score(net: nn.Module, posterior: Posterior, data: Data) -> dict[str, float]:
    """``accuracy`` (labels) or ``rmse`` (numbers), and ``nll``, of a single network in place of the posterior's draws.

    The likelihood's own parameters are at their posterior means.
    """
    model = posterior.model
    batches = [(net(model.network.own_input(x)), y) for x, y in data]
    outputs, y = torch.cat([output for output, _ in batches]).unsqueeze(0), torch.cat([y for _, y in batches])
    own = {name: value.unsqueeze(0) for name, value in model.likelihood_params(posterior.mean()).items()}
    prediction = model.likelihood.predict(outputs, own, outputs.new_zeros(1))  # one draw
    found = {"nll": nll(prediction, y)}
    if isinstance(prediction, ClassPrediction):
        return {"accuracy": accuracy(prediction, y), **found}
    return {"rmse": rmse(prediction, y), **found}
