"""Certify a posterior on held-out rows: sets or intervals, rejection and alarms with guarantees.

Held-out rows serve several guarantees. Those of sets, intervals and p-values hold on average over draws of the held-out
rows and of the new row, and need no split. The rejection rule's holds with probability 1 - delta over draws of the
held-out rows, and rows that choose something are not those that test it: for classes a fifth of the rows chooses where
the tests begin; for numbers half of the rows (more if there are few) makes the intervals, whose misses the other half
counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import betaincinv
from torch import Tensor

from knowable.core.model.data import as_data
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.training_rows import refuse_training_rows
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.support.randomness import generator_for
from knowable.core.support.tensors import to_tensor
from knowable.decisions.certificate import (
    Certificate,
    Guarantee,
    check_kind,
    novelty_of,
    uncertainty_of,
    uniforms_of,
)
from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation.calibration import coverage_curve, reliability_curve
from knowable.evaluation.conformal import (
    CLASS_SCORES,
    NUMBER_SCORES,
    as_fraction,
    class_thresholds,
    group_thresholds,
    label_scores,
    number_scores,
    rows_needed,
    scores_of,
    threshold,
    thresholds_of,
)
from knowable.evaluation.detection import risk_coverage
from knowable.evaluation.inputs import Array, by_row, classes_and_target, rows_that_count
from knowable.evaluation.risk_control import RejectionRule, accepting_rule, rejection_rule, rows_for_risk

Loss = Callable[[Any, Tensor], Tensor]
NOVELTIES = ("auto", "total", "epistemic")
_LEVELS = tuple((index + 0.5) / 20 for index in range(20))


@torch.no_grad()
def certify(
    posterior: Posterior,
    held_out: Any,
    *,
    alpha: float = 0.1,
    delta: float = 0.05,
    score: str = "auto",
    groups: Array | Sequence[Any] | str | None = None,
    risk: float | None = None,
    loss: Loss | None = None,
    novelty: str = "auto",
    samples: int = 64,
    seed: int = 0,
) -> Certificate:
    """Prove on held-out rows what a posterior's predictions are good for.

    The certificate gives each prediction

    - a set of labels, or an interval, that holds the outcome with probability ``1 - alpha`` (conformal prediction);
    - a decision to accept or reject it, such that with probability ``1 - delta`` few of the accepted are wrong;
    - a p-value for being out of distribution, at most ``alpha`` for at most a share ``alpha`` of usual rows.

    Nothing is assumed of the model: the guarantees are for new rows that are drawn like the held-out ones.

    Args:
        posterior: A fitted posterior.
        held_out: Rows that were not used for training: ``(x, y)``, a Dataset or a DataLoader.
        alpha: Share of new rows for which a guarantee may fail.
        delta: Probability, over draws of the held-out rows, that the rejection rule does not keep its risk.
        score: Of classes, ``"lac"`` (the smallest sets), ``"aps"`` or ``"raps"`` (sets that grow where the model is
            unsure). Of numbers, ``"normalised"`` (by the predictive standard deviation), ``"split"`` (the same width
            everywhere) or ``"cqr"`` (predictive quantiles, moved). ``"auto"``: ``"lac"``; ``"normalised"``, but
            ``"cqr"`` where a standard deviation is not finite.
        groups: The group of each held-out row, or ``"label"``: then sets and intervals have their guarantee in each
            group or class.
        risk: Mean loss allowed among accepted rows. None: of classes, ``alpha``. Of numbers, what comes out: all rows
            are accepted but the share ``alpha`` with the largest standard deviations, and the bound is for these.
        loss: The loss of each row, ``loss(prediction, y)`` with values in [0, 1], ``(rows,)``; booleans, where true is
            wrong, get tighter bounds. None: whether the label is wrong, or the outcome outside its interval (with
            several outputs or pixels, the share).
        novelty: Uncertainty behind the p-values. ``"auto"``: ``"total"`` of classes; of numbers ``"epistemic"``, or
            ``"total"`` where there is none.
        samples: Posterior draws of each prediction.
        seed: Fixes random sets and how held-out rows are split.

    Raises:
        InvalidData: If held-out rows were used for training, have a single class, or are fewer than the guarantees
            need; the message says how many these are.

    Example:
        >>> import knowable as kn
        >>> data = kn.datasets.linear(300, d=2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
        >>> posterior = kn.ExactLinear().fit(model, (data.x[:100], data.y[:100]))
        >>> certificate = certify(posterior, (data.x[100:250], data.y[100:250]), alpha=0.1)
        >>> low, high = certificate.predict(data.x[250:]).interval
        >>> certificate.predict(data.x[250:]).accept.shape
        torch.Size([50])
    """
    held = _HeldOut.of(posterior, held_out, groups, alpha, delta, samples, seed)
    novelty = _chosen_novelty(check_choice("novelty", novelty, NOVELTIES), held.prediction)
    strange = novelty_of(held.prediction, novelty)
    if risk is not None:
        check_number("risk", risk, above=0.0, below=1.0)
    parts = _classes if isinstance(held.prediction, ClassPrediction) else _numbers
    found = parts(held, score, groups, risk, loss)
    alarm = _alarm_guarantee(held, strange)
    return Certificate(
        posterior=posterior,
        n=held.n,
        alpha=held.alpha,
        delta=held.delta,
        score=found.score,
        thresholds=found.thresholds,
        groups=groups if isinstance(groups, str) else None if groups is None else "given",
        rejection=found.rejection,
        novelty=novelty,
        novelty_scores=strange.sort().values,
        calibration=found.calibration,
        risk_coverage=risk_coverage(uncertainty_of(held.prediction)[found.tested], found.losses.double()),
        guarantees=(found.guarantee, found.promise, alarm),
        samples=samples,
        seed=seed,
    )


@dataclass(frozen=True)
class _HeldOut:
    """Held-out rows, checked and predicted."""

    x: Tensor
    y: Tensor
    prediction: Any
    n: int
    alpha: float
    delta: float
    seed: int

    @classmethod
    def of(
        cls, posterior: Any, held_out: Any, groups: Any, alpha: float, delta: float, samples: int, seed: int
    ) -> _HeldOut:
        check_type("posterior", posterior, Posterior, "a posterior (of an estimator: estimator.posterior_)")
        alpha = check_number("alpha", alpha, above=0.0, below=1.0)
        delta = check_number("delta", delta, above=0.0, below=1.0)
        check_count("samples", samples)
        check_count("seed", seed, at_least=0)
        data = as_data(held_out, posterior.model, name="held_out")
        if data.weighted:
            raise InvalidArgument("held_out must have no weights: the guarantees are for rows that count the same.")
        if data.size < rows_needed(alpha):
            raise InvalidData(
                f"A certificate at alpha={alpha:g} needs at least {rows_needed(alpha):,} held-out rows, got "
                f"{data.size:,}. Hold out more rows, or raise alpha."
            )
        refuse_training_rows(posterior, data)
        x, y = data.tensors[:2]
        prediction = posterior.predict(x, samples=samples)
        check_kind(prediction)
        counts = rows_that_count(prediction, y)
        if counts is not None and not counts.all():
            if groups is not None and not isinstance(groups, str):
                raise InvalidData("held_out has rows without any outcome that counts. Drop these and their groups.")
            x, y = x[counts], y[counts]
            prediction = posterior.predict(x, samples=samples)
        return cls(x, y, prediction, len(prediction), alpha, delta, seed)


@dataclass(frozen=True)
class _Found:
    """What differs between classes and numbers."""

    score: str
    thresholds: dict[Any, float]
    rejection: RejectionRule
    calibration: Any
    guarantee: Guarantee
    promise: Guarantee
    losses: Tensor  # of the rows ``tested``
    tested: Tensor


def _classes(held: _HeldOut, score: str, groups: Any, risk: float | None, loss: Loss | None) -> _Found:
    score = check_choice("score", score, ("auto", *CLASS_SCORES))
    score = "lac" if score == "auto" else score
    table, y, counted = classes_and_target(held.prediction, held.y)
    if len(y.unique() if counted is None else y[counted].unique()) < 2:
        raise InvalidData(
            f"held_out has a single class, {int(y.flatten()[0])}. Hold out rows of all classes, like those to come."
        )
    uniforms = uniforms_of(held.x, table.probs, score, held.seed)
    own = scores_of(label_scores(table.probs, score, uniforms), y, counted)
    if isinstance(groups, str):
        q = class_thresholds(own, held.alpha, y, table.probs.shape[-1], groups)
        thresholds: dict[Any, float] = dict(enumerate(q.tolist()))
    else:
        thresholds = _thresholds(own, held.alpha, groups)
    wrong = table.labels != y
    if loss is not None:
        losses = _own_loss(loss, held)
    elif wrong.shape[1] == 1:
        losses = wrong[:, 0]
    else:
        losses = _share(wrong, counted)
    target = held.alpha if risk is None else risk
    rule = rejection_rule(uncertainty_of(held.prediction), losses, target, held.delta, seed=held.seed)
    one = own.shape[1] == 1
    what = f"of {'accepted labels' if one else 'the labels of accepted rows'} are wrong"
    return _Found(
        score=score,
        thresholds=thresholds,
        rejection=rule,
        calibration=reliability_curve(held.prediction, held.y),
        guarantee=_coverage_guarantee(held, held.n, thresholds, groups, one, "set"),
        promise=_rejection_guarantee(rule, what, "entropy", loss is not None),
        losses=losses,
        tested=torch.arange(held.n),
    )


def _numbers(held: _HeldOut, score: str, groups: Any, risk: float | None, loss: Loss | None) -> _Found:
    score = check_choice("score", score, ("auto", *NUMBER_SCORES))
    if groups == "label":
        raise InvalidArgument("groups='label' is for classes. Pass the group of each held-out row.")
    if score == "auto":
        std = held.prediction.std
        score = "normalised" if bool((std.isfinite() & (std > 0)).all()) else "cqr"
    first, rest = _split(held)
    scores = by_row(number_scores(held.prediction, held.y, score, held.alpha)).cpu()
    names = None if groups is None else _rows_of(groups, first, held.n)
    thresholds = _thresholds(scores[first], held.alpha, names)
    q = torch.full((held.n,), thresholds[""]) if groups is None else thresholds_of(thresholds, groups, held.n)
    outside = (scores > q.view(-1, 1)).where(~scores.isnan(), False)
    one = scores.shape[1] == 1
    losses = outside[:, 0] if one else _share(outside, ~scores.isnan())
    losses = losses if loss is None else _own_loss(loss, held)
    u = uncertainty_of(held.prediction)
    if risk is None:
        largest = threshold(u[first], held.alpha)
        rule = (
            accepting_rule(u[rest], losses[rest], largest, held.delta)
            if len(rest)
            else RejectionRule(largest, math.nan, 1.0, math.nan, 0, None, held.delta)
        )
    else:
        if len(rest) < rows_for_risk(risk, held.delta):
            raise InvalidData(
                f"A rejection rule with risk at most {risk:g} with probability {1 - held.delta:g} needs at least "
                f"{2 * rows_for_risk(risk, held.delta):,} held-out rows of numbers (half of them make the intervals), "
                f"got {held.n:,}. Hold out more rows, or raise risk or delta."
            )
        rule = rejection_rule(u[rest], losses[rest], risk, held.delta, seed=held.seed)
    what = f"of {'accepted outcomes' if one else 'the outcomes of accepted rows'} are outside their intervals"
    return _Found(
        score=score,
        thresholds=thresholds,
        rejection=rule,
        calibration=coverage_curve(held.prediction, held.y, _LEVELS),
        guarantee=_coverage_guarantee(held, len(first), thresholds, groups, one, "interval"),
        promise=_rejection_guarantee(rule, what, "standard deviation", loss is not None),
        losses=losses[rest] if len(rest) else losses,
        tested=rest if len(rest) else torch.arange(held.n),
    )


def _split(held: _HeldOut) -> tuple[Tensor, Tensor]:
    """Rows that make the intervals, and rows that test the rejection rule."""
    order = torch.randperm(held.n, generator=generator_for(held.seed, "certify"))
    count = max(min(held.n, rows_needed(held.alpha)), math.ceil(held.n / 2))
    return order[:count], order[count:]


def _thresholds(scores: Tensor, alpha: float, groups: Any) -> dict[Any, float]:
    return {"": threshold(scores, alpha)} if groups is None else group_thresholds(scores, alpha, groups)


def _rows_of(groups: Any, rows: Tensor, n: int) -> list[Any]:
    if len(groups) != n:
        raise InvalidData(f"groups must have one entry for each of {n} held-out rows, got {len(groups)}.")
    return [groups[row] for row in rows.tolist()]


def _share(bad: Tensor, counted: Tensor | None) -> Tensor:
    """Share of a row's outputs that are bad, ``(rows,)``."""
    if counted is None:
        return bad.double().mean(1)
    return (bad & counted).sum(1) / counted.sum(1).clamp_min(1).double()


def _own_loss(loss: Loss, held: _HeldOut) -> Tensor:
    losses = to_tensor(loss(held.prediction, held.y), "loss").cpu()
    if losses.shape != (held.n,):
        raise InvalidData(f"loss must return one number for each of {held.n} rows, got shape {tuple(losses.shape)}.")
    return losses


def _chosen_novelty(novelty: str, prediction: Prediction) -> str:
    if novelty != "auto":
        return novelty
    if not isinstance(prediction, RegressionPrediction):
        return "total"
    epistemic = novelty_of(prediction, "epistemic")
    spread = epistemic.max() - epistemic.min()
    return "epistemic" if bool(spread > 1e-9 * novelty_of(prediction, "total").max()) else "total"


# --- the sentences ----------------------------------------------------------------------------------------------------


def _coverage_guarantee(
    held: _HeldOut, n: int, thresholds: dict[Any, float], groups: Any, one: bool, kind: str
) -> Guarantee:
    what, them = ("set", "label") if kind == "set" else ("interval", "outcome")
    level = f"{1 - held.alpha:.4g}"
    each = "" if groups is None else f" in each of {len(thresholds)} {'classes' if groups == 'label' else 'groups'}"
    if not one:
        text = (
            f"On average at least a share {level} of the {them}s of a new row are in their {what}s{each}, over draws "
            f"of {n:,} held-out rows."
        )
        return Guarantee(kind, n, held.alpha, None, None, text)
    text = f"A new row's {what} holds its {them} with probability at least {level}{each}, over draws of {n:,} held-out"
    text += " rows"
    if groups is not None:
        return Guarantee(kind, n, held.alpha, None, None, text + ".")
    misses = math.floor((n + 1) * as_fraction(held.alpha))
    bound = float(betaincinv(misses, n + 1 - misses, 1 - held.delta))
    text += f"; for these ones at least {1 - bound:.4f}, with probability {1 - held.delta:.4g}."
    return Guarantee(kind, n, held.alpha, None, bound, text)


def _rejection_guarantee(rule: RejectionRule, what: str, by: str, own: bool) -> Guarantee:
    surely, limit = f"With probability {1 - rule.delta:.4g}", rule.bound if rule.alpha is None else rule.alpha
    if not rule.certified:
        text = f"No threshold keeps the risk of accepted rows within {rule.alpha:g}: every row is rejected."
    elif rule.n == 0:
        text = f"Not tested, as no row was left. A row is accepted when its {by} is at most {rule.threshold:.4g}."
    else:
        bound = f"the mean loss of accepted rows is at most {limit:.4g}" if own else f"at most {limit:.2%} {what}"
        text = (
            f"{surely} over draws of {rule.n:,} held-out rows, {bound}. A row is accepted when its {by} is at most "
            f"{rule.threshold:.4g}: {rule.accepted:.1%} of these rows are, with a mean loss of {rule.risk:.4f}."
        )
    return Guarantee("rejection", rule.n, rule.alpha, rule.delta, rule.bound, text)


def _alarm_guarantee(held: _HeldOut, strange: Tensor) -> Guarantee:
    alarms = math.floor((held.n + 1) * as_fraction(held.alpha))
    bound = float(betaincinv(alarms, held.n + 1 - alarms, 1 - held.delta))
    text = (
        f"A new row like the held-out ones has a p-value of at most {held.alpha:g} with probability at most "
        f"{held.alpha:g}, over draws of {held.n:,} held-out rows; for these ones at most {bound:.4f}, with probability "
        f"{1 - held.delta:.4g}."
    )
    if bool(strange.max() == strange.min()):
        text += " The uncertainty of all held-out rows is the same, so only rows above it are ever strange."
    return Guarantee("alarm", held.n, held.alpha, None, bound, text)
