"""Chains that draw apart: once they are tuned, groups of them may advance elsewhere.

In the warm-up all chains learn together. After it, chains of some kernels have nothing to do with each other, and where
a gradient is mostly arithmetic, a group alone is as fast as all at once, chain by chain. Each group has a stream of
random numbers of its own for every block of transitions, so that its draws are the same wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from knowable.core.chains.kernel import Block, Info, Kernel
from knowable.core.chains.target import Target
from knowable.core.compiling.engine import Engine
from knowable.core.support.progress import ProgressSetting
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness


@dataclass(frozen=True)
class Apart:
    """How chains draw apart."""

    size: int  # chains in a group
    engine: Engine  # where they advance
    progress: ProgressSetting = False  # of the engine


@dataclass(frozen=True)
class _Group:
    """A block of transitions of some chains."""

    first: int  # chain
    state: Any  # of these chains
    transitions: int
    done: int  # transitions before
    seed: int
    counts: tuple[int, int, int]  # of the target, on which it depends when steps are compiled


def advance_apart(
    apart: Apart, kernel: Kernel, target: Target, state: Any, transitions: int, *, done: int, seed: int
) -> tuple[Any, Block]:
    """What ``kernel.advance`` does, group by group."""
    chains, before = len(state.position), target.counts
    groups = [
        _Group(first, _some(kernel, state, first, first + apart.size), transitions, done, seed, before)
        for first in range(0, chains, apart.size)
    ]
    found = {
        group.first: result
        for group, result in apart.engine.run(
            _advanced, (kernel, target), groups, label="drawing", progress=apart.progress
        )
    }
    states, blocks, counts = zip(*(found[group.first] for group in groups), strict=True)
    target.counts = (
        before[0] + sum(each[0] - before[0] for each in counts),  # of all chains
        max(each[1] for each in counts),  # of calls, which groups make side by side
        max(each[2] for each in counts),
    )
    together = {name: torch.cat([getattr(each, name) for each in states]) for name in kernel.splits}
    infos = [block.info.tensors() for block in blocks]
    info = Info(**{name: torch.cat([each[name] for each in infos], dim=1) for name in infos[0]})
    positions, values = (torch.cat([getattr(each, name) for each in blocks], dim=1) for name in ("positions", "values"))
    return replace(states[0], **together), Block(positions, values, info)


def _some(kernel: Kernel, state: Any, first: int, end: int) -> Any:
    return replace(state, **{name: getattr(state, name)[first:end] for name in kernel.splits})


def _advanced(shared: tuple[Kernel, Target], group: _Group) -> tuple[Any, Block, tuple[int, int, int]]:
    """Advance one group."""
    kernel, target = shared
    target.counts = group.counts
    path = ("transitions", group.first, group.done)
    generator = generator_for(group.seed, *path, device=group.state.position.device)
    with own_randomness(derive_seed(group.seed, "chains", *path)):
        state, block = kernel.advance(target, group.state, group.transitions, generator=generator)
    return state, block, target.counts
