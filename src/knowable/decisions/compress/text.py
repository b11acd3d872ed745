"""A compression as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from knowable.decisions.compress.compressed import Change, Compressed, CompressedLayer

_HEADER = ("weight", "weights", "nonzero", "sparsity", "before", "after", "bits")


def as_text(compressed: Compressed) -> str:
    """Totals, the layers, what it costs before and after, and notes."""
    first = (
        f"Compressed: {compressed.nonzero:,} of {compressed.weights:,} weights left "
        f"({compressed.sparsity:.2%} zero, {compressed.compression:.3g} times fewer)"
    )
    layers = _aligned([_HEADER, *(_cells(layer) for layer in compressed.layers)])
    costs = _aligned([("", "before", "after", ""), *_costs(compressed)])
    notes = [f"note: {note}" for note in compressed.notes]
    return "\n".join([first, "", *layers, "", *costs, "", _stored(compressed), *notes])


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


def _stored(compressed: Compressed) -> str:
    return (
        f"sparse on disk: {compressed.bytes_sparse:,} bytes, {compressed.compression_on_disk:.3g} times smaller than "
        f"the original ({compressed.compression_by_bits:.3g} times by the bits of the weights alone)"
    )


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
