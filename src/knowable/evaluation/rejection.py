"""Accuracy against the share of rows that are rejected because they are uncertain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.prediction.prediction import Prediction
from knowable.evaluation.detection import risk_coverage
from knowable.evaluation.inputs import Array, classes_and_target, score_tensor


@dataclass(frozen=True)
class AccuracyRejection:
    """Accuracy of what is kept when the most uncertain predictions are rejected.

    Attributes:
        rejected: Share of predictions rejected, ``(n,)``: 0, 1/n, ..., (n-1)/n.
        accuracy: Accuracy of those kept, ``(n,)``.
    """

    rejected: Tensor
    accuracy: Tensor

    @property
    def area(self) -> float:
        """Area under the curve: mean accuracy over all shares of rejection. Higher is better."""
        return self.accuracy.mean().item()

    def rejected_for(self, accuracy: float) -> float | None:
        """The smallest share to reject for at least this accuracy on the rows at hand; None if there is none."""
        reached = (self.accuracy >= accuracy).nonzero()
        return self.rejected[reached[0, 0]].item() if len(reached) else None


def accuracy_rejection(
    prediction: Prediction | Array, y: Array, *, uncertainty: Array | None = None
) -> AccuracyRejection:
    """The accuracy-rejection curve (Nadeem, Zucker and Hanczar, 2009): risk against coverage, the other way round.

    Equally uncertain predictions are a block, as in :func:`risk_coverage`.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        uncertainty: What to reject by, in the shape of ``y``: ``prediction.epistemic``, for instance. None: the total
            uncertainty of a Prediction, and of probabilities one minus that of the most probable label.

    Returns:
        The curve.

    Example:
        >>> accuracy_rejection([0.9, 0.8, 0.6, 0.3], [1, 1, 0, 0]).accuracy
        tensor([0.7500, 1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    table, observed, counted = classes_and_target(prediction, y)
    wrong = (table.labels != observed).double()
    if uncertainty is not None:
        doubt = score_tensor("uncertainty", uncertainty).double().reshape(wrong.shape)
    elif isinstance(prediction, Prediction):
        doubt = score_tensor("uncertainty", prediction.total).double().reshape(wrong.shape)
    else:
        doubt = 1 - table.probs.amax(-1)
    if counted is not None:
        doubt, wrong = doubt[counted], wrong[counted]
    curve = risk_coverage(doubt.flatten(), wrong.flatten())
    return AccuracyRejection((1 - curve.coverage).flip(0), (1 - curve.risk).flip(0))
