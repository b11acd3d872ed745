"""What the chain loop needs of a sampler: a transition kernel over all chains at once, and its typed state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from knowable.core.chains.target import Target
from knowable.errors import InvalidArgument

S = TypeVar("S")


@dataclass(frozen=True)
class State:
    """Everything the next transition depends on, tuned settings included: what a checkpoint holds.

    The state of a kernel is a frozen dataclass below this one. Its fields are tensors, numbers, dataclasses of the same
    kind, or None. Tensors in a state are never changed in place: a transition makes a new state.
    """

    position: Tensor  # (chains, D)
    value: Tensor  # log density of each, (chains,)


@dataclass(frozen=True)
class Info:
    """What diagnostics want of one transition, each ``(chains,)``, or of n of them, ``(n, chains)``."""

    acceptance: Tensor | None = None  # acceptance probability
    diverging: Tensor | None = None  # 1 where the trajectory diverged, else 0
    energy: Tensor | None = None  # energy at the beginning of the trajectory
    steps: Tensor | None = None  # gradients taken
    swap: Tensor | None = None  # mean acceptance of a chain's swaps with hotter replicas

    def tensors(self) -> dict[str, Tensor]:
        """Those that the sampler has, by name."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if value is not None}


@dataclass(frozen=True)
class WarmUp:
    """Which transitions of the warm-up these are."""

    first: int  # number of the first of them, from 0
    total: int  # length of the whole warm-up


@dataclass(frozen=True)
class Block:
    """The outcome of n transitions of every chain."""

    positions: Tensor  # (n, chains, D)
    values: Tensor  # log density of each, (n, chains)
    info: Info  # for diagnostics, each (n, chains)

    @classmethod
    def stack(cls, transitions: list[tuple[State, Info]]) -> Block:
        """From the state after each transition, and its info."""
        states, infos = zip(*transitions, strict=True)
        named = [info.tensors() for info in infos]
        stacked = {name: torch.stack([each[name] for each in named]) for name in named[0]}
        positions, values = torch.stack([s.position for s in states]), torch.stack([s.value for s in states])
        return cls(positions, values, type(infos[0])(**stacked))


class Kernel(ABC):
    """A transition of all chains that leaves a target distribution as it is, and how it is tuned before.

    The kernel itself holds settings only; what changes is in the state, which goes in and comes out.
    """

    state_type: ClassVar[type[State]] = State
    """Class of the state, which a resumed run restores."""
    splits: ClassVar[tuple[str, ...]] = ()
    """Fields of the state that are each chain's own, where tuned chains have nothing else to do with each other."""

    @abstractmethod
    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> Any:
        """The state of chains that begin at ``position`` ``(chains, D)``."""

    @abstractmethod
    def advance(
        self, target: Target, state: Any, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[Any, Block]:
        """``n`` transitions of every chain, or those there is time for; with ``warmup`` they also tune the kernel."""

    def tuned(self, state: Any) -> dict[str, float]:
        """The settings that the warm-up found, for the report."""
        return {}


# --- a state as named tensors, for the checkpoint --------------------------------------------------------------------


def state_tensors(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors and numbers of a state, by the path of their fields (``"window.count"``)."""
    found: dict[str, Tensor] = {}
    for each in fields(state):
        name, value = prefix + each.name, getattr(state, each.name)
        if is_dataclass(value):
            found |= state_tensors(value, name + ".")
        elif isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            found[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return found


def restored_state(kind: type[S], tensors: dict[str, Tensor]) -> S:
    """The state that :func:`state_tensors` was made of; an error where the names are those of another version."""
    tensors = _as_named_now(tensors)
    try:
        state = _restored(kind, tensors, "")
    except KeyError:
        state = None
    if state is None or state_tensors(state).keys() != tensors.keys():
        raise InvalidArgument(
            "checkpoint was written by an older version of knowable, whose samplers kept another state: it cannot be "
            "resumed. Start again in a new folder."
        )
    return state


def _restored(kind: type[S], tensors: dict[str, Tensor], prefix: str) -> S:
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if name not in kind.__dataclass_fields__:  # type: ignore[attr-defined]  # a class variable
            continue
        path, options = prefix + name, get_args(hint) or (hint,)
        part = next((each for each in options if is_dataclass(each)), None)
        optional = type(None) in options
        if part is not None and (not optional or any(each.startswith(path + ".") for each in tensors)):
            values[name] = _restored(part, tensors, path + ".")  # type: ignore[arg-type]
        elif optional and path not in tensors:
            values[name] = None
        else:
            values[name] = tensors[path] if Tensor in options else options[0](tensors[path].item())
    return kind(**values)


_VECTORS = {  # of version 0.1.0, whose numbers are fields now
    "step": ("log_step", "log_averaged", "error", "updates", "anchor"),
    "length": ("log_length", "log_averaged", "slope", "change", "updates"),
    "energy": ("total", "weights", "step"),
}
_NAMES = {"batch.seed": "batch_seed", "batch.step": "batch_step", "noise.count": "noise_count"}


def _as_named_now(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state as version 0.1.0 named them, by the names of today."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in _VECTORS and value.dim() == 1:
            found |= {f"{name}.{part}": number for part, number in zip(_VECTORS[name], value, strict=True)}
            continue
        name = _NAMES.get(name, name).replace("replica.", "replicas.")
        found[f"{name.removesuffix('.sum')}.total" if name.endswith(".sum") else name] = value
    return found
