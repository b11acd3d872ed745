r"""Moves of chains at temperatures of their own: what Metropolis, annealing and tempering share.

A move takes a state and temperatures :math:`T` ``(N,)`` and leaves :math:`p(\theta)^{1/T}` of every chain as it is.
Chains come in groups (see :mod:`~knowable.inference.sampling.warmup_covariance`); each group has its own shape and its
own scale of steps, both learned in the warm-up and kept in the state. Values and gradients in the state are those of
the target itself, without T, so that a change of temperature costs nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.kernel import State
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.inference.sampling import warmup_covariance as spread
from knowable.inference.sampling.hmc import DIVERGED
from knowable.inference.sampling.sampler import Sampler

KINDS = ("hmc", "metropolis")
_LENGTH = 0.5 * math.pi  # of a mean trajectory in units of the spread: a quarter of a turn forgets where it began
_NUMBERS = 2**22  # random numbers drawn at once


@dataclass(frozen=True)
class Moves(ABC):
    """One kind of move.

    Attributes:
        groups: Groups of chains.
        dense: Whether shapes are whole covariances.
        steps: Steps of one transition; None is the move's own choice.
        target_acceptance: Acceptance the scale of steps is tuned to; None is the move's own.
    """

    groups: int = 1
    dense: bool = True
    steps: int | None = None
    target_acceptance: float | None = None

    def init(self, target: Target, position: Tensor) -> State:
        """The state of chains that begin at ``position`` ``(N, D)``, before any tuning."""
        value, gradient = target.value_and_grad(position)
        state = {"position": position, "value": value, "gradient": gradient}
        state = {name: state[name] for name in self.carried}
        state["factor"] = spread.initial(self.groups, position, dense=self.dense)
        spread.open_window(state)
        self._restart_scale(state)
        return state

    @property
    @abstractmethod
    def carried(self) -> tuple[str, ...]:
        """What of the state belongs to the position: names of tensors ``(N, ...)`` that go where it goes."""

    @abstractmethod
    def transition(
        self, target: Target, state: State, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> dict[str, Tensor]:
        """Move every chain once, in place of what ``state`` holds; returns what diagnostics want, each ``(N,)``."""

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def learn(self, state: State, number: int, total: int) -> None:
        """After transition ``number`` of a warm-up of ``total``: count it, and where a window ends take its shape."""
        spread.observe(state)
        if number + 1 not in spread.windows(total):
            return
        found = spread.estimate(state, within=2 * number >= total)
        if found is not None:
            state["factor"] = found
            self._restart_scale(state)
        spread.open_window(state)

    def _restart_scale(self, state: State) -> None:
        first = math.log(self._first_scale(state["position"].shape[1]))
        state["log_scale"] = torch.full((self.groups,), first, dtype=torch.float64)
        state["updates"] = torch.zeros((), dtype=torch.float64)

    def _tune(self, state: State, acceptance: Tensor) -> None:
        r"""Robbins and Monro (1951): :math:`\log s \leftarrow \log s + t^{-0.6} \min(1, \alpha/\alpha^* - 1)`."""
        wanted = self.target_acceptance or self._own_target(state["position"].shape[1])
        state["updates"] = state["updates"] + 1
        error = acceptance.double().reshape(self.groups, -1).mean(1).cpu() / wanted - 1
        state["log_scale"] = state["log_scale"] + state["updates"] ** -0.6 * error.clamp_max(1.0)

    def _scales(self, state: State) -> Tensor:
        """Scale of the steps of every chain, ``(N, 1)``."""
        position = state["position"]
        each = state["log_scale"].exp().to(position)
        return each.repeat_interleave(len(position) // self.groups).unsqueeze(1)

    @abstractmethod
    def _first_scale(self, dimension: int) -> float:
        """Scale that suits a normal whose shape is known."""

    @abstractmethod
    def _own_target(self, dimension: int) -> float:
        """Acceptance that suits the move best."""


@dataclass(frozen=True)
class RandomWalk(Moves):
    r"""Steps of random-walk Metropolis: :math:`\theta' = \theta + s L z`, accepted with
    :math:`\min(1, (p(\theta') / p(\theta))^{1/T})`.

    A transition is a step for every two dimensions, but from 10 to 200: a walk of the best scale takes some three for
    each dimension to forget where it was.
    """  # noqa: D205

    @property
    def carried(self) -> tuple[str, ...]:
        """See :class:`Moves`."""
        return ("position", "value")

    def transition(
        self, target: Target, state: State, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> dict[str, Tensor]:
        """Several steps of every chain."""
        count = self.steps or min(max(10, state["position"].shape[1] // 2), 200)
        most = max(1, _NUMBERS // state["position"].numel())
        together = min(most, max(5, count // 10) if tuning else count)  # steps of the same scale
        acceptances = []
        for first in range(0, count, together):
            noise, luck = _numbers(min(together, count - first), state["position"], generator)
            ways = spread.apply(state["factor"], noise) * self._scales(state)
            acceptances.append(walk(target, state, ways, luck, temperature))
            if tuning:
                self._tune(state, acceptances[-1].mean(0))
        return {"acceptance": torch.cat(acceptances).mean(0)}

    def _first_scale(self, dimension: int) -> float:
        return 2.38 / math.sqrt(dimension)  # Roberts, Gelman and Gilks (1997)

    def _own_target(self, dimension: int) -> float:
        return 0.44 if dimension == 1 else 0.234


@dataclass(frozen=True)
class Hamiltonian(Moves):
    """Hamiltonian trajectories in coordinates in which the shape is a sphere: a quarter of a turn, half more or less.

    All chains take the same number of leapfrog steps, which the first group's step size decides.
    """

    most_steps: int = 100
    most_untuned: int = 10  # while nothing is known of the shape

    @property
    def carried(self) -> tuple[str, ...]:
        """See :class:`Moves`."""
        return ("position", "value", "gradient")

    def transition(
        self, target: Target, state: State, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> dict[str, Tensor]:
        """One trajectory of every chain."""
        share, shortened = (0.5 + torch.rand(2, generator=generator, device=temperature.device)).tolist()
        shortened = min(
            1.0, shortened
        )  # every other time, by up to a half: a way out of where the full step is too long
        count = self._count(state, share, shortened, tuning)
        momentum, luck = _numbers(1, state["position"], generator)
        step = shortened * self._scales(state)
        new, change, energy = leapfrog(target, state, momentum[0], step, count, temperature)
        good = torch.isfinite(change) & torch.isfinite(new["position"]).all(1) & torch.isfinite(new["gradient"]).all(1)
        acceptance = torch.where(good, (-change).clamp_max(0.0).exp(), 0.0)
        accepted = good & (luck[0] < -change)
        for name in self.carried:
            state[name] = torch.where(
                accepted.unsqueeze(1) if new[name].dim() == 2 else accepted, new[name], state[name]
            )
        if tuning:
            self._tune(state, acceptance)
        return {
            "acceptance": acceptance, "diverging": (~good | (change > DIVERGED)).to(acceptance), "energy": energy,
            "steps": torch.full_like(acceptance, count),
        }  # fmt: skip

    def _count(self, state: State, share: float, shortened: float, tuning: bool) -> int:
        if self.steps is not None:
            return max(1, round(share * self.steps))
        most = self.most_untuned if tuning and state["updates"] < 20 else self.most_steps
        step = shortened * math.exp(state["log_scale"][0].item())
        return min(most, math.ceil(share * _LENGTH / step))

    def _first_scale(self, dimension: int) -> float:
        return dimension**-0.25

    def _own_target(self, dimension: int) -> float:
        return 0.95


@dataclass(frozen=True, repr=False)
class MovedSampler(Sampler):
    """A sampler whose chains are moved at temperatures of their own.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: What moves learn of the shape: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200 dimensions).
        steps: Mean number of leapfrog steps, or number of random-walk steps, of a transition; None chooses.
        target_acceptance: Acceptance that steps are tuned to; None is 0.95, or 0.234 for random walks.
    """

    moves: str = "hmc"
    mass: str = "auto"
    steps: int | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("moves", self.moves, KINDS)
        check_choice("mass", self.mass, spread.KINDS)
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.target_acceptance is not None:
            check_number("target_acceptance", self.target_acceptance, above=0, below=1)

    def moves_for(self, dimension: int, groups: int) -> Moves:
        """What moves ``groups`` groups of chains in so many dimensions."""
        make = Hamiltonian if self.moves == "hmc" else RandomWalk
        return make(groups, spread.is_dense(self.mass, dimension), self.steps, self.target_acceptance)


def walk(target: Target, state: State, ways: Tensor, luck: Tensor, temperature: Tensor) -> Tensor:
    """Random-walk steps of every chain, ``state`` put where they end.

    Args:
        target: The log density.
        state: Where chains are.
        ways: Differences to the proposed positions, ``(count, N, D)``.
        luck: Logs of uniform numbers, ``(count, N)``.
        temperature: Of every chain, ``(N,)``.

    Returns:
        Acceptance probabilities, ``(count, N)``.
    """
    position, value, ratios = state["position"], state["value"], []
    for way, limit in zip(ways, luck, strict=True):
        proposed = position + way
        new = target.value(proposed)
        ratio = (new - value) / temperature
        accepted = (limit < ratio) & (new < math.inf)  # a ratio that is not a number is not accepted
        position = torch.where(accepted.unsqueeze(1), proposed, position)
        value = torch.where(accepted, new, value)
        ratios.append(ratio)
    state["position"], state["value"] = position, value
    return torch.stack(ratios).nan_to_num(-math.inf, -math.inf, -math.inf).clamp_max(0.0).exp()


def leapfrog(
    target: Target, state: State, momentum: Tensor, step: Tensor, count: int, temperature: Tensor
) -> tuple[State, Tensor, Tensor]:
    """``count`` leapfrog steps of every chain: where they end, by how much the energy has changed, and what it was.

    Args:
        target: The log density.
        state: Where chains are; ``factor`` holds their shapes.
        momentum: Standard normal, ``(N, D)``.
        step: Of every chain, ``(N, 1)``.
        count: How many.
        temperature: Of every chain, ``(N,)``.
    """
    factor, heat = state["factor"], temperature.unsqueeze(1)
    position, value, gradient = state["position"], state["value"], state["gradient"]
    energy = 0.5 * momentum.square().sum(1) - value / temperature
    momentum = momentum + 0.5 * step * spread.apply_transposed(factor, gradient / heat)
    for k in range(count):
        position = position + step * spread.apply(factor, momentum)
        value, gradient = target.value_and_grad(position)
        kick = step if k + 1 < count else 0.5 * step
        momentum = momentum + kick * spread.apply_transposed(factor, gradient / heat)
    change = 0.5 * momentum.square().sum(1) - value / temperature - energy
    return {"position": position, "value": value, "gradient": gradient}, change, energy


def _numbers(count: int, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard normals ``(count, N, D)`` and the logs of uniforms ``(count, N)``."""
    kind = {"generator": generator, "dtype": position.dtype, "device": position.device}
    return torch.randn((count, *position.shape), **kind), torch.rand((count, len(position)), **kind).log()
