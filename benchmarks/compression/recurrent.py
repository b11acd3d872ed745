"""Recurrent networks made sparse (Lobacheva et al., 2017): an LSTM and a GRU that must remember.

The task is made here: a sequence of symbols, some of which are to be remembered, the others noise. At every place the
answer is the last symbol to be remembered so far (or that there was none), however long ago that was: a network without
memory is right only where that symbol stands.

Embedding, recurrent weights and the last layer are all made sparse; their weights are drawn once a step, as they act at
every place of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.compression.architectures import Tagger, seeded
from benchmarks.compression.images import Images
from benchmarks.compression.sparsity import counts, error_percent, kept_weights, pruned
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, table

KINDS = 4
"""Symbols that are to be remembered."""
NOISE = 6
"""Symbols that are not."""
CELLS = ("lstm", "gru")
_HEADER = ("cell", "weights", "dense error %", "sparse error %", "compression", "sparsity of parameters %", "minutes")
_NOTE = (
    "Errors: wrong answers per place of new sequences (a network without memory has about {chance:.0f} %). Sparse: the "
    "mean network without the weights whose log alpha is above 3."
)


@dataclass(frozen=True)
class Plan:
    """How much of it there is.

    Attributes:
        rows: Training sequences.
        test: New sequences.
        length: Symbols in a sequence.
        remembered: Probability that a symbol is one to be remembered.
        hidden: Units of the recurrent layer.
        dense_epochs: Of maximum likelihood.
        epochs: Of sparse variational dropout, from there.
        kl_warmup: Epochs over which the KL gets its full weight.
        batch_size: Sequences per step.
        learning_rate: Of Adam.
    """

    rows: int = 4_000
    test: int = 2_000
    length: int = 20
    remembered: float = 0.15
    hidden: int = 64
    dense_epochs: int = 15
    epochs: int = 60
    kl_warmup: int = 10
    batch_size: int = 64
    learning_rate: float = 2e-3


PLAN = Plan()
_QUICK = Plan(rows=40, test=10, length=6, hidden=4, dense_epochs=1, epochs=2, kl_warmup=1, batch_size=20)


def sequences(plan: Plan, *, seed: int = 0) -> Images:
    """Symbols ``(N, length)`` and, for every place, which symbol was the last to be remembered (KINDS: none yet)."""
    generator = torch.Generator().manual_seed(seed)
    shape = plan.rows + plan.test, plan.length
    kept = torch.rand(shape, generator=generator) < plan.remembered
    kind = torch.randint(KINDS, shape, generator=generator)
    noise = KINDS + torch.randint(NOISE, shape, generator=generator)
    x, y = torch.where(kept, kind, noise), last_kept(kept, kind)
    return Images(x[: plan.rows], y[: plan.rows], x[plan.rows :], y[plan.rows :])


def last_kept(kept: Tensor, kind: Tensor) -> Tensor:
    """For every place ``(N, length)``: the kind at the last place up to there that is kept, KINDS if there is none."""
    places = torch.arange(kept.shape[1]).expand_as(kept)
    last = torch.where(kept, places, -1).cummax(1).values
    return torch.where(last < 0, KINDS, kind.gather(1, last.clamp_min(0)))


def chance_percent(plan: Plan) -> float:
    """Error of who sees only the present symbol: elsewhere one of KINDS at best, or none yet where that is likelier."""
    error = 0.0
    for place in range(plan.length):
        nothing_yet = (1 - plan.remembered) ** (place + 1)
        hidden = 1 - plan.remembered - nothing_yet  # something is to be remembered, and it stands elsewhere
        error += hidden + nothing_yet - max(nothing_yet, hidden / KINDS)
    return 100.0 * error / plan.length


def evaluate(cell: str, plan: Plan, *, fits: Fits) -> dict[str, Any]:
    """Train a network with that cell both ways, and compare."""
    import knowable as kn

    data = sequences(plan)
    build = partial(Tagger, KINDS + NOISE, KINDS + 1, cell=cell, hidden=plan.hidden)
    model = kn.Model(seeded(build, 0), kn.Categorical(), kn.Flat())
    training = {"batch_size": plan.batch_size, "learning_rate": plan.learning_rate}
    dense, _ = fits.fit(f"{cell}, dense", kn.MaximumLikelihood(epochs=plan.dense_epochs, **training), model, data.rows)
    method = kn.SparseVariationalDropout(
        epochs=plan.epochs, kl_warmup=plan.kl_warmup, initial_scale=0.01, start=dense, **training
    )
    sparse, minutes = fits.fit(f"{cell}, sparse", method, model, data.rows)
    kept = kept_weights(sparse)
    return {
        "dense_error": error_percent(dense, dense.mean(), data.test_x, data.test_y),
        "sparse_error": error_percent(sparse, pruned(sparse, kept), data.test_x, data.test_y),
        **counts(kept),
        "minutes": minutes,
    }


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Both cells; ``only`` is a glob such as ``"gru"``."""
    plan, fits = _QUICK if quick else PLAN, Fits.beside(rows)
    cases: dict[str, Callable[[], dict[str, Any]]] = {cell: partial(evaluate, cell, plan, fits=fits) for cell in CELLS}
    found = work_through(cases, only=only, rows=rows, recipe=plan, quick=quick)
    return describe(
        "compression_recurrent", quick=quick, packages=(), plan=asdict(plan), chance=chance_percent(plan), cells=found
    )  # fmt: skip


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each cell."""
    plan = run["plan"]
    title = f"The last of {KINDS} symbols among noise, {plan['rows']:,} sequences of {plan['length']}"
    rows = [_cells(name, row) for name, row in run["cells"].items()]
    return page(run, table(title, _HEADER, rows, _NOTE.format(chance=run["chance"])))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    compression = "all gone" if row["compression"] is None else f"{row['compression']:.1f}"
    layers = ", ".join(f"{layer.removesuffix('_l0')} {value:.1f}" for layer, value in row["sparsity"].items())
    return [
        name, f"{row['weights']:,}", f"{row['dense_error']:.2f}", f"{row['sparse_error']:.2f}", compression, layers,
        f"{row['minutes']:.1f}",
    ]  # fmt: skip
