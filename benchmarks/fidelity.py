"""Is it the posterior? Predictions beside those of a long NUTS run, and the width of posteriors by library.

The first tables: on three small problems, the total variation distance between a method's predictive distribution and
that of NUTS, averaged over inputs among the data and outside. A second NUTS run with other seeds says what the noise of
a finite number of draws is worth.

The last table: on linear models whose exact posterior is known and has independent weights, so that a mean-field family
contains it, the standard deviations that each library's documented recipe ends with, over the right ones, as layers
are added and get wider.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity_recipes import RECIPES, SIZES, Setting, ratio
from benchmarks.harness import one_line
from benchmarks.peers import PACKAGES
from benchmarks.study import Rows, describe, page, say, table

SEEDS = (0, 1)
SAMPLES = 2000
REFERENCE = {"chains": 16, "warmup": 300, "draws": 400}
AGAIN = "NUTS, another seed"
_NOTE = (
    "Total variation distance of the predictive distributions to that of NUTS, between 0 and 1: mean over the inputs "
    "and over two seeds of the fit. {mixed} Every method has its defaults; noise and prior are given "
    "and the same for all. Ensembles, dropout and SWAG do not claim to be the posterior; their "
    "distance says how far from it they are."
)
_SD_NOTE = (
    "Standard deviation of the weights over the right one, geometric mean over the weights: 1 is right, 0.25 is four "
    "times too sure. The model: y is a sum of linear layers, each with inputs of its own, N = {rows} rows, batches of "
    "{batch}, normal noise and a N(0, 1) prior, both known; columns are orthogonal, so that the weights are "
    "independent in the posterior. Each library is used as its documentation shows for a loss that is a mean over the "
    "batch; the noise and the prior are given to all. "
    "For torch-uncertainty, whose tutorials have fixed numbers, the weight of the KL is 1/N."
)


# --- the problems ----------------------------------------------------------------------------------------------------


def two_moons() -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
    """Two classes in the plane, 60 rows, 2-10-2 tanh."""
    import knowable as kn

    data = kn.datasets.two_moons(n=60, noise=0.2)
    line = torch.linspace(-2.5, 2.5, 15)
    grid = torch.cartesian_prod(line, line) + data.x.mean(0)
    return kn.Model(_network(2, 10, 2), kn.Categorical(), kn.Normal(1.0)), (data.x, data.y), grid


def blobs() -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
    """Three classes in the plane, 90 rows, 2-8-3 tanh."""
    import knowable as kn

    data = kn.datasets.blobs(n=90, noise=0.8).standardised()[0]
    line = torch.linspace(-4, 4, 15)
    return (
        kn.Model(_network(2, 8, 3), kn.Categorical(), kn.Normal(1.0)),
        (data.x, data.y),
        torch.cartesian_prod(line, line),
    )


def sine() -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
    """A noisy sine with a gap, 40 rows, 1-20-1 tanh, noise known."""
    import knowable as kn

    data = kn.datasets.sine_with_gap(n=40, noise=0.2)
    grid = torch.linspace(-5, 5, 81).unsqueeze(1)
    return kn.Model(_network(1, 20, 1), kn.Gaussian(noise=0.2), kn.Normal(1.0)), (data.x, data.y), grid


PROBLEMS = {"two moons, 2-10-2": two_moons, "three blobs, 2-8-3": blobs, "sine with a gap, 1-20-1": sine}


def _network(inputs: int, width: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def contenders() -> dict[str, Callable[[], Any]]:
    """Methods at their defaults, by name; the reference comes first."""
    import knowable as kn

    names = (
        "HMC", "MCLMC", "SGLD", "SGHMC", "CyclicalSGMCMC", "SVGD", "AnnealedImportance", "FullRankVI", "LowRankVI",
        "MatrixNormalVI", "MixtureVI", "FlowVI", "MeanFieldVI", "NaturalVI", "MomentVI", "MCDropout", "ConcreteDropout",
        "DeepEnsemble", "SnapshotEnsemble", "BayesianBootstrap", "SWAG", "MultiSWAG", "MAP",
    )  # fmt: skip
    found: dict[str, Callable[[], Any]] = {"NUTS": lambda: kn.NUTS(**REFERENCE), AGAIN: lambda: kn.NUTS(**REFERENCE)}
    found |= {f"Laplace, {each}": lambda each=each: kn.Laplace(structure=each) for each in ("full", "kron", "diag")}
    found |= {"Laplace, full, draws": lambda: kn.Laplace(structure="full", prediction="sampling")}
    found |= {"EnsembleOf(MeanFieldVI)": lambda: kn.EnsembleOf(kn.MeanFieldVI(), 5)}
    return found | {name: getattr(kn, name) for name in names}


# --- fits ------------------------------------------------------------------------------------------------------------


def predictive(prediction: Any) -> Tensor:
    """Probabilities of the classes, or of 400 bins of the outcome: (inputs, bins)."""
    if hasattr(prediction, "probs"):
        return prediction.probs.double()
    edges = torch.linspace(-8, 8, 401)
    logs = torch.stack([prediction.log_prob(torch.full_like(prediction.mean, y)).flatten() for y in edges.tolist()], 1)
    mass = logs.double().exp()
    return mass / mass.sum(1, keepdim=True)


def fit(method: Any, problem: str, seed: int) -> dict[str, Any]:
    """Fit and predict: CPU seconds, the predictive distribution, and R-hat for chains."""
    model, data, grid = PROBLEMS[problem]()
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(model, data, seed=seed, progress=False)
        prediction = posterior.predict(grid, samples=SAMPLES, generator=torch.Generator().manual_seed(seed))
    row: dict[str, Any] = {"error": None, "seconds": round(time.process_time() - begun, 1)}
    if hasattr(posterior, "function_diagnostics"):
        found = posterior.function_diagnostics(grid[:: max(1, len(grid) // 40)])
        row["rhat"] = round(found.rhat["f"].nan_to_num(0.0).max().item(), 4)
    return row | {"probs": [[round(p, 6) for p in each] for each in predictive(prediction).tolist()]}


def distance(p: list[list[float]], q: list[list[float]]) -> float:
    """Total variation, mean over the inputs."""
    return (torch.tensor(p) - torch.tensor(q)).abs().sum(1).mul(0.5).mean().item()


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Every method on every problem, then every recipe at every size; ``only`` is a glob of problems and recipes."""
    return describe(
        "fidelity",
        quick=quick,
        packages=PACKAGES,
        reference=REFERENCE,
        problems=_distances(quick, only, rows),
        recipes=_ratios(quick, only, rows),
        setting=vars(Setting()),
    )


