"""Drawing from a proposal, block by block, and weighing the draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from knowable.core.chains.target import DensityTarget, ModelTarget, NormalDensity
from knowable.core.model.data import Data
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.network import no_hidden_loops
from knowable.core.network.params import Layout, Params, expand_params, index_params, stack_params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.progress import progress_bar
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument
from knowable.inference.sampling.mode import StudentTProposal, effective_size
from knowable.inference.sampling.pareto import smooth_weights
from knowable.inference.sampling.sampler import Start

_BLOCK = 64  # draws weighed together, fewer where a draw is large
_BLOCK_BYTES = 2**26
_VECTORISE_BELOW = 20_000  # parameters; beyond it a batched call is no faster than a loop


class PriorProposal:
    """Draws from the prior, which cancels in the weights: None stands for its density."""

    def __init__(self, model: Model, layout: Layout):
        self.model, self.layout = model, layout
        start = model.params()
        self.like = {name: start[name] for name in layout.names}

    @property
    def device(self) -> torch.device:
        """Where draws are made."""
        return self.model.device

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, None]:
        """Positions ``(count, D)``."""
        draws = [self.model.prior.sample(self.like, generator=generator) for _ in range(count)]
        return self.layout.flatten(stack_params(draws)), None


class FittedProposal:
    """Draws from a fitted posterior of the same parameters."""

    def __init__(self, posterior: Posterior, layout: Layout):
        self.posterior, self.layout = posterior, layout
        given = [name for name in posterior.model.random_names if name not in posterior.points]
        if set(given) != set(layout.names):
            odd = sorted(set(given) ^ set(layout.names))
            raise InvalidArgument(
                f"proposal must be a posterior over the same random parameters as the model; they differ in "
                f"{', '.join(odd[:5])}."
            )

    @property
    def device(self) -> torch.device:
        """Where draws are made."""
        return self.posterior.model.device

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions ``(count, D)`` and their log densities."""
        params = self.posterior.sample(count, generator)
        return self.layout.flatten(params), self.posterior.log_prob(params).double()


Proposal = PriorProposal | FittedProposal | StudentTProposal


class JointDensity:
    """The log joint of a model given its point estimates, the likelihood and the prior apart; draws ``(n, D)``."""

    def __init__(self, model: Model, data: Data, start: Start):
        self.model, self.start = model, start
        self._target = ModelTarget(model, data, points=start.points, buffers=start.buffers)
        self.layout = self._target.layout
        self.block = _block_size(self.layout.size)
        self._vectorise = sum(value.numel() for value in model.params().values()) <= _VECTORISE_BELOW
        normal = NormalDensity.of(model, self.layout)
        self._normal = None if normal is None else NormalDensity(normal.mean.double(), normal.precision.double())

    def __call__(self, position: Tensor) -> Tensor:
        """Log joint of each draw."""
        return self.log_likelihood(position) + self.log_prior(position)

    def log_likelihood(self, position: Tensor) -> Tensor:
        """Σ log p(y | x, θ) of each draw."""
        return torch.cat([self._of_block(block.to(self.model.dtype)) for block in position.split(self.block)])

    def log_prior(self, position: Tensor) -> Tensor:
        """Log p(θ) of the random parameters of each draw."""
        if self._normal is not None:
            return self._normal.value(position.double())
        layout, prior = self.layout, self.model.prior
        position = position.to(self.model.dtype)
        try:
            return vmap(lambda flat: prior.log_prob(layout.views(flat)))(position).double()
        except RuntimeError:
            return torch.stack([prior.log_prob(layout.views(flat)) for flat in position]).double()

    def _of_block(self, block: Tensor) -> Tensor:
        stack = {**expand_params(self.start.points, len(block)), **self.layout.views(block)}
        network = self.model.network_params(stack)
        own = {name: value for name, value in stack.items() if name.startswith(LIKELIHOOD_PREFIX)}
        total = torch.zeros(len(block), dtype=torch.float64, device=block.device)
        for x, y in self._target.rows(self.block):
            outputs = self.model.network.over_draws(network, x, buffers=self.start.buffers, vectorise=self._vectorise)
            total += self._scores(outputs, y, own).double()
        return total

    def _scores(self, outputs: Tensor, y: Tensor, own: Params) -> Tensor:
        """Σ log p(y | output, θ) for each draw's outputs ``(n, rows, ...)``."""

        def score(output: Tensor, params: Params) -> Tensor:
            return self.model.score(output, y, params).sum()

        try:
            with no_hidden_loops():
                return vmap(score)(outputs, own)
        except RuntimeError:  # a likelihood that cannot be batched
            return torch.stack([score(output, index_params(own, k)) for k, output in enumerate(outputs)])


