"""What a report says where a fit did not aim at the Bayes posterior, or leans on more than the prior it was given."""

from __future__ import annotations

from knowable.core.diagnostics import NOT_BAYES
from knowable.core.model import Model
from knowable.core.training import TrainingResult

_MANY_SCALES = 10  # learned from one data set; or a tenth of its rows


def tempering_notes(beta: float, temperature: float) -> tuple[str, ...]:
    """What the factors on the KL and on the entropy do to the target."""
    notes = []
    if beta != 1.0:
        notes.append(f"beta={beta:g}: {NOT_BAYES} (beta=1 is). Every row counts {1 / beta:.3g} times.")
    if temperature != 1.0:
        notes.append(f"temperature={temperature:g}: {NOT_BAYES} (temperature=1 is).")
    return tuple(notes)


def warmup_notes(kl_warmup: int, result: TrainingResult) -> tuple[str, ...]:
    """Whether the state that was kept is from the warm-up of the KL: stopped by hand, or by the validation data."""
    epoch = _epoch_of_what_was_kept(result)
    if epoch >= kl_warmup:
        return ()
    share = (epoch + 1.0) / (kl_warmup + 1.0)
    return (
        f"kl_warmup={kl_warmup}: what was kept is from epoch {epoch:g}, when the KL still counted {share:.0%}, so "
        f"{NOT_BAYES}. Train on, or shorten the warm-up.",
    )


def _epoch_of_what_was_kept(result: TrainingResult) -> float:
    scored = [record for record in result.history if "validation_log_likelihood" in record]
    if scored:
        return max(scored, key=lambda record: record["validation_log_likelihood"])["epoch"]
    if result.interrupted:  # back at the end of the last record
        return result.history[-1]["epoch"] if result.history else 0.0
    return result.epochs


def learned_scale_notes(model: Model, size: int) -> tuple[str, ...]:
    """Whether the prior has more learned scales than the data can be asked to choose."""
    start = model.params()
    count = sum(start[name].numel() for name in model.hyper_names)
    if count < max(2, min(_MANY_SCALES, size / 10)):
        return ()
    return (
        f"{count:,} scales of the prior were learned from the same {size:,} rows: the bound takes the best of them for "
        f"granted, and so may overfit. Share scales (per='glob', per='layer') or give a hyperprior.",
    )
