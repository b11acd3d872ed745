r"""What an attacker maximises: the error of a prediction, and with a detector in view, its silence as well.

For classes the error is the log odds that the label is another one,

.. math:: \log \frac{1 - p(y \mid x)}{p(y \mid x)}, \qquad p(y \mid x) = E_w\, p(y \mid x, w),

which grows with the negative log likelihood, so that its gradient points in the same direction, but has digits left
where the network is sure (there the gradient of the likelihood itself rounds to 0, and a network seems robust that is
not). For numbers it is the squared error of the mean.

A detector that flags scores above a threshold t adds a penalty to the attacker who knows it,

.. math:: \min(\text{error}, 3) - w \max\Big(0, \frac{s(x) - t'}{t - m}\Big)

with m the median score of ordinary points, and t' a quarter of the way from t to m, so that the score stays below t on
other draws too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from knowable.core.model.checking import checked_pair
from knowable.core.model.data import as_rows
from knowable.core.posterior.monte_carlo import differentiable_prediction, rows_to_differentiate
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_type
from knowable.decisions.feature_density import FeatureDensity
from knowable.errors import InvalidType, Unsupported
from knowable.evaluation.detect import Detection, Score, uncertainty_score
from knowable.evaluation.detection import threshold_at_fpr
from knowable.evaluation.inputs import by_row

_SURE = 3.0  # log odds of an error beyond which an attacker who knows the detector works on the score alone
_ROWS = 256  # at most, in one gradient


class Value(NamedTuple):
    """What an attacker has reached in each row: whether that is the aim, and how good it is otherwise."""

    reached: Tensor  # (rows,): wrong, and not flagged where there is a detector
    gain: Tensor  # (rows,): to be made large

    def better_than(self, other: Value) -> Tensor:
        """In which rows, ``(rows,)``."""
        return (self.reached & ~other.reached) | ((self.reached == other.reached) & (self.gain > other.gain))


@dataclass(frozen=True)
class Detector:
    """A score with what the attacker knows of it."""

    score: Score
    threshold: float
    aim: float  # t'
    unit: float  # t - m

    @classmethod
    def of(cls, given: Any, posterior: Posterior, x: Tensor, samples: int) -> Detector | None:
        """From a Detection, a score or its name; the last two get their threshold from the inputs ``x``."""
        if given is None:
            return None
        if isinstance(given, Detection):
            if given.function is None:
                raise InvalidType(
                    "detector has no function of its score. Make it by kn.detect of predictions, with the score's name."
                )
            score, ordinary = given.function, given.inside if given.validation is None else given.validation
        else:
            if not (isinstance(given, str) or callable(given)):
                check_type("detector", given, Detection, "a Detection or a score")
            score: Score = uncertainty_score(given) if isinstance(given, str) else cast("Score", given)
            ordinary = score_at(score, posterior, x, posterior.predict(x, samples)).detach().double().cpu()
        threshold = given.threshold if isinstance(given, Detection) else threshold_at_fpr(ordinary)
        unit = threshold - ordinary.median().item()
        unit = unit if unit > 0 else max(abs(threshold), 1e-6)
        return cls(score, threshold, threshold - 0.25 * unit, unit)


def score_at(score: Score, posterior: Posterior, x: Tensor, prediction: Prediction) -> Tensor:
    """A score of the prediction at ``x``, or of ``x`` itself, ``(rows,)``."""
    return score(x) if isinstance(score, FeatureDensity) else score(prediction)


@dataclass(frozen=True)
class Objective:
    """The aim of an attack on a posterior at some rows.

    Attributes:
        posterior: Under attack.
        samples: Number of its draws.
        detector: That the attacker knows, or None.
        weight: Of the penalty on its score.
        nearest: Whether the error of classes is the log odds of the nearest other label alone, not of all others.
    """

    posterior: Posterior
    samples: int
    detector: Detector | None
    weight: float = 1.0
    nearest: bool = False

    def rows(self, x: Tensor) -> int:
        """How many rows to take at a time."""
        return min(_ROWS, rows_to_differentiate(self.posterior, x, self.samples))

    def value(self, x: Tensor, y: Tensor, seed: int) -> Value:
        """What the inputs ``x`` reach, without gradients."""
        with torch.no_grad():
            prediction = self.posterior._predict(x, self.samples, seed, None).shaped(self.posterior.target_shape)
            return self._of(prediction, x, y)

    def gradient(self, x: Tensor, y: Tensor, seed: int) -> tuple[Value, Tensor]:
        """What they reach, and the gradient of their gain."""
        x = x.detach().requires_grad_()
        prediction = differentiable_prediction(self.posterior, x, samples=self.samples, seed=seed)
        with torch.enable_grad():
            value = self._of(prediction, x, y)
        if not value.gain.requires_grad:
            raise Unsupported("The prediction has no gradient in x: the network rounds, or detaches its inputs.")
        (gradient,) = torch.autograd.grad(value.gain.sum(), x)
        return Value(value.reached, value.gain.detach()), gradient

    def _of(self, prediction: Prediction, x: Tensor, y: Tensor) -> Value:
        error, wrong = error_of(prediction, y, nearest=self.nearest)
        if self.detector is None:
            return Value(wrong, error)
        score = score_at(self.detector.score, self.posterior, x, prediction)
        excess = ((score - self.detector.aim) / self.detector.unit).clamp_min(0.0)
        if isinstance(prediction, ClassPrediction):
            error = error.clamp_max(_SURE)
        return Value(wrong & (score <= self.detector.threshold), error - self.weight * excess)


def error_of(prediction: Prediction, y: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
    """The error that an attacker makes large, and whether the row counts as wrong (numbers always do), ``(rows,)``."""
    if isinstance(prediction, ClassPrediction):
        log_probs, y = prediction.log_mean_probs, y.long().view_as(prediction.labels)
        own = log_probs.gather(1, y.unsqueeze(1))
        others = log_probs.scatter(1, y.unsqueeze(1), -torch.inf)
        others = others.amax(1) if nearest else others.logsumexp(1)
        wrong = by_row(prediction.labels != y).double().mean(1) >= 0.5  # of pixels, most
        return by_row(others - own.squeeze(1)).mean(1), wrong
    if isinstance(prediction, RegressionPrediction):
        error = by_row((prediction.mean - y.view_as(prediction.mean)).square()).mean(1)
        return error, torch.ones(len(error), dtype=torch.bool, device=error.device)
    raise Unsupported(f"Attacks know predictions of numbers and of classes, not a {type(prediction).__name__}.")


def attacked_data(posterior: Posterior, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets in the model's dtype, checked; inputs that cannot be moved a little are refused."""
    check_type("posterior", posterior, Posterior, "a Posterior")
    rows = as_rows(x, "x")
    if not isinstance(rows, Tensor):
        raise InvalidType(
            f"x must be one tensor or array, got a {type(x).__name__} of several: attacks move one input."
        )
    if not rows.is_floating_point():
        raise InvalidType(
            f"x holds integers ({rows.dtype}), and an attack moves inputs by a little. Pass pixels as floats "
            f"(x.float() / 255); of token ids only their embeddings can be attacked."
        )
    return checked_pair(rows, y, posterior.model)
