"""The log density that samplers draw from: of flat positions, for all chains at once.

A model's log joint and a user's own density have the same interface: positions ``(chains, D)`` in, values and gradients
out.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from knowable.core.compiling.recorder import BatchedGradient, Recorded
from knowable.core.model.data import Batch, Data
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.monte_carlo import bytes_per_row
from knowable.core.support.processes import ALONE, Processes
from knowable.core.support.time_limit import Deadline
from knowable.errors import InvalidArgument, InvalidType

Recordable = tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Tensor, ...]]
"""``(position, *constants) -> value, gradient`` as operations that can be recorded, and the constants."""

CHAINS_PER_BLOCK = 16  # and more, as far as they stay in the cache together
_CACHE_BYTES = 8 * 2**20
_BLOCK_BYTES = 128 * 2**20  # working memory of one call
_GROUP_FLOPS = 1e8  # of a forward pass: about 7 ms of a step on a core, beside which its overhead of 0.4 ms is little


class Target(ABC):
    """A log density, up to a constant, of positions ``(C, D)``."""

    function: BatchedGradient  # a resumed run restores its count of calls
    processes: Processes = ALONE  # that compute it together

    def __init__(self, layout: Layout, temperature: float = 1.0):
        self.step_graphs: dict[Any, Recorded] = {}  # compiled steps of kernels, by the step's function
        self.layout = layout  # how a flat position is cut into parameters
        self.temperature: float | Tensor = temperature  # T of p^(1/T), or one for each chain (C,); 1 is Bayes
        self.gradients = 0  # taken so far, each chain's counted
        self.time: Deadline | None = None  # of the block of transitions under way; None without a limit

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities ``(C,)`` and their gradients ``(C, D)``, at the target's temperature."""
        self._note(len(position))
        return self._tempered(*self._value_and_grad(position))

    def value(self, position: Tensor) -> Tensor:
        """Log densities ``(C,)``, at the target's temperature."""
        self._note(0)
        return self._value(position) / self.temperature

    def _tempered(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.temperature, Tensor):
            return value / self.temperature, gradient / self.temperature.unsqueeze(-1)
        return (value, gradient) if self.temperature == 1.0 else (value / self.temperature, gradient / self.temperature)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Gradients of all chains, and calls of the function, on which it depends when steps are compiled."""
        return self.gradients, self.function.calls, self.function.direct

    @counts.setter
    def counts(self, counts: Sequence[int]) -> None:
        self.gradients, self.function.calls, self.function.direct = counts

    def count(self, chains: int, gradients: int) -> None:
        """Count gradients that were taken within a fused step."""
        self.function.calls += gradients
        self._note(chains * gradients)

    def in_time(self, n: int) -> Iterator[int]:
        """Numbers of ``n`` transitions; where time is limited, of at least one and of those there is time for."""
        for i in range(n):
            if i and self.time is not None and self.time.enough:
                return
            yield i

    def _note(self, gradients: int) -> None:
        self.gradients += gradients
        if self.time is not None:
            self.time.check()

    def block_size(self, chains: int, x: Tensor | None = None) -> int:
        """How many of ``chains`` chains go through the target together, on all rows or on those of ``x``."""
        return chains

    def recordable(self, chains: int) -> Recordable | None:
        """What :meth:`value_and_grad` computes, to be recorded in a larger graph; None where steps are not compiled."""
        return None

    @property
    def _fuses(self) -> bool:
        alone = not self.processes.several  # a graph has no place for what others say
        return alone and self.function.compiling and not isinstance(self.temperature, Tensor)

    @abstractmethod
    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients at temperature 1."""

    @abstractmethod
    def _value(self, position: Tensor) -> Tensor:
        """Values at temperature 1."""


