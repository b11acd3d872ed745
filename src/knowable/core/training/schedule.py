"""The learning-rate schedule, and when training stops.

With a fixed number of epochs the learning rate is constant for the first half and then falls to zero along a cosine.
Without one, it is constant until the loss has converged, and then falls over half as many steps again. Gradient noise
keeps the iterates at a distance from the optimum that grows with the step size; with the fall to zero they reach it.

The rate may also be restarted several times (cycles, each of which ends in an optimum of its own), or stay constant
(where the distribution of the iterates is of interest).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Any

SHAPES = ("fall", "constant")
WINDOW = 100  # steps averaged into one record of the history
_BLOCK = 5  # records compared with as many before them
_LONGEST = 20_000  # most steps at the full rate when the number of epochs is not fixed
_SHORTEST_FALL = 2_000  # fewest steps of falling rate


@dataclass
class Settling:
    """Detects when the loss has stopped improving.

    The mean loss of the last five records is compared with that of the five before. It has settled when the gain is
    below one standard error of the difference, or below ``tolerance``.
    """

    tolerance: float
    losses: list[float] = field(default_factory=list)

    def add(self, loss: float) -> None:
        """Take the mean loss of one more window."""
        self.losses = [*self.losses, loss][-2 * _BLOCK :]

    @property
    def settled(self) -> bool:
        """Whether the loss has stopped improving."""
        if len(self.losses) < 2 * _BLOCK:
            return False
        before, after = self.losses[:_BLOCK], self.losses[_BLOCK:]
        gain = _mean(before) - _mean(after)
        error = math.sqrt((_variance(before) + _variance(after)) / _BLOCK)
        return gain < max(self.tolerance, error)


@dataclass
class Schedule:
    r"""Learning rate and end of training.

    With several cycles and a fixed number of steps T the rate follows Huang et al. (2017): in each of M cycles

    .. math:: \alpha(t) = \frac{\alpha_0}{2} \Big( \cos\frac{\pi\,(t \bmod T/M)}{T/M} + 1 \Big).

    Without a fixed number, the first fall begins once the loss has converged, and the others are as long as it.
    """

    fixed_steps: int | None  # number of steps the user asked for, or None to stop when settled
    settling: Settling  # detects when the loss has converged
    fall_from: int | None = None  # the step at which the rate began to fall, once known
    scale: float = 1.0  # factor on the rate, halved after a divergence
    forced: bool = False  # the longest run was reached before the loss settled
    shape: str = "fall"  # "fall" or "constant"
    cycles: int = 1  # how often the rate falls
    warmup: int = 0  # steps over which the rate rises at the beginning
    most: int | None = None  # how many steps the time limit allows, if there is one
    timed: bool = False  # whether the time limit has shortened the run

    def __post_init__(self) -> None:
        if self.fixed_steps is not None and self.fall_from is None:
            self.fall_from = self.fixed_steps // 2 if self.cycles == 1 else 0

    @property
    def total_steps(self) -> int:
        """How many steps there will be, as far as is known now."""
        return self._planned_steps if self.most is None else min(self._planned_steps, self.most)

    @property
    def _planned_steps(self) -> int:
        """How many there would be without a time limit."""
        if self.fixed_steps is not None:
            return self.fixed_steps
        if self.fall_from is None:
            return _LONGEST + _LONGEST // 2
        if self.shape == "constant":
            return self.fall_from
        return self.fall_from + self.cycles * max(_SHORTEST_FALL, self.fall_from // 2)

    @property
    def converged(self) -> bool | None:
        """Whether the loss settled: before the rate fell, or by now if the steps were fixed (None: unknown).

        It is unknown with fewer than ten records, and where the loss rises with every cycle.
        """
        if self.forced or (self.timed and self.fixed_steps is None):
            return False
        if self.fixed_steps is None:
            return self.fall_from is not None
        told = self.cycles == 1 and len(self.settling.losses) == 2 * _BLOCK
        return self.settling.settled if told else None

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with at ``step``."""
        return self._fallen(step) * (1.0 if step >= self.warmup else (step + 1) / self.warmup)

    def _fallen(self, step: int) -> float:
        if self.shape == "constant" or self.fall_from is None or step < self.fall_from:
            return self.scale
        first, last = self._cycle_of(step)
        share = (step - first) / max(1, last - first)
        return self.scale * max(0.5 * (1 + math.cos(math.pi * min(1.0, share))), 1e-3)

    def ends_cycle(self, step: int) -> bool:
        """Whether the rate has fallen to its end once ``step`` steps are done."""
        if self.shape == "constant" or self.fall_from is None or step <= self.fall_from:
            return False
        return self._cycle_of(step - 1)[1] == step

    def _cycle_of(self, step: int) -> tuple[int, int]:
        """First step of the fall that ``step`` is in, and the one after its last."""
        begin = self.fall_from or 0
        length = (self.total_steps - begin) / self.cycles
        edges = [begin + round(number * length) for number in range(self.cycles + 1)]
        after = min(bisect.bisect_right(edges, step), self.cycles)
        return edges[after - 1], edges[after]

    def record(self, step: int, loss: float) -> None:
        """Take the mean loss of a finished window."""
        self.settling.add(loss)
        if self.fall_from is None and (self.settling.settled or step >= _LONGEST):
            self.forced = not self.settling.settled
            self.fall_from, self.timed = step, False

    def limit(self, step: int, possible: int) -> None:
        """There is time for ``possible`` steps in all: let the rate fall in time, or end.

        Without a fixed number of steps the falls begin where they would no longer fit in; M of them take M / (M + 2) of
        all steps at most. Once several cycles have begun, their lengths stay as they are.
        """
        if self.cycles > 1 and self.most is not None and self.fall_from is not None:
            self.most = step if possible <= step else self.most
        else:
            self.most = possible
        if self.fixed_steps is not None:
            self.timed = self.fixed_steps > self.most
            if self.fall_from is not None and step < self.fall_from:
                self.fall_from = min(self.fall_from, max(step, self.most // 2))
        elif self.fall_from is None and self.shape == "constant":
            self.timed = True
        elif self.fall_from is None:
            wanted = self.cycles * max(_SHORTEST_FALL, step // 2)
            if step + min(wanted, self.most * self.cycles // (self.cycles + 2)) >= self.most:
                self.fall_from, self.timed = step, not self.settling.settled

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "fall_from": self.fall_from, "scale": self.scale, "forced": self.forced, "timed": self.timed,
            "losses": self.settling.losses,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.fall_from, self.scale, self.forced = state["fall_from"], state["scale"], state["forced"]
        self.timed = state.get("timed", False)
        self.settling.losses = list(state["losses"])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _variance(values: list[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
