"""Trajectories of many chains that grow by doubling, one leapfrog step of every chain at a time.

A subtree of 2^k leapfrog steps is integrated in order. To notice a turn inside it without keeping all its points, one
remembers at each level the first point of the part that is under way (Phan, Pradhan and Jankowiak, 2019): leaf number n
is the last of as many complete parts as n has trailing ones in binary, and the first of each was stored before.

Whatever consists of two halves has turned back if it has as a whole, or either half together with the point of the
other that is next to it: the whole alone can close a full circle between two looks and go on for long.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, State
from knowable.core.chains.target import Target
from knowable.inference.sampling.hmc import CAREFUL_EVERY, CAREFULLY, DIVERGED, leapfrog
from knowable.inference.sampling.metric import Metric, velocity


class Trees:
    """``count`` transitions of every chain. Which chain is where in its tree is kept in small arrays on the CPU.

    Where ``careful_depth`` is given, some trajectories have shorter steps, and double at most that often: see
    :mod:`~knowable.inference.sampling.hmc`.
    """

    def __init__(
        self, target: Target, state: State, count: int, max_depth: int, *, generator: torch.Generator,
        careful_depth: int | None = None,
    ):  # fmt: skip
        self.target, self.count, self.max_depth, self.generator = target, count, max_depth, generator
        self.metric = Metric(state["inverse_mass"])
        self.position, self.value, self.gradient = (state[k].clone() for k in ("position", "value", "gradient"))
        chains, dimension = self.position.shape
        self.chains = chains
        like = self.position
        # the point that moves, and the ends of every trajectory (backwards, forwards)
        self.q, self.p, self.g = like.clone(), torch.zeros_like(like), self.gradient.clone()
        self.ends_of = {name: like.new_zeros((2, chains, dimension)) for name in ("q", "p", "g")}
        # the draw so far of the whole tree, and of the subtree that is growing
        self.sub_q, self.sub_g, self.sub_v = like.clone(), self.gradient.clone(), self.value.clone()
        self.sum, self.sub_sum = torch.zeros_like(like), torch.zeros_like(like)
        self.weight, self.sub_weight = self.value.new_zeros(chains), self.value.new_full((chains,), -math.inf)
        self.energy = self.value.new_zeros(chains)
        self.acceptance = self.value.new_zeros(chains)
        # of the first points of the parts under way: velocity and momentum, the same of the leaf before, and the sum of
        # momenta before it
        nothing = torch.zeros_like(like).cpu().numpy()
        self.marks = [np.stack([nothing] * (max_depth + 1)) for _ in range(5)]
        self.before = nothing, nothing  # velocity and momentum of the last leaf
        self.leaf, self.depth, self.done, self.taken = (np.zeros(chains, dtype=np.int64) for _ in range(4))
        self.direction = np.ones(chains)
        self.active = np.ones(chains, dtype=bool)
        self.step = like.new_zeros((chains, 1))
        self.positions = like.new_zeros((count, chains, dimension))
        self.values = self.value.new_zeros((count, chains))
        self.info = {name: self.value.new_zeros((count, chains)) for name in _INFO}
        self._leap = FusedStep(target, leap)
        self.careful_depth, self.most = careful_depth, np.full(chains, max_depth)  # doublings of every chain's tree
        self._pending = np.arange(chains)  # chains that begin a new trajectory at the next tick

    @property
    def finished(self) -> bool:
        """Whether every chain has made all its transitions."""
        return not self.active.any()

    def ends(self) -> State:
        """Where the chains are."""
        return {"position": self.position, "value": self.value, "gradient": self.gradient}

    def block(self) -> Block:
        """All transitions."""
        return Block(self.positions, self.values, self.info)

    # --- one leapfrog step of every chain ----------------------------------------------------------------------------

    def tick(self, step: float) -> list[float]:
        """One leapfrog step; returns the mean acceptance of every trajectory that ended with it."""
        if len(self._pending):
            self._begin(self._pending, step)
        uniform = torch.rand(self.chains, generator=self.generator, dtype=self.value.dtype, device=self.value.device)
        (
            self.q, self.p, self.g, velocity, self.sub_q, self.sub_g, self.sub_v, self.sub_weight, self.sub_sum,
            self.acceptance, bad,
        ) = self._leap(
            (
                self.q, self.p, self.g, self.step, self.energy, uniform, self.sub_q, self.sub_g, self.sub_v,
                self.sub_weight, self.sub_sum, self.acceptance,
            ),
            (self.metric.inverse_mass,),
        )  # fmt: skip
        diverging = bad.cpu().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # a chain that diverges may have infinite momenta
            turning = self._turning_within(velocity)
        self.leaf += 1
        self.taken += 1
        complete = self.leaf == 2**self.depth
        over = np.flatnonzero((complete | diverging | turning) & self.active)
        return self._close(over, complete & ~diverging & ~turning, diverging) if len(over) else []

    def _turning_within(self, velocity: Tensor) -> np.ndarray:
        """Whether a part of the growing subtree that ends with this leaf has turned back."""
        speed, momentum, total = (each.cpu().numpy() for each in (velocity, self.p, self.sub_sum))
        first = np.flatnonzero((self.leaf & 1 == 0) & self.active)  # this leaf is the first of a part: remember it
        if len(first):
            level = _LEVEL[self.leaf[first]]
            here = (speed, momentum, *self.before, total - momentum)
            for mark, value in zip(self.marks, here, strict=True):
                mark[level, first] = value[first]
        self.before = speed, momentum
        last = np.flatnonzero((self.leaf & 1 == 1) & self.active)  # this leaf is the last of one or several parts
        turning = np.zeros(self.chains, dtype=bool)
        if len(last):
            parts = _PARTS[self.leaf[last]]
            chain = np.repeat(last, parts)
            inner = np.arange(len(chain)) - np.repeat(np.cumsum(parts) - parts, parts)  # 0: the smallest part
            level = np.repeat(_LEVEL[self.leaf[last]], parts) - inner
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

    # --- the ends of subtrees and trajectories -----------------------------------------------------------------------

    def _close(self, over: np.ndarray, whole: np.ndarray, diverging: np.ndarray) -> list[float]:
        """Join finished subtrees to their trees; begin the next subtree or end the transition."""
        ended = ~whole[over]
        grown = over[whole[over]]
        if len(grown):
            ended[whole[over]] = self._join(grown)
        self._emit(over[ended], diverging)
        going_on = over[~ended]
        if len(going_on):
            self._grow(going_on)
        stopped = over[ended]
        self._pending = stopped[self.done[stopped] < self.count]
        idle = stopped[self.done[stopped] >= self.count]
        if len(idle):
            self.active[idle] = False
            index = torch.from_numpy(idle)  # they stay where they are until the others are there
            self.q[index], self.g[index] = self.position[index], self.gradient[index]
            self.p[index] = self.step[index] = 0.0
        return [self.info["acceptance"][self.done[c] - 1, c].item() for c in stopped]

    def _join(self, grown: np.ndarray) -> np.ndarray:
        """Add complete subtrees to their trees; returns which trees have now turned back or reached their depth."""
        index = torch.from_numpy(grown)
        side = torch.from_numpy((self.direction[grown] > 0).astype(np.int64))
        # biased progressive draw: the new half is preferred
        uniform = torch.rand(len(grown), generator=self.generator, dtype=self.weight.dtype, device=self.weight.device)
        taken = uniform.log() < self.sub_weight[index] - self.weight[index]
        chosen = index[taken]
        self.position[chosen], self.value[chosen] = self.sub_q[chosen], self.sub_v[chosen]
        self.gradient[chosen] = self.sub_g[chosen]
        self.weight[index] = torch.logaddexp(self.weight[index], self.sub_weight[index])
        far, near = self.ends_of["p"][1 - side, index], self.ends_of["p"][side, index]
        v_second, p_second = (mark[0, grown] for mark in self.marks[:2])  # the first leaf of the subtree
        v_far, v_near, v_last = (self.metric.velocity(each).cpu().numpy() for each in (far, near, self.p[index]))
        left, right = self.sum[index].cpu().numpy(), self.sub_sum[index].cpu().numpy()
        turned = _turned(v_far, v_near, v_second, v_last, left, right, near.cpu().numpy(), p_second)
        self.sum[index] += self.sub_sum[index]
        for name, now in (("q", self.q), ("p", self.p), ("g", self.g)):
            self.ends_of[name][side, index] = now[index]
        self.depth[grown] += 1
        return turned | (self.depth[grown] >= self.most[grown])

    def _grow(self, chains: np.ndarray) -> None:
        """Begin a new subtree at one end of each tree, forwards or backwards at random."""
        index = torch.from_numpy(chains)
        forwards = torch.rand(len(chains), generator=self.generator) < 0.5
        side = forwards.long()
        self.q[index], self.p[index], self.g[index] = (self.ends_of[name][side, index] for name in ("q", "p", "g"))
        self.direction[chains] = np.where(forwards.numpy(), 1.0, -1.0)
        self.step[index] = self.step[index].abs() * torch.where(forwards, 1.0, -1.0).unsqueeze(-1).to(self.step)
        self.sub_sum[index] = 0.0
        self.sub_weight[index] = -math.inf
        self.leaf[chains] = 0

    def _begin(self, chains: np.ndarray, step: float) -> None:
        """Fresh momenta for chains that start a transition."""
        index = torch.from_numpy(chains)
        noise = torch.randn(
            (len(chains), self.q.shape[1]), generator=self.generator, dtype=self.q.dtype, device=self.q.device
        )
        momentum = self.metric.momentum(noise)
        for name, now in (("q", self.position), ("p", None), ("g", self.gradient)):
            self.ends_of[name][:, index] = momentum if now is None else now[index]
        self.energy[index] = self.metric.kinetic(momentum) - self.value[index]
        self.sum[index] = momentum
        self.weight[index] = 0.0
        self.acceptance[index] = 0.0
        self.depth[chains] = self.taken[chains] = 0
        self.step[index], self.most[chains] = step, self.max_depth
        if self.careful_depth is not None:
            slow = chains[self.done[chains] % CAREFUL_EVERY == 0]
            self.step[torch.from_numpy(slow)], self.most[slow] = step * CAREFULLY, self.careful_depth
        self._grow(chains)
        self._pending = chains[:0]

    def _emit(self, chains: np.ndarray, diverging: np.ndarray) -> None:
        """Write down the draws of transitions that have ended."""
        if not len(chains):
            return
        index = torch.from_numpy(chains)
        row = torch.from_numpy(self.done[chains])
        self.positions[row, index], self.values[row, index] = self.position[index], self.value[index]
        taken = torch.from_numpy(self.taken[chains]).to(self.value)
        self.info["acceptance"][row, index] = self.acceptance[index] / taken
        self.info["diverging"][row, index] = torch.from_numpy(diverging[chains]).to(self.value)
        self.info["energy"][row, index] = self.energy[index]
        self.info["steps"][row, index] = taken
        self.done[chains] += 1


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


_INFO = ("acceptance", "diverging", "energy", "steps")
_LEAVES = np.arange(2**15)
_LEVEL = np.array([int(n).bit_count() for n in _LEAVES >> 1])  # where the first point of a part is remembered
_PARTS = np.array([(~n & (n + 1)).bit_length() - 1 for n in map(int, _LEAVES)])  # trailing ones


# --- the arithmetic of one step, which can be fused ------------------------------------------------------------------


def leap(
    value_and_grad: Gradient, q: Tensor, p: Tensor, g: Tensor, step: Tensor, energy: Tensor, uniform: Tensor,
    sub_q: Tensor, sub_g: Tensor, sub_v: Tensor, sub_weight: Tensor, sub_sum: Tensor, acceptance: Tensor,
    inverse_mass: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A leapfrog step; the new point's weight, and whether it becomes the subtree's draw."""
    q, p, g, value = leapfrog(value_and_grad, q, p, g, step, inverse_mass)
    speed = velocity(p, inverse_mass)
    change = energy - (0.5 * (p * speed).sum(-1) - value)  # log weight: -ΔH
    change = torch.where(torch.isfinite(change), change, -math.inf)
    total = torch.logaddexp(sub_weight, change)
    taken = uniform.log() < change - total
    wide = taken.unsqueeze(-1)
    return (
        q, p, g, speed, torch.where(wide, q, sub_q), torch.where(wide, g, sub_g), torch.where(taken, value, sub_v),
        total, sub_sum + p, acceptance + change.clamp_max(0.0).exp(), change < -DIVERGED,
    )  # fmt: skip
