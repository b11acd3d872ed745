"""Monte Carlo prediction under a memory limit: blocks of draws, blocks of rows, one result.

Draws are made once and kept for the next call where they fit. What they have in common runs once for a block of them.
Where few weights are random, several draws run in one batched call (their time is overhead, or products with weights
that all share); where many are, draw by draw (their time is arithmetic, which batching cannot save).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from knowable.core.model.model import Model
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.network.params import Buffers, Params, index_params
from knowable.core.prediction.prediction import Prediction
from knowable.errors import InvalidArgument

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

T = TypeVar("T")

_CACHED = 2**24  # bytes of activations that a processor keeps near: small convolutions of more rows take up to twice
_PER_WEIGHT = (
    4  # the time; but every block reads all weights again, so that their activations may be so many times more
)
_DEFAULT_MEMORY = 2 * 2**30  # working memory when no cap is given
_VECTORISE_BELOW = 20_000  # random parameters; beyond it a batched call is no faster than a loop,
_OR_SHARE = 0.02  # unless they are so few of all that draws have nearly all products in common


def differentiable_prediction(posterior: Posterior, x: Tensor, *, samples: int, seed: int) -> Prediction:
    """What :meth:`Posterior.predict` gives, as a function of ``x`` that can be differentiated.

    All activations of all draws are kept for the gradient: give few rows at a time, see :func:`rows_to_differentiate`.

    Args:
        posterior: The posterior.
        x: Inputs in the model's dtype and on its device, which require a gradient.
        samples: Number of draws.
        seed: Fixes them; ``posterior.seed`` has those of :meth:`Posterior.predict`.
    """
    with torch.enable_grad():
        return posterior._predict(x, samples, seed, None).shaped(posterior.target_shape)


def rows_to_differentiate(posterior: Posterior, x: Tensor, samples: int) -> int:
    """How many rows of ``x`` at a time :func:`differentiable_prediction` may have."""
    each = 2 * samples * bytes_per_row(posterior.model, x, posterior.buffers)
    return max(1, free_memory(posterior.model.device) // (2 * each))


def predict_outputs(
    posterior: Posterior,
    x: Tensor,
    samples: int,
    seed: int,
    memory: int | None,
    *,
    only: tuple[int, int] | None = None,
    budget: Budget | None = None,
) -> tuple[Tensor, Params, Tensor]:
    """Network outputs ``(K, rows, ...)`` for K draws, the draws' likelihood parameters, and their log weights.

    ``only`` are the numbers of the first draw and of the one behind the last, where not all are wanted. ``budget`` is
    one made for rows of the same shape, which saves to measure what a row takes.
    """
    draws, log_weights = posterior.draws_for_prediction(samples, seed)
    first, last = only or (0, draws)
    budget = budget or Budget(posterior, x, draws, memory)
    outputs: Tensor | None = None
    own: list[Params] = []
    for start in range(first, last, budget.block):
        stop = min(start + budget.block, last)
        stack = draws_of_block(posterior, start, stop, samples, seed, keep=budget.keep)
        own.append({name: value.clone() for name, value in stack.items() if name.startswith("likelihood.")})
        network = posterior.model.network_params(stack)
        for row in range(0, len(x), budget.rows):
            rows = x[row : row + budget.rows]
            out = posterior.run_draws(network, rows, first=start, seed=seed, vectorise=budget.vectorise)
            if outputs is None:
                outputs = out.new_empty((last - first, len(x), *out.shape[2:]))
            outputs[start - first : stop - first, row : row + budget.rows] = out
    assert outputs is not None
    return outputs, {name: torch.cat([each[name] for each in own]) for name in own[0]}, log_weights[first:last]


def bytes_to_export(posterior: Posterior, x: Tensor | None, draws: int, memory: int) -> int:
    """Bytes of draws, and of an outcome and the log likelihoods of each; refuse a ``memory`` that is too small."""
    parameters = sum(value.numel() * value.element_size() for value in posterior.model.params().values())
    each = parameters if x is None else parameters + 2 * len(x) * _Footprint(posterior, x).output
    if draws * each > memory // 2:
        raise InvalidArgument(
            f"max_memory={memory:,} is too small: {draws:,} draws take {draws * each:,} bytes, and at most half may go "
            f"into them. Ask for fewer samples, or give fewer rows."
        )
    return draws * each


def check_result_fits(posterior: Posterior, x: Tensor, draws: int, memory: int | None) -> None:
    """Refuse a ``memory`` limit of which the outputs of ``draws`` draws alone would take more than half."""
    if memory is not None:  # or nothing is asked of the network
        _check_result(len(x) * draws * _bytes_of_output(posterior, x), draws, len(x), memory)


def _check_result(size: int, draws: int, rows: int, memory: int | None) -> None:
    if memory is not None and size > memory // 2:
        raise InvalidArgument(
            f"max_memory={memory:,} is too small: the outputs of {draws} draws for {rows:,} rows and their copies take "
            f"{size:,} bytes, and at most half may go into them. Use predict_stream, which yields predictions for "
            f"blocks of rows, or fewer samples."
        )


def rows_that_fit(posterior: Posterior, x: Tensor, samples: int, memory: int | None) -> int:
    """How many rows a prediction may have so that its result takes at most half of the memory."""
    per_row = _bytes_of_output(posterior, x) * samples
    return max(1, (memory or free_memory(posterior.model.device)) // (2 * per_row))


def free_memory(device: torch.device) -> int:
    """Working memory where no limit is given: 2 GiB, or half of what is free on a graphics card if that is less."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _DEFAULT_MEMORY
    return min(_DEFAULT_MEMORY, torch.cuda.mem_get_info(device)[0] // 2)


def draws_of_block(posterior: Posterior, start: int, stop: int, samples: int, seed: int, *, keep: bool) -> Params:
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


class Budget:
    """Sizes of the blocks of draws and of rows with which a prediction stays within its memory limit."""

    def __init__(self, posterior: Posterior, x: Tensor, draws: int, memory: int | None):
        footprint = _footprint(posterior, x)
        result = draws * len(x) * footprint.output
        _check_result(result, draws, len(x), memory)
        left = (memory or free_memory(posterior.model.device) + result) - result
        self.keep = draws * footprint.draw <= left // 4
        self.block = draws if self.keep else max(1, min(draws, left // (4 * footprint.draw)))
        left -= self.block * footprint.draw
        every = sum(value.numel() for value in posterior.model.net.parameters())
        self.vectorise = footprint.random <= max(_VECTORISE_BELOW, _OR_SHARE * every)
        together = min(self.block, DRAWS_AT_ONCE) if self.vectorise else 1
        each = footprint.working + (together - 1) * footprint.own
        most = min(left // 2, bytes_near(posterior.model)) if posterior.model.device.type == "cpu" else left // 2
        self.rows = max(1, int(most // each))


def bytes_near(model: Model) -> int:
    """Bytes of activations of a block of rows with which a processor is at its quickest."""
    return max(_CACHED, _PER_WEIGHT * sum(value.numel() * value.element_size() for value in model.net.parameters()))


class _Footprint:
    """Bytes per row: a draw's output with its copies, all activations, those of each draw alone; and of a draw."""

    def __init__(self, posterior: Posterior, x: Tensor):
        params, network, buffers = posterior.model.params(), posterior.model.network, posterior.buffers
        random = {name: value for name, value in params.items() if name not in posterior.points}
        all_params, rows = posterior.model.network_params(params), x[:2]
        varying = {name: value for name, value in all_params.items() if name in random}
        with torch.no_grad():
            function, once = _counted(lambda: network.given(all_params, varying, rows, buffers), len(rows))
            output, self.own = _counted(lambda: function(varying), len(rows))
        self.working = max(once, self.own)
        copies = posterior.model.likelihood.copies
        self.output = max(1, copies * output.numel() * output.element_size() // len(rows))
        self.draw = max(1, sum(value.numel() * value.element_size() for value in random.values()))
        self.random = sum(value.numel() for value in random.values())


def _footprint(posterior: Posterior, x: Tensor) -> _Footprint:
    """That of rows of this shape, measured once."""
    if not isinstance(x, Tensor):
        return _Footprint(posterior, x)
    key = (*x.shape[1:], len(x) > 1, x.dtype)
    if key not in posterior._footprints:
        posterior._footprints[key] = _Footprint(posterior, x)
    return posterior._footprints[key]


def _bytes_of_output(posterior: Posterior, x: Tensor) -> int:
    """Bytes of a row's output with its copies."""
    output = posterior.model.probe(x)
    return max(1, posterior.model.likelihood.copies * output.numel() * output.element_size() // len(output))


def bytes_per_row(model: Model, x: Tensor, buffers: Buffers) -> int:
    """Bytes of all activations of one row in a forward pass."""
    params, rows = model.network_params(model.params()), x[:2]
    with torch.no_grad():
        return _counted(lambda: model.network(params, rows, buffers=buffers), len(rows))[1]


def flops_per_row(model: Model, x: Tensor, buffers: Buffers | None = None) -> float:
    """Operations of a forward pass on one row, at least two for each parameter."""
    params, rows = model.network_params(model.params()), x[:2]
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.network(params, rows, buffers=model.buffers() if buffers is None else buffers)
    size = sum(value.numel() for value in params.values())
    return max(counted.get_total_flops() / len(rows), 2.0 * size)


def _counted(run: Callable[[], T], rows: int) -> tuple[T, int]:
    """What ``run`` returns, and the bytes that it allocates for each of so many rows."""
    with _CountBytes() as counted:
        output = run()
    return output, max(1, counted.bytes // rows)


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
