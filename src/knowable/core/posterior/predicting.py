"""Monte Carlo prediction under a memory budget: blocks of draws, blocks of rows, one result.

The cost is K forward passes. Draws are made once and kept for the next call where they fit. Small networks are run for
a whole block of draws in one batched call (their time goes into overhead); large ones draw by draw (their time goes
into arithmetic, which batching cannot reduce).
"""

from __future__ import annotations

import numbers
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from knowable.core.network.params import Buffers, Params, index_params
from knowable.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior

DRAWS_PER_BLOCK = 8
_DEFAULT_MEMORY = 2 * 2**30  # working memory when no cap is given
_VECTORISE_BELOW = 20_000  # parameters; beyond it a batched call is no faster than a loop
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(value: int | str | None) -> int | None:
    """Bytes from a number or from text such as ``"500MB"``."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise InvalidArgument(f"max_memory must be bytes or text such as '500MB', got {value!r}.")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidType(f"max_memory must be bytes or text such as '500MB', got {type(value).__name__}.")
    if value <= 0:
        raise InvalidArgument(f"max_memory must be > 0, got {value}.")
    return int(value)


def predict_outputs(
    posterior: Posterior, x: Tensor, samples: int, seed: int, memory: int | None
) -> tuple[Tensor, Params, Tensor]:
    """Network outputs ``(K, rows, ...)`` for K draws, the draws' likelihood parameters, and their log weights."""
    draws, log_weights = posterior.draws_for_prediction(samples, seed)
    budget = _Budget(posterior, x, draws, memory)
    outputs: Tensor | None = None
    own: list[Params] = []
    for start in range(0, draws, budget.block):
        stop = min(start + budget.block, draws)
        stack = _block(posterior, start, stop, samples, seed, keep=budget.keep)
        own.append({name: value.clone() for name, value in stack.items() if name.startswith("likelihood.")})
        network = posterior.model.network_params(stack)
        for row in range(0, len(x), budget.rows):
            rows = x[row : row + budget.rows]
            out = posterior.run_draws(network, rows, first=start, seed=seed, vectorise=budget.vectorise)
            if outputs is None:
                outputs = out.new_empty((draws, len(x), *out.shape[2:]))
            outputs[start : start + budget.block, row : row + budget.rows] = out
    assert outputs is not None
    return outputs, {name: torch.cat([each[name] for each in own]) for name in own[0]}, log_weights


def check_result_fits(posterior: Posterior, x: Tensor, draws: int, memory: int | None) -> None:
    """Refuse a ``memory`` limit of which the outputs of ``draws`` draws alone would take more than half."""
    _check_result(len(x) * draws * _Footprint.of(posterior, x).output, draws, len(x), memory)


def _check_result(size: int, draws: int, rows: int, memory: int | None) -> None:
    if memory is not None and size > memory // 2:
        raise InvalidArgument(
            f"max_memory={memory:,} is too small: the outputs of {draws} draws for {rows:,} rows alone take {size:,} "
            f"bytes, and at most half may go into them. Use predict_stream, which yields predictions for blocks of "
            f"rows, or fewer samples."
        )


def rows_that_fit(posterior: Posterior, x: Tensor, samples: int, memory: int | None) -> int:
    """How many rows a prediction may have so that its result takes at most half of the memory."""
    per_row = _Footprint.of(posterior, x).output * samples
    return max(1, (memory or _DEFAULT_MEMORY) // (2 * per_row))


def _block(posterior: Posterior, start: int, stop: int, samples: int, seed: int, *, keep: bool) -> Params:
    """Draws start..stop and the buffers of each, from those kept at an earlier call if they are the same ones."""
    if not keep:
        return _drawn(posterior, start, stop, samples, seed)
    key = hash((samples, seed))
    if posterior._kept is None or posterior._kept[0] != key:
        count, _ = posterior.draws_for_prediction(samples, seed)
        posterior._kept = (key, _drawn(posterior, 0, count, samples, seed))
    return index_params(posterior._kept[1], slice(start, stop))


def _drawn(posterior: Posterior, start: int, stop: int, samples: int, seed: int) -> Params:
    draws = posterior.draw_block(start, stop, samples, seed)
    return {**draws, **posterior.buffer_block(start, stop, samples, seed)}


class _Budget:
    """Sizes of the blocks of draws and of rows with which a prediction stays within its memory limit."""

    def __init__(self, posterior: Posterior, x: Tensor, draws: int, memory: int | None):
        footprint = _Footprint.of(posterior, x)
        result = draws * len(x) * footprint.output
        _check_result(result, draws, len(x), memory)
        left = (memory or _DEFAULT_MEMORY + result) - result
        self.keep = draws * footprint.draw <= left // 4
        left -= draws * footprint.draw if self.keep else 0
        self.block = draws if self.keep else max(1, min(DRAWS_PER_BLOCK, left // (4 * footprint.draw)))
        self.block = min(self.block, DRAWS_PER_BLOCK)
        left -= 0 if self.keep else self.block * footprint.draw
        self.vectorise = footprint.parameters <= _VECTORISE_BELOW
        together = self.block if self.vectorise else 1
        self.rows = max(1, int(left // 2 // (footprint.working * together)))


class _Footprint:
    """Bytes per row and draw: the output, all activations, and the weights."""

    def __init__(self, output: int, working: int, draw: int, parameters: int):
        self.output, self.working, self.draw, self.parameters = output, working, draw, parameters

    @classmethod
    def of(cls, posterior: Posterior, x: Tensor) -> _Footprint:
        params = posterior.mean()
        random = {name: value for name, value in params.items() if name not in posterior.points}
        network = posterior.model.network_params(params)
        rows = x[:2]
        output = posterior.model.network.probe(x, network, posterior.buffers)[:2]
        working = bytes_per_row(posterior.model, rows, posterior.buffers)
        draw = sum(value.numel() * value.element_size() for value in random.values())
        size = sum(value.numel() for value in params.values())
        per_row = output.numel() * output.element_size() // len(rows)
        return cls(max(1, per_row), working, max(1, draw), size)


def bytes_per_row(model: Model, x: Tensor, buffers: Buffers) -> int:
    """Bytes of all activations of one row in a forward pass."""
    params = model.network_params(model.params())
    with _CountBytes() as counted, torch.no_grad():
        model.network(params, x[:2], buffers=buffers)
    return max(1, counted.bytes // len(x[:2]))


class _CountBytes(TorchDispatchMode):
    """Adds up the sizes of all tensors that operations allocate: an upper bound of the peak memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:  # a view takes nothing
                self.bytes += each.numel() * each.element_size()
        return result
