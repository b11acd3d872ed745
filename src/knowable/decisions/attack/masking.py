"""Whether an attack fails because the model is robust, or because its gradients lead nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_count, check_number
from knowable.decisions.attack.attacks import pgd, random_search
from knowable.decisions.attack.objective import Objective, attacked_data

_RESTARTS = 3  # of the attack that others must not beat
_FAR = 10.0  # times the range of the inputs: an attack without bounds


@dataclass(frozen=True)
class Check:
    """One sign of gradients that can be trusted.

    Attributes:
        name: What was looked at.
        passed: Whether it is as it should be.
        sentence: What was found, in words.
    """

    name: str
    passed: bool
    sentence: str


@dataclass(frozen=True, repr=False)
class MaskingReport:
    """Signs of masked gradients (Athalye et al., 2018), checked.

    Attributes:
        checks: What was looked at.
    """

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check did. Then there is no sign that gradients are masked, which is no proof."""
        return all(check.passed for check in self.checks)

    def __repr__(self) -> str:
        head = "no sign of masked gradients" if self.passed else "gradients may be masked: do not trust the attack"
        lines = [f"  {'ok    ' if check.passed else 'FAILED'} {check.sentence}" for check in self.checks]
        return "\n".join([f"MaskingReport: {head}", *lines])


