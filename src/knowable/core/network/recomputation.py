"""Activation checkpointing (``torch.utils.checkpoint``) in a network that runs with other tensors than its own.

A checkpointed block runs once more in the backward pass, when the module has its own tensors back. Here the second run
is given the tensors of the first. Where more than autograd watches the first run (``torch.func``, a trace of the
weights' uses, a recording), the block runs as if it were not checkpointed: the same numbers, for more memory.

Torch offers no hook for it, so that two of its functions are replaced once. Outside of our networks they do what they
did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext

Block = Callable[..., Any]
"""What is checkpointed: a module or a function."""

_once_more: ContextVar[Callable[[Block], Block] | None] = ContextVar("once_more", default=None)


@contextmanager
def recomputed_by(once_more: Callable[[Block], Block]) -> Iterator[None]:
    """Inside this block, ``once_more`` says how a checkpointed block is run in the backward pass."""
    before = _once_more.set(once_more)
    try:
        yield
    finally:
        _once_more.reset(before)


_without_reentrance = torch_checkpoint._checkpoint_without_reentrant_generator
_with_reentrance = torch_checkpoint.CheckpointFunction.apply


def _around_the_first_run(block: Block, preserve_rng_state: bool = True, *rest: Any, **kwargs: Any) -> Iterator[None]:
    once_more = _once_more.get()
    if once_more is None:
        return _without_reentrance(block, preserve_rng_state, *rest, **kwargs)
    if _is_watched():
        return iter((None,))
    return _without_reentrance(once_more(block), True, *rest, **kwargs)  # weights may be drawn inside the block


def _reentrant(block: Block, preserve_rng_state: bool, *args: Any) -> Any:
    """The older form cannot give gradients of the block's weights unless they are leaves: take the newer one."""
    if _once_more.get() is None:
        return _with_reentrance(block, preserve_rng_state, *args)
    return torch_checkpoint.checkpoint(block, *args, use_reentrant=False)


def _is_watched() -> bool:
    inside: Any = torch._C
    modes = _get_current_function_mode_stack()
    return (
        inside._functorch.peek_interpreter_stack() is not None
        or any(not isinstance(mode, DeviceContext) for mode in modes)
        or inside._len_torch_dispatch_stack() > 0
    )


torch_checkpoint._checkpoint_without_reentrant_generator = _around_the_first_run
torch_checkpoint.CheckpointFunction.apply = _reentrant  # type: ignore[method-assign]
