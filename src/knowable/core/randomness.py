"""Seeds: one number from the user, independent streams from it, and the state that makes a resumed run exact."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

_PARALLEL_ABOVE = 65_536  # values; below it one thread is quicker
_PARTS = 4  # fixed, so that the noise does not depend on the machine


def derive_seed(seed: int, *path: int | str) -> int:
    """A new seed for the part of the work named by ``path``, independent of every other part."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on its own stream."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, *path))


def parallel_randn(rows: int, columns: int, *, like: Tensor) -> Tensor:
    """Standard normal noise ``(rows, columns)`` from the global generator, by several threads where that pays.

    A generator fills memory with one thread. Here each part has a generator of its own, seeded from the global one, so
    the result depends only on the global generator's state and never on timing.
    """
    size = rows * columns
    if size < _PARALLEL_ABOVE or like.device.type != "cpu":
        return torch.randn((rows, columns), dtype=like.dtype, device=like.device)
    noise = torch.empty((rows, columns), dtype=like.dtype)
    parts = noise.view(-1).chunk(_PARTS)
    seeds = torch.randint(2**62, (len(parts),)).tolist()
    list(_threads().map(_fill, parts, seeds))
    return noise


def _fill(part: Tensor, seed: int) -> None:
    part.normal_(generator=torch.Generator().manual_seed(seed))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PARTS, thread_name_prefix="knowable-noise")


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Run a block on its own global random stream, and leave the caller's untouched.

    Layers such as dropout draw from the global generator; a fit that runs inside this block is reproducible whatever
    the caller drew before, and the caller's own draws do not depend on the fit.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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
