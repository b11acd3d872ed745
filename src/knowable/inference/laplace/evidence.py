r"""The Laplace estimate of the log marginal likelihood, and the noise and prior scale that maximise it (MacKay, 1992).

.. math:: \log p(D) \approx \log p(D \mid \hat\theta) + \log p(\hat\theta) + \tfrac{D}{2} \log 2\pi
    - \tfrac12 \log\det P

At fixed weights, noise and prior scale enter through the two densities and through P, whose curvature part is
proportional to 1 / noise²: the estimate can be maximised over them without another pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from knowable.core.model.data import Batch
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.network.params import Buffers, Params
from knowable.errors import InvalidArgument
from knowable.inference.laplace.curvature import Curvature, conditional_prior, prior_precision
from knowable.inference.laplace.expansion import ExpansionPoint
from knowable.inference.point.own_parameters import (
    in_double,
    integral_over,
    log_likelihood_of,
    maximise,
    outputs_of,
    with_priors,
)
from knowable.inference.point.point import PointObjective

_LARGEST = 12.0  # logarithms of scales are searched between minus and plus this


@dataclass(frozen=True)
class Evidence:
    """The log marginal likelihood log p(D) as a function of noise and prior hyperparameters, at given weights."""

    expansion: ExpansionPoint
    curvature: Curvature

    def __call__(self, settings: Params) -> Tensor:
        """The estimate at ``settings`` (values of some of the noise and hyperparameters), in double precision."""
        prior = prior_precision(self.expansion, settings)
        log_det = self.curvature.log_det(prior, self.weights(settings))
        constant = 0.5 * self.expansion.layout.size * math.log(2 * math.pi)
        return self.log_likelihood(settings) + self.log_prior(settings) + constant - 0.5 * log_det

    def over_noise(self, settings: Params) -> tuple[Tensor, str]:
        """The estimate, integrated over the noise where that is among the ``settings``, and a note if it is not."""
        name, params = self.expansion.noise_name, self.expansion.params
        own = [each for each in params if each.startswith(LIKELIHOOD_PREFIX)]
        if name is None or name not in settings:
            return self(settings), f"The log evidence is that at the given {own[0]}." if own else ""
        return integral_over(
            self.expansion.model, name, lambda value: self._at_noise({**settings, name: value}), settings[name]
        )

    def _at_noise(self, settings: Params) -> Tensor:
        r"""The estimate at another noise, with the weights at the mode that they have there, to second order.

        At the mode the slope of the likelihood, in proportion to 1 / noise², and that of the prior cancel; at another
        noise g is left of them, and the quadratic expansion gains :math:`\tfrac12 g^\top P^{-1} g`. The derivatives at
        the ``settings`` are right, to the second, and these are what the integral takes.
        """
        if self.expansion.groups > 1:
            return self(settings)
        weights, layout = self.weights(settings), self.expansion.layout
        flat = layout.flatten(self.expansion.params).detach().requires_grad_()
        known = {name: value.detach() for name, value in settings.items()}
        prior = self.expansion.model.log_prior({**self.expansion.params, **known, **layout.views(flat)})
        (slope,) = torch.autograd.grad(prior, flat) if prior.requires_grad else (torch.zeros_like(flat),)
        left = (1.0 - weights / weights.detach()) * slope.double()
        step = self.curvature.solve(prior_precision(self.expansion, settings), weights, left)
        return self(settings) + 0.5 * left @ step

    def weights(self, settings: Params) -> Tensor:
        """Factors of the curvature's groups, ``(groups,)``: (old noise / new noise)²."""
        name = self.expansion.noise_name
        if name is None or name not in settings:
            return torch.ones(self.expansion.groups, dtype=torch.float64, device=self.expansion.model.device)
        return torch.exp(2.0 * (self.expansion.params[name].double() - settings[name])).reshape(-1)

    def log_likelihood(self, settings: Params) -> Tensor:
        """The log likelihood log p(D | θ) at the weights."""
        if not any(name.startswith("likelihood.") for name in settings):
            return self.expansion.log_likelihood()[0]
        model, params = self.expansion.model, in_double(self.expansion.params) | settings
        return log_likelihood_of(model, self._outputs, params)

    @cached_property
    def _outputs(self) -> list[Batch]:
        return outputs_of(self.expansion.model, self.expansion.data, self.expansion.params, self.expansion.buffers)

    def log_prior(self, settings: Params) -> Tensor:
        """The log prior log p(θ) of the random weights."""
        params = in_double(self.expansion.params) | settings
        names, prior = self.expansion.layout.names, conditional_prior(self.expansion)
        if isinstance(prior, PosteriorPrior) and prior.correlated:
            return prior.log_prob({name: self.expansion.params[name] for name in names}).double()
        bound = [self.expansion.model.prior.bound(name, params) for name in names]
        pairs = zip(names, bound, strict=True)
        return torch.stack([each.log_prob(params[name]).sum() for name, each in pairs if each is not None]).sum()

    @property
    def proper(self) -> bool:
        """Whether the prior integrates to one, without which there is no evidence."""
        prior = self.expansion.model.prior
        each = [prior.prior_of(name) for name in self.expansion.layout.names]
        return all(one is None or one.proper for one in each)

    def maximised(self, names: Iterable[str], *, steps: int = 100) -> tuple[Params, float]:
        """The values of ``names`` that maximise the estimate times their own prior, by L-BFGS, and the gain in nats."""
        start = {name: self.expansion.params[name].double().clone() for name in names}
        if not start:
            return {}, 0.0

        def objective(free: Params) -> Tensor:
            return self._objective({name: value.clamp(-_LARGEST, _LARGEST) for name, value in free.items()})

        try:
            found = maximise(objective, start, max_iter=steps, tolerance_grad=1e-8, tolerance_change=1e-14)
        except InvalidArgument:  # a step into where P is singular
            return start, 0.0
        found = {name: value.clamp(-_LARGEST, _LARGEST) for name, value in found.items()}
        gain = self.gain(found)
        return (found, gain) if gain >= 0 else (start, 0.0)

    def gain(self, settings: Params) -> float:
        """How much larger the objective is at ``settings`` than at the present values, in nats."""
        now = {name: self.expansion.params[name].double() for name in settings}
        with torch.no_grad():
            return (self._objective(settings) - self._objective(now)).item()

    def _objective(self, settings: Params) -> Tensor:
        """The estimate, and the log densities of the settings themselves."""
        model, params = self.expansion.model, {**self.expansion.params, **settings}
        own = {name: value for name, value in settings.items() if name not in model.hyper_names}
        return with_priors(self(settings) + model.prior.log_hyperprior(params), model, own, params)


