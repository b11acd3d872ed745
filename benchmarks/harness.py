"""Timing of contenders that do the same job, fairly and with the spread of the measurement.

A contender is a factory: called once, it builds what it needs and returns a step without arguments, which is what is
timed. All contenders of a case run in one process and take turns, so that whatever else the machine does hits all of
them alike; the order changes every round. A contender that cannot be imported, built or run stays in the result with
its error.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Step = Callable[[], object]
Factory = Callable[[], Step]


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Attributes:
        rounds: How often each contender gets its turn; each turn gives one time.
        inner: Steps in a turn, whose mean is that time.
        warmup: Untimed steps before the first round.
    """

    rounds: int = 15
    inner: int = 3
    warmup: int = 3

    def __post_init__(self) -> None:
        for name in ("rounds", "inner", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


QUICK = Plan(rounds=2, inner=1, warmup=1)


@dataclass(frozen=True)
class Case:
    """One table: contenders for the same job.

    Attributes:
        name: Short name, unique in its benchmark.
        title: What the table shows.
        contenders: The factories by name, in the order of the table's rows.
        reference: The contender to which all others are divided.
        plan: How long to measure in a full run.
        packages: Distributions whose versions belong beside the table.
        note: A sentence below the table.
    """

    name: str
    title: str
    contenders: Mapping[str, Factory]
    reference: str
    plan: Plan = Plan()
    packages: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.reference not in self.contenders:
            raise ValueError(f"reference must be one of {list(self.contenders)}, got {self.reference!r}.")


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and minimum of some measurements."""

    median: float
    lower: float
    upper: float
    minimum: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise at least one value; quartiles interpolate linearly between the sorted values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, min(values))


@dataclass
class Outcome:
    """What was measured of one contender.

    Attributes:
        milliseconds: Time of a step, one value a round.
        error: Why there are no times, in one line.
        memory: Peak memory, where it was asked for (see the memory module).
    """

    milliseconds: list[float] = field(default_factory=list)
    error: str | None = None
    memory: Mapping[str, float | str] | None = None

    def time(self) -> Spread | None:
        """Time of a step in milliseconds."""
        return Spread.of(self.milliseconds) if self.milliseconds and self.error is None else None

    def ratio(self, reference: Outcome) -> Spread | None:
        """Time over the reference's time in the same round, which cancels what slowed the whole round down."""
        if self.time() is None or reference.time() is None:
            return None
        return Spread.of([a / b for a, b in zip(self.milliseconds, reference.milliseconds, strict=True)])


def measure(contenders: Mapping[str, Factory], plan: Plan) -> dict[str, Outcome]:
    """Build, warm up and time all contenders in turn.

    Args:
        contenders: Factories by name.
        plan: How long to measure.

    Returns:
        An outcome for every contender, failed ones included, in the given order.
    """
    outcomes = {name: Outcome() for name in contenders}
    steps: dict[str, Step] = {}
    for name, factory in contenders.items():
        try:
            steps[name] = _warmed_up(factory, plan.warmup)
        except Exception as error:
            outcomes[name].error = one_line(error)
    for number in range(plan.rounds):
        gc.collect()
        for name in turns(list(steps), number):
            try:
                outcomes[name].milliseconds.append(_time_of_step(steps[name], plan.inner))
            except Exception as error:
                outcomes[name].error = one_line(error)
                del steps[name]
    return outcomes


def turns(names: list[str], number: int) -> list[str]:
    """The order of a round: rotated by its number, and backwards every other round to vary who follows whom."""
    shift = number % max(1, len(names))
    order = names[shift:] + names[:shift]
    return order[::-1] if number % 2 else order


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its message, without the folders of this machine."""
    lines = str(error).strip().splitlines() or [""]
    message = re.sub(r"(?<![\w.])(?:/[^\s/'\"():,]+)+/", "", lines[0])
    return f"{type(error).__name__}: {message}"[:200].rstrip(": ")


def _warmed_up(factory: Factory, warmup: int) -> Step:
    step = factory()
    for _ in range(warmup):
        _check_finite(step())
    return step


def _time_of_step(step: Step, inner: int) -> float:
    """Mean time of a step in milliseconds over ``inner`` of them."""
    result = None
    start = time.perf_counter()
    for _ in range(inner):
        result = step()
    elapsed = time.perf_counter() - start
    _check_finite(result)
    return elapsed / inner * 1e3


def _check_finite(result: object) -> None:
    """A step that returns numbers must return finite ones: time spent on NaN measures nothing."""
    value = result if isinstance(result, Tensor) else torch.tensor(result) if isinstance(result, float) else None
    if value is not None and not math.isfinite(float(value.detach().sum())):
        raise FloatingPointError("the step returned a value that is not finite")