class DensityTarget(Target):
    """A log density of one dict of parameters, given by the user."""

    def __init__(
        self, log_density: Callable[[Params], Tensor], layout: Layout, *, temperature: float = 1.0, mode: str = "auto"
    ):
        if not callable(log_density):
            raise InvalidType(f"log_density must be a function of a dict of tensors, got {type(log_density).__name__}.")
        super().__init__(layout, temperature)
        self.function = BatchedGradient(lambda flat: _one_number(log_density(layout.views(flat))), mode=mode)

    def recordable(self, chains: int) -> Recordable | None:
        """See :class:`Target`; there are no constants."""
        return (self._recorded, ()) if self._fuses else None

    def _recorded(self, position: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.function.operations("gradient", position)
        return value / self.temperature, gradient / self.temperature

    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.function.value_and_grad(position)

    def _value(self, position: Tensor) -> Tensor:
        return self.function.value(position)


class ModelTarget(Target):
    r"""The log joint of a model given its point estimates, on the full-data scale.

    .. math:: \log p(D, \theta) = \sum_n \log p(y_n \mid x_n, \theta) + \log p(\theta)

    The network is in evaluation mode, so that this is one fixed function of the weights. Normal priors are added in
    closed form. Chains go through the network in blocks that stay in the cache, rows in blocks that stay in memory.

    Args:
        model: The model.
        data: Its rows; those of this process alone where ``size`` is larger than their number.
        points: Values of the parameters that are not random.
        buffers: The network's buffers.
        temperature: T of p^(1/T).
        mode: How gradients are computed.
        processes: Those that compute the sum over the rows together, each on its share; all see the same positions.
        size: Number of rows N of all processes, where each has rows of its own.
    """

    def __init__(
        self, model: Model, data: Data, *, points: Params, buffers: Buffers, temperature: float = 1.0,
        mode: str = "auto", processes: Processes = ALONE, size: int | None = None,
    ):  # fmt: skip
        start = model.params()
        super().__init__(Layout.of({name: start[name] for name in model.random_names}), temperature)
        self.model, self.size, self.points, self.buffers = model, size or data.size, points, buffers
        self.processes, self.divided = processes, size is not None
        self.normal_prior = NormalDensity.of(model, self.layout)  # None where the prior is another one
        self._prior_of_block = None if processes.several else self.normal_prior  # with several, once for their sum
        self.function = BatchedGradient(self._joint_of_batch, mode=mode)
        self.data = data
        self._options = {"points": points, "buffers": buffers, "temperature": temperature, "mode": mode}
        self._rows: dict[int, list[Batch]] = {}
        self._stands_for = 1.0
        self._row_bytes: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For a worker: without what was recorded here."""
        return partial(ModelTarget, **self._options), (self.model, self.data)

    def _bytes_per_row(self, x: Tensor) -> int:
        """Memory that the gradient of one chain takes for one row of ``x``, about."""
        if self._row_bytes is None:
            self._row_bytes = 3 * bytes_per_row(self.model, x, self.buffers)
        return self._row_bytes

    def value_and_grad(self, position: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """See :class:`Target`; with a batch of rows, which stands for all rows, an unbiased estimate."""
        self._note(len(position))
        return self._tempered(*self._value_and_grad(position, batch))

    def _value_and_grad(self, position: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        blocks = position.split(self.block_size(len(position), None if batch is None else batch[0]))
        value, gradient = _joined([self._block_gradient(block, batch) for block in blocks])
        if not self.processes.several:
            return value, gradient
        self.processes.add(value, gradient)
        prior = self.normal_prior
        return (value, gradient) if prior is None else prior.add_to(position, value, gradient)

    def _value(self, position: Tensor) -> Tensor:
        value = torch.cat([self._block_value(block) for block in position.split(self.block_size(len(position)))])
        if not self.processes.several:
            return value
        self.processes.add(value)
        return value if self.normal_prior is None else value + self.normal_prior.value(position)

    def block_size(self, chains: int, x: Tensor | None = None) -> int:
        """Equal blocks, of as many chains as stay in the cache on these rows, or sixteen."""
        if chains <= CHAINS_PER_BLOCK:
            return chains
        x = self.data.tensors[0] if x is None else x
        return equal_blocks(chains, self._bytes_per_row(x) * len(x))

    def recordable(self, chains: int, batch: Batch | None = None) -> Recordable | None:
        """See :class:`Target`; the constants are the rows. Rows in several pieces are too many for fusing to matter."""
        if not self._fuses:
            return None
        rows = self.rows(self.block_size(chains)) if batch is None else [batch]
        return (self._recorded, rows[0]) if len(rows) == 1 else None

    def _recorded(self, position: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.function.operations("gradient", position, *batch)
        scale = self.size / len(batch[0])
        value, gradient = value * scale, gradient * scale
        if self.normal_prior is not None:
            value, gradient = self.normal_prior.added(position, value, gradient)
        return value / self.temperature, gradient / self.temperature

    def _block_gradient(self, block: Tensor, batch: Batch | None) -> tuple[Tensor, Tensor]:
        value = gradient = None
        for rows in self.rows(len(block)) if batch is None else self._shared([batch]):
            part, slope = self.function.value_and_grad(block, *rows)
            value = part if value is None else value + part
            gradient = slope if gradient is None else gradient + slope
        if value is None or gradient is None:  # no row left for this process
            return block.new_zeros(len(block)), torch.zeros_like(block)
        scale = self._stands_for if batch is None else self.data.size / len(batch[0])
        if scale != 1.0:
            value, gradient = value.mul_(scale), gradient.mul_(scale)
        prior = self._prior_of_block
        return (value, gradient) if prior is None else prior.add_to(block, value, gradient)

    def _block_value(self, block: Tensor) -> Tensor:
        value = sum(self.function.value(block, *rows) for rows in self.rows(len(block)))
        value = value * self._stands_for if isinstance(value, Tensor) else block.new_zeros(len(block))
        return value if self._prior_of_block is None else value + self._prior_of_block.value(block)

    def _shared(self, pieces: list[Batch]) -> list[Batch]:
        """This process's share of rows that all have."""
        if not self.processes.several or self.divided:
            return pieces
        shares = [self.processes.share(each) for each in pieces]
        return [each for each in shares if len(each[0])]

    def rows(self, chains: int) -> list[Batch]:
        """All rows of this process, with their weights, cut so that ``chains`` chains on one piece fit in memory."""
        if chains not in self._rows:
            whole = self.data.tensors
            x = whole[0]
            pieces = math.ceil(len(x) / max(1, _BLOCK_BYTES // (self._bytes_per_row(x) * chains)))
            count = math.ceil(len(x) / pieces)
            self._rows[chains] = self._shared(list(zip(*(each.split(count) for each in whole), strict=True)))
            self._stands_for = self.data.size / len(x)  # 1, unless a loader gives another number of rows than announced
        return self._rows[chains]

    def _joint_of_batch(self, flat: Tensor, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Σ log p(y | x, θ) of these rows, and their share of log p(θ) where it has no closed form."""
        params = {**self.points, **self.layout.views(flat)}
        output = self.model.forward(params, x, buffers=self.buffers)
        total = self.model.score(output, y, params, weights).sum()
        if self.normal_prior is not None:
            return total
        return total + (len(x) / self.size) * self.model.log_prior(params)


class NormalDensity:
    """The log density of independent normals over a flat position, and its gradient, in closed form.

    Where all have mean 0 and one scale, which is the usual prior, two passes over the weights do.
    """

    def __init__(self, mean: Tensor, precision: Tensor):
        self.mean, self.precision = mean, precision  # (D,)
        self.constant = 0.5 * (precision.log() - math.log(2 * math.pi)).sum()
        simple = bool((mean == 0).all()) and bool((precision == precision[0]).all())
        self._common = precision[0].item() if simple else None

    @classmethod
    def of(cls, model: Model, layout: Layout) -> NormalDensity | None:
        """The prior of a model's random parameters, if all of it is normal."""
        means, precisions = {}, {}
        start = model.params()
        for name in layout.names:
            prior = model.prior.prior_of(name)
            moments = None if prior is None or not prior.proper else prior.normal_moments()
            if moments is None:
                return None
            like = {"dtype": start[name].dtype, "device": start[name].device}
            means[name] = torch.as_tensor(moments[0], **like).expand_as(start[name])
            precisions[name] = torch.as_tensor(moments[1], **like).expand_as(start[name])
        return cls(layout.flatten(means), layout.flatten(precisions))

    def value(self, position: Tensor) -> Tensor:
        """Log densities ``(C,)``."""
        return self.constant - 0.5 * ((position - self.mean).square() @ self.precision)

    def scaled(self, factor: float) -> NormalDensity:
        """``factor`` times the log density, which is no longer that of a distribution."""
        found = copy.copy(self)
        found.precision, found.constant = self.precision * factor, self.constant * factor
        found._common = None if self._common is None else self._common * factor
        return found

    def added(self, position: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`add_to` does, with new tensors."""
        if self._common is not None:
            squares = (position * position).sum(-1)
            return value + (self.constant - 0.5 * self._common * squares), gradient - self._common * position
        away = position - self.mean
        slope = away * self.precision
        return value + (self.constant - 0.5 * (slope * away).sum(-1)), gradient - slope

    def add_to(self, position: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Add the log densities and gradients at ``position`` to ``value`` and ``gradient``, in place."""
        if self._common is not None:
            value.add_(torch.linalg.vecdot(position, position), alpha=-0.5 * self._common).add_(self.constant)
            return value, gradient.add_(position, alpha=-self._common)
        away = position - self.mean
        slope = away * self.precision
        value.add_(torch.linalg.vecdot(away, slope), alpha=-0.5).add_(self.constant)
        return value, gradient.sub_(slope)


def equal_blocks(chains: int, bytes_each: int) -> int:
    """How many chains, or members, go through a network together: equal blocks that stay in the cache, or sixteen."""
    most = max(CHAINS_PER_BLOCK, _CACHE_BYTES // max(1, bytes_each))
    return math.ceil(chains / math.ceil(chains / most))


def worthwhile_group(count: int, flops: float) -> int:
    """How many chains, or members, advance together: equal groups in which a step costs little beside its arithmetic.

    ``flops`` are those of the forward pass of one of them, on all rows of a step. With more in a group a step takes
    longer in proportion, so that groups lose nothing, and can be apart.
    """
    most = max(1, math.ceil(_GROUP_FLOPS / max(1.0, flops)))
    return math.ceil(count / math.ceil(count / most))


def _one_number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidArgument(f"log_density must return one number as a tensor, got {got}. Sum over its terms.")
    return value


def _joined(blocks: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([value for value, _ in blocks]), torch.cat([gradient for _, gradient in blocks])
