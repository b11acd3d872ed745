"""What a certificate consists of, how it predicts, and what it says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.model.row_hashes import row_hashes
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.storage.files import Files
from knowable.core.support.randomness import derive_seed
from knowable.errors import InvalidArgument, Unsupported
from knowable.evaluation.calibration import CoverageCurve, ReliabilityCurve
from knowable.evaluation.conformal import in_class_order, label_scores, number_interval, p_values, thresholds_of
from knowable.evaluation.detection import RiskCoverage
from knowable.evaluation.inputs import Array, by_row, class_table, in_double
from knowable.evaluation.risk_control import RejectionRule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from knowable.decisions.stream_alarm import StreamAlarm


@dataclass(frozen=True)
class Guarantee:
    """One promise of a certificate.

    Attributes:
        name: ``"set"``, ``"interval"``, ``"rejection"`` or ``"alarm"``.
        n: Number of held-out rows it rests on.
        alpha: Share of new rows for which it may fail; None where that is what came out.
        delta: Probability, over draws of the held-out rows, that it does not hold; None: it holds on average over
            draws of the held-out rows.
        bound: With probability ``1 - delta`` of the certificate, the share of new rows for which it fails is at most
            this; None where that is not known.
        statement: The promise as a sentence that may be quoted.
    """

    name: str
    n: int
    alpha: float | None
    delta: float | None
    bound: float | None
    statement: str


@dataclass(frozen=True, eq=False)
class CertifiedPrediction:
    """A prediction with what a certificate says about each row.

    Attributes:
        prediction: The prediction of the posterior.
        set: Which labels are in the set of each row, booleans ``(rows, classes)``, or ``(rows, classes, ...)`` with
            several outputs or pixels; None for numbers.
        interval: Lower and upper ends, in the shape of the outcomes; None for classes.
        accept: Whether the rejection rule accepts the row, ``(rows,)``.
        p_value: How usual the row's uncertainty is among held-out rows, ``(rows,)``: small is strange.
        novelty: The scores that the p-values come from, ``(rows,)``.
    """

    prediction: Prediction
    set: Tensor | None
    interval: tuple[Tensor, Tensor] | None
    accept: Tensor
    p_value: Tensor
    novelty: Tensor

    def __len__(self) -> int:
        return len(self.accept)

    def __repr__(self) -> str:
        if self.set is not None:
            size = f"mean set size={self.set.sum(1).double().mean():.3g}"
        else:
            assert self.interval is not None
            size = f"mean width={(self.interval[1] - self.interval[0]).mean():.3g}"
        return (
            f"CertifiedPrediction(rows={len(self)}, {size}, accepted={self.accept.double().mean():.1%}, "
            f"smallest p-value={self.p_value.min():.3g})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """What held-out rows prove about a posterior; made by :func:`knowable.certify`.

    Attributes:
        posterior: The posterior.
        n: Number of held-out rows.
        alpha: Share of new rows for which each guarantee may fail.
        delta: Probability, over draws of the held-out rows, that the rejection rule does not keep its risk.
        score: Conformal score of the sets or intervals.
        thresholds: Its threshold, under the name ``""``, or one for each group or class.
        groups: What the groups are: ``"label"``, ``"given"`` with the rows, or None.
        rejection: The rule that accepts or rejects a row by its uncertainty.
        novelty: What p-values are made of: ``"total"`` or ``"epistemic"`` uncertainty.
        novelty_scores: That of the held-out rows, in order, ``(n,)``.
        calibration: The calibration curve on the held-out rows, before anything is certified.
        risk_coverage: Mean loss of the held-out rows that are accepted, over the share that is.
        guarantees: The promises, each with its numbers and a sentence.
        samples: Posterior draws of each prediction.
        seed: Fixes random sets and how held-out rows are split.
    """

    posterior: Posterior
    n: int
    alpha: float
    delta: float
    score: str
    thresholds: Mapping[Any, float]
    groups: str | None
    rejection: RejectionRule
    novelty: str
    novelty_scores: Tensor
    calibration: ReliabilityCurve | CoverageCurve
    risk_coverage: RiskCoverage
    guarantees: tuple[Guarantee, ...]
    samples: int
    seed: int

    @torch.no_grad()
    def predict(self, x: Any, *, groups: Array | Sequence[Any] | None = None) -> CertifiedPrediction:
        """Predict new rows, with a set or interval, whether to accept, and a p-value for each.

        The same row gets the same answer every time and in any batch.

        Args:
            x: Inputs, one row each, as ``posterior.predict`` takes them.
            groups: The group of each row, if the certificate was made with groups.
        """
        if (groups is None) == (self.groups == "given"):
            raise InvalidArgument(
                "groups must be given: the certificate has a threshold for each group."
                if groups is None
                else f"groups must be left out: the certificate was made with groups={self.groups!r}."
            )
        rows = as_input(x, self.posterior.model)
        prediction = self.posterior.predict(rows, samples=self.samples)
        strange = novelty_of(prediction, self.novelty)
        sets = interval = None
        if isinstance(prediction, ClassPrediction):
            sets = self._sets(prediction, rows, groups)
        else:
            assert isinstance(prediction, RegressionPrediction)
            q = self.thresholds[""] if groups is None else thresholds_of(dict(self.thresholds), groups, len(prediction))
            low, high = number_interval(prediction, q, self.score, self.alpha)
            interval = low.to(prediction.mean.dtype), high.to(prediction.mean.dtype)
        return CertifiedPrediction(
            prediction=prediction,
            set=sets,
            interval=interval,
            accept=uncertainty_of(prediction) <= self.rejection.threshold,
            p_value=p_values(self.novelty_scores, strange),
            novelty=strange,
        )

    def _sets(self, prediction: ClassPrediction, rows: Tensor, groups: Any) -> Tensor:
        table = class_table(prediction)
        scores = label_scores(table.probs, self.score, uniforms_of(rows, table.probs, self.score, self.seed))
        if self.groups == "label":
            q = torch.tensor([self.thresholds[each] for each in range(table.probs.shape[-1])], dtype=torch.float64)
        elif groups is not None:
            q = thresholds_of(dict(self.thresholds), groups, len(prediction)).view(-1, 1, 1)
        else:
            q = torch.tensor(self.thresholds[""], dtype=torch.float64)
        return in_class_order(scores <= q.to(scores.device), table.shape)

    def watch(self, delta: float | None = None, *, seed: int = 0) -> StreamAlarm:
        """An alarm for a stream of rows: whether they are still like the held-out ones.

        Args:
            delta: Probability of a false alarm, ever; None: that of the certificate.
            seed: Breaks ties.

        Returns:
            The alarm; ``alarm.update(certificate.predict(x).novelty)`` gives it the next rows.
        """
        from knowable.decisions.stream_alarm import StreamAlarm

        return StreamAlarm(self.novelty_scores, delta=self.delta if delta is None else delta, seed=seed)

    def summary(self) -> str:
        """The promises in plain sentences."""
        curve, surely = self.calibration, sum(each.bound is not None for each in self.guarantees)
        what = "Confidence and accuracy" if isinstance(curve, ReliabilityCurve) else "Nominal and observed coverage"
        return "\n".join(
            (
                f"Certificate on {self.n:,} held-out rows, alpha={self.alpha:g}, delta={self.delta:g}.",
                *(f"- {each.name.capitalize()}: {each.statement}" for each in self.guarantees),
                f"- Calibration: {what} of the posterior differ by {curve.error:.3f}, on average over held-out rows.",
                "Each statement holds by itself, for rows drawn like the held-out ones. Those with a probability of "
                f"{1 - self.delta:.4g} hold together with at least {max(0.0, 1 - surely * self.delta):.4g}.",
            )
        )

    def plot(self) -> Figure:
        """Draw the calibration curve, the risk of what is accepted, and the scores behind the p-values.

        Returns:
            The figure; ``figure.savefig("certificate.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        from knowable.decisions.certificate_plot import plot_certificate

        return plot_certificate(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write a folder with the certificate and its posterior, which ``knowable.load`` reads; it has no code.

        Args:
            path: The folder; a name that ends in ``.knowable`` is that of a single file.
            overwrite: Replace a certificate that was saved there before.
        """
        from knowable.decisions.certificate_saving import save_certificate

        return save_certificate(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | Files, load_posterior: Callable[[Files], Posterior]) -> Certificate:
        """Read a certificate; ``knowable.load`` is the door.

        Args:
            path: The folder or file.
            load_posterior: Reads the posterior from the files that it is given.
        """
        from knowable.decisions.certificate_saving import read_certificate

        return cls(**read_certificate(path, load_posterior, Guarantee))

    def __repr__(self) -> str:
        rule = f"{self.rejection.accepted:.1%}" if self.rejection.certified else "none"
        return (
            f"Certificate({type(self.posterior).__name__}, held-out rows={self.n:,}, alpha={self.alpha:g}, "
            f"delta={self.delta:g}, score={self.score!r}, accepted={rule})"
        )


def uncertainty_of(prediction: Prediction) -> Tensor:
    """The number that rejection goes by, ``(rows,)``: entropy, or the predictive standard deviation."""
    numbers = isinstance(prediction, RegressionPrediction)
    return by_row(in_double(prediction.std if numbers else prediction.total)).mean(1).cpu()


def novelty_of(prediction: Prediction, novelty: str) -> Tensor:
    """The score of the p-values, ``(rows,)``."""
    return by_row(in_double(prediction.total if novelty == "total" else prediction.epistemic)).mean(1).cpu()


def check_kind(prediction: Prediction) -> None:
    """Refuse what is neither labels nor numbers."""
    if not isinstance(prediction, ClassPrediction | RegressionPrediction):
        raise Unsupported(
            f"certify is for predictions of labels or of numbers, got a {type(prediction).__name__}. Use the functions "
            f"of kn.conformal on its parts."
        )


def uniforms_of(rows: Tensor, probs: Tensor, score: str, seed: int) -> Tensor | None:
    """A number between 0 and 1 for each row and output, from a hash of the row: the same in any batch."""
    if score == "lac":
        return None
    hashes = row_hashes(rows, torch.zeros(len(rows))).numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        mixed = hashes[:, None] + np.uint64(derive_seed(seed, "sets"))
        mixed = mixed + np.arange(1, probs.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64 (Steele et al., 2014)
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) / 2.0**53).to(probs.device)