def _distances(quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for problem in [each for each in PROBLEMS if fnmatch(each, only)]:
        methods = contenders()
        if quick:
            import knowable as kn

            methods = {"NUTS": lambda: kn.NUTS(chains=2, warmup=10, draws=10), "MAP": lambda: kn.MAP(epochs=20)}
        reference: list[list[float]] | None = None
        found[problem] = {}
        for name, make in methods.items():
            fits = []
            for seed in SEEDS[:1] if quick or name in ("NUTS", AGAIN) else SEEDS:
                seed = 100 if name == AGAIN else seed
                row = _kept(
                    f"{problem}, {name}, {seed}{', quick' * quick}",
                    rows,
                    lambda m=make, p=problem, s=seed: fit(m(), p, s),
                )
                if row["error"] is None:
                    reference = row["probs"] if reference is None else reference
                    far = distance(row["probs"], reference)
                    fits.append({key: value for key, value in row.items() if key != "probs"} | {"distance": far})
                else:
                    fits.append(row)
            found[problem][name] = fits
            say(f"{problem}, {name}: {[each.get('distance', each['error']) for each in fits]}")
    return found


def _ratios(quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        if not fnmatch(name, only):
            continue
        found[name] = {}
        for layers, width in SIZES[:1] if quick else SIZES:
            setting = Setting(layers=layers, width=width, epochs=2 if quick else Setting.epochs)
            key = f"{name}, {layers} x {width}{', quick' * quick}"
            found[name][f"{layers} x {width}"] = _kept(
                key, rows, lambda r=recipe, s=setting: {"error": None, "ratio": ratio(r, s)}
            )
        say(f"{name}: {[each.get('ratio', each['error']) for each in found[name].values()]}")
    return found


def _kept(key: str, rows: Rows, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row = work()
    except Exception as error:
        row = {"error": one_line(error)}
    return rows.add(key, row)


# --- tables ----------------------------------------------------------------------------------------------------------


def summary(fits: list[Mapping[str, Any]]) -> float:
    """Mean distance over the seeds that worked, nan if none did."""
    good = [each["distance"] for each in fits if each["error"] is None]
    return statistics.fmean(good) if good else math.nan


def to_markdown(run: Mapping[str, Any]) -> str:
    """Distances, a column for each problem; ratios, a column for each size."""
    return page(run, distances_table(run), ratios_table(run))


def distances_table(run: Mapping[str, Any]) -> str:
    """Methods by their mean distance over the problems."""
    problems = run["problems"]
    names = [name for name in next(iter(problems.values()), {}) if name != "NUTS"]
    means = {name: [summary(problems[each].get(name, [])) for each in problems] for name in names}
    order = sorted(names, key=lambda name: math.inf if any(map(math.isnan, means[name])) else sum(means[name]))
    lines = [[name, *("" if math.isnan(value) else f"{value:.3f}" for value in means[name])] for name in order]
    rhats = [fit["rhat"] for each in problems.values() for fit in each.get("NUTS", []) if "rhat" in fit]
    size = run["reference"]
    mixed = f"NUTS: {size['chains']} chains of {size['draws']} draws after {size['warmup']}"
    mixed += f", largest R-hat of a prediction {max(rhats):.3f}." if rhats else "."
    return table(
        "Distance of predictions to those of a long NUTS run", ("method", *problems), lines, _NOTE.format(mixed=mixed)
    )


def ratios_table(run: Mapping[str, Any]) -> str:
    """Libraries by size."""
    sizes = list(dict.fromkeys(size for found in run["recipes"].values() for size in found))
    lines = [[name, *(_ratio(found.get(size)) for size in sizes)] for name, found in run["recipes"].items()]
    header = ("library", *(f"layers x inputs: {size}" for size in sizes))
    note = _SD_NOTE.format(**run["setting"])
    return table("Standard deviation of weights over the right one", header, lines, note)


def _ratio(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['ratio']:.2f}" if row["error"] is None else f"failed: {row['error']}"
