"""Uncertainty between two stretches of data, for variational families beside long chains.

Mean-field inference is known to be nearly as sure in a gap of the data as at the data (Foong et al., 2019 and 2020),
where the exact posterior is not. Each contender fits the same network to the same data; what counts is the epistemic
standard deviation of the function in the middle of the gap over that at the data.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table

NOISE = 0.1
SEEDS = (0, 1, 2)
GAP, DATA = (0.0, 0.5), (1.5, 2.5)
"""Distances from 0 between which the standard deviation is averaged: in the gap, and at the data."""
REFERENCE = "NUTS"
_HEADER = ("method", "sd at the data", "sd in the gap", "ratio", "ratio over NUTS's", "RMSE to NUTS's mean", "seconds")
_NOTE = (
    "Epistemic standard deviations of the function, means over the seeds (of data, network and fit) with the standard "
    "deviation of the ratio over seeds. The function-space rows with a kernel have another prior than NUTS."
)


@dataclass(frozen=True)
class Recipe:
    """Data and network.

    Attributes:
        rows: Rows of data, on [-3, -1] and [1, 3].
        width: Hidden units.
        samples: Posterior draws of a prediction.
        epochs: Steps of the variational fits (all rows are one batch).
        chains: Settings of the reference.
    """

    rows: int = 40
    width: int = 20
    samples: int = 1_000
    epochs: int = 4_000
    chains: tuple[tuple[str, int], ...] = (("chains", 4), ("warmup", 400), ("draws", 400), ("max_depth", 8))


RECIPE = Recipe()
_QUICK = Recipe(rows=10, width=3, samples=10, epochs=3, chains=(("chains", 2), ("draws", 4), ("warmup", 4)))


def contenders(recipe: Recipe) -> dict[str, Callable[[], Any]]:
    """The methods by name; those that the library does not have are left out."""
    import knowable as kn

    trained = {"epochs": recipe.epochs}
    found: dict[str, Callable[[], Any]] = {
        "mean-field": lambda: kn.MeanFieldVI(**trained, draws=8),
        "full rank": lambda: kn.FullRankVI(**trained, draws=8),
    }
    own, kernel = kn.NetworkPrior(), kn.RBFKernel(lengthscale=1.0, scale=1.0)
    found["function space, the network's prior"] = lambda: kn.FunctionSpaceVI(prior=own, **trained)
    found["function space, RBF kernel"] = lambda: kn.FunctionSpaceVI(prior=kernel, **trained)
    found[REFERENCE] = lambda: kn.NUTS(**dict(recipe.chains))
    return found


def model(recipe: Recipe, seed: int) -> Any:
    """A tanh network whose prior functions vary on the data's scale, with known noise."""
    import knowable as kn

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, recipe.width), nn.Tanh(), nn.Linear(recipe.width, 1))
    prior = {"0.*": kn.Normal(2.0), "2.weight": kn.Normal(1 / math.sqrt(recipe.width)), "2.bias": kn.Normal(1.0)}
    return kn.Model(net, kn.Gaussian(NOISE), prior)


def grid(points: int = 121) -> Tensor:
    """Where functions are looked at."""
    return torch.linspace(-4.5, 4.5, points).unsqueeze(1)


