r"""Predictions that take no more posterior draws than the decision needs.

A prediction averages over K draws. Long before the last of them most rows are decided: whatever the draws that are left
say, the answer stays. Rows are looked at after a few draws, and those that are settled take no more.

Labels are settled by a test that is exact at any number of draws, looked at however often (Waudby-Smith and Ramdas,
2020). For each class a gambler bets, draw by draw and without replacement, that this class does *not* have the highest
mean over all K draws. Write :math:`d_j` for the probability, under draw j, of the class that leads after the draws
before j, less that of the gambler's class, and :math:`S_{j-1}` for the sum of the same difference over these draws. If
the gambler's class has the highest mean, :math:`d_j` is :math:`c_j = -S_{j-1} / (K - j + 1)` at most on average, so
that the wealth

.. math:: W_k = \sum_\theta w_\theta \prod_{1 < j \le k} \left(1 + \theta \frac{d_j - c_j}{1 + c_j}\right)

does not grow on average, and ever reaches :math:`1 / \epsilon` with probability :math:`\epsilon` at most. The label is
settled when the gamblers of all other classes have reached that. It is wrong only if the gambler of the final label
has, so that :math:`\epsilon` need not be shared among the classes; the leader is known before each bet, and not chosen
after.

The ends of an interval are settled when they move by less than a twentieth of its width, up to the probability
:math:`\epsilon`, by the t distribution of a quantile's error after k of K draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from knowable.core.network.params import index_params
from knowable.core.posterior.monte_carlo import Budget, predict_outputs
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.randomness import generator_for

LOOKS = (11, 14, 18, 23, 30, 39, 50)  # numbers of draws after which rows are looked at
MOVE = 0.05  # of an interval's width, by which its ends may move and count as the same
_BETS = {0.95: 0.8, 0.6: 0.2}  # shares of the wealth that a gambler puts in, and how much begins with each
_FEWEST = 1e-12
_REACH, _HALVINGS = 6.0, 10  # standard deviations within which an end is looked for, and how often they are halved


@dataclass(frozen=True)
class Piece:
    """Rows that were settled by the same number of draws."""

    rows: Tensor  # their places, (n,); one may be there twice
    prediction: Prediction
    draws: int


class Draws:
    """A posterior that predicts each row with as many draws as its label, or its interval, needs.

    Args:
        posterior: The posterior; see :func:`in_random_order`.
        samples: Number of draws that there are.
        block: Rows are computed in multiples of so many, the last one repeated. Products of matrices may differ in
            their last digit with the number of rows; in whole blocks a row's answer is the same in any company.

    Attributes:
        posterior: The posterior, its draws in random order.
        samples: As given.
    """

    def __init__(self, posterior: Posterior, samples: int, *, block: int = 1):
        self.posterior, self.samples, self.block = in_random_order(posterior, samples), samples, block
        self._one_by_one = predicts_by_draws(self.posterior, samples)
        self._budgets: dict[Any, Budget] = {}

    @torch.no_grad()
    def predict(self, x: Tensor, *, most: int, epsilon: float, level: float) -> Iterator[Piece]:
        """Predict ``x`` in pieces; a row may be in a piece more than once.

        Args:
            x: Checked inputs.
            most: The most draws that a row takes, the first of them.
            epsilon: Probability, at most, that a row's decision is another than with ``most`` draws. 0 takes all.
            level: Probability that an interval holds.
        """
        posterior, samples = self.posterior, self.samples
        left = self._whole(torch.arange(len(x)))
        if not self._one_by_one:
            yield Piece(
                left, posterior.predict(x[left], samples=samples), len(posterior.draws_for_prediction(samples, 0)[1])
            )
            return
        model, most, taken = posterior.model, min(most, samples), 0
        looks = [look for look in LOOKS if look < most and epsilon > 0]
        stops = torch.tensor([*looks, most], dtype=torch.double)
        due = stops[:1].expand(len(left))  # when a row is looked at: whatever its company, so that it changes no answer
        outputs, params = torch.zeros(0), {}
        while True:
            stop = int(due.min())
            new, own, _ = predict_outputs(
                posterior, x[left], samples, posterior.seed, None, only=(taken, stop), budget=self._budget(x)
            )
            outputs = torch.cat([outputs, new]) if taken else new
            params = {name: torch.cat([params[name], own[name]]) for name in own} if taken else own
            noise = model.likelihood_params(params)
            equal = torch.zeros(stop, dtype=model.dtype, device=model.device).log_softmax(0)
            found = model.likelihood.predict(outputs, noise, equal)
            if stop == most:
                yield Piece(left, found.shaped(posterior.target_shape), stop)
                return
            needed = draws_needed(found, most, epsilon, level, looks=len(looks)).cpu().double().nan_to_num(most)
            settled = (due == stop) & (needed <= stop)
            if settled.any():
                rows = self._whole(settled.nonzero().flatten())
                these = found if settled.all() else model.likelihood.predict(outputs[:, rows], noise, equal)
                yield Piece(left[rows], these.shaped(posterior.target_shape), stop)
            if settled.all():
                return
            later = stops[torch.searchsorted(stops, needed.clamp(stop + 1, most))]
            rows = self._whole((~settled).nonzero().flatten())
            left, outputs, taken, due = left[rows], outputs[:, rows], stop, later.where(due == stop, due)[rows]

    def _whole(self, places: Tensor) -> Tensor:
        return in_blocks(places, self.block)

    def _budget(self, x: Tensor) -> Budget:
        """What a row of this shape takes, measured once."""
        key = tuple((leaf.shape[1:], leaf.dtype) for leaf in tree_leaves(x))
        if key not in self._budgets:
            self._budgets[key] = Budget(self.posterior, x, self.samples, None)
        return self._budgets[key]


def in_blocks(places: Tensor, size: int) -> Tensor:
    """Places of rows, the last one repeated until they are a multiple of ``size``."""
    lacking = -len(places) % size
    return torch.cat([places, places[-1:].expand(lacking)]) if lacking and len(places) else places


def predicts_by_draws(posterior: Posterior, samples: int) -> bool:
    """Whether a prediction costs a pass for each of ``samples`` draws, which come from one distribution."""
    cls = type(posterior)
    passes = cls._predict is Posterior._predict or getattr(posterior, "prediction", "") in ("sampling", "monte_carlo")
    plain = cls.draws_for_prediction in (Posterior.draws_for_prediction, Particles.draws_for_prediction)
    draws, log_weights = posterior.draws_for_prediction(samples, posterior.seed)
    return passes and plain and draws == samples and bool((log_weights == log_weights[0]).all())


def in_random_order(posterior: Posterior, samples: int) -> Posterior:
    """The posterior with draws of which the first few are a random sample of all: atoms are shuffled.

    Chains and ensembles keep their draws in an order, of which the first few are not like the last; other posteriors
    draw each by itself. Where there are more atoms than ``samples``, that many of them are chosen.
    """
    if not isinstance(posterior, Particles) or not predicts_by_draws(posterior, samples):
        return posterior
    chosen = posterior._chosen(0, samples, samples, posterior.seed).cpu()
    chosen = chosen[torch.randperm(samples, generator=generator_for(posterior.seed, "served"))]
    made = Particles(
        posterior.model, index_params(posterior.stack, chosen),
        buffer_stack=index_params(posterior.buffer_stack, chosen), points=posterior.points, buffers=posterior.buffers,
        diagnostics=posterior.diagnostics, seed=posterior.seed,
    )  # fmt: skip
    made.target_shape = posterior.target_shape
    return made


def draws_needed(prediction: Prediction, samples: int, epsilon: float, level: float, *, looks: int) -> Tensor:
    """After how many draws each row is settled, ``(rows,)``: it is if these are no more than it has, else a guess.

    Several outputs of a row must all be settled.

    Args:
        prediction: Of the draws so far, in random order.
        samples: Number of draws of which these are the first.
        epsilon: Probability, at most, that a row counts as settled whose decision is another over all ``samples``.
        level: Probability that an interval holds.
        looks: How often rows are looked at.
    """
    if isinstance(prediction, ClassPrediction):
        needed = _for_label(prediction.draw_log_probs.double().exp(), samples, epsilon)
    elif isinstance(prediction, RegressionPrediction):
        needed = _for_interval(prediction, samples, epsilon, level, looks)
    else:
        return torch.full((len(prediction),), float(samples))
    return needed.flatten(1).amax(1) if needed.dim() > 1 else needed


def _for_label(probs: Tensor, samples: int, epsilon: float) -> Tensor:
    """Draws until the label of the mean so far is that of all: ``probs`` is ``(k, rows, classes, ...)``."""
    sums = probs.cumsum(0)
    goal, taken = -math.log(epsilon), len(probs)
    wealth = _log_wealth(probs[1:], sums[:-1], samples)
    wealth = wealth.scatter(1, sums[-1].argmax(1, keepdim=True), math.inf).amin(1)
    at_this_pace = taken * goal / wealth.clamp_min(goal * taken / samples)
    return at_this_pace.where(wealth >= goal, (at_this_pace + taken) / 2)  # stakes rise, the nearer the end is


def _log_wealth(probs: Tensor, before: Tensor, samples: int) -> Tensor:
    """Logs of the gamblers' wealth, ``(rows, classes, ...)``: draws from the second on, the sums before each."""
    leader = before.argmax(2, keepdim=True)
    ahead, total = (each.gather(2, leader) - each for each in (probs, before))
    left = torch.arange(samples - 1, samples - 1 - len(probs), -1, dtype=probs.dtype, device=probs.device)
    centre = -total / left.view(-1, *(1,) * (probs.dim() - 1))
    certain = (centre <= -1).any(0)  # the draws that are left cannot turn it
    gain = (ahead - centre) / (1 + centre).clamp_min(_FEWEST)
    each = [torch.log1p(bet * gain).sum(0) + math.log(share) for bet, share in _BETS.items()]
    return torch.logaddexp(*each).masked_fill(certain, math.inf)