# --- Training with a noise and prior scale that maximise the evidence every few epochs (Immer et al., 2021) ----------

_FIRST = 500  # steps before the first choice: the weights should fit the data by then
_STEPS, _EPOCHS = 200, 4  # the fewest from one choice to the next
_LARGEST_MOVE = 0.5  # of the logarithm of a scale in one choice
_SETTLED = 0.1  # nats: training goes on while a choice gains more
_LONGEST = 10_000  # steps after which training may stop although a choice gains more

Choose = Callable[[Params, Buffers], tuple[Params, float]]
"""``(params, buffers) -> values of the scales that maximise the evidence there, gain in nats``."""


class TuningObjective(PointObjective):
    """The loss -log p(D, θ) / N, with a noise and prior scales (``names``) that are chosen again every few epochs."""

    def __init__(self, model: Model, size: int, *, names: list[str], choose: Choose):
        super().__init__(model, size, use_prior=True, held=names)
        self._choose = choose
        self._steps, self._epochs = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
        self._last = torch.zeros(2, dtype=torch.long)  # steps and epochs at the last choice
        self._gain = torch.full((), math.inf, dtype=torch.float64)  # of the last choice

    @property
    def settles_from(self) -> float:
        """Infinite while the scales still gain from being chosen again."""
        return math.inf if self._gain > _SETTLED and self._steps < _LONGEST else 0.0

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        self._steps += 1
        return super().forward(x, y, weights)

    def end_of_epoch(self) -> None:
        """Choose the scales, if enough steps and epochs have passed."""
        self._epochs += 1
        since = torch.stack([self._steps, self._epochs]) - self._last
        if self._steps < _FIRST or since[0] < _STEPS or since[1] < _EPOCHS:
            return
        self._choose_again()

    def changes_at_minimum(self) -> bool:
        """Choose the scales."""
        self._choose_again()
        return self.settles_from > 0

    def _choose_again(self) -> None:
        params = {name: value.detach() for name, value in self.params().items()}
        chosen, gain = self._choose(params, self.net_buffers)
        for name, value in chosen.items():
            params[name] += (value.to(params[name]) - params[name]).clamp(-_LARGEST_MOVE, _LARGEST_MOVE)
        self._gain.fill_(gain)
        self._last.copy_(torch.stack([self._steps, self._epochs]))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes."""
        own = {"steps": self._steps, "epochs": self._epochs, "last": self._last, "gain": self._gain}
        return {**super().tensors(), **{f"tuning.{name}": value for name, value in own.items()}}