def fit(method: Any, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Mean and epistemic standard deviation along the grid, and the seconds of the fit."""
    import knowable as kn

    data = kn.datasets.sine_with_gap(n=recipe.rows, noise=NOISE, seed=seed)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(model(recipe, seed), (data.x, data.y), seed=seed, progress=False)
    seconds = time.perf_counter() - begun
    prediction = posterior.predict(grid(), samples=recipe.samples)
    return {
        **mixing(posterior),
        "mean": [round(value, 5) for value in prediction.mean.flatten().tolist()],
        "std": [round(value, 5) for value in prediction.epistemic.sqrt().flatten().tolist()],
        "seconds": round(seconds, 1),
    }


def mixing(posterior: Any) -> dict[str, float]:
    """Of chains the largest R-hat and the smallest effective sample size of the function along the grid."""
    from knowable.core.chains.posterior import ChainPosterior

    if not isinstance(posterior, ChainPosterior):
        return {}
    found = posterior.function_diagnostics(grid())
    return {"rhat": round(found.rhat["f"].max().item(), 4), "ess": round(found.ess["f"].min().item(), 1)}


def spread(std: list[float], between: tuple[float, float]) -> float:
    """Mean standard deviation at distances from 0 within bounds."""
    distance = grid(len(std)).flatten().abs()
    inside = (distance >= between[0]) & (distance <= between[1])
    return torch.tensor(std)[inside].mean().item()


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """A fit for every contender and seed; what is finished is not run again. The plot goes beside the rows."""
    recipe, seeds = (_QUICK, SEEDS[:1]) if quick else (RECIPE, SEEDS)
    found: dict[str, dict[str, Any]] = {}
    for title, make in contenders(recipe).items():
        if not fnmatch(title, only):
            continue
        found[title] = {}
        for seed in seeds:
            key = f"{title} {seed} {quick}"
            row = rows.get(key) or rows.add(key, _tried(make, recipe, seed))
            shown = {name: row[name] for name in ("seconds", "rhat", "ess") if name in row}
            say(f"{title}, seed {seed}: {row.get('error') or shown}")
            found[title][str(seed)] = row
    if rows.path is not None:
        plot(found, recipe, rows.path.with_suffix(".png"))
    return describe("in_between", quick=quick, packages=("knowable",), methods=found)


def _tried(make: Callable[[], Any], recipe: Recipe, seed: int) -> dict[str, Any]:
    try:
        return fit(make(), recipe, seed)
    except Exception as error:
        return {"error": one_line(error)}


# --- the table and the plot ------------------------------------------------------------------------------------------


def summary(fits: Mapping[str, Mapping[str, Any]], reference: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Means over the seeds that succeeded."""
    good = {seed: row for seed, row in fits.items() if "error" not in row}
    ratios = {seed: spread(row["std"], GAP) / spread(row["std"], DATA) for seed, row in good.items()}
    known = {seed: row for seed, row in reference.items() if "error" not in row and seed in good}
    against = [ratios[s] / (spread(row["std"], GAP) / spread(row["std"], DATA)) for s, row in known.items()]
    apart = [math.dist(good[s]["mean"], row["mean"]) / math.sqrt(len(row["mean"])) for s, row in known.items()]
    return {
        "data": statistics.fmean(spread(row["std"], DATA) for row in good.values()),
        "gap": statistics.fmean(spread(row["std"], GAP) for row in good.values()),
        "ratio": statistics.fmean(ratios.values()),
        "ratio_std": statistics.stdev(ratios.values()) if len(ratios) > 1 else 0.0,
        "over_reference": statistics.fmean(against) if against else math.nan,
        "apart": statistics.fmean(apart) if apart else math.nan,
        "seconds": statistics.fmean(row["seconds"] for row in good.values()),
    }


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table, with the plot below it."""
    methods = run["methods"]
    lines = [_cells(title, fits, methods.get(REFERENCE, {})) for title, fits in methods.items()]
    title = "A sine seen on [-3, -1] and [1, 3]: standard deviation of the function in the gap and at the data"
    note = f"{_NOTE} {_mixed(methods.get(REFERENCE, {}))}".strip()
    return page(run, table(title, _HEADER, lines, note), "![mean and two standard deviations](in_between.png)\n")


def _mixed(reference: Mapping[str, Any]) -> str:
    """How well the reference has mixed, in words."""
    known = [row for row in reference.values() if "rhat" in row]
    if not known:
        return ""
    rhat, ess = max(row["rhat"] for row in known), min(row["ess"] for row in known)
    return f"{REFERENCE}: R-hat of the function at most {rhat:.3f}, effective sample size at least {ess:,.0f}."


def _cells(title: str, fits: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    errors = [row["error"] for row in fits.values() if "error" in row]
    if len(errors) == len(fits):
        return [title, f"failed: {errors[0]}"]
    found = summary(fits, reference)
    return [
        title, f"{found['data']:.3f}", f"{found['gap']:.3f}", f"{found['ratio']:.2f} ± {found['ratio_std']:.2f}",
        f"{found['over_reference']:.2f}", f"{found['apart']:.3f}", f"{found['seconds']:.1f}",
    ]  # fmt: skip


def plot(methods: Mapping[str, Mapping[str, Any]], recipe: Recipe, path: Path) -> None:
    """Mean and two standard deviations of every method on the first seed, and all standard deviations in one panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    import knowable as kn

    firsts = {title: next(iter(fits.values())) for title, fits in methods.items()}
    shown = {title: row for title, row in firsts.items() if "error" not in row}
    seed = int(next(iter(next(iter(methods.values())))))
    data = kn.datasets.sine_with_gap(n=recipe.rows, noise=NOISE, seed=seed)
    x = grid().flatten().tolist()
    columns = min(3, len(shown) + 1)
    lines = -(-(len(shown) + 1) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.0 * lines), sharex=True, squeeze=False)
    panels = list(axes.flat)
    for panel, (title, row) in zip(panels, shown.items(), strict=False):
        mean, std = torch.tensor(row["mean"]), torch.tensor(row["std"])
        panel.fill_between(x, (mean - 2 * std).tolist(), (mean + 2 * std).tolist(), alpha=0.3, linewidth=0)
        panel.plot(x, mean.tolist())
        panel.plot(data.x.flatten().tolist(), data.y.flatten().tolist(), "k.", markersize=3)
        panel.set_title(title, fontsize=10)
        panel.set_ylim(-3.5, 3.5)
        panels[len(shown)].plot(x, row["std"], label=title)
    panels[len(shown)].set_title("standard deviations", fontsize=10)
    panels[len(shown)].set_ylim(0, 1.8 * panels[len(shown)].get_ylim()[1])  # room for the legend
    panels[len(shown)].legend(fontsize=7, loc="upper center")
    for panel in panels[len(shown) + 1 :]:
        panel.set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
