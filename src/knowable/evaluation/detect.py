"""``kn.detect``: how well an uncertainty tells points from elsewhere, and a threshold to act on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction
from knowable.core.support.checks import check_choice
from knowable.core.support.figure import COLOURS, INK, MUTED, new_figure
from knowable.core.support.randomness import generator_for
from knowable.errors import ModelWarning, Unsupported
from knowable.evaluation.detection import aupr, auroc, fpr95, sample_of_scores, threshold_at_fpr
from knowable.evaluation.inputs import Array, by_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Score = Callable[[Any], Tensor]
"""One number for each row, high where a point seems to be from elsewhere."""

_RESAMPLES = 200  # of the bootstrap
_FPR = 0.05  # at which `threshold` is set


# --- scores of a prediction, which can be differentiated --------------------------------------------------------------


def uncertainty_score(name: str) -> Score:
    r"""The score of this name as a function of a prediction, one number for each row (the mean over outputs or pixels).

    ``total``, ``aleatoric`` and ``epistemic`` are for every prediction; for classes these are called ``entropy``,
    ``expected_entropy`` and ``mutual_information``. Also for classes:

    - ``max_prob``: one less the largest class probability.
    - ``variance``: :math:`\sum_c \operatorname{Var}_w\\, p(y = c \\mid x, w)`. For numbers it is the total variance.
    - ``energy``: :math:`-E_w \log \sum_c \exp f_c(x; w)` (Liu et al., 2020), which needs a logit for each class.
    - ``max_logit``: :math:`-E_w \max_c f_c(x; w)`.
    """
    if name == "density":
        raise Unsupported(
            "score='density' needs features of training rows, which a prediction does not have. Make the score, "
            "density = kn.FeatureDensity(posterior, x, y), and pass inputs: kn.detect(x_in, x_out, score=density)."
        )
    function = _SCORES[check_choice("score", name, _SCORES)]

    def score(prediction: Prediction) -> Tensor:
        if not isinstance(prediction, Prediction):
            return prediction  # numbers, which are scores already
        if not isinstance(prediction, ClassPrediction) and name not in _OF_NUMBERS:
            raise Unsupported(
                f"score={name!r} is for classes; for a {type(prediction).__name__} there are {', '.join(_OF_NUMBERS)}."
            )
        return by_row(function(prediction)).mean(1)

    return score


def _max_prob(prediction: Any) -> Tensor:
    log_probs = prediction.log_mean_probs
    largest = torch.zeros_like(log_probs, dtype=torch.bool).scatter(1, log_probs.argmax(1, keepdim=True), True)
    return log_probs.exp().masked_fill(largest, 0.0).sum(1)  # 1 - max has no digits where the maximum is almost 1


def _variance(prediction: Any) -> Tensor:
    if not isinstance(prediction, ClassPrediction):
        return prediction.total
    variance = prediction.probs_variance
    return 2.0 * variance if variance.shape == prediction.labels.shape else variance.sum(1)  # of 0 as of 1


def _log_sums(prediction: Any) -> Tensor:
    if prediction.log_sums is None:
        raise Unsupported(
            f"energy and max_logit need a logit for each class, which this {type(prediction).__name__} does not have. "
            f"They exist for predictions of a Categorical() model; elsewhere use 'entropy' or 'max_prob'."
        )
    return prediction.log_sums


_SCORES: dict[str, Score] = {
    "total": lambda prediction: prediction.total,
    "aleatoric": lambda prediction: prediction.aleatoric,
    "epistemic": lambda prediction: prediction.epistemic,
    "entropy": lambda prediction: prediction.total,
    "expected_entropy": lambda prediction: prediction.aleatoric,
    "mutual_information": lambda prediction: prediction.epistemic,
    "max_prob": _max_prob,
    "variance": _variance,
    "energy": lambda prediction: -prediction._mix(_log_sums(prediction)),
    "max_logit": lambda prediction: -prediction._mix(_log_sums(prediction) + prediction.samples.amax(2).log()),
}
_OF_NUMBERS = ("total", "aleatoric", "epistemic", "variance")
_OF_SEVERAL_DRAWS = ("epistemic", "mutual_information", "variance")


# --- detection --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class Detection:
    """Scores of points inside and outside, what they tell of each other, and a threshold.

    A point is flagged where its score lies above :attr:`threshold`.

    Attributes:
        score: Name of the score.
        inside: Scores of points like the training data, ``(n,)``.
        outside: Scores of points from elsewhere, ``(m,)``.
        validation: Scores of other points like the training data, of which thresholds come; None: they come of
            ``inside``, and rates of ``inside`` at them are then what was asked for by construction.
        function: The score as a function of what was given.
    """

    score: str
    inside: Tensor
    outside: Tensor
    validation: Tensor | None = None
    function: Score | None = field(default=None, compare=False)

    @cached_property
    def auroc(self) -> float:
        """Probability that a point outside scores higher than one inside."""
        return auroc(self.inside, self.outside)

    @cached_property
    def aupr(self) -> float:
        """Average precision of finding the points outside."""
        return aupr(self.inside, self.outside)

    @cached_property
    def fpr95(self) -> float:
        """Share of points inside that are flagged where 95% outside are found."""
        return fpr95(self.inside, self.outside)

    @property
    def threshold(self) -> float:
        """The lowest threshold at which at most 5% of the points that thresholds come of are flagged."""
        return self.threshold_at_fpr(_FPR)

    def threshold_at_fpr(self, fpr: float = _FPR) -> float:
        """The lowest threshold at which at most a share ``fpr`` of the points that thresholds come of is flagged."""
        return threshold_at_fpr(self.inside if self.validation is None else self.validation, fpr)

    def tpr_at_fpr(self, fpr: float = _FPR) -> float:
        """True positive rate: the share of points outside above :meth:`threshold_at_fpr`."""
        return _share_above(self.outside, self.threshold_at_fpr(fpr))

    def fpr_at_threshold(self, fpr: float = _FPR) -> float:
        """The share of points inside above :meth:`threshold_at_fpr`: what was asked for came to this."""
        return _share_above(self.inside, self.threshold_at_fpr(fpr))

    def flags(self, new: Any) -> Tensor:
        """Which rows of a prediction (or scores, or what the score is of) lie above the threshold, ``(rows,)``."""
        return _scores("new", new, self.function) > self.threshold

    def roc(self) -> tuple[Tensor, Tensor]:
        """The ROC curve: false positive rates and true positive rates, from (0, 0) to (1, 1)."""
        return tuple(torch.cat((rate.new_zeros(1), rate)) for rate in self._rates())  # type: ignore[return-value]

    def precision_recall(self) -> tuple[Tensor, Tensor]:
        """Recall and precision at each distinct score, from the highest down."""
        false, true = self._rates()
        flagged = true * len(self.outside) + false * len(self.inside)
        return true, true * len(self.outside) / flagged

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Shares inside and outside that score at least each distinct score, from the highest down."""
        thresholds = torch.cat((self.inside, self.outside)).unique().flip(0)
        below = [torch.searchsorted(each.sort().values, thresholds) for each in (self.inside, self.outside)]
        inside, outside = (
            1.0 - count.double() / len(each) for count, each in zip(below, (self.inside, self.outside), strict=True)
        )
        return inside, outside

    @cached_property
    def standard_errors(self) -> Mapping[str, float]:
        """Standard errors of ``auroc``, ``aupr``, ``fpr95`` and ``tpr_at_fpr`` (at 5%).

        By the bootstrap: points inside, outside and for validation are resampled 200 times, each group by itself.
        """
        generator = generator_for(0, "detection")
        groups = [each for each in (self.inside, self.outside, self.validation) if each is not None]
        found = []
        for _ in range(_RESAMPLES):
            drawn = [each[torch.randint(len(each), (len(each),), generator=generator)] for each in groups]
            again = Detection(self.score, drawn[0], drawn[1], drawn[2] if len(drawn) > 2 else None)
            found.append([again.auroc, again.aupr, again.fpr95, again.tpr_at_fpr()])
        errors = torch.tensor(found, dtype=torch.float64).std(0).tolist()
        return dict(zip(("auroc", "aupr", "fpr95", "tpr_at_fpr"), errors, strict=True))

    def plot(self) -> Figure:
        """Histograms of the scores with the threshold, and the ROC curve with its place on it.

        Returns:
            The figure; ``figure.savefig("detection.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
            draw_histograms(left, {"inside": self.inside, "outside": self.outside}, self.threshold, self.score)
            right.plot(*(each.numpy() for each in self.roc()), color=COLOURS[0], linewidth=1.8)
            right.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=":")
            right.plot(self.fpr_at_threshold(), self.tpr_at_fpr(), "o", color=COLOURS[1], markersize=5)
            right.annotate(
                f"{self.tpr_at_fpr():.1%} found\nat {self.fpr_at_threshold():.1%} false alarms",
                (self.fpr_at_threshold(), self.tpr_at_fpr()), (0.3, 0.3), fontsize=8,
                arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.8},
            )  # fmt: skip
            right.set(xlabel="false positive rate", ylabel="true positive rate", title=f"AUROC {self.auroc:.4f}")
            right.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")

        return new_figure(7.4, 3.2, draw)

    def __repr__(self) -> str:
        origin = (
            "the points inside themselves" if self.validation is None else f"{len(self.validation)} validation rows"
        )
        return (
            f"Detection({self.score}: {len(self.inside)} inside, {len(self.outside)} outside; "
            f"AUROC {self.auroc:.4f}, AUPR {self.aupr:.4f}, FPR95 {self.fpr95:.4f}, "
            f"TPR {self.tpr_at_fpr():.4f} at FPR {self.fpr_at_threshold():.4f}; "
            f"threshold {self.threshold:.4g} from {origin})"
        )


@torch.no_grad()
def detect(
    inside: Prediction | Array | Any,
    outside: Prediction | Array | Any,
    *,
    score: str | Score = "total",
    validation: Prediction | Array | Any = None,
) -> Detection:
    """How well a score tells points outside from points inside, and the threshold that keeps false alarms at 5%.

    Args:
        inside: Points like the training data, which were not trained on: a Prediction, its scores themselves (an array
            with one number for each row), or what a ``score`` of your own takes.
        outside: Points from elsewhere, in the same form.
        score: Which uncertainty, see :func:`uncertainty_score`: ``"total"``, ``"epistemic"``, ``"aleatoric"``,
            ``"entropy"``, ``"mutual_information"``, ``"expected_entropy"``, ``"max_prob"``, ``"variance"``,
            ``"energy"``, ``"max_logit"``. Or a function that gives one number for each row, high outside, such as
            a :class:`knowable.FeatureDensity`. It is not used for arrays, which are scores already.
        validation: More points like the training data, in the same form. Thresholds come from these alone, so that the
            rates at them are those of new data. Without them thresholds come from ``inside``, and ``repr`` says so.

    Returns:
        The detection.

    Example:
        >>> found = detect([0.1, 0.2, 0.3, 0.4], [0.25, 0.35, 0.5, 0.6])
        >>> found.auroc, found.fpr95
        (0.8125, 0.5)
    """
    function = score if callable(score) else uncertainty_score(score)
    name = score if isinstance(score, str) else getattr(score, "__name__", type(score).__name__)
    if name in _OF_SEVERAL_DRAWS and isinstance(inside, ClassPrediction) and len(inside.log_weights) == 1:
        warnings.warn(
            f"score={name!r} is 0 everywhere: the posterior has one draw, so its draws cannot disagree. Use 'entropy' "
            f"or 'max_prob', or a posterior with several draws.", ModelWarning, stacklevel=2,
        )  # fmt: skip
    thresholds = None if validation is None else _scores("validation", validation, function)
    return Detection(
        name, _scores("inside", inside, function), _scores("outside", outside, function), thresholds, function
    )


def _scores(name: str, given: Any, function: Score | None) -> Tensor:
    """Scores as a flat vector on the CPU in double precision."""
    with torch.no_grad():
        return sample_of_scores(name, given if function is None else function(given)).cpu()


def _share_above(scores: Tensor, threshold: float) -> float:
    return (scores > threshold).double().mean().item()


# --- the picture ------------------------------------------------------------------------------------------------------

_BINS, _DECADES = 40, 6


def draw_histograms(axes: Axes, groups: Mapping[str, Tensor], threshold: float, label: str) -> None:
    """Histograms of several groups of scores over each other, and a line at the threshold.

    Scores that are positive and spread over decades have a logarithmic axis.
    """
    every = torch.cat(list(groups.values()))
    every = every[every.isfinite()]
    if np.isfinite(threshold):
        every = torch.cat((every, every.new_tensor([threshold])))
    low, high = every.min().item(), every.max().item()
    logarithmic = low >= 0 and high > 50 * every.median().item() and high > 0
    if logarithmic:
        low = max(low, high * 10.0**-_DECADES)
        edges = np.geomspace(low, max(high, low * 1.01), _BINS + 1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter("")
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
        axes.locator_params(axis="x", nbins=5)
    for index, (name, scores) in enumerate(groups.items()):
        inside = scores.clamp(edges[0], edges[-1]).numpy()  # what lies beyond is in the first and the last bin
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "label": f"{name} ({len(scores):,})"}
        weights = np.full(len(inside), 1.0 / max(1, len(inside)))
        axes.hist(inside, edges.tolist(), weights=weights, histtype="stepfilled", alpha=0.35, linewidth=0, **style)
        axes.hist(inside, edges.tolist(), weights=weights, histtype="step", linewidth=1.2, color=style["color"])
    if edges[0] <= threshold <= edges[-1]:
        axes.axvline(threshold, color=INK, linewidth=1.0, linestyle="--", label=f"threshold {threshold:.3g}")
    axes.set(xlabel=label.replace("_", " "), ylabel="share of the points")
    axes.legend(loc="best")
