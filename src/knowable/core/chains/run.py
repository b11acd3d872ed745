"""A run of chains under way: its blocks of transitions, what it keeps of them, and what a checkpoint holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knowable.core.chains.convergence import convergence_terms
from knowable.core.chains.draw_store import DTYPES, DrawStore
from knowable.core.chains.groups import Apart, advance_apart
from knowable.core.chains.kernel import Block, Kernel, WarmUp, restored_state, state_tensors
from knowable.core.chains.settings import ChainResult, ChainSettings, Mixing, info_terms
from knowable.core.chains.target import Target
from knowable.core.network.params import with_prefix, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import Checkpoint
from knowable.core.support.progress import Bar
from knowable.core.support.randomness import generator_for, random_state, restore_random_state
from knowable.core.support.tensors import give_back_free_memory
from knowable.core.support.time_limit import Deadline, TimeIsUp
from knowable.errors import Diverged, Unsupported

Monitor = Callable[[Tensor], Tensor]
"""Positions ``(n, chains, D)`` to the quantities whose R-hat is monitored, ``(n, chains, M)``."""

PredictionTerms = Callable[[Tensor], dict[str, float]]
"""Draws ``(chains, draws, D)`` to numbers for the report, among them ``prediction_error``."""

_BLOCK = 50  # transitions between two checks of the clock
_BLOCK_BYTES = 32 * 2**20
_FIRST_BLOCK = 1  # transitions, where time is limited: nobody knows yet what one takes
_BLOCK_SHARE = 0.05  # of the time that is left, for a block
_WARMUP_SHARE = 0.5  # most of the time that the warm-up may take


@dataclass
class ChainRun:
    """The state of a run, and its blocks of transitions."""

    kernel: Kernel
    target: Target
    settings: ChainSettings
    warmup: int
    monitor: Monitor
    mixing: Mixing
    seed: int
    apart: Apart | None = None  # how tuned chains draw in groups; None: all together
    done: int = 0  # transitions, warm-up included
    finished: bool = False
    converged: bool | None = None
    monitored: list[Tensor] = field(default_factory=list)  # each (n, chains, M)
    values: list[Tensor] = field(default_factory=list)
    info: dict[str, list[Tensor]] = field(default_factory=dict)
    sampling_from: int = 0  # gradients taken when the warm-up ended
    timed: bool = False  # ended by a time limit
    every: float | None = None  # seconds that a block may take, where somebody looks on
    posterior: Callable[[Tensor], Posterior] | None = None  # of draws (chains, n, D), for those who look on
    _compiled: bool = False

    def __post_init__(self) -> None:
        self.thin = self.settings.storage.thin
        self._asked = self.warmup  # transitions, before a time limit makes them fewer
        if self.target.processes.several and Deadline.within_limit() is not None:
            raise Unsupported(
                "time_limit does not hold for chains whose rows are shared among processes: their clocks would stop "
                "them at different transitions. Set warmup= and draws= instead."
            )

    # --- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, start: Tensor) -> None:
        """Put the chains at their first positions."""
        self.deadline = Deadline.within_limit()
        self.generator = generator_for(self.seed, "transitions", device=start.device)
        self._make_store(start)
        self.state = self.kernel.init(self.target, start, generator=self.generator)
        self._check_finite(self.state.position)
        value = self.state.value
        if not torch.isfinite(value).all():
            chain = int((~torch.isfinite(value)).nonzero()[0])
            raise Diverged(
                f"The log density is {value[chain].item()} where chain {chain} begins. Standardise the data, or begin "
                f"elsewhere (start=...)."
            )
        self._keep_good()

    def _make_store(self, start: Tensor) -> None:
        (chains, dimension), storage = start.shape, self.settings.storage
        self.store = DrawStore(
            chains,
            dimension,
            dtype=DTYPES[storage.dtype] or start.dtype,
            max_bytes=storage.max_bytes,
            expected=self.mixing.most if self.settings.draws is None else self.settings.draws,
            file=storage.file,
        )
        each = chains * dimension * start.element_size()
        self.largest_block = max(1, min(_BLOCK, _BLOCK_BYTES // each))
        unlimited = self.deadline is None and self.every is None
        self.block_size = self.largest_block if unlimited else min(_FIRST_BLOCK, self.largest_block)

    # --- transitions -------------------------------------------------------------------------------------------------

    def block(self, bar: Bar) -> None:
        """Some transitions of every chain."""
        warming = self.done < self.warmup
        end = self.warmup if warming else self.warmup + self._wanted() * self.thin
        wanted = min(self.block_size, end - self.done, self._transitions_left())
        if self.target.function.compiling and not self._compiled:  # it may now take some seconds without a move
            self._compiled = True
            bar.update(self.done, self.warmup + self._wanted() * self.thin, "compiling")
        began = time.monotonic()
        try:
            block = self._advance(wanted, WarmUp(self.done, self.warmup) if warming else None)
        except TimeIsUp:
            self.restore_good()
            self._cut_short(warming)
            return
        self._check_finite(block.positions)
        if not warming:
            self._keep(block)
        count = len(block.positions)
        self.done += count
        self._apply_time_limit(warming, (time.monotonic() - began) / count)
        if warming and self.done >= self.warmup:
            self.sampling_from = self.target.gradients
        if not warming and not self.finished and (self.done >= end or self._out_of_gradients()):
            self._check_convergence()
        self._keep_good()
        if self.largest_block < _BLOCK:  # positions are large
            give_back_free_memory()
        what = "warm-up" if warming else "drawing"
        bar.update(
            self.done, self.warmup + self._wanted() * self.thin, what, self._figures(block, warming), self.present
        )

    def _figures(self, block: Block, warming: bool) -> dict[str, float]:
        """How a block went: means over its transitions and chains."""
        info = block.info.tensors()
        means = {name: info[name].mean().item() for name in ("acceptance", "diverging", "steps") if name in info}
        log_density = block.values.mean().item()
        return {"warming_up": float(warming), "log_density": log_density, **means, **self.kernel.tuned(self.state)}

    @property
    def present(self) -> Callable[[], Posterior] | None:
        """What makes the posterior of the draws so far; in the warm-up, of where the chains are."""
        make = self.posterior
        if make is None:
            return None
        if self.store.kept:
            return lambda: make(self.store.draws.transpose(0, 1).contiguous())
        return lambda: make(self.state.position.unsqueeze(1).cpu())

    def _advance(self, count: int, warmup: WarmUp | None) -> Block:
        """So many transitions; TimeIsUp if they do not end in time (the first of a warm-up may use all of it)."""
        if self.deadline is not None:
            until = _WARMUP_SHARE if warmup is not None and self.done else 1.0
            self.target.time = self.deadline.part(_BLOCK_SHARE, until=until)
        try:
            if self.apart is not None and warmup is None and self.deadline is None:
                self.state, block = advance_apart(
                    self.apart, self.kernel, self.target, self.state, count, done=self.done, seed=self.seed
                )
            else:
                self.state, block = self.kernel.advance(
                    self.target, self.state, count, generator=self.generator, warmup=warmup
                )
        finally:
            self.target.time = None
        return block

    def _cut_short(self, warming: bool) -> None:
        """Give up the block under way: the warm-up ends here, or the run."""
        assert self.deadline is not None
        if self.deadline.left == 0:
            self._end_in_time()
        elif warming:
            self.warmup, self.sampling_from, self.block_size = self.done, self.target.gradients, 1
            self._keep_good()

    def _keep(self, block: Block) -> None:
        first = -(self.done - self.warmup + 1) % self.thin  # the last of every thin transitions is kept
        positions = block.positions[first :: self.thin]
        if not len(positions):
            return
        self.store.add(positions)
        self.monitored.append(self.monitor(positions).cpu())  # in main memory, as the draws are
        self.values.append(block.values[first :: self.thin].cpu())
        for name, value in block.info.tensors().items():
            self.info.setdefault(name, []).append(value[first :: self.thin].cpu())

    def _wanted(self) -> int:
        """Draws of each chain until convergence is checked next, or until the end."""
        if self.settings.draws is not None:
            return self.settings.draws
        wanted = self.mixing.first
        while wanted * self.thin <= self.done - self.warmup and not self.finished:
            wanted *= 2
        return min(wanted, self.mixing.most)

    def _check_convergence(self) -> None:
        """Stop where the chains have mixed, or have all the draws they may have."""
        draws = (self.done - self.warmup) // self.thin
        self.finished = self.settings.draws is not None or draws >= self.mixing.most or self._out_of_gradients()
        self.converged = self._mixed()
        if self.settings.draws is None and self.converged:
            self.finished = True

    def _transitions_left(self) -> int:
        """Transitions, about, until the draws have used up the gradients that they may."""
        drawn, most = self.done - self.warmup, self.settings.max_gradients
        if most is None or drawn < 0:
            return self.largest_block
        used = self.target.gradients - self.sampling_from
        left = (most * self.store.chains - self.target.gradients) * drawn // max(1, used)
        return max(left, 1)

    def _out_of_gradients(self) -> bool:
        most = self.settings.max_gradients
        return most is not None and self.target.gradients >= most * self.store.chains and len(self.monitored) > 0

    def _apply_time_limit(self, warming: bool, each: float) -> None:
        """Shorten the warm-up, or end the run, where the time limit demands it; a transition took ``each`` seconds."""
        limits = [self.every or math.inf, math.inf if self.deadline is None else _BLOCK_SHARE * self.deadline.left]
        if min(limits) < math.inf:
            planned = max(1, int(min(limits) / max(each, 1e-9)))
            self.block_size = min(self.largest_block, planned, 2 * self.block_size)
        if self.deadline is None:
            return
        if warming:
            possible = self.deadline.steps_left(self.done, until=_WARMUP_SHARE)
            self.warmup = self._asked if possible is None else min(self._asked, self.done + possible)
        if self.deadline.left == 0:
            self._end_in_time()

    def _end_in_time(self) -> None:
        self.finished = self.timed = True
        if self.monitored:
            self.converged = self._mixed()

    def _mixed(self) -> bool | None:
        monitored = torch.cat(self.monitored).transpose(0, 1)
        found = convergence_terms(monitored)
        if self._out_of_gradients():
            return self.mixing.reached(found, monitored.shape[1]) is True
        return self.mixing.reached(found, self.settings.draws)

    def _check_finite(self, positions: Tensor) -> None:
        if not torch.isfinite(positions).all():
            raise Diverged(
                f"The position of a chain became NaN or infinite after {self.done} transitions. Standardise the data, "
                f"check the log density for infinite gradients, or set a smaller step_size."
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def _keep_good(self) -> None:
        self._good = (
            self.state,
            self.generator.get_state(),
            random_state(),
            self.target.counts,
            (self.done, self.finished, self.converged, self.sampling_from),
            (len(self.monitored), self.store.seen),
        )

    def restore_good(self) -> None:
        """Go back to the end of the last whole block."""
        self.state, generator, own, gradients, progress, (lists, seen) = self._good
        self.generator.set_state(generator)
        restore_random_state(own)
        self.target.counts = gradients
        self.done, self.finished, self.converged, self.sampling_from = progress
        for each in (self.monitored, self.values, *self.info.values()):
            del each[lists:]
        self.store.back_to(seen)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint holds."""
        content = {
            "done": self.done, "finished": self.finished, "converged": self.converged,
            "sampling_from": self.sampling_from, "store": [self.store.seen, self.store.stride],
            "warmup": self.warmup, "timed": self.timed,
            "gradients": list(self.target.counts),
        }  # fmt: skip
        tensors = state_tensors(self.state, "state.")
        tensors |= with_prefix("random.", random_state())
        tensors |= {"generator": self.generator.get_state(), "draws": self.store.draws}
        lists = {"monitored": self.monitored, "values": self.values, **{f"info.{k}": v for k, v in self.info.items()}}
        tensors |= {f"history.{name}": torch.cat(found) for name, found in lists.items() if found}
        return content, tensors

    def resume(self, checkpoint: Checkpoint, start: Tensor) -> bool:
        """Take up a saved run; False if there is none."""
        saved = checkpoint.load()
        if saved is None:
            return False
        content, tensors = saved
        draws = tensors.pop("draws")
        tensors = {name: value.clone() for name, value in tensors.items()}  # else they hold on to the file in memory
        self.deadline = Deadline.within_limit()
        self.generator = generator_for(self.seed, "transitions", device=start.device)
        self.generator.set_state(tensors["generator"])
        self._make_store(start)
        self.store.restore(draws, *content["store"])
        state = {name: value.to(start.device) for name, value in without_prefix("state.", tensors).items()}
        self.state = restored_state(self.kernel.state_type, state)
        restore_random_state(without_prefix("random.", tensors))
        self.done, self.finished, self.converged = content["done"], content["finished"], content["converged"]
        self.sampling_from = content["sampling_from"]
        self.warmup, self.timed = content.get("warmup", self.warmup), content.get("timed", False)
        self.target.counts = content["gradients"]
        history = without_prefix("history.", tensors)
        self.monitored = [history["monitored"]] if "monitored" in history else []
        self.values = [history["values"]] if "values" in history else []
        self.info = {name: [value] for name, value in without_prefix("info.", history).items()}
        self._keep_good()
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def result(self, interrupted: bool, seconds: float) -> ChainResult:
        """The draws so far, and how the run went."""
        if not self.store.kept:  # stopped before the first draw: the present positions
            position = self.state.position.unsqueeze(0)
            self.store.add(position)
            self.monitored = [self.monitor(position).cpu()]
            self.values = [self.target.value(position[0]).unsqueeze(0).cpu()]
            self.info = {}
        monitored = torch.cat(self.monitored).transpose(0, 1)
        info = {name: torch.cat(found).transpose(0, 1) for name, found in self.info.items()}
        terms = {**convergence_terms(monitored), **info_terms(info), **self.kernel.tuned(self.state)}
        terms["gradients"] = float(self.target.gradients)
        known = {name: value for name, value in terms.items() if math.isfinite(value)}
        stride = self.store.stride  # of the draws, where memory was short
        if stride > 1:
            known["kept_every"] = float(stride)
        return ChainResult(
            draws=self.store.by_chain(), monitored=monitored,
            values=torch.cat(self.values).transpose(0, 1)[:, ::stride],
            info={name: value[:, ::stride] for name, value in info.items()}, terms=known,
            state=self.state, converged=False if interrupted else self.converged, interrupted=interrupted,
            message=self._message(interrupted), seconds=seconds,
            out_of_time=self.timed and not interrupted,
        )  # fmt: skip

    def _message(self, interrupted: bool) -> str:
        transitions = max(0, self.done - self.warmup)
        if interrupted and not transitions:
            return f"stopped from the keyboard in the warm-up of {self.settings.chains} chains, before the first draw"
        if interrupted:
            return f"stopped from the keyboard after {transitions} transitions of {self.settings.chains} chains"
        outcome = {True: "mixed", False: "not mixed", None: "ended"}[self.converged]
        if self.timed:
            outcome += " when time was up,"
        return f"{outcome} after {transitions} transitions of {self.store.chains} chains"
