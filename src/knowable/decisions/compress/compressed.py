"""The result of a compression: the networks, their sizes and costs, and their scores."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from knowable.decisions.compress.rewrite import RewritePlan
from knowable.decisions.compress.saving import export_onnx, export_program, save_network
from knowable.decisions.compress.sparse_code import SparseCode


@dataclass(frozen=True)
class CompressedLayer:
    """One weight tensor.

    Attributes:
        name: The parameter's name in the original network.
        weights: How many weights it has there.
        nonzero: How many of them are not pruned.
        before: Its shape in the original network.
        after: Its shape in the rewritten network, or None if it was removed.
        bits: Bits of a weight; 32 for single precision.
        stored_bits: Bits of the tensor on disk: values and positions.
    """

    name: str
    weights: int
    nonzero: int
    before: tuple[int, ...]
    after: tuple[int, ...] | None
    bits: int
    stored_bits: int

    @property
    def sparsity(self) -> float:
        """Share of the weights that are zero."""
        return 1 - self.nonzero / self.weights


@dataclass(frozen=True)
class Change:
    """A number before and after."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times smaller it has become."""
        return self.before / self.after if self.after else float("inf")


@dataclass(frozen=True, repr=False)
class Compressed:
    """The result of :func:`knowable.compress`; ``print`` it for a table.

    Attributes:
        net: The smaller network, dense, in evaluation mode, with quantised weights and without dead units. Of the
            original's class where only layers have changed, else a ``torch.fx`` graph module.
        masked: The original architecture with the same quantised weights, and zeros.
        layers: One entry for each weight tensor that was pruned.
        parameters: Number of parameters of the network, before and after.
        multiply_adds: For one row, in linear layers and convolutions.
        bytes_dense: Size as a safetensors file: of the original, and of the rewritten network.
        bytes_sparse: Size of the folder that :meth:`save` writes.
        latency: Median seconds for the example batch on one thread, or None if not measured.
        scores: ``accuracy`` or ``rmse``, and ``nll``, of the network at the posterior mean and of ``net``; empty
            without data.
        difference: Largest difference between the outputs of ``net`` and ``masked`` on the example batch, relative to
            the largest output or 1.
        value_bits: Bits of a weight before.
        notes: What was left as it is, and why.
    """

    net: nn.Module
    masked: nn.Module
    layers: tuple[CompressedLayer, ...]
    parameters: Change
    multiply_adds: Change
    bytes_dense: Change
    bytes_sparse: int
    latency: Change | None
    scores: Mapping[str, Change]
    difference: float
    value_bits: int
    notes: tuple[str, ...]
    _example: Tensor = field(default_factory=lambda: Tensor())
    _plan: RewritePlan = field(default_factory=RewritePlan)
    _codes: Mapping[str, tuple[SparseCode, Tensor]] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Weights of all pruned tensors."""
        return sum(layer.weights for layer in self.layers)

    @property
    def nonzero(self) -> int:
        """Weights that are not pruned."""
        return sum(layer.nonzero for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Share of the weights of pruned tensors that are zero."""
        return 1 - self.nonzero / self.weights

    @property
    def compression(self) -> float:
        """The ratio |w| / |w ≠ 0| over the pruned tensors."""
        return self.weights / self.nonzero if self.nonzero else float("inf")

    @property
    def compression_by_bits(self) -> float:
        """Bits of all weights of pruned tensors before, over their bits after (values and positions)."""
        stored = sum(layer.stored_bits for layer in self.layers)
        return self.weights * self.value_bits / stored if stored else float("inf")

    @property
    def compression_on_disk(self) -> float:
        """Bytes of the original as a safetensors file, over those of the folder that :meth:`save` writes."""
        return self.bytes_dense.before / self.bytes_sparse

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the network in sparse form to a folder that ``knowable.load_compressed`` reads.

        Args:
            path: The folder.
            overwrite: Replace a network that was saved there before.
        """
        return save_network(
            path, self.net, original=self.masked, plan=self._plan, codes=self._codes, overwrite=overwrite
        )

    def to_export(self, path: str | os.PathLike[str]) -> Path:
        """Write the network as a ``torch.export`` program, ``*.pt2``, for batches of any size."""
        return export_program(self.net, self._example, path)

    def to_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write the network as an ONNX file, ``*.onnx``, for batches of any size.

        Raises:
            MissingExtra: If onnx or onnxscript is not installed.
        """
        return export_onnx(self.net, self._example, path)

    def as_dict(self) -> dict[str, Any]:
        """All the numbers, as plain values."""
        changes = ("parameters", "multiply_adds", "bytes_dense")
        return {
            "layers": [{**asdict(layer), "sparsity": layer.sparsity} for layer in self.layers],
            **{name: getattr(self, name) for name in ("weights", "nonzero", "sparsity", "compression")},
            **{name: getattr(self, name) for name in ("compression_by_bits", "compression_on_disk", "bytes_sparse")},
            **{name: asdict(getattr(self, name)) for name in changes},
            "latency": None if self.latency is None else asdict(self.latency),
            "scores": {name: asdict(change) for name, change in self.scores.items()},
            "difference": self.difference,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        first = (
            f"Compressed: {self.nonzero:,} of {self.weights:,} weights left "
            f"({self.sparsity:.2%} zero, {self.compression:.3g} times fewer)"
        )
        stored = (
            f"sparse on disk: {self.bytes_sparse:,} bytes, {self.compression_on_disk:.3g} times smaller than "
            f"the original ({self.compression_by_bits:.3g} times by the bits of the weights alone)"
        )
        layers = _aligned([_HEADER, *(_cells(layer) for layer in self.layers)])
        costs = _aligned([("", "before", "after", ""), *_costs(self)])
        return "\n".join([first, "", *layers, "", *costs, "", stored, *(f"note: {note}" for note in self.notes)])


# --- the table -------------------------------------------------------------------------------------------------------

_HEADER = ("weight", "weights", "nonzero", "sparsity", "before", "after", "bits")


def _cells(layer: CompressedLayer) -> tuple[str, ...]:
    after = "gone" if layer.after is None else _shape(layer.after)
    numbers = (f"{layer.weights:,}", f"{layer.nonzero:,}", f"{layer.sparsity:.2%}")
    return (layer.name, *numbers, _shape(layer.before), after, str(layer.bits))


def _costs(compressed: Compressed) -> list[tuple[str, str, str, str]]:
    rows = [
        _row("parameters", compressed.parameters, "{:,.0f}"),
        _row("multiply-adds a row", compressed.multiply_adds, "{:,.0f}"),
        _row("bytes, dense", compressed.bytes_dense, "{:,.0f}"),
    ]
    if compressed.latency is not None:
        milliseconds = Change(1e3 * compressed.latency.before, 1e3 * compressed.latency.after)
        rows.append(_row("milliseconds a batch", milliseconds, "{:.3g}"))
    scores = [(name, f"{each.before:.4g}", f"{each.after:.4g}", "") for name, each in compressed.scores.items()]
    return [*rows, *scores]


def _row(name: str, change: Change, form: str) -> tuple[str, str, str, str]:
    return name, form.format(change.before), form.format(change.after), f"{change.ratio:.3g}x"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "1"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: names to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# --- costs: parameters, multiply-adds, time --------------------------------------------------------------------------

_WARM_UP = 2


def count_parameters(net: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(value.numel() for value in net.parameters())


@torch.no_grad()
def multiply_adds(net: nn.Module, example: Tensor) -> int:
    """Multiply-adds of one row of ``example``, in linear layers and convolutions (other layers are not counted)."""
    counted = [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            counted[0] += output.numel() * module.in_features
        elif isinstance(module, _ConvTransposeNd):
            counted[0] += inputs[0].numel() * module.out_channels // module.groups * prod(module.kernel_size)
        elif isinstance(module, _ConvNd):
            counted[0] += output.numel() * module.in_channels // module.groups * prod(module.kernel_size)

    hooks = [each.register_forward_hook(count) for each in net.modules() if isinstance(each, nn.Linear | _ConvNd)]
    try:
        net(example)
    finally:
        for hook in hooks:
            hook.remove()
    return counted[0] // len(example)


@torch.no_grad()
def latencies(nets: Sequence[nn.Module], example: Tensor, repeats: int) -> list[float]:
    """Median seconds of a forward pass of each network, alternating, on one thread."""
    taken: list[list[float]] = [[] for _ in nets]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(_WARM_UP + repeats):
            for net, times in zip(nets, taken, strict=True):
                started = time.perf_counter()
                net(example)
                if example.is_cuda:
                    torch.cuda.synchronize(example.device)
                if turn >= _WARM_UP:
                    times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(times) for times in taken]
