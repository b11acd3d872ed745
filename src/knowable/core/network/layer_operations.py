"""The operations of layers: which functions of torch are linear maps and convolutions, and what their operands are.

Methods that change what a layer does with its weights, without changing the network, look for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR = F.linear
CONVOLUTIONS = frozenset(
    getattr(module, f"conv{kind}{n}d") for module in (F, torch) for kind in ("", "_transpose") for n in (1, 2, 3)
)
METADATA = frozenset(
    (
        "__get__",
        "__len__",
        "__repr__",
        "size",
        "dim",
        "stride",
        "numel",
        "ndimension",
        "is_floating_point",
        "is_complex",
    )
)
"""Names of functions that ask a tensor about itself and compute nothing."""

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def is_transposed(op: Callable[..., Any]) -> bool:
    """Whether ``op`` is a transposed convolution, whose weight has its inputs first."""
    return "transpose" in op.__name__


def operands(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Input, weight, bias and the other arguments of a linear or convolution call, by name."""
    names = _TRANSPOSED if is_transposed(op) else _ARGUMENTS
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.pop("input"), given.pop("weight"), given.pop("bias", None), given


_PRODUCTS = frozenset((torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__))
_PRODUCTS_WITH_BIAS = frozenset((torch.addmm, Tensor.addmm))


def right_product(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, weight and bias of a call for ``x W`` or ``b + x W``, with W ``(in, out)``; None for other calls."""
    if op in _PRODUCTS and len(args) == 2 and not kwargs:
        bias, (x, weight) = None, args
    elif op in _PRODUCTS_WITH_BIAS and len(args) == 3 and not kwargs:
        bias, x, weight = args
    else:
        return None
    is_layer = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[1:])
    return (x, weight, bias) if is_layer else None


# --- recurrent layers by steps, so that every product with a weight matrix is a call of its own ----------------------
#
# They replace ``torch.lstm`` and ``torch.gru`` while a network is traced; dropout between layers is off, as it is in
# evaluation.

Step = Callable[[Tensor, tuple[Tensor, ...], Sequence[Tensor]], tuple[Tensor, ...]]
"""``(input part of the gates, states, hidden weight and bias) -> new states``; the first one is the output."""


def lstm_by_steps(
    inputs: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What ``torch.lstm`` computes."""
    output, found = _run(_lstm_step, inputs, states, weights, has_biases, layers, bidirectional, batch_first)
    return output, found[0], found[1]


def gru_by_steps(
    inputs: Tensor, state: Tensor, weights: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``torch.gru`` computes."""
    output, found = _run(_gru_step, inputs, (state,), weights, has_biases, layers, bidirectional, batch_first)
    return output, found[0]


def lstm_is_plain(args: Sequence[Any]) -> bool:
    """Whether a call of ``torch.lstm`` is on padded sequences, without projections."""
    return len(args) == 9 and isinstance(args[1], tuple | list) and _plain(args[2], args[3], args[4], args[7])


def gru_is_plain(args: Sequence[Any]) -> bool:
    """Whether a call of ``torch.gru`` is on padded sequences."""
    return len(args) == 9 and isinstance(args[2], tuple | list) and _plain(args[2], args[3], args[4], args[7])


def _plain(weights: Sequence[Tensor], has_biases: bool, layers: int, bidirectional: bool) -> bool:
    return len(weights) == (4 if has_biases else 2) * layers * (2 if bidirectional else 1)


def _run(
    step: Step, inputs: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, layers: int,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """All layers and directions; states are ``(layers * directions, batch, hidden)`` each."""
    sequence = inputs.transpose(0, 1) if batch_first else inputs  # (steps, batch, features)
    each, directions = (4 if has_biases else 2), (2 if bidirectional else 1)
    final: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            first = tuple(state[number] for state in states)
            output, last = _one_direction(step, sequence, first, own, backwards=direction == 1)
            outputs.append(output)
            final.append(last)
        sequence = torch.cat(outputs, dim=-1)
    output = sequence.transpose(0, 1) if batch_first else sequence
    return output, [torch.stack([last[i] for last in final]) for i in range(len(states))]


def _one_direction(
    step: Step, sequence: Tensor, states: tuple[Tensor, ...], weights: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    biases = weights[2:] or (None, None)
    gates = F.linear(sequence, weights[0], biases[0])  # the inputs' part, of all steps together
    hidden = [each for each in (weights[1], biases[1]) if each is not None]
    outputs = []
    order = range(len(sequence) - 1, -1, -1) if backwards else range(len(sequence))
    for t in order:
        states = step(gates[t], states, hidden)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs), states


def _lstm_step(gates: Tensor, states: tuple[Tensor, ...], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    output, cell = states
    enter, forget, content, leave = (gates + F.linear(output, *hidden)).chunk(4, dim=-1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * content.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru_step(gates: Tensor, states: tuple[Tensor, ...], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (output,) = states
    reset, update, content = gates.chunk(3, dim=-1)
    own_reset, own_update, own_content = F.linear(output, *hidden).chunk(3, dim=-1)
    update = (update + own_update).sigmoid()
    content = (content + (reset + own_reset).sigmoid() * own_content).tanh()
    return (content + update * (output - content),)
