"""FGSM, PGD and random search on the averaged prediction of a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.randomness import derive_seed, generator_for
from knowable.decisions.attack.objective import Detector, Objective, Value, attacked_data
from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation.detect import Detection, Score

_WEIGHTS = (1.0, 0.2, 5.0)  # of the detector's penalty, from restart to restart


def fgsm(
    posterior: Posterior,
    x: Any,
    y: Any,
    epsilon: float,
    *,
    norm: Any = "inf",
    clip: tuple[float, float] | None = None,
    samples: int = 64,
    detector: Detection | Score | str | None = None,
    weight: float = 1.0,
) -> Tensor:
    r"""The fast gradient sign method (Goodfellow et al., 2015) through the average over draws.

    .. math:: x + \epsilon \operatorname{sign} \nabla_x \big({-\log} E_w\, p(y \mid x, w)\big)

    One step, the best there is against a model that is linear in x. For numbers it follows the squared error of the
    mean.

    Args:
        posterior: Whose prediction is attacked, by the draws that ``posterior.predict`` uses.
        x: Inputs, floating point, one row each.
        y: Their targets.
        epsilon: How far a row may be moved, in the norm.
        norm: ``"inf"``: no element by more than epsilon; or ``2``: a row by no more than epsilon in Euclidean length.
        clip: Smallest and largest value of an input, such as ``(0, 1)`` for pixels. None: any value is allowed.
        samples: Number of draws.
        detector: See :func:`pgd`.
        weight: See :func:`pgd`.

    Returns:
        The moved inputs, a tensor like ``x``.
    """
    setting = _Setting.of(posterior, x, y, epsilon, norm, clip, samples, detector, weight)
    moved = torch.empty_like(setting.x)
    for rows in setting.parts():
        start = setting.x[rows]
        _, gradient = setting.objective.gradient(start, setting.y[rows], posterior.seed)
        moved[rows] = setting.ball.project(start + epsilon * setting.ball.direction(gradient), start)
    return setting.like_given(moved)


def pgd(
    posterior: Posterior,
    x: Any,
    y: Any,
    epsilon: float,
    *,
    steps: int = 40,
    restarts: int = 1,
    norm: Any = "inf",
    step_size: float | None = None,
    clip: tuple[float, float] | None = None,
    samples: int = 64,
    detector: Detection | Score | str | None = None,
    weight: float = 1.0,
    fresh_draws: bool = False,
    seed: int = 0,
) -> Tensor:
    r"""Projected gradient ascent (Madry et al., 2018) through the average over draws.

    The draws are those of ``posterior.predict``, the same at every step: the gradient is the full
    gradient of the very prediction that is made, and the attack is deterministic. With ``fresh_draws`` each step takes
    new ones, so that it ascends the expectation over all draws (Athalye et al., 2018): for defenders who make new ones.

    Of every row the best point on the way is returned: a wrong one if there was any, and of these the one with the
    largest error. The first start is x itself, further ones are random in the ball; every other one of these follows
    the log odds of the nearest other label, which finds some labels that fall to none in particular.

    A ``detector`` makes the attacker aware of it: the score is in the objective, and the best point is a wrong one that
    is not flagged (see :mod:`knowable.decisions.attack.objective`). Restarts then also differ in the weight of the
    score (1, 0.2 and 5 times ``weight``): three or more find most.

    For a transfer attack, craft on another posterior of the same task and evaluate on this one.

    Args:
        posterior: Whose prediction is attacked.
        x: Inputs, floating point, one row each.
        y: Their targets.
        epsilon: How far a row may be moved, in the norm.
        steps: Number of gradient steps.
        restarts: Number of starts.
        norm: ``"inf"``: no element by more than epsilon; or ``2``: a row by no more than epsilon in Euclidean length.
        step_size: Length of a step in the norm. None: 2.5 epsilon / steps, with which any point of the ball can be
            reached.
        clip: Smallest and largest value of an input, such as ``(0, 1)`` for pixels. None: any value is allowed.
        samples: Number of draws.
        detector: What the attacker avoids: a Detection, with its threshold; or the name of a score, a function of a
            prediction or a :class:`knowable.FeatureDensity`, with the threshold that flags 5% of ``x``.
        weight: Weight of the detector's score in the objective.
        fresh_draws: New draws at every step. The last point of each restart counts then, since points along the way
            were judged by different draws.
        seed: Of random starts and fresh draws.

    Returns:
        The moved inputs, a tensor like ``x``.
    """
    setting = _Setting.of(posterior, x, y, epsilon, norm, clip, samples, detector, weight)
    steps, restarts = check_count("steps", steps), check_count("restarts", restarts)
    length = 2.5 * epsilon / steps if step_size is None else check_number("step_size", step_size, above=0.0)
    climb = _Climb(setting, steps, length, fresh_draws, seed)
    starts = [setting.x, *(setting.random_start(derive_seed(seed, "start", k)) for k in range(1, restarts))]
    moved = torch.empty_like(setting.x)
    for rows in setting.parts():
        best = _Best(setting.x[rows], None)
        for k, start in enumerate(starts):
            objective = replace(setting.objective, nearest=k % 2 == 1, weight=weight * _WEIGHTS[k % len(_WEIGHTS)])
            found = climb.run(objective, rows, start[rows], k)
            best.offer(found, setting.objective.value(found, setting.y[rows], posterior.seed))
        moved[rows] = best.x
    return setting.like_given(moved)


def random_search(
    posterior: Posterior,
    x: Any,
    y: Any,
    epsilon: float,
    *,
    queries: int = 200,
    norm: Any = "inf",
    clip: tuple[float, float] | None = None,
    samples: int = 64,
    seed: int = 0,
) -> Tensor:
    """An attack that sees predictions only, no gradients: random blocks of the input to the edge of the ball.

    A move is kept where it makes the error larger; blocks get smaller with time (after the square attack of
    Andriushchenko et al., 2020, for inputs of any shape). An attack by gradients that finds less than this one is
    broken: see :func:`check_masking`.

    Args:
        posterior: Whose prediction is attacked.
        x: Inputs, floating point, one row each.
        y: Their targets.
        epsilon: How far a row may be moved, in the norm.
        queries: Number of predictions for each row.
        norm: As for :func:`pgd`.
        clip: As for :func:`pgd`.
        samples: Number of draws.
        seed: Of the search.

    Returns:
        The moved inputs, a tensor like ``x``.
    """
    setting = _Setting.of(posterior, x, y, epsilon, norm, clip, samples, None, 1.0)
    generator = generator_for(seed, "random search")
    size = setting.x[0].numel()
    moved = setting.x
    best = setting.value(moved)
    for query in range(check_count("queries", queries)):
        count = max(1, round(size * 0.5 ** (1 + 6 * query / queries)))
        signs = torch.randint(0, 2, (len(moved), 1 if count < size // 2 else size), generator=generator) * 2 - 1
        first = torch.randint(0, size - count + 1, (len(moved), 1), generator=generator)
        place = torch.arange(size)
        block = (place >= first) & (place < first + count)
        step = (epsilon * signs * torch.ones(size)).to(moved).view_as(moved)
        change = moved.where(~block.view_as(moved).to(moved.device), setting.x + step)
        change = setting.ball.project(change, setting.x)
        value = setting.value(change)
        better = value.better_than(best)
        moved = change.where(_over(better, moved), moved)
        best = Value(value.reached.where(better, best.reached), value.gain.where(better, best.gain))
    return setting.like_given(moved)


# --- parts of the attacks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ball:
    """Where a row may be moved to: no further than epsilon, and not out of the box."""

    epsilon: float
    norm: str  # "inf" or "2"
    clip: tuple[float, float] | None

    @classmethod
    def of(cls, epsilon: Any, norm: Any, clip: Any, x: Tensor) -> Ball:
        """From arguments, checked."""
        epsilon = check_number("epsilon", epsilon, above=0.0)
        name = str(norm).lower().removeprefix("l").removesuffix(".0")
        if name not in ("inf", "2"):
            raise InvalidArgument(f"norm must be 'inf' or 2, got {norm!r}.")
        if clip is not None:
            low, high = (check_number("clip", each) for each in clip)
            if not low < high:
                raise InvalidArgument(f"clip must be a smallest and a larger largest value, got {clip!r}.")
            outside = ((x < low) | (x > high)).flatten(1).any(1) if x.dim() > 1 else (x < low) | (x > high)
            if outside.any():
                raise InvalidData(
                    f"x has values from {x.min():.4g} to {x.max():.4g}, outside of clip={clip!r}, in row "
                    f"{int(outside.nonzero()[0])} (counting from 0). Pass the range that inputs have."
                )
            clip = (low, high)
        return cls(epsilon, name, clip)

    def direction(self, gradient: Tensor) -> Tensor:
        """The steepest direction of length 1 in the norm; 0 where the gradient is."""
        if self.norm == "inf":
            return gradient.sign()
        largest = gradient.flatten(1).abs().amax(1)  # first, so that squares do not underflow
        gradient = gradient / _over(largest.where(largest > 0, 1.0), gradient)
        return gradient / _over(_lengths(gradient).clamp_min(1e-12), gradient)

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """The nearest point of the ball, and then of the box."""
        change = x - centre
        if self.norm == "inf":
            change = change.clamp(-self.epsilon, self.epsilon)
        else:
            change = change * _over((self.epsilon / _lengths(change).clamp_min(1e-12)).clamp_max(1.0), change)
        return centre + change if self.clip is None else (centre + change).clamp(*self.clip)

    def random(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A uniform point of the ball around each row, then in the box."""
        if self.norm == "inf":
            noise = 2.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1.0
        else:
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            radius = torch.rand(len(x), generator=generator, dtype=x.dtype) ** (1.0 / x[0].numel())
            noise = noise * _over(radius / _lengths(noise), noise)
        return self.project(x + self.epsilon * noise.to(x.device), x)


