"""What is known of the outcomes of the training rows: enough for a guess without inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.errors import DamagedArtifact, InvalidType
from knowable.likelihoods.categorical import CategoricalPrediction
from knowable.likelihoods.normal_components import NormalComponents


@dataclass(frozen=True)
class Outcomes:
    """Moments of numbers, or counts of classes.

    Attributes:
        mean: Mean of the numbers; 0 for classes.
        std: Their standard deviation (divided by n).
        counts: Rows of each class; empty for numbers.
    """

    mean: float = 0.0
    std: float = 1.0
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, y: Tensor, classes: int = 0) -> Outcomes:
        """Of numbers ``(rows,)``, or of codes where there are ``classes``."""
        if classes:
            return cls(counts=tuple(torch.bincount(y.flatten().long(), minlength=classes).tolist()))
        known = y.double().flatten()
        return cls(known.mean().item(), known.std(correction=0).item())

    def guess(self, prediction: Prediction) -> Prediction:
        """What one would say of each row of ``prediction`` knowing only this.

        Numbers: the normal distribution with their mean and standard deviation. Classes: their shares, with one more
        of each, so that none is held impossible.
        """
        rows, weight = len(prediction), torch.zeros(1, dtype=torch.float64)
        if isinstance(prediction, RegressionPrediction):
            mean = torch.tensor(self.mean, dtype=torch.float64).expand(1, rows, *prediction.mean.shape[1:])
            scale = torch.tensor(max(self.std, 1e-300), dtype=torch.float64)
            return RegressionPrediction(NormalComponents(mean, scale), weight)
        if isinstance(prediction, ClassPrediction):
            shares = torch.tensor(self.counts, dtype=torch.float64) + 1.0
            return CategoricalPrediction((shares / shares.sum()).log().expand(1, rows, len(shares)), weight)
        raise InvalidType(f"prediction must be over numbers or classes, got a {type(prediction).__name__}.")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Outcomes:
        """Back from plain values."""
        try:
            return cls(float(saved["mean"]), float(saved["std"]), tuple(int(count) for count in saved["counts"]))
        except (KeyError, TypeError, ValueError):
            raise DamagedArtifact("The run does not say what its training outcomes were. Fit again.") from None
