"""Trajectories of many chains that grow by doubling, one leapfrog step of every chain at a time.

A subtree of 2^k leapfrog steps is integrated in order. To notice a turn inside it without keeping all its points, one
remembers at each level the first point of the part that is under way (Phan, Pradhan and Jankowiak, 2019): leaf number n
is the last of as many complete parts as n has trailing ones in binary, and the first of each was stored before.

Whatever consists of two halves has turned back if it has as a whole, or either half together with the point of the
other that is next to it: the whole alone can close a full circle between two checks and go on for long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, Info
from knowable.core.chains.target import Target
from knowable.inference.sampling.hmc import DIVERGED, SMALL_STEP, SMALL_STEP_EVERY, leapfrog, standard_normal
from knowable.inference.sampling.metric import Metric, MetricState, velocity


@dataclass
class Points:
    """Points in phase space: position, momentum and gradient ``(..., C, D)``."""

    position: Tensor
    momentum: Tensor
    gradient: Tensor


@dataclass
class Draws:
    """The draw so far of every chain's tree, or of the subtree that is growing."""

    position: Tensor  # (C, D)
    value: Tensor  # log densities (C,)
    gradient: Tensor  # their gradients (C, D)
    log_weight: Tensor  # log of the sum of e^(-ΔH) over all points, (C,)
    momentum_sum: Tensor  # sum of the momenta of all points, (C, D)


class Counters:
    """Which chain is where in its tree, in small arrays on the CPU."""

    def __init__(self, chains: int, max_depth: int):
        # steps of the growing subtree; doublings of the tree; leapfrog steps of the trajectory; transitions made
        self.leaf, self.depth, self.steps, self.transitions = (np.zeros(chains, dtype=np.int64) for _ in range(4))
        self.max_depth = np.full(chains, max_depth)  # most doublings of this tree
        self.forwards = np.ones(chains, dtype=bool)  # whether the subtree grows forwards
        self.active = np.ones(chains, dtype=bool)  # whether the chain has transitions to make


