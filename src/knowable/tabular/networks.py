"""Networks that suit small tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.prior import Prior
from knowable.core.support.checks import check_choice, check_count
from knowable.errors import DamagedArtifact, InvalidArgument
from knowable.priors import Normal

_NARROWEST, _WIDEST = 16, 128
_MOST_NUMBERS = 2**25  # of a saved network
_EMBEDDED_FROM = 8  # categories
_DEEP_FROM = 5_000  # rows
_GAIN = math.sqrt(2.0)
_MOSTLY_LINEAR = 0.25  # factor on what the layers add to logits, before their size is learned
_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


def default_network(
    inputs: int,
    outputs: int,
    rows: int,
    *,
    categorical: Sequence[slice] = (),
    gain: bool = False,
    activation: str = "tanh",
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """A network sized to the data: a :class:`ResidualMLP` beside a linear map of the inputs.

    Its width grows with the square root of the number of rows from 16 to 128: 16 up to 256 rows, 32 for 1,000, 100 for
    10,000. It has one residual layer, and two with 5,000 rows or more. Columns of 8 categories or more are embedded.

    Args:
        inputs: Numbers in a row.
        outputs: Numbers that the likelihood wants.
        rows: Training rows.
        categorical: Which of the inputs are the categories of one column, for each such column.
        gain: Whether the size of the outputs is learned, as logits need it.
        activation: ``"tanh"``, which is smooth and bounded where inputs are far out, or ``"relu"``, with which
            classifiers that are trained do better.
        dtype: Precision of the weights.
    """
    check_count("inputs", inputs)
    check_count("outputs", outputs)
    check_count("rows", rows)
    embedded = [(block.start, block.stop) for block in categorical if block.stop - block.start >= _EMBEDDED_FROM]
    return ResidualMLP(
        inputs, outputs, width=min(_WIDEST, max(_NARROWEST, round(math.sqrt(rows)))),
        depth=2 if rows >= _DEEP_FROM else 1, embedded=embedded, skip=True, gain=gain,
        activation=activation,
    ).to(dtype)  # fmt: skip


def default_prior(net: nn.Module, widened: float = 1.0) -> dict[str, Prior]:
    r"""The prior for a network of ours: :math:`w \sim \mathcal{N}(0, 2 / \text{inputs of its layer})`, others N(0, 1).

    The linear map beside the layers has half of that variance. Functions drawn from the prior are then of about the
    size of standardised targets, whatever the widths (Neal, 1996). With N(0, 1) on every weight they would grow with
    the widths, and networks would be free to follow the noise. Logits whose size is learned (``gain``) are mostly
    linear at first: what the layers add to them is a quarter of that size, unless the prior is widened.

    Args:
        net: The network.
        widened: Factor on the standard deviations of the weights in its layers, not of the linear map beside them: for
            networks that rows held out keep from following the noise.
    """
    layers = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
    gains = {name: 1.0 if name == "skip" else _GAIN * widened for name, _ in layers}
    if isinstance(net, ResidualMLP) and net.gain is not None and widened == 1.0:
        gains["last"] *= _MOSTLY_LINEAR
    scales = {name: float(f"{gains[name] / math.sqrt(layer.in_features):.4g}") for name, layer in layers}
    return {**{f"{name}.weight": Normal(scale) for name, scale in scales.items()}, "*": Normal(1.0)}


class ResidualMLP(nn.Module):
    r"""Hidden layers that add to what came before, and embeddings for columns of many categories.

    .. math:: h_0 = W_0 z, \qquad h_{l+1} = h_l + B_l\, \sigma(A_l h_l + a_l), \qquad
        f = e^{g_1} (W \sigma(h_L) + b) + e^{g_2} V x

    where z holds the inputs x, those of a column of categories replaced by their embedding. An embedding is a linear
    map of the numbers that are 1 for the category of the row and 0 elsewhere, so that every method which knows linear
    layers knows it. The linear map V is there with ``skip``: a linear relation then needs no hidden layer. The gains g
    are there with ``gain``, else zero: with them, the scales of the priors of W and V are learned like any weight.
    The activation σ is the hyperbolic tangent, or max(0, ·).

    Args:
        inputs: Numbers in a row.
        outputs: Numbers in the output.
        width: Of the hidden layers.
        depth: How many layers add to what came before.
        embedded: First input and the one after the last, of each column of categories that is to be embedded.
        skip: Whether a linear map of the inputs is added to the outputs.
        gain: Whether the size of both parts is learned.
        activation: ``"tanh"`` or ``"relu"``.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int = 64,
        depth: int = 2,
        embedded: Sequence[tuple[int, int]] = (),
        skip: bool = False,
        gain: bool = False,
        activation: str = "tanh",
    ):
        super().__init__()
        self.activation = check_choice("activation", activation, _ACTIVATIONS)
        self.inputs, self.outputs, self.width, self.depth = inputs, outputs, width, depth
        self.embedded = [(int(first), int(last)) for first, last in embedded]
        if any(not 0 <= first < last <= inputs for first, last in self.embedded):
            raise InvalidArgument(f"embedded must name ranges within {inputs} inputs, got {self.embedded}.")
        inside = {place for first, last in self.embedded for place in range(first, last)}
        self.plain = [place for place in range(inputs) if place not in inside]
        sizes = [embedding_size(last - first) for first, last in self.embedded]
        self.embeddings = nn.ModuleList(
            nn.Linear(last - first, size, bias=False) for (first, last), size in zip(self.embedded, sizes, strict=True)
        )
        self.first = nn.Linear(len(self.plain) + sum(sizes), width)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.last = nn.Linear(width, outputs)
        self.skip = nn.Linear(inputs, outputs, bias=False) if skip else None
        self.gain = nn.Parameter(torch.zeros(1 + skip)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        """Rows ``(batch, inputs)`` to ``(batch, outputs)``."""
        bent = _ACTIVATIONS[self.activation]
        parts = [embed(x[:, first:last]) for embed, (first, last) in zip(self.embeddings, self.embedded, strict=True)]
        hidden = self.first(torch.cat([x[:, self.plain], *parts], dim=1) if self.embedded else x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            hidden = hidden + outer(bent(inner(hidden)))
        outputs = [self.last(bent(hidden))]
        if self.skip is not None:
            outputs.append(self.skip(x))
        if self.gain is not None:
            outputs = [size * output for size, output in zip(self.gain.exp().unbind(), outputs, strict=True)]
        return torch.stack(outputs).sum(0) if len(outputs) > 1 else outputs[0]

    def settings(self) -> dict[str, Any]:
        """What it was made with, as plain values."""
        return {
            "inputs": self.inputs, "outputs": self.outputs, "width": self.width, "depth": self.depth,
            "embedded": [list(each) for each in self.embedded],
            "skip": self.skip is not None, "gain": self.gain is not None,
            "activation": self.activation,
        }  # fmt: skip


def embedding_size(categories: int) -> int:
    """How many numbers a category becomes: the square root of how many there are, at most 16."""
    return min(16, max(2, round(math.sqrt(categories))))


def network_to_json(net: nn.Module) -> dict[str, Any] | None:
    """How to make a network of ours again; None for any other, which the artifact describes if it can."""
    if type(net) is not ResidualMLP:
        return None
    dtype = next(net.parameters()).dtype
    return {"network": "ResidualMLP", "dtype": str(dtype).removeprefix("torch."), **net.settings()}


def network_from_json(saved: Mapping[str, Any] | None) -> nn.Module | None:
    """The network that was described, with weights not yet filled in."""
    if saved is None:
        return None
    try:
        dtype = {"float32": torch.float32, "float64": torch.float64}[saved["dtype"]]
        sizes = [saved[name] for name in ("inputs", "outputs", "width", "depth")]
        embedded = [number for pair in saved["embedded"] for number in pair]
        whole = all(type(each) is int and each >= 0 for each in (*sizes, *embedded))
        if (
            not whole
            or sum(sizes) * (saved["width"] + 16) > _MOST_NUMBERS
            or max(embedded, default=0) > saved["inputs"]
        ):
            raise ValueError("it is larger than any that is made for a table")
        return ResidualMLP(
            saved["inputs"], saved["outputs"], width=saved["width"], depth=saved["depth"],
            embedded=[(first, last) for first, last in saved["embedded"]], skip=saved.get("skip", False),
            gain=saved.get("gain", False), activation=saved.get("activation", "tanh"),
        ).to(dtype)  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedArtifact(f"The saved network cannot be made: {error!r:.300}. Pass network= instead.") from None
