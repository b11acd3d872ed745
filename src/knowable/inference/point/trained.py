"""A posterior beside the trained weights that it was made from: it should not predict worse than they do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.method import FitJob
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.network.params import Buffers, Params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import ConvergenceWarning, Interrupted, InvalidType, WorseThanNetwork
from knowable.inference.point.own_parameters import most_probable
from knowable.inference.point.point import one_atom, start_values

_ROWS = 500  # that are compared, at most
_ALLOWED = 0.005  # nats by which each outcome of training rows may be predicted worse, where there is a choice
_FEWEST = 10  # of which a spread can be told
_WORSE = 0.01  # nats for each outcome, beyond twice the standard error, above which there is a warning


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that were trained elsewhere, and rows on which posteriors around them are compared with them.

    The rows are held-out ones where the fit has them, and training rows elsewhere. The likelihood's own parameters (a
    noise), which training did not define, are the posterior's.
    """

    model: Model
    weights: Params  # of the network
    buffers: Buffers
    x: Tensor
    y: Tensor
    held_out: bool
    cost: float = 0.0  # nats by which a right posterior predicts these rows worse, having seen them
    counts: Tensor | None = None  # the rows' weights

    @classmethod
    def of(cls, job: FitJob, point: Posterior, parameters: float = 0.0, *, most: int = _ROWS) -> TrainedWeights:
        r"""Those of a ``point``, and some rows of the fit; of the ``parameters``, so many are determined by the data.

        A linear regression with leverage h, the share of parameters in targets, leaves residuals of variance
        :math:`(1 - h) \sigma^2`, and its exact posterior predicts these targets worse than the mode does, by
        :math:`\tfrac12 (\log(1 + h) - h (1 - h) / (1 + h))` nats each. That is no fault of it.
        """
        rows = job.rows if job.validation is None else job.validation
        own = (LIKELIHOOD_PREFIX, *job.model.hyper_names)
        weights = {name: value for name, value in point.mean().items() if not name.startswith(own)}
        x, y, *counts = rows.some(most, seed=job.seed)
        cost, held_out = 0.0, job.validation is not None
        if not held_out and job.model.likelihood.noise_name is not None:
            targets = y[0].numel()
            share = min(1.0, max(0.0, parameters / (job.rows.size * targets)))
            cost = 0.5 * targets * (math.log1p(share) - share * (1 - share) / (1 + share))
        return cls(job.model, weights, point.buffers, x, y, held_out, cost, *counts)

    @property
    def rows(self) -> str:
        """Which rows are compared."""
        return "validation rows" if self.held_out else "training rows"

    @property
    def outcomes(self) -> int:
        """How many outcomes a row has: pixels of an image, several targets."""
        return sum(each[0].numel() for each in tensors_of(self.y))

    def losses(self, posterior: Posterior, samples: int = 64) -> tuple[Tensor, Tensor]:
        """NLL of each row (times its weight, of which the mean is 1): the posterior's, and that of the weights."""
        params = {**posterior.mean(), **self.weights}
        with torch.no_grad():
            output = posterior.model.forward(params, self.x, buffers=self.buffers)
            network = posterior.model.score(output, self.y, params)
            share = 1.0 if self.counts is None else self.counts / self.counts.mean()
            return -share * posterior.predict(self.x, samples=samples).log_prob(self.y), -share * network

    def best(self, make: Callable[[float], Posterior], sizes: Sequence[float]) -> float:
        """Which of ``sizes``, from large to small, the posterior ``make(size)`` should have.

        With held-out rows, the one with the smallest NLL. Otherwise the largest one with which the training rows are
        predicted as well as by the weights, to 0.005 nats for each outcome (or to ``cost``, if that is more), found by
        bisection.
        """
        if self.held_out:
            return min(sizes, key=lambda size: self.losses(make(size))[0].mean().item())
        first, last = 0, len(sizes) - 1
        allowed = max(_ALLOWED * self.outcomes, 1.1 * self.cost)
        while first < last:
            middle = (first + last) // 2
            mine, network = self.losses(make(sizes[middle]))
            first, last = (first, middle) if (mine - network).mean() <= allowed else (middle + 1, last)
        return sizes[first]

    def compared(self, posterior: Posterior, advice: str) -> None:
        """Report the NLL of the posterior beside that of the weights, and warn where it is worse."""
        mine, network = self.losses(posterior)
        worse = mine - network
        own, before = mine.mean().item(), network.mean().item()
        terms = {"nll": own, "nll_network": before}
        notes = posterior.diagnostics.notes
        if worse.mean().item() - 2 * _error(worse) > _WORSE * self.outcomes + self.cost:
            text = (
                f"The posterior predicts worse than the weights it was made from: NLL {own:.3g} on {len(worse)} "
                f"{self.rows}, {before:.3g} by the weights alone. {advice}"
            )
            warnings.warn(text, WorseThanNetwork, stacklevel=5)
            notes = (*notes, text)
        elif own - 2 * _error(mine) > (guess := self._guess(posterior)) + _WORSE * self.outcomes:
            text = (
                f"The posterior predicts the {self.rows} worse than a guess that does not look at the inputs: NLL "
                f"{own:.3g}, {guess:.3g} by the targets' mean and spread. Training rows that a network goes "
                f"through do not say what the noise is. {advice}"
            )
            warnings.warn(text, WorseThanNetwork, stacklevel=5)
            notes = (*notes, text)
        posterior.diagnostics = replace(
            posterior.diagnostics, terms={**posterior.diagnostics.terms, **terms}, notes=notes
        )

    def _guess(self, posterior: Posterior) -> float:
        """NLL of a row by a normal with the mean and spread of these targets.

        It is infinite where no noise was learned, or where the weights predict no better than that.
        """
        model = self.model
        if f"{LIKELIHOOD_PREFIX}{model.likelihood.noise_name}" not in model.names or len(self.y) < _FEWEST:
            return math.inf
        with torch.no_grad():
            output = model.forward({**posterior.mean(), **self.weights}, self.x, buffers=self.buffers)
        targets = model.align(self.y, output).double().flatten(1)
        known, errors = ~targets.isnan(), targets - output.double().flatten(1)
        spread, rest = (torch.stack([each[:, k][known[:, k]].std(correction=0) for k in range(known.shape[1])])
                        for each in (targets, errors))  # fmt: skip
        if not (rest < spread).all():
            return math.inf
        return (spread.log() + 0.5 * math.log(2 * math.pi * math.e)).sum().item()