class BareDensity:
    """A bare log density of draws ``(n, D)``."""

    def __init__(self, log_density: Callable[[Params], Tensor], layout: Layout, dtype: torch.dtype):
        self.dtype, self.layout = dtype, layout
        self.block = _block_size(layout.size)
        self._target = DensityTarget(log_density, layout, mode="eager")  # too few calls for a recording to pay

    def __call__(self, position: Tensor) -> Tensor:
        """Log density of each draw."""
        return torch.cat([self._target.value(block.to(self.dtype)).double() for block in position.split(self.block)])


def _block_size(dimension: int) -> int:
    return max(1, min(_BLOCK, _BLOCK_BYTES // (8 * dimension)))


@dataclass(frozen=True)
class Weighed:
    """Weights of all draws, ``(n,)`` in double precision, and what they say."""

    log_weights: Tensor
    values: Tensor  # log density of the target
    k: float
    interrupted: bool
    block: int  # draws of one stream

    @property
    def worth(self) -> float:
        """Effective sample size."""
        return effective_size(self.log_weights)

    @property
    def log_evidence(self) -> float:
        """Log of the mean weight."""
        return (self.log_weights.logsumexp(0) - math.log(len(self.log_weights))).item()

    @property
    def error(self) -> float:
        """Standard error of the log of the mean weight, by the delta method."""
        count = len(self.log_weights)
        if count < 2:
            return math.nan
        return math.sqrt(max(0.0, (count / self.worth - 1) / (count - 1)))


def weigh(
    proposal: Proposal,
    density: JointDensity | BareDensity,
    draws: int,
    *,
    smooth: bool,
    seed: int,
    progress: bool | None,
) -> Weighed:
    """Draw block by block and weigh; the draws themselves are made again once it is known which ones are kept."""
    found: list[tuple[Tensor, Tensor]] = []
    interrupted = False
    with progress_bar("ImportanceSampling", progress) as bar:
        try:
            for number, count in enumerate(_blocks(draws, density.block)):
                found.append(_weights(density, *_draw(proposal, number, count, seed)))
                bar.update(min(draws, (number + 1) * density.block), draws, "weighing draws")
        except KeyboardInterrupt:
            interrupted = True
    if not found:
        raise KeyboardInterrupt  # there are no draws yet to return
    raw = torch.cat([weights for _, weights in found]).nan_to_num(-math.inf, math.inf, -math.inf)
    if not torch.isfinite(raw.max()):
        raise InvalidArgument(
            "No draw has a finite weight: the likelihood of all of them is zero, not a number or infinite. Give a "
            "proposal nearer to the posterior, or check the data's scale."
        )
    smoothed, k = smooth_weights(raw)
    values = torch.cat([value for value, _ in found])
    return Weighed(smoothed if smooth else raw, values, k, interrupted, density.block)


def _weights(density: JointDensity | BareDensity, position: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log density of the target and log weight of each draw."""
    if log_q is not None:
        value = density(position)
        return value, value - log_q
    assert isinstance(density, JointDensity)
    likelihood = density.log_likelihood(position)
    return likelihood, likelihood


def _blocks(draws: int, size: int) -> list[int]:
    return [min(size, draws - first) for first in range(0, draws, size)]


def _draw(proposal: Proposal, number: int, count: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Block ``number``, on its own stream: the same draws whenever it is asked for."""
    with torch.no_grad():
        return proposal.draw(count, generator_for(seed, "draws", number, device=proposal.device))


def drawn_again(proposal: Proposal, run: Weighed, index: Tensor | None, seed: int) -> Tensor:
    """The draws named by ``index``, in order (None: all), ``(n, D)``."""
    found, first = [], 0
    for number, count in enumerate(_blocks(len(run.log_weights), run.block)):
        here = slice(None) if index is None else index[(index >= first) & (index < first + count)] - first
        if index is None or len(here):  # type: ignore[arg-type]
            found.append(_draw(proposal, number, count, seed)[0][here])
        first += count
    return torch.cat(found)


# --- what weights are worth ------------------------------------------------------------------------------------------


def systematic(log_weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices ``(count,)``, in order, by systematic resampling (Kitagawa, 1996): each as often as its weight says."""
    total = log_weights.softmax(0).cumsum(0).cpu()
    points = (
        torch.arange(count, dtype=torch.float64) + torch.rand((), generator=generator, dtype=torch.float64)
    ) / count
    return torch.searchsorted(total / total[-1], points).clamp_max(len(total) - 1).to(log_weights.device)


def effective_sizes(position: Tensor, log_weights: Tensor) -> Tensor:
    r"""What weighted draws ``(n, D)`` are worth for the mean of each coordinate, ``(D,)``.

    .. math:: \frac{\sum_s \bar w_s (\theta_s - \mu)^2}{\sum_s \bar w_s^2 (\theta_s - \mu)^2}
    """
    weights = log_weights.softmax(0)
    squares = (position.double() - weights @ position.double()).square()
    return (weights @ squares) / (weights.square() @ squares)
