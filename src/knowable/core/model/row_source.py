"""Rows that can be divided among processes, and read shuffled or in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from knowable.core.support.processes import Processes
from knowable.core.support.randomness import generator_for


class RowSource(ABC):
    """A loader whose rows are known by their numbers.

    Iterated, it gives the batches of one epoch, in an order that it draws from torch's generator.

    Attributes:
        size: Number of rows.
    """

    size: int

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches of an epoch."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch."""

    @abstractmethod
    def in_order(self) -> Iterable[Any]:
        """All rows once, in their order, in batches."""

    @abstractmethod
    def share(self, processes: Processes) -> RowSource | None:
        """The part of the rows that is this process's, which no other one has; None where they cannot be divided."""


class OwnRows(RowSource):
    """Rows in memory that only this process has.

    Args:
        rows: Inputs and targets.
        at_once: Rows of a batch in order.

    Attributes:
        steps: How many batches an epoch has; their sizes differ by one row at most.
    """

    def __init__(self, rows: tuple[Tensor, ...], at_once: int):
        self.rows, self.at_once, self.size, self.steps = rows, at_once, len(rows[0]), 1

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        # one draw from the global generator, however many rows there are: processes stay on the same stream
        generator = generator_for(int(torch.randint(2**62, ())), "order")
        if self.steps == 1:
            yield self.rows
            return
        order = torch.randperm(self.size, generator=generator).to(self.rows[0].device)
        for chosen in order.tensor_split(self.steps):
            if len(chosen):
                yield tuple(each.index_select(0, chosen) for each in self.rows)

    def in_order(self) -> Iterator[tuple[Tensor, ...]]:
        """All rows once, in order."""
        yield from zip(*(each.split(self.at_once) for each in self.rows), strict=True)

    def share(self, processes: Processes) -> OwnRows:
        """All of them: no other process has any."""
        return self
