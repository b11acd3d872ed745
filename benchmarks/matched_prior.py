"""Priors matched to a Gaussian process beside the default, on UCI regression.

The same network and the same Laplace approximation under three priors: Normal(1.0) on every weight, the library's
default; a scale of 1/√n for weights that sum over n units; and what ``kn.match_prior`` makes of a smooth process, an
RBF kernel of variance 1 whose lengthscale is the root of the number of inputs, a typical distance of standardised rows.
The match sees inputs alone. Standard splits; inputs and targets are standardised on the training rows, and scores are
in the units of the target.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import Split, load, mean_and_error, network, scaler_of, synthetic

DATA = ("yacht", "bostonHousing", "concrete")
PRIORS = ("Normal(1.0)", "1/√n", "matched to RBF")
_HEADER = (
    "data", "prior", "splits", "NLL", "RMSE", "distance to the process", "log evidence", "processor seconds",
)  # fmt: skip
_NOTE = (
    "Mean ± standard error over the splits. Distance: of the covariances of the prior's functions to the process's, "
    "relative to their size. Log evidence: Laplace's estimate, of standardised targets. The noise is learned, the "
    "scales of the prior are fixed. Processor seconds: of the fit."
)


@dataclass(frozen=True)
class Recipe:
    """Network, splits and methods.

    Attributes:
        hidden: Units of each hidden layer, of tanh.
        splits: Of each data set, the first ones.
        draws: Networks that are drawn to match the prior.
        epochs: Steps of Laplace's search for the mode, each of all rows: as many for every prior.
    """

    hidden: tuple[int, ...] = (50,)
    splits: int = 3
    draws: int = 400
    epochs: int = 4_000


RECIPE = Recipe()
_QUICK = Recipe((5,), 1, 50, 20)


def split_of(name: str, number: int, quick: bool) -> Split:
    """A standard split, or a small one for quick runs."""
    return synthetic() if quick else load(name, number)


@lru_cache(maxsize=16)
def matched(name: str, number: int, recipe: Recipe, quick: bool) -> Any:
    """The default model of a split with its prior matched to the process."""
    import knowable as kn

    split = split_of(name, number, quick)
    default = kn.Model(_net(split, recipe, number), kn.Gaussian(), kn.Normal(1.0))
    target = kn.RBFKernel(lengthscale=math.sqrt(split.x.shape[1]))
    x = scaler_of(split).scale_x(split.x)
    return kn.match_prior(default, target, x, draws=recipe.draws)


def _net(split: Split, recipe: Recipe, seed: int) -> Any:
    return network(split.x.shape[1], hidden=recipe.hidden, activation="tanh", outputs=1, seed=seed)


def model_of(prior: str, name: str, number: int, recipe: Recipe, quick: bool) -> tuple[Any, float | None]:
    """The model under one of the priors, and how far that is from the process, where it was measured."""
    import knowable as kn

    if prior != "1/√n":
        found = matched(name, number, recipe, quick)
        return (found.original, found.before.value) if prior == PRIORS[0] else (found.model, found.after.value)
    net = _net(split_of(name, number, quick), recipe, number)
    scales = {key: kn.Normal(1 / math.sqrt(v[0].numel())) for key, v in net.named_parameters() if v.dim() > 1}
    return kn.Model(net, kn.Gaussian(), {**scales, "*": kn.Normal(1.0)}), None


def evaluate(prior: str, name: str, number: int, recipe: Recipe, *, quick: bool) -> dict[str, Any]:
    """Fit under the prior and score the rows held out."""
    import knowable as kn

    split = split_of(name, number, quick)
    scaler = scaler_of(split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ModelWarning)  # where the match is poor: the distance is in the table
        model, distance = model_of(prior, name, number, recipe, quick)
        begun = time.process_time()
        data = (scaler.scale_x(split.x), scaler.scale_y(split.y).unsqueeze(-1))
        method = kn.Laplace(epochs=recipe.epochs, batch_size=len(split.x))
        posterior = method.fit(model, data, seed=number, progress=False)
    seconds = time.process_time() - begun
    predicted = scaler.restore(posterior.predict(scaler.scale_x(split.test_x), samples=500))
    target, evidence = split.test_y.unsqueeze(-1), posterior.log_evidence
    row = {
        "nll": -predicted.log_prob(target).mean().item(),
        "rmse": (predicted.mean - target).square().mean().sqrt().item(),
        "seconds": round(seconds, 1),
    }
    row |= {} if distance is None else {"distance": distance}
    row |= {} if evidence is None else {"evidence": float(evidence)}
    return row


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All data sets, priors and splits; ``only`` is a glob of data sets."""
    recipe, found = (_QUICK if quick else RECIPE), {}
    for name in DATA:
        if not fnmatch(name, only):
            continue
        for prior in PRIORS:
            each = [_row(rows, prior, name, number, recipe, quick) for number in range(recipe.splits)]
            found[f"{name}|{prior}"] = each
    return describe("matched_prior", quick=quick, packages=("knowable",), rows=found)


def _row(rows: Rows, prior: str, name: str, number: int, recipe: Recipe, quick: bool) -> dict[str, Any]:
    key = f"{name}, {prior}, split {number}, {recipe}" + ", quick" * quick
    row = rows.get(key)
    if row is None:
        try:
            row = evaluate(prior, name, number, recipe, quick=quick)
        except Exception as error:
            row = {"error": one_line(error)}
        rows.add(key, row)
    say(f"{name}, {prior}, split {number}: {row}")
    return row


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each data set, method and prior."""
    lines = [_cells(key.split("|"), each) for key, each in run["rows"].items()]
    return page(run, table("Three priors of one network", _HEADER, lines, _NOTE))


def _cells(names: list[str], rows: list[dict[str, Any]]) -> list[Any]:
    good = [row for row in rows if "error" not in row]
    if not good:
        return [*names, f"failed: {rows[0]['error']}"]

    def said(key: str, digits: int) -> str:
        if key not in good[0]:
            return ""
        mean, error = mean_and_error([row[key] for row in good])
        return f"{mean:.{digits}f} ± {error:.{digits}f}"

    seconds = sum(row["seconds"] for row in good) / len(good)
    return [
        *names, len(good), said("nll", 3), said("rmse", 3), said("distance", 2), said("evidence", 1),
        f"{seconds:.0f}",
    ]  # fmt: skip
