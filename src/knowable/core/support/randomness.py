"""Seeds: one number from the user, independent streams from it, and the state that makes a resumed run exact."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_FAST_ABOVE = 16_384  # values; below it the set-up costs more than it saves
_FAST_MASK_ABOVE = 32_768
_IN_CACHE = 65_536  # numbers that are made together
_TO_UNIFORM = (1.0 - 2.0**-24) * 2.0**-31  # from int32 to the open interval (-1, 1), where erfinv is finite
_BITS = np.random.SFC64(0)
_LINEAR, _CUBIC = 0.6075658, 1.76908145  # of the 256 values u (a + b u²) the variance is 1 and the kurtosis 3


def derive_seed(seed: int, *path: int | str) -> int:
    """A new seed for the part of the work named by ``path``, independent of every other part."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on its own stream."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *path))


def fast_randn(rows: int, columns: int, *, like: Tensor) -> Tensor:
    """Standard normal noise ``(rows, columns)`` from the global generator; on the CPU faster than ``randn``.

    Bits from a small fast generator (SFC64), which is seeded from the global one each time, are taken as uniform
    numbers u in (-1, 1) and turned into normal ones by √2 erfinv(u). 32 bits a number and a largest value of 5.4
    standard deviations: as fine as float32 noise is.
    """
    size = rows * columns
    if size < _FAST_ABOVE or like.device.type != "cpu" or like.dtype != torch.float32:
        return torch.randn((rows, columns), dtype=like.dtype, device=like.device)
    noise, bits = torch.empty(size, dtype=torch.float32), _random_bits()
    for part in noise.split(_IN_CACHE):
        words = bits.random_raw((len(part) + 1) // 2).view(np.int32)[: len(part)]
        part.copy_(torch.from_numpy(words)).mul_(_TO_UNIFORM).erfinv_().mul_(math.sqrt(2.0))
    return noise.view(rows, columns)


def fast_keep(rows: int, columns: int, rate: float, *, like: Tensor) -> Tensor:
    """Ones, and with probability ``rate`` zeros, ``(rows, columns)``, from the global generator; fast on the CPU.

    The same generator as :func:`fast_randn` has, 32 bits a number.
    """
    size = rows * columns
    if size < _FAST_MASK_ABOVE or like.device.type != "cpu":
        return (torch.rand((rows, columns), device=like.device) >= rate).to(like.dtype)
    words = torch.from_numpy(_random_words((size + 1) // 2).view(np.int32))
    kept = words[:size] >= min(round(rate * 2**32) - 2**31, 2**31 - 1)
    return kept.view(rows, columns).to(like.dtype)


def raw_noise(rows: int, columns: int, *, like: Tensor) -> Tensor:
    """What :func:`noise_from` turns into noise: a random byte for each number, or a normal one where that is as fast.

    Bytes come as int32, which compilers vectorise.
    """
    size = rows * columns
    if size < _FAST_ABOVE or like.device.type != "cpu" or like.dtype != torch.float32:
        return torch.randn((rows, columns), dtype=like.dtype, device=like.device)
    return torch.from_numpy(_random_words((size + 7) // 8).view(np.int8))[:size].to(torch.int32).view(rows, columns)


def noise_from(raw: Tensor) -> Tensor:
    r"""Independent numbers with the first five moments of a standard normal, from :func:`raw_noise`.

    .. math:: \xi = u\,(0.608 + 1.769\, u^2), \qquad u \in \{\pm 1, \pm 3, \ldots, \pm 255\} / 256

    The increments of Langevin dynamics need not be normal: it is their moments that count (Dünweg and Paul, 1991;
    Kloeden and Platen, 1992, chapter 14, do with three values). Draws are sums of many increments, and have the same
    law up to the error that the size of the step brings anyhow.
    """
    if raw.is_floating_point():
        return raw
    number = raw.to(torch.float32) + 0.5
    return number * (_LINEAR * 2.0**-7 + (_CUBIC * 2.0**-21) * (number * number))


def _random_words(count: int) -> np.ndarray:
    """64-bit words of a generator seeded from the global one."""
    return _random_bits().random_raw(count)


def _random_bits() -> np.random.SFC64:
    """An SFC64 generator seeded from the global one, mixed as its author advises: twelve words dropped."""
    seed = torch.randint(-(2**63), 2**63 - 1, (3,)).numpy()
    bits = copy.copy(_BITS)
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.append(seed.view(np.uint64), np.uint64(1))},
        "has_uint32": 0,
        "uinteger": 0,
    }
    bits.random_raw(12, output=False)
    return bits


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Run a block on its own global random stream, and leave the caller's untouched.

    Layers such as dropout draw from the global generator; a fit that runs inside this block is reproducible whatever
    the caller drew before, and the caller's own draws do not depend on the fit.
    """
    # without an accelerator torch.manual_seed would still format the call stack for CUDA's queue, 2 ms in a deep one
    seed_generators = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng():
        seed_generators(seed)
        yield


def random_state() -> dict[str, Tensor]:
    """The state of the global generators, as tensors that can be saved."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state |= {f"cuda:{i}": each for i, each in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Put the global generators back."""
    torch.set_rng_state(state["cpu"])
    for name, each in state.items():
        if name.startswith("cuda:"):
            torch.cuda.set_rng_state(each, int(name.removeprefix("cuda:")))
