"""The result of a compression: the networks, and what was gained and lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from knowable.decisions.compress.export import export_onnx, export_program
from knowable.decisions.compress.plan import Plan
from knowable.decisions.compress.saving import save_network
from knowable.decisions.compress.sparse_code import Code


@dataclass(frozen=True)
class CompressedLayer:
    """One weight tensor.

    Attributes:
        name: The parameter's name in the original network.
        weights: How many weights it has there.
        nonzero: How many of them are left.
        before: Its shape in the original network.
        after: Its shape in the rewritten one; None if that does not need it.
        bits: Bits of a weight, 32 where it is an ordinary number of 32 bits.
        stored_bits: Bits of all of it on disk: values, and where they are.
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
    """What :func:`knowable.compress` gives back; ``print`` it for a table.

    Attributes:
        net: The smaller network, dense, in evaluation mode: rounded weights, dead units cut out. Of the original's
            class where only layers have changed, else a ``torch.fx`` graph module.
        masked: The original architecture with the same rounded weights, and zeros.
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
    _plan: Plan = field(default_factory=Plan)
    _codes: Mapping[str, tuple[Code, Tensor]] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Weights of all pruned tensors."""
        return sum(layer.weights for layer in self.layers)

    @property
    def nonzero(self) -> int:
        """Those of them that are left."""
        return sum(layer.nonzero for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Share of the weights of pruned tensors that are zero."""
        return 1 - self.nonzero / self.weights

    @property
    def compression(self) -> float:
        """Weights of pruned tensors for each that is left: |w| / |w ≠ 0|."""
        return self.weights / self.nonzero if self.nonzero else float("inf")

    @property
    def compression_by_bits(self) -> float:
        """Bits of all weights of pruned tensors before, over their bits after: values, and where they are."""
        stored = sum(layer.stored_bits for layer in self.layers)
        return self.weights * self.value_bits / stored if stored else float("inf")

    @property
    def compression_on_disk(self) -> float:
        """Bytes of the original as a safetensors file, over those of the folder that :meth:`save` writes."""
        return self.bytes_dense.before / self.bytes_sparse

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the network in sparse form to a folder that ``knowable.load_compressed`` reads."""
        return save_network(path, self.net, original=self.masked, plan=self._plan, codes=self._codes)

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
        from knowable.decisions.compress.text import as_text

        return as_text(self)
