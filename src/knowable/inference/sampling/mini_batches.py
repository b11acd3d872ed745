"""Which batch comes at which step, and the gradient it gives.

The batch of step t follows from a seed and t alone, both of which are in a kernel's state: a resumed chain sees the
batches it would have seen. All chains share a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from knowable.core.chains.target import ModelTarget, Recordable, Target
from knowable.core.model.data import Batch, Data
from knowable.core.support.randomness import generator_for

_WHOLE = 1024  # rows up to which a step takes all of them
_ROWS = 128  # rows of a step beyond


def rows_per_step(batch_size: int | None, size: int) -> int:
    """The batch size for N rows: all rows up to 1,024 and 128 beyond, where it is not given."""
    return min(size, batch_size or (size if size <= _WHOLE else _ROWS))


def batch_seed(generator: torch.Generator) -> int:
    """The seed of all batches of a run, for a kernel's state."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class BatchTarget(Target):
    """A model's log density as one batch of rows, which may be changed, sees it."""

    def __init__(self, target: ModelTarget):
        super().__init__(target.layout)
        self.target, self.function, self.step_graphs = target, target.function, target.step_graphs
        self.batch: Batch | None = None

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates of the log densities ``(C,)`` of all rows and of their gradients ``(C, D)``."""
        return self.target.value_and_grad(position, self._rows)

    def count(self, chains: int, gradients: int) -> None:
        """Take note of gradients that were taken within a fused step."""
        self.target.count(chains, gradients)

    def block_size(self, chains: int, x: Tensor | None = None) -> int:
        """How many of so many chains go through the network together."""
        return self.target.block_size(chains, self._rows[0])

    def recordable(self, chains: int) -> Recordable | None:
        """See :class:`~knowable.core.chains.target.Target`; the rows are the constants."""
        return self.target.recordable(chains, self._rows)

    @property
    def _rows(self) -> Batch:
        assert self.batch is not None
        return self.batch

    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.value_and_grad(position)

    def _value(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]


class MiniBatches:
    r"""Log densities and gradients, each from the batch of its step.

    .. math:: \nabla \log p(\theta) + \frac{N}{B} \sum_{n \in B_t} \nabla \log p(y_n \mid x_n, \theta)

    Rows are drawn independently for every step, with replacement: the noise of the gradient is then as independent as
    the noise that the samplers inject, and its effect on the draws is known. Where there are no rows, or all of them
    fit in one batch, gradients are exact.
    """

    def __init__(self, target: Target, batch_size: int | None, seed: int):
        self.seed = seed
        self.data: Data | None = target.data if isinstance(target, ModelTarget) else None
        size = target.size if isinstance(target, ModelTarget) else 0
        self.rows = rows_per_step(batch_size, size) if size else 0
        self.exact = self.rows >= size  # whether the gradient is that of all rows
        self.per_epoch = 1 if self.data is None or self.exact else self.data.batches_per_epoch(self.rows)
        self.stream: tuple[int, ...] = ()  # of random numbers, beside the seed and the epoch
        if isinstance(target, ModelTarget) and target.divided:  # of a process's own rows, their share of a batch
            self.per_epoch = -(-size // self.rows)
            self.rows = max(1, round(self.rows * target.data.size / size))
            self.stream = (target.processes.rank,)
        self._at = -1  # the step whose batch comes next from the iterator
        self._iterator: Iterator[Batch] = iter(())
        self.current: Target = target  # the log density of the batch last used
        if not self.exact:
            assert isinstance(target, ModelTarget)
            self.current = BatchTarget(target)

    def of_step(self, step: int) -> Target:
        """The log density of the batch of ``step``; one object, which the next call changes."""
        if isinstance(self.current, BatchTarget):
            self.current.batch = self.batch(step)
        return self.current

    def gradient(self, position: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Values ``(C,)`` and gradients ``(C, D)`` from the batch of ``step``."""
        return self.of_step(step).value_and_grad(position)

    def batch(self, step: int) -> Batch:
        """The rows of ``step``."""
        assert self.data is not None
        epoch, number = divmod(step, self.per_epoch)
        if step != self._at or number == 0:
            generator = generator_for(self.seed, epoch, *self.stream)
            self._iterator = _independent(self.data, self.rows, self.per_epoch, generator, number)
        self._at = step + 1
        return next(self._iterator)


def _independent(data: Data, rows: int, count: int, generator: torch.Generator, skip: int) -> Iterator[Batch]:
    """Batches of rows drawn with replacement, from batch number ``skip`` on."""
    whole = data.tensors
    chosen = torch.randint(data.size, (count, rows), generator=generator).to(whole[0].device)
    for each in chosen[skip:]:
        yield tuple(part.index_select(0, each) for part in whole)
