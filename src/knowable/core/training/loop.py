"""The one optimisation loop: every method that is trained by gradient runs in it.

Progress, history, early stopping, divergence, time limits, Ctrl-C, precision, checkpoint and resume live here and
nowhere else. A run that is killed and resumed ends with the same bits as one that was not: a checkpoint holds
everything the next step depends on, and the order of the data depends only on the seed and the epoch.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.model.data import Batch, Data
from knowable.core.network.params import with_prefix, without_prefix
from knowable.core.storage.folder import Checkpoint, as_checkpoint
from knowable.core.support.progress import Bar, ProgressSetting, deferred_interrupts, progress_bar
from knowable.core.support.randomness import derive_seed, own_randomness, random_state, restore_random_state
from knowable.core.support.tensors import keep_free_memory
from knowable.core.support.time_limit import Deadline
from knowable.core.training.lbfgs import lbfgs_round
from knowable.core.training.objective import CompiledObjective, Objective, may_be_compiled
from knowable.core.training.optimiser_state import restore_state, saved_state
from knowable.core.training.schedule import WINDOW, Schedule, Settling
from knowable.core.training.settings import TrainingResult, TrainingSettings, optimiser_of, scheduler_of
from knowable.core.training.shares import Counted, Shares
from knowable.errors import ConvergenceWarning, Diverged, Interrupted, InvalidData, Unsupported


def train(
    objective: Objective,
    data: Data,
    settings: TrainingSettings,
    *,
    validation: Data | None = None,
    seed: int = 0,
    progress: ProgressSetting = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    label: str = "fitting",
    identity: dict[str, Any] | None = None,
) -> TrainingResult:
    """Minimise ``objective`` over ``data``; its parameters hold the answer afterwards.

    Args:
        objective: The loss; its parameters and buffers are changed in place.
        data: The training data.
        settings: Epochs, learning rate, batch size and schedule.
        validation: Held-out data for early stopping on its log predictive density.
        seed: Fixes the order of the data and all noise.
        progress: Show a progress bar (None: only on a terminal), a function of a Progress, or a tracker.
        checkpoint: A folder to save to at intervals and to resume from.
        engine: Precision of the arithmetic, and whether the loss is compiled.
        label: Text of the progress bar.
        identity: Identifies the fit (method, model, data); a checkpoint of another fit is refused.
    """
    saver, engine = as_checkpoint(checkpoint), as_engine(engine)
    started = time.monotonic()
    with own_randomness(derive_seed(seed, "training")), progress_bar(label, progress) as bar:
        run = TrainingRun(objective, data, settings, validation, seed, engine, keeps_all=saver is not None)
        if saver is not None:
            saver.begin(
                {"seed": seed, "size": data.size, **({"settings": repr(settings)} if identity is None else identity)}
            )
            run.resume(saver)
        with deferred_interrupts() as raise_if_interrupted:
            interrupted = _run_to_the_end(run, saver, bar, raise_if_interrupted)
    result = run.result(interrupted, time.monotonic() - started)
    _warn_about(result)
    return result


def _run_to_the_end(
    run: TrainingRun, saver: Checkpoint | None, bar: Bar, raise_if_interrupted: Callable[[], None]
) -> bool:
    """Whether the run was interrupted."""
    interrupted = False
    try:
        while not run.finished:
            run.epoch_of_steps(saver, bar)
            raise_if_interrupted()
        run.finish()
    except KeyboardInterrupt:
        run.restore_good()
        interrupted = True
        if run.shares.processes.several:  # the others are waiting for this one, or have been stopped too
            if saver is not None:
                saver.save(*run.good)
            raise
    if saver is not None:
        saver.save(*run.good)
    return interrupted


def _warn_about(result: TrainingResult) -> None:
    said = result.message
    if result.interrupted:
        text = f"The fit was {said}; the posterior is that of the last complete record."
        warnings.warn(text, Interrupted, stacklevel=3)
    elif result.converged is False and "still improving" in said:
        warnings.warn(f"The objective was {said}. Pass epochs= to train longer.", ConvergenceWarning, stacklevel=3)
    elif result.out_of_time:
        text = f"The fit was {said}, before its planned end. Raise time_limit (--time-limit)."
        warnings.warn(text, ConvergenceWarning, stacklevel=3)


# --- one run of the loop: its steps, its windows, and the state from which it can resume -----------------------------

_MOST_HALVINGS = 8
_SEARCH_FROM = 500  # steps of the first-order optimiser before L-BFGS, which goes to the nearest minimum
_LONGEST_SEARCH = 5_000  # evaluations by L-BFGS, after which the first-order optimiser goes on
_LITTLE = 0.1  # of what is allowed to the optimiser: the gain of a round in which the loss counts as settled
_MOST_SEARCHED = 10_000  # parameters
_NOT_FINITE = "The loss became NaN or infinite"


@dataclass
class TrainingRun:
    """The state of a run, and its steps."""

    objective: Objective
    data: Data
    settings: TrainingSettings
    validation: Data | None
    seed: int
    engine: Engine
    keeps_all: bool = False  # whether the state that is kept has the optimiser's too, as a checkpoint must
    step: int = 0
    epoch: int = 0
    batch: int = 0  # steps done in this epoch: a batch each, or as many as are accumulated
    halvings: int = 0
    finished: bool = False
    history: list[dict[str, float]] = field(default_factory=list)
    best_score: float = -math.inf
    records_since_best: int = 0
    searched: int = 0  # evaluations by L-BFGS; -1: it does not apply, or came to no good end

    def __post_init__(self) -> None:
        keep_free_memory()
        self.params = [value for value in self.objective.parameters() if value.requires_grad]
        training = self.settings.training
        self.optimiser = optimiser_of(
            training.optimiser, self.params, self.settings.step_size(self.objective.dimension)
        )
        self._first_groups = [{**group, "params": None} for group in self.optimiser.param_groups]
        self._begin_schedule(0)
        self.rows = self.settings.rows_per_step(self.data.size)
        self.per_epoch = -(-self.data.batches_per_epoch(self.rows) // self.settings.training.accumulate)
        self.window = WINDOW if self.data.in_memory else self.per_epoch  # a loader can only be resumed between epochs
        epochs = self.settings.epochs
        tolerance = max(0.01 / self.data.size, 1e-5)  # nats per example in 500 steps
        self.schedule = Schedule(
            None if epochs is None else epochs * self.per_epoch, Settling(tolerance),
            shape=self.settings.schedule if self.scheduler is None else "constant", cycles=self.settings.cycles,
            warmup=training.warmup,
        )  # fmt: skip
        self.deadline = Deadline.within_limit()
        if not self._may_search:
            self.searched = -1
        compiled = self.engine.mode == "compiled" and may_be_compiled(self.objective)
        self._loss = CompiledObjective(self.objective) if compiled else self.objective
        self.sums: dict[str, Tensor] = {}
        self.best: dict[str, Tensor] = {}
        self.good: tuple[dict[str, Any], dict[str, Tensor]] = ({}, {})  # the state at the end of the last window
        self.keeping = False  # whether that is just being replaced by the state as it is
        self.shares = Shares(self.engine.processes, self.data, self.seed)
        self.shares.processes.copy_from_first(self.objective.tensors().values())
        self._keep_state()

    # --- steps -------------------------------------------------------------------------------------------------------

    def epoch_of_steps(self, saver: Checkpoint | None, bar: Bar) -> None:
        """Steps to the end of the epoch, or to where the run ends or goes back to its last good state."""
        if self.searched >= 0 and self.step >= _SEARCH_FROM:
            self._search(saver, bar)
            return
        first = self.step
        if self.batch < self.per_epoch:
            done = self.batch * self.settings.training.accumulate
            batches = self.data.batches(self.rows, seed=self.seed, epoch=self.epoch, skip=done)
            left = self.per_epoch * self.settings.training.accumulate - done
            for group in self.shares.groups(batches, self.settings.training.accumulate, left):
                going_on = self._one_step(group)
                if going_on:
                    self._close_epoch_and_cycle()
                    self._apply_time_limit()
                if going_on and (self.step % self.window == 0 or self.step >= self.schedule.total_steps):
                    going_on = self._close_window(saver, bar)
                if not going_on:
                    return
            if self.step == first:
                raise InvalidData("data gave no batch: an iterator that can be read only once? Pass a DataLoader.")
            if self.batch < self.per_epoch:  # a loader with fewer batches than its length
                self._close_epoch()
        self.epoch, self.batch = self.epoch + 1, 0

    def _one_step(self, batches: list[Counted]) -> bool:
        self.objective.epoch = self.epoch + self.batch / self.per_epoch
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule.factor(self.step)
        self.last_rate = self.optimiser.param_groups[0]["lr"]
        done = self._gradient_and_update(batches)
        if done is None:
            self._diverged(_NOT_FINITE)
            return False
        loss, terms = done
        with torch.no_grad():
            for name, value in (("loss", loss), *terms.items()):
                if name in self.sums:
                    self.sums[name] += value
                else:
                    self.sums[name] = value.detach().clone()
        self.step, self.batch = self.step + 1, self.batch + 1
        if self.settings.training.scheduler_every == "step":
            self._step_schedule()
        return True

    def _gradient_and_update(self, batches: list[Counted]) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The loss and its terms, their means over the rows of all batches; None where it is not finite."""
        alone = not self.shares.processes.several
        if len(batches) == 1 and self.settings.training.clip is None and alone:
            done = self.objective.whole_step(self.optimiser, *batches[0][0])
            if done is not None:
                return done if math.isfinite(done[0].item()) else None
        self.optimiser.zero_grad(set_to_none=True)
        divided = self.objective.divides_weights
        means = self.shares.gradient(self._loss_of, batches, self.params, self.step, divided=divided)
        if means is None:
            return None
        if self.settings.training.clip is not None:
            self.objective.clip_gradient(self.settings.training.clip)
        self.objective.update(self.optimiser)
        return means.pop("loss"), means

    def _loss_of(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with self.engine.precision_context(batch[0].device):
            return self._loss(*batch)

    def _begin_schedule(self, steps: int) -> None:
        """The rates as they were first, and the user's scheduler after so many of its steps."""
        for group, first in zip(self.optimiser.param_groups, self._first_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update({**first, "params": params})
        self.scheduler, self.scheduled = scheduler_of(self.settings.training.scheduler, self.optimiser), 0
        self.rates: list[float] = [float(group["lr"]) for group in self.optimiser.param_groups]
        for _ in range(steps):
            self._step_schedule()

    def _step_schedule(self) -> None:
        """A step of the user's scheduler, which sees the rates without warm-up and halvings."""
        if self.scheduler is None:
            return
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate
        self.optimiser._opt_called = True  # type: ignore[attr-defined]  # also where the objective has a step of its own
        self.scheduler.step()
        self.rates = [float(group["lr"]) for group in self.optimiser.param_groups]
        self.scheduled += 1

    def _close_epoch_and_cycle(self) -> None:
        """Before a window is closed, so that the state it keeps has seen it."""
        if self.batch == self.per_epoch:
            self._close_epoch()
        if self.schedule.ends_cycle(self.step):
            self.objective.end_of_cycle()

    def _close_epoch(self) -> None:
        self.objective.end_of_epoch()
        if self.settings.training.scheduler_every == "epoch":
            self._step_schedule()

    def _apply_time_limit(self) -> None:
        """Plan for as many steps as the time limit allows."""
        if self.deadline is None:
            return
        possible = self.shares.processes.from_first(partial(self.deadline.total_steps, self.step))
        if possible is not None:
            self.schedule.limit(self.step, possible)

    def _close_window(self, saver: Checkpoint | None, bar: Bar) -> bool:
        """Record the window and keep the state to go back to. False where the steps end here."""
        if not self.shares.processes.all_finite(self.params):
            self._diverged(_NOT_FINITE)
            return False
        self.shares.mean_buffers(self.objective.tensors())
        done = self.step - (self.history[-1]["step"] if self.history else 0)
        record = {
            "step": self.step,
            "epoch": self.epoch + self.batch / self.per_epoch,
            "learning_rate": self.last_rate,
            **{name: (value / done).item() for name, value in self.sums.items()},
            **self.objective.summary(),
        }
        if fault := self.objective.fault(record):
            self._diverged(fault)
            return False
        self.sums = {}
        if self.validation is not None:
            record["validation_log_likelihood"] = self._validate()
        self.history.append(record)
        settling = record["epoch"] >= self.objective.settles_from and self.searched <= 0
        if settling and self.step > self.settings.training.warmup:
            self.schedule.record(self.step, record["loss"])
        self.finished = self.finished or self.step >= self.schedule.total_steps
        self._keep_state()
        words, terms = f"loss {record['loss']:.4g}", {name: each for name, each in record.items() if name != "step"}
        bar.update(self.step, self.schedule.total_steps, words, terms, self.objective.present_posterior)
        if saver is not None and saver.due:
            saver.save(*self.good)
        return not self.finished

    # --- by L-BFGS ---------------------------------------------------------------------------------------------------

    @property
    def _may_search(self) -> bool:
        """Whether the run goes to a minimum at its defaults, on all rows at once."""
        return (
            self.settings == TrainingSettings(batch_size=self.settings.batch_size)
            and self.per_epoch == 1
            and self.data.in_memory
            and self.validation is None
            and self.deadline is None
            and self.objective.dimension <= _MOST_SEARCHED
        )

    def _search(self, saver: Checkpoint | None, bar: Bar) -> None:
        """A round of L-BFGS. The run ends where it gains nothing; where there are too many, the optimiser goes on."""
        (batch,) = self.data.batches(self.rows, seed=self.seed, epoch=self.epoch)
        if self.searched == 0 and not self.objective.is_smooth(*batch):
            self.searched = -1
            return
        found: dict[str, Tensor] = {}

        def loss() -> Tensor:
            value, terms = self._loss_of(batch)
            found.update(terms, loss=value.detach())
            return value

        done = lbfgs_round(self.params, loss)
        self.step, self.epoch = self.step + done.evaluations, self.epoch + done.evaluations
        self.searched += done.evaluations
        if done.gain <= _LITTLE * self.schedule.settling.tolerance and not self.objective.changes_at_minimum():
            self.finished, self.schedule.fall_from = True, self.step
        elif self.searched > _LONGEST_SEARCH:
            self.searched = -1
        self.sums = {name: done.evaluations * value for name, value in found.items()}
        self.last_rate = self.optimiser.param_groups[0]["lr"]  # which rests
        self._close_window(saver, bar)

    # --- validation --------------------------------------------------------------------------------------------------

    def _validate(self) -> float:
        together = self.objective.divides_weights
        score = self._score() if together else self.shares.processes.from_first(self._score)
        if score > self.best_score:
            self.best_score, self.records_since_best = score, 0
            self.best = {name: value.detach().clone() for name, value in self.objective.tensors().items()}
        else:
            self.records_since_best += 1
            self.finished = self.records_since_best >= self.settings.training.patience
        return score

    def _score(self) -> float:
        # on its own random stream: looking at held-out data does not change what training draws
        with own_randomness(derive_seed(self.seed, "validation")), torch.no_grad():
            total = sum(self.objective.predictive_log_likelihood(x, y).sum().item() for x, y in self.validation or ())
        return total / self.validation.size if self.validation else 0.0

    # --- state -------------------------------------------------------------------------------------------------------

    def _keep_state(self) -> None:
        """Keep the state as the one to go back to, in the memory of the one before."""
        self.keeping = True
        state, plain = saved_state(self.params if self.keeps_all else (), self.optimiser)
        tensors = {**with_prefix("objective.", self.objective.tensors()), **with_prefix("random.", random_state())}
        tensors |= state
        content = {
            "plain_state": plain, "scheduled": self.scheduled,
            "step": self.step, "epoch": self.epoch, "batch": self.batch, "halvings": self.halvings,
            "finished": self.finished, "history": list(self.history), "schedule": self.schedule.state(),
            "best_score": self.best_score if math.isfinite(self.best_score) else None,
            "records_since_best": self.records_since_best, "searched": self.searched,
        }  # fmt: skip
        frames = {f"frame.{index}": value for index, value in enumerate(self.objective.snapshots)}  # they never change
        held = self.good[1]
        kept = {name: _copied(value, held.get(name)) for name, value in tensors.items()}
        self.good = content, {**kept, **frames, **with_prefix("best.", self.best)}
        self.keeping = False

    def resume(self, saver: Checkpoint) -> None:
        """Take up a saved run, if there is one."""
        saved = saver.load()
        if saved is not None:
            lacking = [name for name in self.objective.tensors() if f"objective.{name}" not in saved[1]]
            if lacking:
                raise Unsupported(
                    f"The checkpoint was written by an earlier version, whose fit had no {lacking[0]!r}: it cannot go "
                    f"on here. Finish it with that version, or begin again with checkpoint= another folder."
                )
            self._restore(*saved)
            self._keep_state()

    def restore_good(self) -> None:
        """Go back to the state at the end of the last window."""
        if self.keeping:  # an interrupt came just there: it is the state as it is
            self._keep_state()
        self._restore(*self.good)

    def _restore(self, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.step, self.epoch, self.batch = content["step"], content["epoch"], content["batch"]
        self.halvings, self.finished, self.history = content["halvings"], content["finished"], list(content["history"])
        self.best_score = -math.inf if content["best_score"] is None else content["best_score"]
        self.records_since_best = content["records_since_best"]
        self.searched = content.get("searched", -1)
        self.schedule.restore(content["schedule"])
        self.sums = {}
        with torch.no_grad():
            for name, value in self.objective.tensors().items():
                value.copy_(tensors[f"objective.{name}"])
        count = sum(name.startswith("frame.") for name in tensors)
        self.objective.snapshots = [tensors[f"frame.{index}"] for index in range(count)]
        self.best = without_prefix("best.", tensors)
        restore_state(self.params, self.optimiser, tensors, content.get("plain_state", ()))
        if self.scheduler is not None:
            self._begin_schedule(content.get("scheduled", 0))
        restore_random_state(without_prefix("random.", tensors))

    def _diverged(self, what: str) -> None:
        at = self.step
        halvings = self.halvings + 1
        self.restore_good()
        self.optimiser.state.clear()  # what it remembers is of steps that were too long
        if self.settings.training.on_divergence == "raise" or halvings > _MOST_HALVINGS:
            raise Diverged(
                f"{what} at step {at} with learning rate {self.rates[0] * self.schedule.scale:.3g}"
                f"{f' after {halvings - 1} halvings' if halvings > 1 else ''}. {self.objective.remedy}"
            )
        self.halvings, self.schedule.scale = halvings, self.schedule.scale / 2
        self._keep_state()
        warnings.warn(
            f"{what} at step {at}: training continues from step {self.step} with half the learning rate "
            f"({self.rates[0] * self.schedule.scale:.3g}).",
            ConvergenceWarning,
            stacklevel=2,
        )

    def finish(self) -> None:
        """Restore the state with the best validation score, if there was validation."""
        if self.best:
            with torch.no_grad():
                for name, value in self.objective.tensors().items():
                    value.copy_(self.best[name])
        self.shares.processes.copy_from_first(self.objective.tensors().values())
        if self.keeps_all:
            self._keep_state()

    def result(self, interrupted: bool, seconds: float) -> TrainingResult:
        """How the run went."""
        converged, out_of_time = False if interrupted else self.schedule.converged, False
        if interrupted:
            message = f"stopped from the keyboard at step {self.step}"
        elif self.best and self.records_since_best >= self.settings.training.patience:
            message, converged = f"stopped early at step {self.step}: no gain on the validation data", True
        elif self.schedule.timed:
            message, out_of_time = f"ended by the time limit after {self.step} steps", True
        elif self.schedule.forced:
            message = f"still improving after {self.step} steps"
        else:
            message = f"{'settled' if converged else 'ended'} after {self.step} steps"
        epochs = self.epoch + self.batch / self.per_epoch
        return TrainingResult(self.history, self.step, epochs, converged, interrupted, message, seconds, out_of_time)


def _copied(value: Tensor, held: Tensor | None) -> Tensor:
    """A copy, in the memory that is held where it fits."""
    if held is None or held.shape != value.shape or held.dtype != value.dtype:
        return value.detach().clone()
    return held.copy_(value.detach())
