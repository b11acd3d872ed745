"""R-hat and effective sample sizes of every quantity of a run of chains, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knowable.core.chains.convergence import ess_bulk, ess_tail, rhat
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import Diagnostics

_ROWS = 24  # of a printed table
_NUMBERS_AT_ONCE = 2**22  # numbers whose moments are computed together


@dataclass(frozen=True, repr=False, eq=False)  # equal if the runs are: tensors have no one truth value
class ChainDiagnostics(Diagnostics):
    """The terms of a run of chains, and R-hat and effective sample sizes of every quantity.

    Attributes:
        rhat: Rank-normalised split R-hat of every element, by name; above 1.01 the chains have not mixed.
        ess: Bulk effective sample size of every element: independent draws with the same accuracy of the mean.
        ess_tail: The same for the 5% and 95% quantiles, the smaller one.
        mean: Means of the draws.
        std: Standard deviations of the draws.
    """

    rhat: Params = field(default_factory=dict)
    ess: Params = field(default_factory=dict)
    ess_tail: Params = field(default_factory=dict)
    mean: Params = field(default_factory=dict)
    std: Params = field(default_factory=dict)

    @classmethod
    def of(
        cls, draws: Params, run: Diagnostics | None = None, *, log_weights: Tensor | None = None
    ) -> ChainDiagnostics:
        """For draws ``(chains, draws, *shape)`` by name, with the diagnostics of the run they came from."""
        run = Diagnostics() if run is None else run
        known = {name: getattr(run, name) for name in Diagnostics.__dataclass_fields__}
        moments = {name: moments_of(value, log_weights) for name, value in draws.items()}
        return cls(
            **known,
            rhat={name: rhat(value) for name, value in draws.items()},
            ess={name: ess_bulk(value) for name, value in draws.items()},
            ess_tail={name: ess_tail(value) for name, value in draws.items()},
            mean={name: mean for name, (mean, _) in moments.items()},
            std={name: std for name, (_, std) in moments.items()},
        )

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._table()}" if self.rhat else super().__repr__()

    def _table(self) -> str:
        columns = {
            "mean": self.mean, "sd": self.std, "ess bulk": self.ess, "ess tail": self.ess_tail, "r-hat": self.rhat,
        }  # fmt: skip
        values = [torch.cat([each.reshape(-1) for each in column.values()]) for column in columns.values()]
        total = len(values[-1])
        order = list(range(total))
        if total > _ROWS:  # the worst ones
            order = values[-1].nan_to_num(-1.0).argsort(descending=True)[:_ROWS].tolist()
        names = {place: self._element_name(place) for place in order}
        width = max([12, *(len(name) for name in names.values())])
        lines = ["  " + " " * width + "".join(f"{title:>12}" for title in columns)]
        formats = ("{:>12.4g}", "{:>12.4g}", "{:>12.0f}", "{:>12.0f}", "{:>12.4f}")
        for place in order:
            cells = (f.format(v[place].item()) for f, v in zip(formats, values, strict=True))
            lines.append(f"  {names[place]:<{width}}" + "".join(cells))
        if total > _ROWS:
            lines.append(f"  ({_ROWS} of {total:,}, the largest R-hat)")
        return "\n".join(lines)

    def _element_name(self, place: int) -> str:
        """The name of one number of all of them, one parameter after the other."""
        for key, value in self.rhat.items():
            if place < value.numel():
                return element_name(key, value.shape, place)
            place -= value.numel()
        raise IndexError(place)


def element_name(key: str, shape: torch.Size, place: int) -> str:
    """``w[0, 1]`` for an element of a tensor; the key itself for a scalar.

    >>> element_name("w", torch.Size([2, 3]), 4)
    'w[1, 1]'
    """
    index = []
    for size in reversed(shape):
        place, last = divmod(place, size)
        index.insert(0, last)
    return f"{key}[{', '.join(map(str, index))}]" if index else key


def moments_of(draws: Tensor, log_weights: Tensor | None = None, *, correction: int = 1) -> tuple[Tensor, Tensor]:
    r"""Mean and standard deviation over the first two dimensions, in double precision.

    .. math:: m = \sum_s w_s \theta_s, \qquad \sqrt{\textstyle\sum_s w_s (\theta_s - m)^2 \, \frac{S}{S - c}}

    The result depends on the values alone, not on how they lie in memory, and little memory is used beside theirs.

    Args:
        draws: ``(chains, draws, ...)``.
        log_weights: Log weights ``(chains, draws)`` up to a constant; equal (and then :math:`w_s = 1/S`) if None.
        correction: c, for equal weights; the standard deviation of a single draw is then nan.
    """
    shape = draws.shape[2:]
    flat = draws.flatten(0, 1)
    count, block = len(flat), max(1, _NUMBERS_AT_ONCE // max(1, math.prod(shape)))
    equal = torch.full((count,), 1 / count, dtype=torch.float64, device=draws.device)
    weights = (equal if log_weights is None else log_weights.flatten().double().softmax(0)).unsqueeze(1)
    mean = torch.zeros(math.prod(shape), dtype=torch.float64, device=draws.device)
    square = torch.zeros_like(mean)
    for first in range(0, count, block):
        mean += (_some(flat, first, block) * weights[first : first + block]).sum(0)
    for first in range(0, count, block):
        square += ((_some(flat, first, block) - mean).square() * weights[first : first + block]).sum(0)
    if log_weights is None and correction:
        square = square * (count / (count - correction)) if count > correction else torch.full_like(square, math.nan)
    return mean.reshape(shape), square.sqrt().reshape(shape)


def _some(flat: Tensor, first: int, block: int) -> Tensor:
    """Rows of ``flat`` as a contiguous matrix ``(n, size)`` in double precision."""
    rows = flat[first : first + block].double()
    return rows.reshape(len(rows), -1).contiguous()
