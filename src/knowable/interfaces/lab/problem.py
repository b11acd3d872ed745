"""What the page asks for, checked: data on a plane, a network, a prior, a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.errors import InvalidArgument, InvalidType

TASKS = ("regression", "classes")
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "erf": kn.Erf}
MOST_POINTS, MOST_WIDTH, MOST_DEPTH, MOST_CLASSES = 400, 100, 3, 3
_FURTHEST = 1e6  # size of a coordinate


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Data and model of one picture."""

    task: str = "regression"
    points: tuple[tuple[float, ...], ...] = ()  # (x, y), or (x1, x2, class)
    view: tuple[float, float, float, float] = (-4.0, 4.0, -2.5, 2.5)  # the part of the plane that is shown
    width: int = 20  # units of a hidden layer
    depth: int = 1  # hidden layers
    activation: str = "tanh"
    prior: float = 1.0  # standard deviation of a weight
    by_width: bool = False  # whether that is divided by the root of the number of inputs of a layer
    noise: float | None = 0.1  # standard deviation of the outcomes; None is learned
    beta: float = 1.0  # weight of the KL in variational methods
    rate: float = 0.1  # of dropout
    seed: int = 0

    @classmethod
    def read(cls, given: Any) -> Problem:
        """Check what came from the page.

        Raises:
            InvalidArgument: With the field, what was expected and what came.
        """
        if not isinstance(given, Mapping):
            raise InvalidType(f"The problem must be an object, got {type(given).__name__}.")
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InvalidArgument(f"The problem has no field {unknown[0]!r}. It has {', '.join(sorted(known))}.")
        values = {**asdict(cls()), **given}
        task = check_choice("task", values["task"], TASKS)
        if not isinstance(values["by_width"], bool):
            raise InvalidType(f"by_width must be true or false, got {values['by_width']!r}.")
        noise = values["noise"]
        return cls(
            task=task,
            points=_points(values["points"], task),
            view=_view(values["view"]),
            width=check_count("width", values["width"], at_most=MOST_WIDTH),
            depth=check_count("depth", values["depth"], at_most=MOST_DEPTH),
            activation=check_choice("activation", values["activation"], tuple(ACTIVATIONS)),
            prior=check_number("prior", values["prior"], at_least=0.01, at_most=100.0),
            by_width=values["by_width"],
            noise=None if noise is None else check_number("noise", noise, at_least=0.001, at_most=100.0),
            beta=check_number("beta", values["beta"], at_least=0.001, at_most=100.0),
            rate=check_number("rate", values["rate"], at_least=0.01, at_most=0.9),
            seed=check_count("seed", values["seed"], at_least=0, at_most=10**6),
        )

    # --- as tensors and as a model -----------------------------------------------------------------------------------

    @property
    def classes(self) -> int:
        """How many classes there are, 2 at least."""
        return max(2, 1 + max((int(point[2]) for point in self.points), default=0))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs ``(N, 1)`` and outcomes ``(N, 1)``, or inputs ``(N, 2)`` and labels ``(N,)``."""
        rows = torch.tensor(self.points, dtype=torch.float32).reshape(len(self.points), -1)
        if self.task == "regression":
            return rows[:, :1], rows[:, 1:]
        return rows[:, :2], rows[:, 2].long()

    def network(self) -> nn.Sequential:
        """The network, with the initial weights of the seed."""
        torch.manual_seed(self.seed)
        sizes = [1 if self.task == "regression" else 2, *[self.width] * self.depth]
        layers: list[nn.Module] = []
        for number in range(self.depth):
            layers += [nn.Linear(sizes[number], sizes[number + 1]), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers, nn.Linear(self.width, 1 if self.task == "regression" else self.classes))

    def features(self) -> nn.Sequential:
        """The network of the linear model: as many bumps over the plane as the network is wide."""
        centres, spacing = bumps(self.view, self.width)
        return kn.features.RBF(centres, width=spacing).linear()

    @property
    def likelihood(self) -> kn.Likelihood:
        """Numbers with noise, or labels."""
        return kn.Gaussian(self.noise) if self.task == "regression" else kn.Categorical()

    def priors(self) -> dict[str, float]:
        """Scales of the network's weights, by name or glob; one for all where the width does not count."""
        if not self.by_width:
            return {"*": self.prior}
        inputs = [1 if self.task == "regression" else 2, *[self.width] * self.depth]
        scales = {f"{2 * layer}.weight": self.prior / math.sqrt(size) for layer, size in enumerate(inputs)}
        return {**scales, "*.bias": self.prior}

    def model(self, *, linear: bool = False) -> kn.Model:
        """The network with likelihood and prior, or the linear model on bumps."""
        if linear:
            return kn.Model(self.features(), self.likelihood, kn.Normal(self.prior))
        scales = self.priors()
        prior = kn.Normal(scales["*"]) if "*" in scales else {name: kn.Normal(size) for name, size in scales.items()}
        return kn.Model(self.network(), self.likelihood, prior)


def bumps(view: Sequence[float], count: int) -> tuple[Tensor, float]:
    """Centres ``(count, 1)`` of bumps that cover the view, and their width, the distance between two."""
    centres = torch.linspace(view[0], view[1], count).unsqueeze(1)
    return centres, round((view[1] - view[0]) / max(1, count - 1), 6)


def _points(given: Any, task: str) -> tuple[tuple[float, ...], ...]:
    length = 2 if task == "regression" else 3
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidType(f"points must be a list, got {type(given).__name__}.")
    if not given:
        raise InvalidArgument("There are no points yet. Click on the plane to add some, or choose an example.")
    if len(given) > MOST_POINTS:
        raise InvalidArgument(f"There are {len(given)} points, and the lab takes {MOST_POINTS} at most. Remove some.")
    for place, point in enumerate(given):
        numbers = isinstance(point, Sequence) and not isinstance(point, str) and len(point) == length
        if not numbers or any(isinstance(each, bool) or not isinstance(each, int | float) for each in point):
            what = "[x, y]" if length == 2 else "[x, y, class]"
            raise InvalidArgument(f"points[{place}] must be {what}, got {str(point)[:60]}.")
        if any(not -_FURTHEST <= float(each) <= _FURTHEST for each in point[:2]):  # NaN too
            raise InvalidArgument(f"points[{place}] must be between ±{_FURTHEST:g}, got {str(point)[:60]}.")
    if task == "classes":
        wrong = [point[2] for point in given if point[2] not in range(MOST_CLASSES)]
        if wrong:
            raise InvalidArgument(f"Classes are 0 to {MOST_CLASSES - 1}, got {wrong[0]}.")
        if len({point[2] for point in given}) < 2:
            raise InvalidArgument("All points are of one class. Add some of another: keys 1, 2 and 3 choose it.")
    elif len(given) < 2:
        raise InvalidArgument("There is one point. Add another one.")
    return tuple(tuple(point) for point in given)


def _view(given: Any) -> tuple[float, float, float, float]:
    if not isinstance(given, Sequence) or len(given) != 4:
        raise InvalidArgument(f"view must be [left, right, bottom, top], got {str(given)[:60]}.")
    left, right, bottom, top = (check_number("view", each, at_least=-10 * _FURTHEST, at_most=10 * _FURTHEST)
                                for each in given)  # fmt: skip
    if not (right > left and top > bottom):
        raise InvalidArgument(f"view must be [left, right, bottom, top] in this order, got {list(given)}.")
    return left, right, bottom, top
