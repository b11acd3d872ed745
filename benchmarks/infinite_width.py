"""Networks of growing width beside their limit, and the limit on MNIST.

With prior variances held at what a layer sums over, a network's functions approach a Gaussian process as its layers
grow, before data (Neal, 1996; Matthews et al., 2018) and after (Hron et al., 2020). How far a network of width n is
from it: the Wasserstein distance of the distribution of function values at an input to the normal distribution of the
limit, in units of its standard deviation, the mean over five inputs. Before data from a million independent draws,
after data from NUTS.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

NOISE = 0.2
PRIORS = {"prior, one hidden layer": 1, "prior, two hidden layers": 2}
POSTERIOR = "posterior, one hidden layer"
FLOORS = 2.0  # floors of the estimate below which a distance is not used for the slope
_HEADER = ("width", *PRIORS, POSTERIOR, "R-hat", "effective sample size")
_NOTE = (
    "Mean over replicates (draws, or seeds of the chains) with its standard error; in parentheses what as many "
    "independent draws of the limit itself give, the floor of the estimate. R-hat and effective sample size are of the "
    "functions at the inputs, the worst of all chains."
)


@dataclass(frozen=True)
class Recipe:
    """Widths, and how much is drawn.

    Attributes:
        widths: Units of each hidden layer.
        draws: Networks that are drawn from the prior, of each replicate.
        replicates: Of the prior.
        seeds: Of the chains.
        chains: Settings of NUTS.
    """

    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    draws: int = 250_000
    replicates: int = 4
    seeds: tuple[int, ...] = (0, 1)
    chains: tuple[tuple[str, int], ...] = (("chains", 32), ("warmup", 200), ("draws", 250), ("max_depth", 5))


RECIPE = Recipe()
_QUICK = Recipe((1, 2), 500, 2, (0,), (("chains", 2), ("warmup", 20), ("draws", 20), ("max_depth", 3)))


def model(width: int, layers: int) -> Any:
    """A network with error functions between its layers, whose prior has the same limit at every width."""
    import knowable as kn

    hidden: list[nn.Module] = [nn.Linear(1, width), kn.Erf()]
    prior = {"0.weight": kn.Normal(1.5), "0.bias": kn.Normal(1.0)}
    for number in range(1, layers):
        hidden += [nn.Linear(width, width), kn.Erf()]
        prior[f"{2 * number}.weight"] = kn.Normal(2.0 / math.sqrt(width))
    prior |= {f"{2 * layers}.weight": kn.Normal(1.5 / math.sqrt(width)), "*": kn.Normal(0.3)}
    net = nn.Sequential(*hidden, nn.Linear(width, 1))
    return kn.Model(net.double(), kn.Gaussian(NOISE), prior)


def inputs() -> Tensor:
    """Where functions are looked at."""
    return torch.tensor([[-2.0], [-1.0], [0.0], [0.7], [1.8]], dtype=torch.float64)


def data() -> tuple[Tensor, Tensor]:
    """Six rows to learn from."""
    x = torch.tensor([[-1.6], [-1.2], [-0.4], [0.3], [1.0], [1.4]], dtype=torch.float64)
    return x, torch.sin(2 * x) + 0.3


def distance(values: Tensor, mean: Tensor, std: Tensor) -> float:
    """Wasserstein distance of draws ``(K, inputs)`` to normal distributions, in their units: the mean over inputs."""
    z = ((values - mean) / std).sort(0).values
    quantiles = torch.special.ndtri((torch.arange(len(z), dtype=torch.float64) + 0.5) / len(z))
    return (z - quantiles.unsqueeze(1)).abs().mean().item()


def floor(draws: int) -> float:
    """The distance that as many draws of the normal distribution itself have: asymptotically 0.9 / √K."""
    generator = torch.Generator().manual_seed(0)
    found = [
        distance(torch.randn(draws, 5, generator=generator, dtype=torch.float64), torch.zeros(5), torch.ones(5))
        for _ in range(4)
    ]
    return statistics.fmean(found)


def prior_row(width: int, layers: int, recipe: Recipe) -> dict[str, Any]:
    """Distances of replicates of the prior to its limit."""
    import knowable as kn

    made, x = model(width, layers), inputs()
    std = kn.infinite_width_kernel(made, x).diagonal().sqrt()
    found = []
    for replicate in range(recipe.replicates):
        generator = torch.Generator().manual_seed(1000 * layers + 10 * width + replicate)
        parts = []
        for first in range(0, recipe.draws, 10_000):
            count = min(10_000, recipe.draws - first)
            stack = {
                name: made.prior.prior_of(name).scale
                * torch.randn((count, *value.shape), generator=generator, dtype=torch.float64)
                for name, value in made.params().items()
            }
            parts.append(made.network.over_draws(stack, x, vectorise=True)[..., 0])
        found.append(distance(torch.cat(parts), torch.zeros(5), std))
    return {"distances": found, "floor": floor(recipe.draws)}


def posterior_row(width: int, seed: int, recipe: Recipe) -> dict[str, Any]:
    """Distance of a run of NUTS to the limit's posterior."""
    import knowable as kn

    made, x = model(width, 1), inputs()
    limit = kn.InfiniteWidth(scales="prior").fit(made, data()).predict(x)
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)  # a short run: R-hat is in the table
        chains = kn.NUTS(**dict(recipe.chains)).fit(made, data(), seed=seed, progress=False)  # type: ignore[arg-type]
    values = made.network.over_draws(made.network_params(chains.stack), x, vectorise=True, at_once=10_000)[..., 0]
    mixed = chains.function_diagnostics(x)
    ess = mixed.ess["f"].min().item()
    return {
        "distance": distance(values, limit.mean.flatten(), limit.epistemic.sqrt().flatten()),
        "rhat": round(mixed.rhat["f"].max().item(), 4), "ess": round(ess, 1),
        "floor": floor(max(10, round(ess))), "cpu_seconds": round(time.process_time() - begun, 1), "draws": len(values),
    }  # fmt: skip


