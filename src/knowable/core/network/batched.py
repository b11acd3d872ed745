"""One batched call where torch can batch every operation, a loop where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LINEAR_ALGEBRA_ERROR: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[reportPrivateImportUsage]
"""A matrix that cannot be factorised or inverted: an error of the values, not of the operation."""


class batched:
    """``function`` where ``vmap`` accepts it, ``fallback`` from its first refusal on.

    A refusal is an error that the fallback does not raise: an error in the user's own code comes again from the
    fallback, without ``vmap`` around it, and is passed on. Operations that ``vmap`` would loop over by itself, slowly,
    count as refused.

    >>> from torch.func import vmap
    >>> branch = lambda row: row if row.sum() > 0 else -row
    >>> call = batched(vmap(branch), lambda rows: torch.stack([branch(row) for row in rows]))
    >>> call(torch.tensor([[1.0], [-2.0]])).flatten()
    tensor([1., 2.])
    >>> call.refused
    True

    Args:
        function: Makes one batched call (``vmap``, or ``is_grads_batched=True``).
        fallback: Takes the same arguments and returns the same, one item after the other.

    Attributes:
        refused: Whether ``function`` has been refused; it is not called again.
    """

    def __init__(self, function: Callable[..., Any], fallback: Callable[..., Any]):
        self.function, self.fallback = function, fallback
        self.refused = False

    def __call__(self, *args: Any) -> Any:
        """The result, by either way."""
        if self.refused:
            return self.fallback(*args)
        try:
            with no_hidden_loops():
                return self.function(*args)
        except RuntimeError as error:
            found = self.fallback(*args)
            self.refused = not isinstance(error, LINEAR_ALGEBRA_ERROR)
            return found


_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]


class no_hidden_loops:
    """Make ``vmap`` refuse operations that it can only loop over: an explicit loop is faster."""

    def __enter__(self) -> None:
        self.before = _FUNCTORCH._is_vmap_fallback_enabled()
        _FUNCTORCH._set_vmap_fallback_enabled(False)

    def __exit__(self, *_: object) -> None:
        _FUNCTORCH._set_vmap_fallback_enabled(self.before)
