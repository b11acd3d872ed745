"""Fitting masked weights: shared by dropout with set and with learned rates."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from knowable.core.checkpoint import Checkpoint
from knowable.core.engine import Engine
from knowable.core.method import Method, admit, identity_of
from knowable.core.point_estimate import training_diagnostics
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.training import Training, train
from knowable.inference.dropout.divergence import check_priors
from knowable.inference.dropout.dropout_objective import DropoutObjective, Learning
from knowable.inference.dropout.masked_weights import MaskedWeights
from knowable.inference.dropout.placement import Placement, place_dropout


def fit_dropout(
    method: Method,
    model: Any,
    data: Any,
    *,
    training: Training,
    rate: float | None,
    where: str | tuple[str, ...] | None,
    way: str,
    draws: int,
    prediction: str,
    learning: Learning | None = None,
    validation: Any = None,
    seed: int = 0,
    progress: bool | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
) -> MaskedWeights:
    """Decide where dropout acts, maximise its bound, and return the distribution over weights."""
    rows, held_out, seed = admit(model, data, validation, seed, batch_size=training.batch_size)
    with own_randomness(derive_seed(seed, "start")):
        first = next(iter(rows))[0]
        placement = place_dropout(model, first, rate=rate, where=where, learned=learning is not None)
    check_priors(model, placement.sites)
    objective = DropoutObjective(model, rows.size, placement, way=way, draws=draws, learning=learning)
    result = train(
        objective, rows, training, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
        engine=engine, label=type(method).__name__, identity=identity_of(method, model, rows, held_out),
    )  # fmt: skip
    params = {name: value.detach() for name, value in objective.params().items()}
    found = _with_rates(placement, objective.rates())
    terms = objective.final_bound(rows, seed) | {f"rate.{site.name}": site.rate for site in found.sites}
    return MaskedWeights(
        model, params, found, prediction=prediction, points={name: params[name] for name in model.point_names},
        buffers=objective.net_buffers, seed=seed,
        diagnostics=training_diagnostics(method, model, result, params, terms, _notes(placement)),
    )  # fmt: skip


def _with_rates(placement: Placement, rates: list[float]) -> Placement:
    sites = tuple(replace(site, rate=rate) for site, rate in zip(placement.sites, rates, strict=True))
    return replace(placement, sites=sites)


def _notes(placement: Placement) -> tuple[str, ...]:
    if not placement.noisy:
        return ()
    left = [path for path, rate in placement.own_rates.items() if rate > 0]
    which = f"of {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}" if left else "in the network's own code"
    return (f"Dropout {which} is no distribution over weights: it is random in predictions, but not in sample().",)