def mnist_row(kind: str, quick: bool) -> dict[str, Any]:
    """Accuracy on the test images after the first thousand training images, and the processor time of both steps."""
    import knowable as kn

    with np.load(data_folder() / "mnist.npz") as file:
        x, test = (torch.from_numpy(file[k].reshape(len(file[k]), -1)).float() / 255 for k in ("x_train", "x_test"))
        y, labels = (torch.from_numpy(file[k]).long() for k in ("y_train", "y_test"))
    count, tested = (50, 100) if quick else (1_000, 10_000)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    threads, clock, begun = torch.get_num_threads(), time.perf_counter(), time.process_time()
    method = kn.InfiniteWidth(kind=kind, labels="regression")
    posterior = method.fit(kn.Model(net, kn.Categorical()), (x[:count], y[:count]), progress=False)
    fitted = time.process_time()
    scores = kn.evaluate(posterior.predict(test[:tested]), labels[:tested])
    ended = time.process_time()
    return {
        "accuracy": scores["accuracy"], "nll": scores["nll"], "ece": scores["ece"], "threads": threads,
        "fit": round(fitted - begun, 2), "predict": round(ended - fitted, 2),
        "seconds": round(time.perf_counter() - clock, 2),
    }  # fmt: skip


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Rows of every width, then MNIST; what is finished is not run again. The plot goes beside the rows."""
    recipe, found, images = (_QUICK if quick else RECIPE), {}, {}
    for title in (*PRIORS, POSTERIOR):
        if not fnmatch(title, only):
            continue
        found[title] = {}
        for width in recipe.widths:
            if title in PRIORS:
                each = [_row(rows, f"{title} {width} {quick}", prior_row, width, PRIORS[title], recipe)]
            else:
                each = [
                    _row(rows, f"{title} {width} {s} {quick}", posterior_row, width, s, recipe) for s in recipe.seeds
                ]
            found[title][str(width)] = each
    if fnmatch("mnist", only) and os.environ.get("KNOWABLE_DATA"):
        images = {kind: _row(rows, f"mnist {kind} {quick}", mnist_row, kind, quick) for kind in ("nngp", "ntk")}
    if rows.path is not None and found:
        plot(found, rows.path.with_suffix(".png"))
    return describe("infinite_width", quick=quick, packages=("knowable",), distances=found, mnist=images)


def _row(rows: Rows, key: str, make: Any, *arguments: Any) -> dict[str, Any]:
    row = rows.get(key)
    if row is None:
        try:
            row = make(*arguments)
        except Exception as error:
            row = {"error": one_line(error)}
        rows.add(key, row)
    say(f"{key}: {row}")
    return row


# --- the table and the plot ------------------------------------------------------------------------------------------


def summary(each: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Mean distance, its standard error and the floor, over the replicates that succeeded."""
    good = [row for row in each if "error" not in row]
    values = [value for row in good for value in row.get("distances", [row.get("distance")])]
    if not values:
        return math.nan, math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error, statistics.fmean(row["floor"] for row in good)


