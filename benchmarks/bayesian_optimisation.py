"""Bayesian optimisation of functions whose optimum is known: surrogates of this library, BoTorch's GP, random search.

Every contender begins at the same quasi-random points. What counts is the best value after all evaluations; time is
that of the process for each point that was chosen by a surrogate.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table

SEEDS = (0, 1, 2, 3, 4)
_HEADER = ("surrogate and acquisition", "best value", "worst seed", "regret", "in 95%", "s / point", "seeds")
_NOTE = (
    "Best value: median over the seeds; regret: its distance to the optimum. All are maximised. In 95%: share of "
    "values inside the surrogate's 95% intervals when they came. Seconds are of the CPU, for fit and search."
)


@dataclass(frozen=True)
class Problem:
    """A function to be maximised.

    Attributes:
        function: Of a tensor of inputs between 0 and 1.
        dimensions: Number of inputs.
        optimum: Its largest value.
        initial: Quasi-random points.
        evaluations: Points in all.
    """

    function: Callable[[Tensor], float]
    dimensions: int
    optimum: float
    initial: int
    evaluations: int


def problems() -> dict[str, Problem]:
    """The functions by name."""
    from botorch.test_functions import Branin, Hartmann

    branin, hartmann = Branin(negate=True), Hartmann(negate=True)
    low, high = branin.bounds.double()

    def of_branin(x: Tensor) -> float:
        return branin(low + (high - low) * x[:2].double()).item()

    return {
        "Forrester": Problem(forrester, 1, 6.020740, 4, 12),
        "Branin": Problem(of_branin, 2, -0.397887, 6, 30),
        "Hartmann6": Problem(lambda x: hartmann(x.double()).item(), 6, 3.322368, 10, 50),
        "Branin in 30 dimensions": Problem(of_branin, 30, -0.397887, 10, 50),
    }


def forrester(x: Tensor) -> float:
    """The negative of the function of Forrester et al. (2008)."""
    value = x[0].item()
    return -((6 * value - 2) ** 2) * math.sin(12 * value - 4)


# --- contenders ------------------------------------------------------------------------------------------------------


def contenders() -> dict[str, Callable[[Problem, int], dict[str, Any]]]:
    """What runs a problem with a seed, by name."""
    import knowable as kn

    return {
        "random": ours("random"),
        "random features, ucb": ours("ucb"),
        "random features, logei": ours("logei"),
        "BoTorch GP, logei": gaussian_process,
        "random features, thompson": ours("thompson"),
        "last-layer Laplace, logei": ours("logei", lambda: kn.Laplace(structure="full"), "last_layer"),
        "DeepEnsemble, logei": ours("logei", lambda: kn.DeepEnsemble(members=5, epochs=500)),
        "HMC, logei": ours("logei", lambda: kn.HMC(chains=4, warmup=100, draws=50)),
    }


def ours(
    acquisition: str, method: Callable[[], Any] | None = None, random: str = "*"
) -> Callable[[Problem, int], dict[str, Any]]:
    """The optimiser of this library."""

    def run(problem: Problem, seed: int) -> dict[str, Any]:
        optimizer = made(problem, seed, acquisition, method, random)
        optimizer.run(lambda point: problem.function(torch.tensor(point)), problem.initial)
        begun = time.process_time()
        optimizer.run(lambda point: problem.function(torch.tensor(point)), problem.evaluations)
        inside = [abs(error) < 1.96 for error in optimizer.errors]
        return {
            "values": optimizer.values,
            "seconds": (time.process_time() - begun) / (problem.evaluations - problem.initial),
            "inside": sum(inside) / len(inside) if inside else math.nan,
        }

    return run


def made(problem: Problem, seed: int, acquisition: str, method: Callable[[], Any] | None, random: str) -> Any:
    """An optimiser for a problem; methods other than the default have a small tanh network."""
    import knowable as kn

    model = None
    if method is not None:
        torch.manual_seed(seed)
        width = 50 if random == "last_layer" else 20
        net = nn.Sequential(nn.Linear(problem.dimensions, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        net.append(nn.Linear(width, 1))
        model = kn.Model(net.double(), kn.Gaussian(), random=random)
    space = [(0.0, 1.0)] * problem.dimensions
    settings = {"noise": 0.0 if method is None else None, "initial": problem.initial, "seed": seed, "model": model}
    return kn.Optimizer(space, None if method is None else method(), acquisition, **settings)


def gaussian_process(problem: Problem, seed: int) -> dict[str, Any]:
    """BoTorch's SingleTaskGP with its default priors, and LogEI by ``optimize_acqf``."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    first = made(problem, seed, "random", None, "*").ask(problem.initial)
    x = torch.tensor(first, dtype=torch.float64)
    values = [problem.function(row) for row in x]
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64).repeat(1, problem.dimensions)
    torch.manual_seed(seed)
    begun, inside = time.process_time(), []
    while len(values) < problem.evaluations:
        y = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        acquisition = LogExpectedImprovement(model, best_f=y.max())
        row, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=6, raw_samples=256)
        with torch.no_grad():
            expected = model.posterior(row, observation_noise=True)
        values.append(problem.function(row[0]))
        inside.append(abs(values[-1] - expected.mean.item()) < 1.96 * expected.variance.sqrt().item())
        x = torch.cat([x, row])
    seconds = (time.process_time() - begun) / (problem.evaluations - problem.initial)
    return {"values": values, "seconds": seconds, "inside": sum(inside) / len(inside)}


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """A run for every problem, contender and seed; what is finished is not run again.

    Args:
        quick: A smoke run of one seed with few evaluations.
        only: Glob of contenders, or of rows such as ``Branin: random, 0``.
        rows: The finished rows.
        seeds: The seeds.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in seeds[:1] if quick else seeds:
        for title, problem in problems().items():
            if quick:
                problem = Problem(problem.function, problem.dimensions, problem.optimum, 3, 4)
            for name, contender in contenders().items():
                if not (fnmatch(name, only) or fnmatch(f"{title}: {name}, {seed}", only)):
                    continue
                key = f"{title} {name} {seed} {quick}"
                row = rows.get(key) or rows.add(key, _tried(contender, problem, seed))
                say(f"{title}, {name}, seed {seed}: {row.get('error') or max(row['values'])}")
                found.setdefault(title, {}).setdefault(name, {})[str(seed)] = row
    optima = {title: problem.optimum for title, problem in problems().items()}
    packages = ("knowable", "botorch", "gpytorch")
    return describe("bayesian_optimisation", quick=quick, packages=packages, problems=found, optima=optima)


def _tried(contender: Callable[[Problem, int], dict[str, Any]], problem: Problem, seed: int) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return contender(problem, seed)
    except Exception as error:
        return {"error": one_line(error)}


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each problem."""
    tables = []
    for title, found in run["problems"].items():
        optimum = run["optima"][title]
        lines = [_cells(name, fits, optimum) for name, fits in found.items()]
        lengths = [len(row.get("values", ())) for fits in found.values() for row in fits.values()]
        tables.append(
            table(f"{title}: {max(lengths)} evaluations, the optimum is {optimum:.3f}", _HEADER, lines, _NOTE)
        )
    return page(run, *tables)


def _cells(name: str, fits: Mapping[str, Any], optimum: float) -> list[str]:
    good = [row for row in fits.values() if "error" not in row]
    if not good:
        return [name, f"failed: {next(iter(fits.values()))['error']}"]
    best = [max(row["values"]) for row in good]
    inside = [row["inside"] for row in good if not math.isnan(row["inside"])]
    return [
        name, f"{statistics.median(best):.3f}", f"{min(best):.3f}", f"{optimum - statistics.median(best):.2g}",
        f"{statistics.fmean(inside):.0%}" if inside else "", f"{statistics.fmean(row['seconds'] for row in good):.2f}",
        ", ".join(seed for seed, row in fits.items() if "error" not in row),
    ]  # fmt: skip
