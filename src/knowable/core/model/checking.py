"""Inputs and targets as users pass them, checked against the model that will see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.network.inputs import as_rows, check_inputs
from knowable.core.support.tensors import check_rows, to_tensor
from knowable.errors import InvalidData

if TYPE_CHECKING:
    from knowable.core.model.model import Model


def checked_pair(
    x: Any, y: Any, model: Model | None, name: str = "data", outputs: dict[Any, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets as ``model`` takes them, or an error that says what is wrong with which.

    ``outputs`` keeps the network's by the shape of rows, so that it is tried once for many batches.
    """
    of = "" if name == "data" else f" of {name}"
    x = as_rows(x, f"x{of}")
    y = targets_of(y, model, f"y{of}")
    if isinstance(x, Tensor):
        check_rows(x, f"x{of}")
    if not y.shape or x.shape[0] != y.shape[0]:
        raise InvalidData(
            f"x and y must have the same number of rows, got x {tuple(x.shape)} and y {tuple(y.shape)} in {name}."
        )
    check_inputs(x, f"x{of}")
    if model is None:
        return x, y
    x = cast_inputs(x, model)
    if outputs is None or not isinstance(x, Tensor) or not x.is_floating_point():
        output = model.probe(x)
    elif (output := outputs.get(x.shape[1:])) is None:
        output = outputs[x.shape[1:]] = model.probe(x)
    return x, model.likelihood.check_target(y.to(model.device), output, name=f"y{of}")


def cast_inputs(x: Tensor, model: Model) -> Tensor:
    """Cast to the model's dtype. Integer inputs are kept if the network accepts them (embeddings, masks)."""
    x = x.to(model.device)
    if x.is_floating_point():
        x = x.to(model.dtype)
        if isinstance(x, Tensor):
            return x
    params, buffers = model.network_params(model.params()), model.buffers()
    try:
        model.network.probe(x, params, buffers)
        return x
    except InvalidData as refused:
        cast = _all_cast(x, model.dtype)
        try:
            model.network.probe(cast, params, buffers)
        except InvalidData as again:
            takes_whole = "embedding" in str(refused) or "takes whole numbers" in str(again)
            if takes_whole or not isinstance(x, Tensor):  # an index out of range or a shape, and not its kind
                raise refused from None
            raise
        return cast


def _all_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x.mapped(lambda each: each.to(dtype))


def targets_of(y: Any, model: Model | None, name: str = "y") -> Tensor:
    """Targets with the rows first; several by name are :class:`~knowable.core.network.inputs.Inputs`."""
    if model is not None:
        return model.likelihood.rows_of(y, name)
    return as_rows(y, name) if isinstance(y, Mapping) else to_tensor(y, name)
