"""What every data set here is: inputs, outcomes, and the words that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.prediction.components import restored
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.core.support.checks import check_count, check_number, check_type
from knowable.errors import InvalidArgument, InvalidData


@dataclass(frozen=True, eq=False)
class Truth:
    """The process that made a synthetic data set, in the units of that set.

    Attributes:
        mean: Expected outcome at inputs ``(batch, features)``, shaped ``(batch,)`` (regression).
        noise_std: Standard deviation of the noise at inputs, ``(batch,)`` (regression).
        probs: Probability of each class at inputs, ``(batch, classes)`` (classification).
        weights: The coefficients, ``(features,)``, where the truth is linear.
    """

    mean: Callable[[Tensor], Tensor] | None = None
    noise_std: Callable[[Tensor], Tensor] | None = None
    probs: Callable[[Tensor], Tensor] | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and outcomes with names, units and provenance.

    Attributes:
        name: Short name.
        x: Inputs, ``(rows, features)``, floating point.
        y: Outcomes: ``(rows,)`` floating point for numbers, or ``(rows,)`` whole numbers that index ``classes``.
        x_names: One name for each feature.
        y_name: Name of the outcome.
        x_units: Unit of each feature; an empty string where there is none.
        y_units: Unit of the outcome.
        classes: Names of the classes; empty for regression.
        description: What was measured, in a sentence or two.
        citation: BibTeX of the source.
        truth: How the data were made, where that is known.
    """

    name: str
    x: Tensor
    y: Tensor
    x_names: tuple[str, ...]
    y_name: str
    x_units: tuple[str, ...] = ()
    y_units: str = ""
    classes: tuple[str, ...] = ()
    description: str = ""
    citation: str = ""
    truth: Truth | None = None

    def __post_init__(self) -> None:
        check_type("x", self.x, Tensor, "a tensor")
        check_type("y", self.y, Tensor, "a tensor")
        if self.x.dim() != 2 or self.x.shape[1] != len(self.x_names):
            raise InvalidData(f"x must be (rows, {len(self.x_names)}), got shape {tuple(self.x.shape)}.")
        if self.y.shape != self.x.shape[:1]:
            raise InvalidData(f"y must have shape ({len(self.x)},) like the rows of x, got {tuple(self.y.shape)}.")
        if self.x_units and len(self.x_units) != len(self.x_names):
            raise InvalidArgument(f"x_units must name {len(self.x_names)} units or none, got {len(self.x_units)}.")
        if self.classes and self.y.is_floating_point():
            raise InvalidData("y must hold whole numbers that index classes, got floating point.")

    def __len__(self) -> int:
        return self.x.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack as ``x, y = data``."""
        return iter((self.x, self.y))

    def rows(self, index: Tensor) -> Dataset:
        """The rows that ``index`` names (positions or a mask), in that order."""
        return replace(self, x=self.x[index], y=self.y[index])

    def split(self, seed: int = 0, test: float = 0.2) -> tuple[Dataset, Dataset]:
        """Deal the rows at random into a training and a test set.

        Args:
            seed: The same seed gives the same split.
            test: Share of the rows to hold out, in (0, 1); at least one row stays on each side.

        Returns:
            ``(train, test)``, disjoint, together all rows.
        """
        test = check_number("test", test, above=0.0, below=1.0)
        if len(self) < 2:
            raise InvalidData(f"A split needs at least 2 rows, got {len(self)}.")
        held_out = min(max(round(test * len(self)), 1), len(self) - 1)
        order = self._shuffled(seed)
        return self.rows(order[held_out:]), self.rows(order[:held_out])

    def folds(self, k: int = 10, *, seed: int = 0) -> list[tuple[Dataset, Dataset]]:
        """Deal the rows at random into ``k`` folds for cross-validation.

        Returns:
            ``k`` pairs ``(train, test)``; every row is in exactly one test set, and the test sets differ in size by at
            most one row.
        """
        check_count("k", k, at_least=2, at_most=len(self))
        order = self._shuffled(seed)
        fold_of = torch.arange(len(self)) % k
        return [(self.rows(order[fold_of != fold]), self.rows(order[fold_of == fold])) for fold in range(k)]

    def standardised(self) -> tuple[Dataset, Scaler]:
        """Centre and scale every feature (and a numeric outcome) to mean 0 and standard deviation 1.

        The scaler takes other rows into the same units (``scaler.apply(test)``) and predictions back out of them
        (``scaler.restore(prediction)``). The truth, stated in original units, is left out of the result.

        Returns:
            ``(data, scaler)``.
        """
        scaler = Scaler.of(self)
        return scaler.apply(self), scaler

    def _shuffled(self, seed: int) -> Tensor:
        check_count("seed", seed, at_least=0)
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))

    def __repr__(self) -> str:
        kind = f"classes={len(self.classes)}" if self.classes else f"outcome={self.y_name!r}"
        return f"Dataset({self.name!r}, rows={len(self)}, features={len(self.x_names)}, {kind})"


# --- Standardised units and the way back, for data and for predictive distributions ----------------------------------


@dataclass(frozen=True, eq=False)
class Scaler:
    r"""The affine maps :math:`x' = (x - m_x) / s_x` and :math:`y' = (y - m_y) / s_y`.

    Attributes:
        x_mean: Mean of each feature, ``(features,)``.
        x_scale: Standard deviation of each feature, 1 where a feature is constant, ``(features,)``.
        y_mean: Mean of the outcome; 0 for classes, which are not scaled.
        y_scale: Standard deviation of the outcome; 1 for classes or a constant outcome.
    """

    x_mean: Tensor
    x_scale: Tensor
    y_mean: float = 0.0
    y_scale: float = 1.0

    @classmethod
    def of(cls, data: Dataset) -> Scaler:
        """Measure means and standard deviations (divided by n) on ``data``."""
        if len(data) == 0:
            raise InvalidData("Cannot standardise a data set without rows.")
        x_mean, x_scale = data.x.mean(0), data.x.std(0, correction=0)
        x_scale = torch.where(_varies(x_scale, x_mean), x_scale, torch.ones_like(x_scale))
        if data.classes:
            return cls(x_mean, x_scale)
        y_mean, y_scale = data.y.mean(), data.y.std(correction=0)
        return cls(x_mean, x_scale, y_mean.item(), y_scale.item() if _varies(y_scale, y_mean) else 1.0)

    def apply(self, data: Dataset) -> Dataset:
        """``data`` in standardised units; its truth, stated in original units, is dropped."""
        return replace(data, x=self.scale_x(data.x), y=self.scale_y(data.y), truth=None)

    def scale_x(self, x: Tensor) -> Tensor:
        """Inputs in standardised units."""
        return (x - self.x_mean) / self.x_scale

    def restore_x(self, x: Tensor) -> Tensor:
        """Inputs back in original units."""
        return x * self.x_scale + self.x_mean

    def scale_y(self, y: Tensor) -> Tensor:
        """Outcomes in standardised units (class labels come back untouched)."""
        return (y - self.y_mean) / self.y_scale if y.is_floating_point() else y

    def restore_y(self, y: Tensor) -> Tensor:
        """Outcomes back in original units (class labels come back untouched)."""
        return y * self.y_scale + self.y_mean if y.is_floating_point() else y

    def restore(self, prediction: RegressionPrediction) -> RegressionPrediction:
        """The predictive distribution of the outcome in its original units.

        Exact, not a change of two moments: densities gain the Jacobian 1 / s_y and every quantile moves with the map.
        """
        return restored(prediction, self.y_mean, self.y_scale)


def _varies(scale: Tensor, mean: Tensor) -> Tensor:
    """Whether a spread is more than the rounding error of the values it was measured on."""
    return scale > 10 * torch.finfo(scale.dtype).eps * mean.abs()
