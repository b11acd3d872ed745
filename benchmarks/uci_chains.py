"""Held-out log likelihood of microcanonical chains on UCI regression, on the twenty standard splits.

The recipe of Sommer et al. (2025): chains that begin at the members of a deep ensemble and move by unadjusted MCLMC.
Inputs and targets are standardised on the training rows; the log likelihood is that of the target in its own units,
under the mixture of all draws of all chains.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from benchmarks import uci_data
from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import SPLITS, Split, load, mean_and_error, scaler_of, synthetic

PUBLISHED = {"energy": (-1.38, 0.05), "yacht": (-1.18, 0.05)}
"""Log likelihood and its standard error of deep ensembles (Lakshminarayanan, Pritzel and Blundell, 2017, table 1)."""
_HEADER = (
    "data", "splits", "log likelihood", "published deep ensemble", "difference", "RMSE", "R-hat", "seconds a split",
)  # fmt: skip
_NOTE = (
    "Mean ± standard error over the splits, in the units of the target. R-hat: median over the splits of the largest "
    "one over function values; chains in different modes of a network need not agree: their mixture predicts."
)


@dataclass(frozen=True)
class Recipe:
    """Network and chains.

    Attributes:
        hidden: Units of the hidden layers.
        activation: ``"tanh"`` or ``"relu"``.
        prior: Standard deviation of the normal prior on weights.
        chains: Chains, each from its own trained network.
        warmup: Stretches before the first draw.
        draws: Draws of each chain.
        length: Distance after which a chain has forgotten its direction, in units of the posterior, and the length of a
            stretch. The tuned one is longer and takes more gradients.
        start: Where the chains begin, see :class:`knowable.core.chains.settings.ChainSettings`.
    """

    hidden: tuple[int, ...] = (16, 16)
    activation: str = "tanh"
    prior: float = 1.0
    chains: int = 8
    warmup: int = 60
    draws: int = 40
    length: float | None = 2.0
    start: str = "ensemble"


RECIPE = Recipe()
_QUICK = Recipe(hidden=(4,), chains=2, warmup=2, draws=4, start="prior")


def evaluate(split: Split, recipe: Recipe, *, seed: int) -> dict[str, float]:
    """Fit the chains and score them on the rows held out."""
    import knowable as kn
    from knowable.inference.sampling import MCLMC

    scaler = scaler_of(split)
    model = kn.Model(
        network(split.x.shape[1], recipe, seed=seed), kn.HeteroscedasticGaussian(), kn.Normal(recipe.prior)
    )
    sampler = MCLMC(
        chains=recipe.chains, warmup=recipe.warmup, draws=recipe.draws, start=recipe.start, length=recipe.length,
        adjusted=False,
    )  # fmt: skip
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chains in different modes are not mixed, and need not be
        posterior = sampler.fit(
            model, (scaler.scale_x(split.x), scaler.scale_y(split.y).unsqueeze(-1)), seed=seed, progress=False
        )
    seconds = time.perf_counter() - begun
    predicted = scaler.restore(posterior.predict(scaler.scale_x(split.test_x), samples=recipe.chains * recipe.draws))
    target = split.test_y.unsqueeze(-1)
    return {
        "log_likelihood": predicted.log_prob(target).mean().item(),
        "rmse": (predicted.mean - target).square().mean().sqrt().item(),
        "rhat": float(posterior.diagnostics["rhat"]),
        "gradients": float(posterior.diagnostics["gradients"]),
        "seconds": seconds,
    }


def network(inputs: int, recipe: Recipe, *, seed: int = 0) -> nn.Module:
    """A network with two outputs: mean and logarithm of the noise."""
    return uci_data.network(inputs, hidden=recipe.hidden, activation=recipe.activation, outputs=2, seed=seed)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All splits of all data sets; ``only`` is a glob of data sets. Finished splits are not run again."""
    recipe = _QUICK if quick else RECIPE
    found: dict[str, list[dict[str, Any]]] = {}
    for name in PUBLISHED:
        if fnmatch(name, only):
            found[name] = [_row(name, number, recipe, quick, rows) for number in range(1 if quick else SPLITS)]
    results = {name: summarise(each) for name, each in found.items()}
    return describe("uci_chains", quick=quick, packages=(), recipe=asdict(recipe), data=results, splits=found)


def _row(name: str, number: int, recipe: Recipe, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{name}, split {number}, {recipe}" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row: dict[str, Any] = {"split": number, "error": None}
        row |= evaluate(synthetic() if quick else load(name, number), recipe, seed=number)
    except Exception as error:
        row = {"split": number, "error": one_line(error)}
    said = row["error"] or f"log likelihood {row['log_likelihood']:.3f}, {row['seconds']:.0f} s"
    say(f"{name}, split {number}: {said}")
    return rows.add(key, row)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard errors over the splits that worked, and why others did not."""
    good = [row for row in rows if row["error"] is None]
    errors = sorted({row["error"] for row in rows if row["error"] is not None})
    if not good:
        return {"splits": 0, "error": errors[0]}
    ends = {name: mean_and_error([row[name] for row in good]) for name in ("log_likelihood", "rmse")}
    medians = {name: statistics.median(row[name] for row in good) for name in ("rhat", "seconds", "gradients")}
    return {"splits": len(good), "error": errors[0] if errors else None, **ends, **medians}


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each data set."""
    recipe = run["recipe"]
    layers = "-".join(map(str, recipe["hidden"]))
    title = f"{layers} {recipe['activation']}, {recipe['chains']} chains x {recipe['draws']} draws of MCLMC"
    return page(run, table(title, _HEADER, [_cells(name, row) for name, row in run["data"].items()], _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if not row["splits"]:
        return [name, "0", f"failed: {row['error']}"]
    published, published_error = PUBLISHED[name]
    (mean, error), (rmse, rmse_error) = row["log_likelihood"], row["rmse"]
    return [
        name, f"{row['splits']}" + (f" (others: {row['error']})" if row["error"] else ""), f"{mean:.3f} ± {error:.3f}",
        f"{published:.2f} ± {published_error:.2f}", f"{mean - published:+.3f}", f"{rmse:.3f} ± {rmse_error:.3f}",
        f"{row['rhat']:.2f}", f"{row['seconds']:.0f}",
    ]  # fmt: skip