class Trees:
    """``count`` transitions of every chain.

    Where ``small_step_depth`` is given, some trajectories have shorter steps, and double at most that often: see
    :mod:`~knowable.inference.sampling.hmc`.
    """

    def __init__(
        self, target: Target, state: MetricState, count: int, max_depth: int, *, generator: torch.Generator,
        small_step_depth: int | None = None,
    ):  # fmt: skip
        self.count, self.max_depth, self.small_step_depth = count, max_depth, small_step_depth
        self.generator = generator
        self.metric, like, value = Metric(state.inverse_mass), state.position, state.value
        self.chains, dimension = like.shape
        self.point = Points(like.clone(), torch.zeros_like(like), state.gradient.clone())  # the one that moves
        self.ends = Points(*(like.new_zeros((2, self.chains, dimension)) for _ in range(3)))  # backwards, forwards
        self.tree, self.subtree = (
            Draws(
                like.clone(),
                value.clone(),
                state.gradient.clone(),
                torch.full_like(value, weight),
                torch.zeros_like(like),
            )
            for weight in (0.0, -math.inf)
        )
        self.energy, self.acceptance = torch.zeros_like(value), torch.zeros_like(value)  # at the start; sum over points
        self.step = like.new_zeros((self.chains, 1))  # negative backwards
        self.counters = Counters(self.chains, max_depth)
        self.turns = UTurns(like, max_depth)
        self.positions = like.new_zeros((count, self.chains, dimension))
        self.values = value.new_zeros((count, self.chains))
        self.info = Info(*(value.new_zeros((count, self.chains)) for _ in range(4)))
        self._leap = FusedStep(target, leap)
        self._pending = np.arange(self.chains)  # chains that begin a new trajectory at the next step

    @property
    def finished(self) -> bool:
        """Whether every chain has made all its transitions."""
        return not self.counters.active.any()

    def block(self) -> Block:
        """All transitions."""
        return Block(self.positions, self.values, self.info)

    # --- one leapfrog step of every chain ----------------------------------------------------------------------------

    def advance(self, step: float) -> list[float]:
        """One leapfrog step; returns the mean acceptance of every trajectory that ended with it."""
        if len(self._pending):
            self._begin(self._pending, step)
        at = self.counters
        uniform = torch.rand(self.chains, generator=self.generator, dtype=self.energy.dtype, device=self.energy.device)
        moving, draw = vars(self.point).values(), vars(self.subtree).values()  # in the order of leap
        q, p, g, speed, *draw, self.acceptance, bad = self._leap(
            (*moving, self.step, self.energy, uniform, *draw, self.acceptance), (self.metric.inverse_mass,)
        )
        self.point, self.subtree = Points(q, p, g), Draws(*draw)
        diverging = bad.cpu().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # a chain that diverges may have infinite momenta
            turning = self.turns.within(at.leaf, at.active, speed, p, self.subtree.momentum_sum)
        at.leaf += 1
        at.steps += 1
        complete = at.leaf == 2**at.depth
        ended = np.flatnonzero((complete | diverging | turning) & at.active)
        return self._end_subtrees(ended, complete & ~diverging & ~turning, diverging) if len(ended) else []

    # --- the ends of subtrees and trajectories -----------------------------------------------------------------------

    def _end_subtrees(self, ended: np.ndarray, complete: np.ndarray, diverging: np.ndarray) -> list[float]:
        """Join complete subtrees to their trees; begin the next subtree or end the transition."""
        at = self.counters
        stops = ~complete[ended]
        joining = ended[complete[ended]]
        if len(joining):
            stops[complete[ended]] = self._join(joining)
        stopped, growing = ended[stops], ended[~stops]
        self._record(stopped, diverging)
        if len(growing):
            self._grow(growing)
        more = at.transitions[stopped] < self.count
        self._pending, idle = stopped[more], stopped[~more]
        if len(idle):
            at.active[idle] = False
            index = torch.from_numpy(idle)  # they stay where they are until the others are there
            self.point.position[index] = self.tree.position[index]
            self.point.gradient[index] = self.tree.gradient[index]
            self.point.momentum[index] = self.step[index] = 0.0
        acceptance = self.info.acceptance
        assert acceptance is not None
        return [acceptance[at.transitions[chain] - 1, chain].item() for chain in stopped]

    def _join(self, chains: np.ndarray) -> np.ndarray:
        """Add complete subtrees to their trees; returns which trees have now turned back or reached their depth."""
        at, tree, subtree, index = self.counters, self.tree, self.subtree, torch.from_numpy(chains)
        side = torch.from_numpy(at.forwards[chains].astype(np.int64))
        like = tree.log_weight
        # biased progressive draw: the new half is preferred
        uniform = torch.rand(len(chains), generator=self.generator, dtype=like.dtype, device=like.device)
        chosen = index[(uniform.log() < subtree.log_weight[index] - like[index]).cpu()]
        tree.position[chosen], tree.value[chosen] = subtree.position[chosen], subtree.value[chosen]
        tree.gradient[chosen] = subtree.gradient[chosen]
        tree.log_weight[index] = torch.logaddexp(like[index], subtree.log_weight[index])
        far, near = self.ends.momentum[1 - side, index], self.ends.momentum[side, index]
        v_second, p_second = self.turns.first_leaf(chains)
        v_far, v_near, v_last = (
            self.metric.velocity(each).cpu().numpy() for each in (far, near, self.point.momentum[index])
        )
        left, right = tree.momentum_sum[index].cpu().numpy(), subtree.momentum_sum[index].cpu().numpy()
        turned = _turned(v_far, v_near, v_second, v_last, left, right, near.cpu().numpy(), p_second)
        tree.momentum_sum[index] += subtree.momentum_sum[index]
        self.ends.position[side, index] = self.point.position[index]
        self.ends.momentum[side, index] = self.point.momentum[index]
        self.ends.gradient[side, index] = self.point.gradient[index]
        at.depth[chains] += 1
        return turned | (at.depth[chains] >= at.max_depth[chains])

    def _grow(self, chains: np.ndarray) -> None:
        """Begin a new subtree at one end of each tree, forwards or backwards at random."""
        index = torch.from_numpy(chains)
        forwards = (torch.rand(len(chains), generator=self.generator, device=self.step.device) < 0.5).cpu()
        side = forwards.long()
        self.point.position[index] = self.ends.position[side, index]
        self.point.momentum[index] = self.ends.momentum[side, index]
        self.point.gradient[index] = self.ends.gradient[side, index]
        self.step[index] = self.step[index].abs() * torch.where(forwards, 1.0, -1.0).unsqueeze(-1).to(self.step)
        self.subtree.momentum_sum[index] = 0.0
        self.subtree.log_weight[index] = -math.inf
        self.counters.forwards[chains] = forwards.numpy()
        self.counters.leaf[chains] = 0

    def _begin(self, chains: np.ndarray, step: float) -> None:
        """Fresh momenta for chains that start a transition."""
        at, tree, index = self.counters, self.tree, torch.from_numpy(chains)
        like = tree.position
        momentum = self.metric.momentum(standard_normal(like[index], self.generator))
        self.ends.position[:, index], self.ends.gradient[:, index] = tree.position[index], tree.gradient[index]
        self.ends.momentum[:, index] = tree.momentum_sum[index] = momentum
        self.energy[index] = self.metric.kinetic(momentum) - tree.value[index]
        tree.log_weight[index] = 0.0
        self.acceptance[index] = 0.0
        at.depth[chains] = at.steps[chains] = 0
        self.step[index], at.max_depth[chains] = step, self.max_depth
        if self.small_step_depth is not None:
            slow = chains[at.transitions[chains] % SMALL_STEP_EVERY == 0]
            self.step[torch.from_numpy(slow)], at.max_depth[slow] = step * SMALL_STEP, self.small_step_depth
        self._grow(chains)
        self._pending = chains[:0]

    def _record(self, chains: np.ndarray, diverging: np.ndarray) -> None:
        """Write down the draws of transitions that have ended."""
        if not len(chains):
            return
        at, index = self.counters, torch.from_numpy(chains)
        row = torch.from_numpy(at.transitions[chains])
        self.positions[row, index], self.values[row, index] = self.tree.position[index], self.tree.value[index]
        steps = torch.from_numpy(at.steps[chains]).to(self.energy)
        diverged = torch.from_numpy(diverging[chains]).to(self.energy)
        found = (self.acceptance[index] / steps, diverged, self.energy[index], steps)  # in the order of Info
        for kept, value in zip(self.info.tensors().values(), found, strict=True):
            kept[row, index] = value
        at.transitions[chains] += 1