def check_masking(
    posterior: Posterior,
    x: Any,
    y: Any,
    epsilon: float,
    *,
    steps: int = 20,
    queries: int = 200,
    norm: Any = "inf",
    clip: tuple[float, float] | None = None,
    samples: int = 64,
    surrogate: Posterior | None = None,
    seed: int = 0,
) -> MaskingReport:
    """Look for signs that PGD fails on masked gradients and not on robustness (Athalye et al., 2018).

    The error must grow with epsilon and with the number of steps; attacks without the model's gradients (random search,
    and transfer from a surrogate) must not beat it by more than chance; without a bound on epsilon every label must
    fall; and no row may have a gradient of zero.

    Args:
        posterior: Whose prediction is attacked.
        x: Inputs, floating point, one row each; some dozens are enough.
        y: Their targets. For numbers the errors are squared errors of the mean, and no label has to fall.
        epsilon: How far a row may be moved.
        steps: Steps of the attack at full strength.
        queries: Predictions of the random search.
        norm: As for :func:`pgd`.
        clip: As for :func:`pgd`.
        samples: Number of draws.
        surrogate: Another posterior of the same task, on which the transfer attack is crafted.
        seed: Of the random search.

    Returns:
        The report; printed, it says what was found in plain sentences.
    """
    epsilon, steps = check_number("epsilon", epsilon, above=0.0), check_count("steps", steps, at_least=4)
    common: dict[str, Any] = {"norm": norm, "clip": clip, "samples": samples}
    inputs, target = attacked_data(posterior, x, y)
    judge = _Judge(Objective(posterior, samples, None), inputs, target)

    radii = [epsilon / 4, epsilon / 2, epsilon]
    by_radius = [judge(pgd(posterior, inputs, y, each, steps=steps, **common)) for each in radii]
    counts = [1, steps // 4, steps]
    by_steps = [judge(pgd(posterior, inputs, y, epsilon, steps=n, **common)) for n in counts[:2]] + by_radius[-1:]
    strongest = judge(pgd(posterior, inputs, y, epsilon, steps=steps, restarts=_RESTARTS, **common))
    checks = [
        _grows("epsilon", [f"{each:.3g}" for each in radii], by_radius, judge.labels),
        _grows("steps", [str(each) for each in counts], by_steps, judge.labels),
        _not_better(
            "random search", judge(random_search(posterior, inputs, y, epsilon, queries=queries, seed=seed, **common)),
            strongest, judge.labels,
        ),
    ]  # fmt: skip
    if surrogate is not None:
        moved = pgd(surrogate, inputs, y, epsilon, steps=steps, **common)
        checks.append(_not_better("transfer from the surrogate", judge(moved), strongest, judge.labels))
    if judge.labels:
        spread = (inputs.max() - inputs.min()).item() or 1.0
        far = (clip[1] - clip[0]) if clip is not None else _FAR * spread
        far = far * (inputs[0].numel() ** 0.5 if str(norm).strip("lL") in ("2", "2.0") else 1.0)
        checks.append(_falls(judge(pgd(posterior, inputs, y, far, steps=2 * steps, restarts=2, **common)), far))
    checks.append(_gradients(judge))
    return MaskingReport(tuple(checks))


@dataclass(frozen=True)
class _Outcome:
    error: Tensor  # (rows,), what the attack maximises
    wrong: Tensor  # (rows,)

    @property
    def mean(self) -> float:
        return self.error.mean().item()

    def size(self, labels: bool) -> float:
        """The share of rows that are wrong, or the mean error of numbers."""
        return self.wrong.double().mean().item() if labels else self.mean


class _Judge:
    """What moved inputs do, by the draws of a prediction."""

    def __init__(self, objective: Objective, x: Tensor, y: Tensor):
        self.objective, self.x, self.y = objective, x, y
        self.labels = isinstance(objective.posterior.predict(x[:1], objective.samples), ClassPrediction)

    def __call__(self, moved: Tensor) -> _Outcome:
        seed, size = self.objective.posterior.seed, self.objective.rows(self.x)
        pairs = zip(moved.split(size), self.y.split(size), strict=True)
        values = [self.objective.value(rows, y, seed) for rows, y in pairs]
        return _Outcome(torch.cat([each.gain for each in values]), torch.cat([each.reached for each in values]))


def _grows(name: str, values: list[str], outcomes: list[_Outcome], labels: bool) -> Check:
    means = [each.mean for each in outcomes]
    slack = 0.01 * (max(means) - min(means))
    passed = all(later >= earlier - slack for earlier, later in pairwise(means))
    found = ", ".join(_said(each, labels) for each in outcomes)
    verb = "grows" if passed else "does not grow"
    return Check(name, passed, f"The error {verb} with {name}: {found} at {name} {', '.join(values)}.")


def _not_better(name: str, other: _Outcome, own: _Outcome, labels: bool) -> Check:
    more, fewer = int((other.wrong & ~own.wrong).sum()), int((own.wrong & ~other.wrong).sum())
    within_chance = more - fewer <= 2.0 * (more + fewer) ** 0.5  # McNemar's test of paired rows
    passed = within_chance if labels else other.mean <= 1.01 * own.mean
    verb = "does not beat" if passed else "beats"
    return Check(
        name, passed, f"{name[0].upper()}{name[1:]} {verb} PGD: {_said(other, labels)} against {_said(own, labels)}."
    )


def _said(outcome: _Outcome, labels: bool) -> str:
    size = outcome.size(labels)
    return f"{size:.1%} wrong" if labels else f"squared error {size:.3g}"


def _falls(outcome: _Outcome, far: float) -> Check:
    passed = bool(outcome.wrong.all())
    left = (~outcome.wrong).sum().item()
    found = "every label falls" if passed else f"{left} of {len(outcome.wrong)} labels stand"
    return Check("no bound", passed, f"Without a bound (epsilon {far:.3g}) {found}.")


def _gradients(judge: _Judge) -> Check:
    objective, size = judge.objective, judge.objective.rows(judge.x)
    pairs = zip(judge.x.split(size), judge.y.split(size), strict=True)
    found = [objective.gradient(rows, y, objective.posterior.seed)[1].flatten(1) for rows, y in pairs]
    zero = int((torch.cat(found).abs().amax(1) == 0).sum())
    said = "No row has" if zero == 0 else f"{zero} of {len(judge.x)} rows have"
    return Check("gradients", zero == 0, f"{said} a gradient of zero.")
