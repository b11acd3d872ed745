"""The one chain loop: every sampler runs in it.

Progress, memory, convergence, Ctrl-C, checkpoint and resume live here and in the run it drives, and nowhere else. A run
that is killed and resumed ends with the same bits as one that was not: a checkpoint holds the kernel's state, the
generator's, and the draws.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from knowable.core.chains.convergence import ACCURATE
from knowable.core.chains.groups import Apart
from knowable.core.chains.kernel import Kernel
from knowable.core.chains.run import ChainRun, Monitor, PredictionTerms
from knowable.core.chains.settings import FEW, ChainResult, ChainSettings, Mixing
from knowable.core.chains.target import Target
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import Checkpoint
from knowable.core.support.progress import Bar, ProgressSetting, deferred_interrupts, progress_bar
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import ConvergenceWarning, Interrupted


def run_chains(
    kernel: Kernel,
    target: Target,
    start: Tensor,
    settings: ChainSettings,
    *,
    warmup: int,  # transitions
    monitor: Monitor,  # the quantities whose R-hat and effective sample sizes are monitored
    prediction_terms: PredictionTerms | None = None,  # how well predictions are known, where draws make some
    mixing: Mixing | None = None,  # when to stop where settings.draws is None
    seed: int = 0,
    progress: ProgressSetting = None,  # None: a bar only on a terminal
    posterior: Callable[[Tensor], Posterior] | None = None,  # of draws (chains, n, D), for those who look on
    checkpoint: Checkpoint | None = None,  # where to save now and then, and to resume from
    label: str = "sampling",  # of the bar
    identity: dict[str, Any] | None = None,  # of this run; a checkpoint of another is refused
    apart: Apart | None = None,  # how tuned chains draw in groups; None: all together
) -> ChainResult:
    """Run all chains from ``start`` ``(chains, D)``: warm-up, then draws until there are enough."""
    started = time.monotonic()
    run = ChainRun(kernel, target, settings, warmup, monitor, mixing or Mixing(), seed, apart)
    with own_randomness(derive_seed(seed, "chains")), progress_bar(label, progress) as bar:
        run.every, run.posterior = bar.every, posterior
        if checkpoint is not None:
            checkpoint.begin({"seed": seed, **(identity or {})})
        if checkpoint is None or not run.resume(checkpoint, start):
            run.begin(start)
        with deferred_interrupts() as raise_if_interrupted:
            interrupted = _run_to_the_end(run, checkpoint, bar, raise_if_interrupted)
        result = run.result(interrupted, time.monotonic() - started)
        bar.update(run.done, run.done, "done", result.terms, run.present)
    if prediction_terms is not None:
        result = _with_predictions(result, prediction_terms(result.draws))
    _warn(result)
    return result


def _run_to_the_end(
    run: ChainRun, checkpoint: Checkpoint | None, bar: Bar, raise_if_interrupted: Callable[[], None]
) -> bool:
    interrupted = False
    try:
        while not run.finished:
            run.block(bar)
            raise_if_interrupted()
            if checkpoint is not None and checkpoint.due:
                checkpoint.save(*run.saved())
    except KeyboardInterrupt:
        run.restore_good()
        interrupted = True
        if run.target.processes.several:  # the others are waiting for this one, or have been stopped too
            if checkpoint is not None:
                checkpoint.save(*run.saved())
            raise
    if checkpoint is not None:
        checkpoint.save(*run.saved())
    return interrupted


def _with_predictions(result: ChainResult, terms: dict[str, float]) -> ChainResult:
    """Chains that disagree, each near modes of its own: not a failure where predictions are known all the same."""
    known = {name: value for name, value in terms.items() if math.isfinite(value)}
    result = replace(result, terms={**result.terms, **known})
    error = known.get("prediction_error", math.inf)
    if result.converged is not False or result.interrupted or error > ACCURATE:
        return result
    return replace(
        result, converged=None, message=f"{result.message}, but predictions are known to {error:.1g} nats a row"
    )


_MORE_TIME = "Raise time_limit (--time-limit)"


def _warn(result: ChainResult) -> None:
    terms = result.terms
    if result.interrupted:
        what = "these are the draws so far" if "rhat" in terms else "these are the chains' positions, hardly draws"
        warnings.warn(f"Sampling was {result.message}; {what}.", Interrupted, stacklevel=5)
        return
    if result.converged is False:
        least = min(terms.get("ess_bulk", 0.0), terms.get("ess_tail", 0.0))
        longer = "Ask for more draws or a longer warmup, or reparameterise"
        warnings.warn(
            f"The chains have {result.message}: R-hat {terms.get('rhat', math.inf):.3g}, smallest effective sample "
            f"size {least:.0f}. {_MORE_TIME if result.out_of_time else longer}: averages over these draws are less "
            f"accurate than their number suggests.",
            ConvergenceWarning, stacklevel=5,
        )  # fmt: skip
    elif result.converged is None and result.out_of_time:
        warnings.warn(
            f"The chains {result.message}: too few draws to tell whether they have mixed. {_MORE_TIME}.",
            ConvergenceWarning, stacklevel=5,
        )  # fmt: skip
    share = terms.get("divergences", 0.0) / max(1, result.values.numel())
    if share > 0.01 and result.monitored.shape[1] >= FEW:
        warnings.warn(
            f"{terms['divergences']:.0f} of {result.values.numel()} transitions diverged: the sampler cannot follow "
            f"the curvature there, and the draws miss that region. Raise target_acceptance, or "
            f"reparameterise the model.",
            ConvergenceWarning, stacklevel=5,
        )  # fmt: skip
