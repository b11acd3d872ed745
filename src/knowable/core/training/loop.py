"""The one optimisation loop: every method that is trained by gradient runs in it.

Progress, history, early stopping, divergence, time limits, Ctrl-C, precision, checkpoint and resume live here and
nowhere else. A run that is killed and resumed ends with the same bits as one that was not: a checkpoint holds
everything the next step depends on, and the order of the data depends only on the seed and the epoch.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.model.data import Data
from knowable.core.storage.checkpoint import Checkpoint, as_checkpoint
from knowable.core.support.interrupts import deferred_interrupts
from knowable.core.support.progress import Bar, progress_bar
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.objective import Objective
from knowable.core.training.run import TrainingRun
from knowable.core.training.settings import TrainingResult, TrainingSettings
from knowable.errors import ConvergenceWarning, Interrupted


def train(
    objective: Objective,
    data: Data,
    settings: TrainingSettings,
    *,
    validation: Data | None = None,
    seed: int = 0,
    progress: bool | None = None,
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
        progress: Show a progress bar (None: only on a terminal).
        checkpoint: A folder to save to at intervals and to resume from.
        engine: Precision of the arithmetic, and whether the loss is compiled.
        label: Text of the progress bar.
        identity: Identifies the fit (method, model, data); a checkpoint of another fit is refused.
    """
    saver, engine = as_checkpoint(checkpoint), as_engine(engine)
    started = time.monotonic()
    with own_randomness(derive_seed(seed, "training")), progress_bar(label, progress) as bar:
        run = TrainingRun(objective, data, settings, validation, seed, engine)  # here: it keeps the random state
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
    try:
        while not run.finished:
            run.epoch_of_steps(saver, bar)
            raise_if_interrupted()
    except KeyboardInterrupt:
        run.restore_good()
        if saver is not None:
            saver.save(*run.state())
        return True
    run.finish()
    if saver is not None:
        saver.save(*run.state())
    return False


def _warn_about(result: TrainingResult) -> None:
    if result.interrupted:
        warnings.warn(
            f"The fit was {result.message}; the posterior is that of the last complete record.",
            Interrupted,
            stacklevel=3,
        )
    elif result.converged is False and "still improving" in result.message:
        warnings.warn(
            f"The objective was {result.message}. Pass epochs= to train longer.", ConvergenceWarning, stacklevel=3
        )
    elif result.converged is False and result.out_of_time:
        warnings.warn(
            f"The fit was {result.message}, before its objective had converged. Give it more time.",
            ConvergenceWarning, stacklevel=3,
        )  # fmt: skip
