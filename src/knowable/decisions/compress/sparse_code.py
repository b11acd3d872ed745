"""Quantised and sparse weight tensors in few bytes.

Two layouts, of which the shorter is taken: all entries in order (``dense``), or the nonzero ones with the number of
zeros before each (``gaps``) in k bits, with the best k. A gap that does not fit is preceded by symbols of all ones,
each of which stands for 2^k - 1 zeros (Han, Mao and Dally, 2016); k = 1 is a bit mask. Entries are fixed-point numbers
of a few bits where the tensor is quantised, or the floating-point numbers themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.network.params import Params
from knowable.core.support.checks import check_count
from knowable.errors import DamagedArtifact, InvalidArgument

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_WIDEST_GAP = 16
FEWEST, MOST = 2, 16  # bits of a fixed-point weight


@dataclass(frozen=True)
class SparseCode:
    """How to read the bytes of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    layout: str  # "dense" or "gaps"
    count: int  # of the entries that are stored
    gap_bits: int = 0
    symbols: int = 0  # number of symbols for the gaps
    bits: int | None = None  # of an entry that is a fixed-point number
    step: float | None = None  # the quantisation step of fixed-point numbers

    @property
    def value_bits(self) -> int:
        """Bits of an entry."""
        return self.bits or 8 * _DTYPES[self.dtype].itemsize

    @property
    def place_bits(self) -> int:
        """Bits for the positions of the entries."""
        return self.symbols * self.gap_bits

    @property
    def total_bits(self) -> int:
        """Bits of positions and entries."""
        return self.place_bits + self.count * self.value_bits

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {key: value for key, value in asdict(self).items() if value not in (None, 0)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SparseCode:
        """The inverse of :meth:`to_json`; raises DamagedArtifact if a value is missing or out of range."""
        try:
            shape = tuple(int(each) for each in content["shape"])
            made = cls(**{"count": 0, **content, "shape": shape})
            whole = (made.count, made.gap_bits, made.symbols)
            fits = all(isinstance(each, int) and each >= 0 for each in whole) and made.gap_bits <= _WIDEST_GAP
            fits = fits and made.dtype in _DTYPES and (made.bits is None or FEWEST <= made.bits <= MOST)
            if not fits or made.count > prod(shape) or made.layout not in ("dense", "gaps"):
                raise ValueError("a number is out of range")
            return made
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedArtifact(f"A saved weight cannot be read: {error}.") from None


def encode(weight: Tensor, grid: QuantisationGrid | None = None) -> tuple[SparseCode, Tensor]:
    """A floating-point tensor as a code and its bytes, ``uint8``.

    The grid it was quantised to is ignored where a weight is not on it, so that decoding is exact.
    """
    flat = weight.detach().cpu().flatten()
    if grid is not None and not torch.equal(grid.rounded(flat), flat):
        grid = None
    places = flat.nonzero().squeeze(1)
    code = _shortest(weight, places, grid)
    written = flat if code.layout == "dense" else flat[places]
    return code, torch.cat([_place_bytes(code, places), _value_bytes(written, grid)])


def decode(code: SparseCode, stream: Tensor) -> Tensor:
    """The inverse of :func:`encode`."""
    head = -(-code.place_bits // 8)
    wanted = head + -(-code.count * code.value_bits // 8)
    if stream.dtype != torch.uint8 or stream.dim() != 1 or len(stream) != wanted:
        raise DamagedArtifact(f"A saved weight has {stream.numel()} bytes where {wanted} were expected.")
    values = _read_values(code, stream[head:])
    if code.layout == "dense":
        places = torch.arange(prod(code.shape))
    else:
        places = torch.from_numpy(_read_places(code, stream[:head].numpy()))
    if len(places) != code.count or (len(places) and int(places[-1]) >= prod(code.shape)):
        raise DamagedArtifact("A saved weight has places that do not fit its shape.")
    flat = torch.zeros(prod(code.shape), dtype=_DTYPES[code.dtype])
    flat[places] = values
    return flat.view(code.shape)


def _shortest(weight: Tensor, places: Tensor, grid: QuantisationGrid | None) -> SparseCode:
    common: dict[str, Any] = {
        "shape": tuple(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "bits": None if grid is None else grid.bits,
        "step": None if grid is None else grid.step,
    }
    gaps = _gaps(places)
    choices = [SparseCode(layout="dense", count=weight.numel(), **common)]
    for bits in range(1, _WIDEST_GAP + 1):
        symbols = len(gaps) + int((gaps // (2**bits - 1)).sum())
        choices.append(SparseCode(layout="gaps", count=len(places), gap_bits=bits, symbols=symbols, **common))
    return min(choices, key=lambda code: code.total_bits)


def _gaps(places: Tensor) -> np.ndarray:
    """Zeros before each entry."""
    return np.diff(places.numpy(), prepend=-1) - 1


def _place_bytes(code: SparseCode, places: Tensor) -> Tensor:
    if code.layout == "dense":
        return torch.zeros(0, dtype=torch.uint8)
    gaps, full = _gaps(places), 2**code.gap_bits - 1
    symbols = np.full(code.symbols, full, dtype=np.int64)
    symbols[np.cumsum(gaps // full + 1) - 1] = gaps % full
    return pack(symbols, code.gap_bits)


def _read_places(code: SparseCode, stream: np.ndarray) -> np.ndarray:
    symbols, full = unpack(stream, code.gap_bits, code.symbols), 2**code.gap_bits - 1
    last = symbols != full
    return (np.cumsum(symbols + last) - 1)[last]


def _value_bytes(values: Tensor, grid: QuantisationGrid | None) -> Tensor:
    if grid is None:
        return values.contiguous().view(torch.uint8)
    offset = 2 ** (grid.bits - 1)  # integers from -(2^(b-1) - 1) up, shifted to be positive
    return pack(grid.codes(values).long().numpy() + offset, grid.bits)


def _read_values(code: SparseCode, stream: Tensor) -> Tensor:
    dtype = _DTYPES[code.dtype]
    if code.bits is None or code.step is None:
        return stream.clone().view(dtype)
    codes = unpack(stream.numpy(), code.bits, code.count) - 2 ** (code.bits - 1)
    return QuantisationGrid(code.bits, code.step).values(torch.from_numpy(codes), dtype)


def pack(numbers: np.ndarray, bits: int) -> Tensor:
    """Integers below 2^bits as bytes, lowest bit first."""
    each = np.empty((len(numbers), bits), dtype=np.uint8)
    for bit in range(bits):
        each[:, bit] = (numbers >> bit) & 1
    return torch.from_numpy(np.packbits(each.reshape(-1), bitorder="little"))


def unpack(stream: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The inverse of :func:`pack`."""
    each = np.unpackbits(stream, count=bits * count, bitorder="little").reshape(count, bits)
    numbers = np.zeros(count, dtype=np.int64)
    for bit in range(bits):
        numbers |= each[:, bit].astype(np.int64) << bit
    return numbers


# --- quantisation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantisationGrid:
    """Multiples of ``step``, from -L to L of them with L = 2^(bits - 1) - 1 and ``bits`` bits for a weight."""

    bits: int
    step: float

    @classmethod
    def over(cls, weight: Tensor, bits: int) -> QuantisationGrid:
        """The grid that ends at the largest absolute weight."""
        largest = weight.abs().max() if weight.numel() else weight.new_zeros(())
        step = (largest / (2 ** (bits - 1) - 1)).item()
        return cls(bits, step if step > 0 else 1.0)

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest grid point to each weight, as an integer."""
        return (weight.double() / self.step).round()

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of integer codes."""
        return (codes.double() * self.step).to(dtype)

    def rounded(self, weight: Tensor) -> Tensor:
        """Each weight at its nearest grid point."""
        return self.values(self.codes(weight), weight.dtype)


def bits_needed(mean: Tensor, std: Tensor) -> int | None:
    r"""Bits for weights with these posterior means and standard deviations (Louizos, Ullrich and Welling, 2017).

    The step of the grid may be as large as the average standard deviation of the weights that are kept,
    :math:`s = \sqrt{\mathrm{mean}(\sigma^2)}`: rounding then moves a weight by at most s/2. With M the largest
    :math:`|\mu|` and :math:`2^{b-1} - 1` steps on either side of zero that is

    .. math:: b = \min \{ b \ge 2 : M / (2^{b-1} - 1) \le s \}.

    Returns:
        The bits, or None if 16 do not suffice: the weights then stay as they are.
    """
    if mean.numel() == 0:
        return FEWEST
    largest, spread = mean.double().abs().max().item(), std.double().square().mean().sqrt().item()
    return next((bits for bits in range(FEWEST, MOST + 1) if largest <= spread * (2 ** (bits - 1) - 1)), None)


def check_bits(bits: Any) -> str | int | None:
    """Return ``bits`` if it is None, ``"posterior"`` or a number of bits, or raise."""
    if bits is None or bits == "posterior":
        return bits
    if isinstance(bits, str):
        raise InvalidArgument(
            f"bits must be None, 'posterior' or a whole number from {FEWEST} to {MOST}; got {bits!r}."
        )
    return check_count("bits", bits, at_least=FEWEST, at_most=MOST)


def choose_grids(weights: Params, masks: Params, std: Params, bits: str | int | None) -> dict[str, QuantisationGrid]:
    """A quantisation grid for each pruned tensor: ``bits`` for all, or ``"posterior"`` for :func:`bits_needed`."""
    grids = {}
    for name, mask in masks.items() if bits is not None else ():
        kept = weights[name][mask]
        number = bits_needed(kept, std[name][mask]) if bits == "posterior" else bits
        if isinstance(number, int):
            grids[name] = QuantisationGrid.over(kept, number)
    return grids