@dataclass(frozen=True)
class _Setting:
    """The checked arguments of an attack."""

    objective: Objective
    ball: Ball
    x: Tensor
    y: Tensor
    like_given: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls, posterior: Any, x: Any, y: Any, epsilon: Any, norm: Any, clip: Any, samples: Any, detector: Any,
        weight: Any,
    ) -> _Setting:  # fmt: skip
        own, target = attacked_data(posterior, x, y)
        ball = Ball.of(epsilon, norm, clip, own)
        check_count("samples", samples)
        weight = check_number("weight", weight, above=0.0)
        known = Detector.of(detector, posterior, own, samples)

        def like_given(moved: Tensor) -> Tensor:
            return moved.to(dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else moved

        return cls(Objective(posterior, samples, known, weight), ball, own, target, like_given)

    def parts(self) -> list[slice]:
        """Rows that are worked on together."""
        size = self.objective.rows(self.x)
        return [slice(start, start + size) for start in range(0, len(self.x), size)]

    def value(self, x: Tensor) -> Value:
        """What ``x`` reaches, by the draws of a prediction."""
        seed = self.objective.posterior.seed
        found = [self.objective.value(x[rows], self.y[rows], seed) for rows in self.parts()]
        return Value(torch.cat([each.reached for each in found]), torch.cat([each.gain for each in found]))

    def random_start(self, seed: int) -> Tensor:
        return self.ball.random(self.x, generator_for(seed))


class _Best:
    """The best point so far of each row."""

    def __init__(self, x: Tensor, value: Value | None):
        self.x, self.value = x, value

    def offer(self, x: Tensor, value: Value) -> None:
        if self.value is None:
            self.x, self.value = x, value
            return
        better = value.better_than(self.value)
        self.x = x.where(_over(better, x), self.x)
        self.value = Value(
            value.reached.where(better, self.value.reached), value.gain.where(better, self.value.gain)
        )  # fmt: skip


@dataclass(frozen=True)
class _Climb:
    """Steps along the gradient from one start."""

    setting: _Setting
    steps: int
    length: float
    fresh_draws: bool
    seed: int

    def run(self, objective: Objective, rows: slice, start: Tensor, restart: int) -> Tensor:
        """The best point on the way, or the last one with fresh draws."""
        centre, y, ball = self.setting.x[rows], self.setting.y[rows], self.setting.ball
        generator = generator_for(self.seed, "kick", restart, rows.start)
        here, best = start, _Best(start, None)
        for step in range(self.steps):
            value, gradient = objective.gradient(here, y, self._draws(objective, restart, step))
            best.offer(here, value)
            noise = torch.randn(here.shape, generator=generator, dtype=here.dtype).to(here.device)
            flat = gradient.flatten(1).abs().amax(1) == 0  # nothing to follow, as at an error of exactly 0
            still = flat if objective.detector is None else flat & ~value.reached
            gradient = noise.where(_over(still, noise), gradient)
            here = ball.project(here + self.length * ball.direction(gradient), centre)
        if self.fresh_draws:
            return here
        best.offer(here, objective.value(here, y, self._draws(objective, restart, self.steps)))
        return best.x

    def _draws(self, objective: Objective, restart: int, step: int) -> int:
        own = objective.posterior.seed
        return derive_seed(self.seed, "fresh draws", own, restart, step) if self.fresh_draws else own


def _over(per_row: Tensor, like: Tensor) -> Tensor:
    """One number for each row, to be broadcast over ``like``."""
    return per_row.view(-1, *(1,) * (like.dim() - 1))


def _lengths(x: Tensor) -> Tensor:
    return x.flatten(1).square().sum(1).sqrt()