def _for_interval(prediction: RegressionPrediction, samples: int, epsilon: float, level: float, looks: int) -> Tensor:
    """Draws until neither end of the interval moves by more than a share of its width."""
    from scipy.stats import t

    parts = prediction.components
    shares = (1 - level) / 2, (1 + level) / 2
    low, high = (_end(prediction, share) for share in shares)
    step = 1.0 if parts.discrete else MOVE * (high - low)
    far = float(t.isf(epsilon / (4 * looks), len(prediction.log_weights) - 1))
    needed = torch.zeros_like(low)
    for end, share in zip((low, high), shares, strict=True):
        above, below = parts.cdf(end if parts.discrete else end + step), parts.cdf(end - step)
        for cdf, margin in ((above, above.mean(0) - share), (below, share - below.mean(0))):
            ratio = margin.clamp_min(0.0) / (far * cdf.std(0)).clamp_min(torch.finfo(low.dtype).tiny)
            needed = torch.maximum(needed, 1 / (ratio.square() + 1 / samples))
    return needed


def _end(prediction: RegressionPrediction, share: float) -> Tensor:
    """About the quantile, as near as it takes to see how far it may move."""
    reach = _REACH * prediction.std
    low, high = prediction.mean - reach, prediction.mean + reach
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = prediction.components.cdf(middle).mean(0) >= share
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
    return high.ceil() if prediction.components.discrete else high
