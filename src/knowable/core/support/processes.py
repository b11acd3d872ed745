"""The processes that make one fit together, and all that they say to each other.

Every process runs the same program and comes to the same decisions; each computes on its share of the rows. What they
exchange goes through a :class:`Processes`: sums over all, values of the first one, and checks that all agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from knowable.errors import InvalidArgument, ProcessLost

T = TypeVar("T")
Rows = tuple[Tensor, ...]

_FEWEST = 2  # rows of a share: batch statistics need two


@dataclass(frozen=True)
class Processes:
    """This process among those of the fit; by default it is alone, and nothing is exchanged."""

    rank: int = 0  # its number
    count: int = 1  # how many there are

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and shows progress."""
        return self.rank == 0

    def share(self, rows: Rows) -> Rows:
        """This process's part of rows that all have: equal parts in order, of two rows at least; it may be empty."""
        total = len(rows[0])
        parts = min(self.count, max(1, total // _FEWEST))
        if self.rank >= parts:
            return tuple(each[:0] for each in rows)
        begin, end = total * self.rank // parts, total * (self.rank + 1) // parts
        return tuple(each[begin:end] for each in rows)

    def add(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over all processes; all go in one message."""
        if self.several:
            message = tensors[0] if len(tensors) == 1 else torch.cat([each.flatten() for each in tensors])
            with _exchange():
                dist.all_reduce(message)
            if len(tensors) > 1:
                for each, found in zip(tensors, message.split([each.numel() for each in tensors]), strict=True):
                    each.copy_(found.view_as(each))

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by that of the first process; those that are divided among processes stay."""
        if self.several:
            with _exchange(), torch.no_grad():
                for each in tensors:
                    if _is_divided(each):
                        continue
                    whole = each.detach().contiguous()
                    dist.broadcast(whole, 0)
                    each.copy_(whole)

    def all_finite(self, tensors: Iterable[Tensor]) -> bool:
        """Whether no number is NaN or infinite, in the parts of all processes."""
        local: list[Any] = list(tensors)
        local = [each.to_local() if self.several and _is_divided(each) else each for each in local]
        strange = torch.tensor(float(not all(torch.isfinite(each).all() for each in local)))
        self.add(strange)
        return strange.item() == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, or raises, in the first process, which alone calls it."""
        if not self.several:
            return make()
        found: list[Any] = [None, None]
        if self.first:
            try:
                found = [make(), None]
            except Exception as error:
                found = [None, error]
        with _exchange():
            dist.broadcast_object_list(found, 0)
        value, error = found
        if error is not None:
            raise error
        return value

    def gather(self, value: T) -> list[T]:
        """What every process has, in their order."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.count
        with _exchange():
            dist.all_gather_object(found, value)
        return found

    def in_turn(self, values: Iterable[T]) -> Iterator[T]:
        """The values of the first process, then those of the second, ...: the same sequence in all."""
        own = iter(values)
        for rank in range(self.count):
            while True:
                found = [next(own, None) if rank == self.rank else None]
                if self.several:
                    with _exchange():
                        dist.broadcast_object_list(found, rank)
                if found[0] is None:
                    break
                yield found[0]

    def agree(self, what: str, value: Any, advice: str) -> None:
        """Refuse a fit for which the processes were given different things."""
        found = self.gather(value)
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise InvalidArgument(f"{what} differ between process 0 and process {others[0]} of {self.count}. {advice}")


ALONE = Processes()


def _is_divided(value: Any) -> bool:
    """Whether each process has a part of a tensor."""
    from torch.distributed.tensor import DTensor  # takes a moment to import

    return isinstance(value, DTensor)


@contextmanager
def _exchange() -> Iterator[None]:
    """Turn the errors of torch.distributed into one that says what happened."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        late = "timed out" in said.lower() or "timeout" in said.lower()
        raise ProcessLost(
            f"Another process of the fit {'did not answer in time: it hangs, or it' if late else 'has gone: it'} was "
            f"stopped, ran out of memory or raised an error of its own (look at its output). Start again, with "
            f"checkpoint= to go on from the last state, and under torchrun --max-restarts=N that happens by itself; a "
            f"longer time: TorchDistributed(timeout=...). [{said}]"
        ) from error