# --- where trajectories turn back ------------------------------------------------------------------------------------


class UTurns:
    """The first points of the parts of every chain's subtree that are under way, by level, on the CPU.

    Each mark is ``(levels, C, D)``: velocity and momentum of the first leaf, the same of the leaf before, and the sum
    of momenta before it.
    """

    def __init__(self, like: Tensor, max_depth: int):
        nothing = torch.zeros_like(like).cpu().numpy()
        self.max_depth = max_depth
        self.marks = [np.stack([nothing] * (max_depth + 1)) for _ in range(5)]
        self.last = nothing, nothing  # velocity and momentum of the last leaf

    def first_leaf(self, chains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Velocity and momentum of the first leaf of the subtree."""
        return self.marks[0][0, chains], self.marks[1][0, chains]

    def within(self, leaf: np.ndarray, active: np.ndarray, *tensors: Tensor) -> np.ndarray:
        """Whether a part of the growing subtree that ends with this leaf has turned back, ``(C,)``.

        ``leaf`` is its number in the subtree; the tensors are velocity, momentum, and the sum of momenta, ``(C, D)``.
        """
        speed, momentum, total = (each.cpu().numpy() for each in tensors)
        first = np.flatnonzero((leaf & 1 == 0) & active)  # this leaf is the first of a part: remember it
        if len(first):
            level = _LEVEL[leaf[first]]
            here = (speed, momentum, *self.last, total - momentum)
            for mark, value in zip(self.marks, here, strict=True):
                mark[level, first] = value[first]
        self.last = speed, momentum
        last = np.flatnonzero((leaf & 1 == 1) & active)  # this leaf is the last of one or several parts
        turning = np.zeros(len(leaf), dtype=bool)
        if len(last):
            parts = _PARTS[leaf[last]]
            chain = np.repeat(last, parts)
            inner = np.arange(len(chain)) - np.repeat(np.cumsum(parts) - parts, parts)  # 0: the smallest part
            level = np.repeat(_LEVEL[leaf[last]], parts) - inner
            # the second half of a part began one level above; that of the smallest is this leaf alone
            v_first, p_first, _, _, before = (mark[level, chain] for mark in self.marks)
            above = np.minimum(level + 1, self.max_depth)
            v_second, p_second, v_middle, p_middle, half = (mark[above, chain] for mark in self.marks)
            pair = np.flatnonzero(inner == 0)
            v_second[pair], p_second[pair] = speed[last], momentum[last]
            v_middle[pair], p_middle[pair] = v_first[pair], p_first[pair]
            half[pair] = total[last] - momentum[last]
            left, right = half - before, total[chain] - half
            back = _turned(v_first, v_middle, v_second, speed[chain], left, right, p_middle, p_second)
            turning[chain[back]] = True
        return turning


def _turned(
    v_first: np.ndarray, v_middle: np.ndarray, v_second: np.ndarray, v_last: np.ndarray, left: np.ndarray,
    right: np.ndarray, p_middle: np.ndarray, p_second: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Whether two halves ``(n, D)`` one after the other turn back: first ... middle | second ... last.

    ``left`` and ``right`` are the sums of their momenta, ``v`` velocities and ``p`` momenta at their ends.
    """

    def against(begin: np.ndarray, end: np.ndarray, span: np.ndarray) -> np.ndarray:
        return (np.einsum("nd,nd->n", begin, span) <= 0) | (np.einsum("nd,nd->n", end, span) <= 0)

    return (
        against(v_first, v_last, left + right)
        | against(v_first, v_second, left + p_second)
        | against(v_middle, v_last, p_middle + right)
    )


_LEAVES = np.arange(2**15)
_LEVEL = (_LEAVES[:, None] >> np.arange(1, 15) & 1).sum(axis=1)  # ones: where the first point of a part is remembered
_PARTS = np.log2(~_LEAVES & (_LEAVES + 1)).astype(int)  # trailing ones


# --- the arithmetic of one step, which can be fused ------------------------------------------------------------------


def leap(
    value_and_grad: Gradient, q: Tensor, p: Tensor, g: Tensor, step: Tensor, energy: Tensor, uniform: Tensor,
    draw_q: Tensor, draw_value: Tensor, draw_g: Tensor, log_weight: Tensor, momentum_sum: Tensor, acceptance: Tensor,
    inverse_mass: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A leapfrog step; the new point's weight, and whether it becomes the subtree's draw."""
    q, p, g, value = leapfrog(value_and_grad, q, p, g, step, inverse_mass)
    speed = velocity(p, inverse_mass)
    change = energy - (0.5 * (p * speed).sum(-1) - value)  # log weight: -ΔH
    change = torch.where(torch.isfinite(change), change, -math.inf)
    total = torch.logaddexp(log_weight, change)
    chosen = uniform.log() < change - total
    wide = chosen.unsqueeze(-1)
    return (
        q, p, g, speed, torch.where(wide, q, draw_q), torch.where(chosen, value, draw_value),
        torch.where(wide, g, draw_g), total, momentum_sum + p, acceptance + change.clamp_max(0.0).exp(),
        change < -DIVERGED,
    )  # fmt: skip