def slope(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[float, float, int]:
    """Slope of log distance against log width with its standard error, and how many widths it rests on.

    By least squares over the widths from 2 on whose distance is well above the floor.
    """
    points = [(int(width), *summary(each)) for width, each in found.items()]
    kept = [(math.log(n), math.log(d)) for n, d, _, low in points if n > 1 and d > FLOORS * low]
    if len(kept) < 3:
        return math.nan, math.nan, len(kept)
    x, y = (np.array(each) for each in zip(*kept, strict=True))
    centred = x - x.mean()
    found_slope = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - found_slope * centred
    return found_slope, math.sqrt(float(rest @ rest) / (len(kept) - 2) / float(centred @ centred)), len(kept)


def to_markdown(run: Mapping[str, Any]) -> str:
    """The table of distances with the slopes, the plot, and MNIST."""
    found, parts = run["distances"], []
    if found:
        widths = list(next(iter(found.values())))
        lines = [[width, *(_cell(found.get(title, {}).get(width, [])) for title in (*PRIORS, POSTERIOR)),
                  *_mixed(found.get(POSTERIOR, {}).get(width, []))] for width in widths]  # fmt: skip
        fits = {title: slope(each) for title, each in found.items()}
        lines.append(["slope", *(_slope(fits[title]) if title in fits else "" for title in (*PRIORS, POSTERIOR))])
        parts.append(table("Distance of a network of width n to its limit", _HEADER, lines, _NOTE))
        parts.append("![distance against width](infinite_width.png)\n")
    if run["mnist"]:
        header = ("kernel", "accuracy", "NLL", "ECE", "processor seconds: fit", "predict", "threads", "by the clock")
        rows = [
            [kind, f"failed: {row['error']}"] if "error" in row else
            [kind, f"{row['accuracy']:.4f}", f"{row['nll']:.3f}", f"{row['ece']:.3f}", row["fit"], row["predict"],
             row["threads"], row["seconds"]]
            for kind, row in run["mnist"].items()
        ]  # fmt: skip
        note = "Two hidden layers of ReLU, scales and noise by the evidence on 500 images, labels as numbers."
        parts.append(table("MNIST: 1,000 training images, 10,000 test images", header, rows, note))
    return page(run, *parts)


def _cell(each: Sequence[Mapping[str, Any]]) -> str:
    mean, error, low = summary(each)
    return f"{mean:.4f} ± {error:.4f} ({low:.4f})"


def _mixed(each: Sequence[Mapping[str, Any]]) -> list[str]:
    good = [row for row in each if "error" not in row]
    return [f"{max(row['rhat'] for row in good):.3f}", f"{min(row['ess'] for row in good):,.0f}"] if good else []


def _slope(fit: tuple[float, float, int]) -> str:
    return f"{fit[0]:.2f} ± {fit[1]:.2f} ({fit[2]} widths)"


def plot(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Distances against width on logarithmic axes, with the fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for number, (title, each) in enumerate(found.items()):
        widths = np.array([int(width) for width in each])
        mean, error, low = (np.array(values) for values in zip(*map(summary, each.values()), strict=True))
        fit = slope(each)
        label = title if math.isnan(fit[0]) else f"{title}: slope {fit[0]:.2f} ± {fit[1]:.2f}"
        axes.errorbar(widths, mean, 2 * error, fmt="o", ms=4, capsize=2, color=f"C{number}", label=label)
        axes.plot(widths, low, ":", lw=1, color=f"C{number}")
        if not math.isnan(fit[0]):
            kept = (widths > 1) & (mean > FLOORS * low)
            level = np.exp(np.log(mean[kept]).mean() - fit[0] * np.log(widths[kept]).mean())
            axes.plot(widths[kept], level * widths[kept] ** fit[0], lw=1, color=f"C{number}")
    axes.set(xscale="log", yscale="log", xlabel="width n", ylabel="Wasserstein distance to the limit")
    axes.set_title("dotted: the floor of the estimate", fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
