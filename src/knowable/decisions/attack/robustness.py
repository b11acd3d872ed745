"""What adversarial inputs do to a posterior: its accuracy, and whether its uncertainty gives them away."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_count, check_generator
from knowable.decisions.attack.objective import attacked_data, error_of
from knowable.decisions.feature_density import FeatureDensity
from knowable.errors import InvalidData, Unsupported
from knowable.evaluation.detect import Detection, Score, detect


@dataclass(frozen=True, repr=False, eq=False)
class Robustness:
    """Accuracy under attack, and detection of the attacked inputs by a score.

    Attributes:
        accuracy_clean: Share of the inputs as they were that get their label.
        accuracy: The same of the adversarial inputs.
        detection: Scores of the inputs as they were (inside) and of the adversarial ones (outside).
        wrong: Which adversarial inputs get another label, ``(rows,)``.
    """

    accuracy_clean: float
    accuracy: float
    detection: Detection
    wrong: Tensor

    @property
    def undetected(self) -> float:
        """Share of all rows that are wrong and not flagged: what the attacker gets through.

        The threshold is the detection's, which flags 5% of ordinary inputs.
        """
        return (self.wrong & (self.detection.outside <= self.detection.threshold)).double().mean().item()

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`accuracy`."""
        return math.sqrt(self.accuracy * (1.0 - self.accuracy) / len(self.wrong))

    def __repr__(self) -> str:
        found = self.detection
        return (
            f"Robustness({len(self.wrong)} rows: accuracy {self.accuracy_clean:.1%} clean, {self.accuracy:.1%} "
            f"attacked; by {found.score} AUROC {found.auroc:.3f}, {found.tpr_at_fpr():.1%} flagged at "
            f"{found.fpr_at_threshold():.1%} false alarms; {self.undetected:.1%} wrong and not flagged)"
        )


@torch.no_grad()
def evaluate(
    posterior: Posterior,
    x: Any,
    adversarial: Any,
    y: Any,
    *,
    score: str | Score = "total",
    validation: Any = None,
    samples: int = 64,
    generator: torch.Generator | None = None,
) -> Robustness:
    """Accuracy before and after an attack, and how well a score tells the two apart.

    Args:
        posterior: The classifier that is judged, not necessarily the one that the attack was crafted on.
        x: The inputs as they were.
        adversarial: The same inputs after the attack.
        y: Their labels.
        score: The detector, see :func:`knowable.detect`.
        validation: Further ordinary inputs, from which the threshold comes. None: from ``x``.
        samples: Number of draws.
        generator: Makes the draws new, the same for all inputs: how the attack does against draws that it has not seen.

    Returns:
        The figures.
    """
    check_count("samples", samples)
    check_generator(generator)
    inputs, labels = attacked_data(posterior, x, y)
    moved, _ = attacked_data(posterior, adversarial, y)
    if moved.shape != inputs.shape:
        raise InvalidData(f"adversarial must have the shape of x, {tuple(inputs.shape)}; got {tuple(moved.shape)}.")
    before, after = (posterior.predict(each, samples, _again(generator)) for each in (inputs, moved))
    if not isinstance(before, ClassPrediction):
        raise Unsupported("evaluate counts errors of classes. For numbers compare kn.metrics.rmse before and after.")
    of_inputs = isinstance(score, FeatureDensity)
    if not of_inputs and validation is not None:
        validation = posterior.predict(validation, samples, _again(generator))
    pair = (inputs, moved) if of_inputs else (before, after)
    detection = detect(*pair, score=score, validation=validation)
    wrong_before, wrong = (error_of(each, labels)[1].cpu() for each in (before, after))
    accuracies = [1.0 - each.double().mean().item() for each in (wrong_before, wrong)]
    return Robustness(accuracies[0], accuracies[1], detection, wrong)


def _again(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator that gives the same draws once more."""
    return None if generator is None else generator.clone_state()