def _error(losses: Tensor) -> float:
    """The standard error of their mean."""
    return (losses.std() / len(losses) ** 0.5).item() if len(losses) > 1 else 0.0


def without_spread(point: Posterior, when: str, *, interrupted: bool = True) -> Posterior:
    """A point in place of a posterior whose fit was stopped too early, with a warning that it has no uncertainty."""
    text = (
        f"The fit was stopped {when}: what it returns is a point estimate WITHOUT ANY UNCERTAINTY about the weights. "
        f"Fit again; with checkpoint= it continues where it was stopped."
    )
    warnings.warn(text, Interrupted if interrupted else ConvergenceWarning, stacklevel=4)
    known = point.diagnostics
    message = known.message if known.interrupted or known.out_of_time else f"stopped from the keyboard {when}"
    point.diagnostics = replace(
        known, interrupted=interrupted, converged=False, message=message, notes=(*known.notes, text)
    )
    return point


def check_start(start: Any, *, none: bool) -> None:
    """Refuse what :func:`given_point` cannot read; ``none`` says whether None is allowed."""
    if isinstance(start, str):
        check_choice("start", start, ("network",))
    elif not isinstance(start, Posterior | nn.Module | Mapping) and not (none and start is None):
        expected = f"{'None, ' if none else ''}'network', a posterior, a network or its state_dict()"
        raise InvalidType(f"start must be {expected}, got {type(start).__name__}.")


def given_point(job: FitJob, start: Any) -> Particles:
    """Weights from ``start`` as a posterior of one particle.

    Parameters of the likelihood that ``start`` does not have are set to their most probable values: by the validation
    rows where there are any, since errors on rows that a network was trained on are too small.
    """
    model = job.model
    values = start_values("start", model, start)
    params = dict(values.params)
    own = [name for name in values.unset if name not in model.hyper_names]
    if own:
        with own_randomness(derive_seed(job.seed, "own")):  # a loader may draw
            found = most_probable(model, job.validation or job.rows, params, values.buffers, own)
        params |= {name: value.to(params[name]) for name, value in found.items()}
    diagnostics = Diagnostics(repr(job.method), message="expanded around the given weights")
    return one_atom(model, params, buffers=values.buffers, seed=job.seed, diagnostics=diagnostics)
