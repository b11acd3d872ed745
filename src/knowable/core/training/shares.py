"""What a process adds to a step that several make together: its rows, its noise, and its gradient.

The loss of a step is the mean over the rows of all processes, and each process's loss is a mean over its own rows with
the prior or the KL on top. Weighted with the numbers of rows the losses add up to the one of all rows, in which prior
and KL count once, whatever rows each process has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from knowable.core.model.data import Batch, Data
from knowable.core.support.processes import Processes
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import InvalidData

LossOf = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
Counted = tuple[Batch, int]
"""Rows, and for how many they count: none where a process has nothing left and repeats what it had."""


class Shares:
    """The shares of this process in the steps of a run.

    Args:
        processes: This process among those of the fit.
        data: The rows: the same in all, or divided among them.
        seed: Of the fit.
    """

    def __init__(self, processes: Processes, data: Data, seed: int):
        self.processes, self.data, self.seed = processes, data, seed

    def groups(self, batches: Iterable[Batch], size: int, count: int) -> Iterator[list[Counted]]:
        """The rows of each step: ``size`` batches, the last time perhaps fewer; ``count`` batches are left."""
        source = iter(self._counted(batches, count))
        while group := list(itertools.islice(source, size)):
            yield group

    def _counted(self, batches: Iterable[Batch], count: int) -> Iterator[Counted]:
        if not self.processes.several:
            yield from ((batch, len(batch[0])) for batch in batches)
        elif not self.data.divided:
            for batch in batches:
                share = self.processes.share(batch)
                rows = len(share[0])
                yield (share, rows) if rows else (batch, 0)
        else:  # as many batches in all processes
            last, given = self.data.first, 0
            for last in itertools.islice(batches, count):
                given += 1
                yield last, len(last[0])
            yield from itertools.repeat((last, 0), count - given)

    def gradient(
        self,
        loss_of: LossOf,
        batches: Sequence[Counted],
        params: Sequence[nn.Parameter],
        step: int,
        *,
        divided: bool = False,
    ) -> dict[str, Tensor] | None:
        """Leave the gradient of the mean over all rows in ``params``; the loss and its terms, means like it.

        Args:
            loss_of: The loss of a batch and its terms.
            batches: This process's rows of the step.
            params: What is trained.
            step: The number of the step.
            divided: Whether ``params`` are divided among the processes: their gradients then come as sums.

        Returns:
            None where the loss is not finite.
        """
        rows, found = sum(count for _, count in batches), []
        weight = 1.0 if not divided else self._share_of_all(rows)
        for number, (batch, count) in enumerate(batches):
            with self.noise(step, number):
                loss, terms = loss_of(batch)
            if not self.processes.several and not math.isfinite(loss.item()):
                return None
            share = count / max(1, rows)
            (loss if len(batches) == 1 and not divided else weight * share * loss).backward()
            found.append((share, {"loss": loss.detach(), **terms}))
        means = found[0][1]
        if len(found) > 1:
            means = {name: torch.stack([share * each[name] for share, each in found]).sum(0) for name in means}
        if not self.processes.several:
            return means
        means = self._mean_of_all([] if divided else params, rows, means)
        return means if math.isfinite(means["loss"].item()) else None

    def noise(self, step: int, batch: int) -> AbstractContextManager[None]:
        """The random stream of a loss: of this process and step alone, so that a run goes on from anywhere.

        All other random numbers of the loop are the same in all processes.
        """
        if not self.processes.several:
            return nullcontext()
        return own_randomness(derive_seed(self.seed, "noise", self.processes.rank, step, batch))

    def _share_of_all(self, rows: int) -> float:
        count = torch.tensor(float(rows))
        self.processes.add(count)
        return rows / max(1.0, count.item())

    def _mean_of_all(self, params: Sequence[nn.Parameter], rows: int, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace gradients by their means over the rows of all processes; return those of the terms.

        Everything goes in one message. A parameter that has no gradient anywhere keeps none.
        """
        one = terms["loss"].new_ones(())
        there = [one * float(each.grad is not None) for each in params]
        numbers = torch.stack([each.detach().to(one).reshape(()) for each in (one, *terms.values(), *there)])
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in params]
        message = torch.cat([numbers, *(each.flatten() for each in found)])
        message = message.mul_(rows) if rows else message.zero_()  # a loss that counts for nothing may be NaN
        self.processes.add(message)
        count = message[0].clone()
        if count == 0:
            raise InvalidData("No process has a batch left: the loaders gave fewer batches than their lengths say.")
        sizes = [1, len(terms), len(params), *(each.numel() for each in params)]
        _, values, counted, *gradients = message.div_(count).split(sizes)
        for param, gradient, some in zip(params, gradients, counted.tolist(), strict=True):
            param.grad = gradient.view_as(param).to(param) if some else None
        return dict(zip(terms, values.unbind(), strict=True))

    def mean_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Average running statistics of the network, each of which is linear in what its process has seen."""
        for name, value in tensors.items():
            if self.processes.several and name.startswith("buffer.") and value.is_floating_point():
                mean = value.clone()
                self.processes.add(mean)
                value.copy_(mean / self.processes.count)
