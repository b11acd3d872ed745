"""How empirical Bayes overfits: the more scales of the prior are learned, the higher the evidence, the worse the fit.

Two problems, each with rows that no fit has seen:

- ``linear``: a linear model whose weights all come from the same normal. It is cut into 1, 2, 4, ... groups, each with
  a scale of its own, and the exact evidence is maximised over them. One scale is the truth; every further one can only
  be fitted to noise.
- ``network``: a network with one hidden layer under mean-field inference, with a fixed scale and with scales learned
  for all weights together, for each layer, each tensor and each weight, also with a hyperprior on each.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import mean_and_error

if TYPE_CHECKING:
    from knowable.core.model.prior import Prior
    from knowable.core.posterior.posterior import Posterior

CASES = ("linear", "network")
_TEST_ROWS = 2_000
_HEADER = ("scales", "learned", "log evidence", "held-out log likelihood", "difference to the first row", "seconds")
_WORDS = {"0": "none: the true one", "1": "one for all", "fixed": "none", "glob": "one for all"}
_NOTES = {
    "linear": "Log evidence: exact, at the scales that maximise it, of all training rows.",
    "network": "Log evidence: the lower bound of mean-field inference at the end of the fit, of all training rows.",
}
_READ = "Held-out: per row. Means ± standard errors over seeds; the difference is taken seed by seed. Seconds: a fit."


@dataclass(frozen=True)
class Plan:
    """How much of it there is.

    Attributes:
        features: Of the linear model.
        rows: Training rows of the linear model.
        scale: Of the true weights.
        network_rows: Training rows of the network.
        hidden: Units of the network.
        epochs: Steps of the network's fit, of all rows each.
        groups: Numbers of scales of the linear model; 0 is the true scale, not learned. Rows that are kept depend
            neither on these nor on the numbers of seeds.
        seeds: Data sets of the linear problem.
        network_seeds: Data sets of the network's problem.
    """

    features: int = 64
    rows: int = 96
    scale: float = 0.3
    network_rows: int = 100
    hidden: int = 30
    epochs: int = 3_000
    groups: tuple[int, ...] = field(default=(0, 1, 2, 4, 8, 16, 32, 64), repr=False)
    seeds: int = field(default=8, repr=False)
    network_seeds: int = field(default=4, repr=False)


PLAN = Plan()
_QUICK = Plan(6, 12, network_rows=12, hidden=3, epochs=20, groups=(0, 1, 6), seeds=1, network_seeds=1)
PRIORS = ("fixed", "glob", "layer", "parameter", "weight", "weight, hyperprior")


# --- the problems ----------------------------------------------------------------------------------------------------


class Grouped(nn.Module):
    """A linear model whose weights come in groups of neighbours, each a parameter of its own."""

    def __init__(self, features: int, groups: int):
        super().__init__()
        sizes = [len(part) for part in torch.arange(features).tensor_split(max(1, groups))]
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat(list(self.parts))).unsqueeze(1)


def linear_data(plan: Plan, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test rows; all weights from one normal, noise of size 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = plan.scale * torch.randn(plan.features, generator=generator, dtype=torch.float64)
    x = torch.randn(plan.rows + _TEST_ROWS, plan.features, generator=generator, dtype=torch.float64)
    y = (x @ weights + torch.randn(len(x), generator=generator, dtype=torch.float64)).unsqueeze(1)
    return x[: plan.rows], y[: plan.rows], x[plan.rows :], y[plan.rows :]


def network_data(plan: Plan, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A smooth function of three of eight inputs, noise 0.3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(plan.network_rows + _TEST_ROWS, 8, generator=generator)
    mean = torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    y = (mean + 0.3 * torch.randn(len(x), generator=generator)).unsqueeze(1)
    return x[: plan.network_rows], y[: plan.network_rows], x[plan.network_rows :], y[plan.network_rows :]


def fit_linear(plan: Plan, groups: int, x: Tensor, y: Tensor) -> Posterior:
    """The exact posterior at the scales with the highest evidence (0 groups: at the true scale)."""
    import knowable as kn

    fixed = kn.Normal(plan.scale)
    prior = kn.EmpiricalBayes(fixed, per="parameter") if groups else fixed
    net = Grouped(plan.features, groups).double()
    return kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(noise=1.0), prior), (x, y))


def network_prior(which: str) -> Prior:
    """The prior of a row of the network's table."""
    import knowable as kn

    if which == "fixed":
        return kn.Normal(1.0)
    per, _, hyperprior = which.partition(", ")
    return kn.EmpiricalBayes(kn.Normal(1.0), kn.Normal(0.5) if hyperprior else None, per=per)


def fit_network(plan: Plan, which: str, x: Tensor, y: Tensor, seed: int) -> Posterior:
    """Mean-field inference with the noise known."""
    import knowable as kn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, plan.hidden), nn.Tanh(), nn.Linear(plan.hidden, 1))
    model = kn.Model(net, kn.Gaussian(noise=0.3), network_prior(which))
    return kn.MeanFieldVI(epochs=plan.epochs).fit(model, (x, y), seed=seed, progress=False)


# --- the study -------------------------------------------------------------------------------------------------------


def evaluate(case: str, which: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Fit, and score on rows the fit has not seen."""
    import knowable as kn

    x, y, test_x, test_y = (linear_data if case == "linear" else network_data)(plan, seed)
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of steps is fixed, whether the loss has settled or not
        posterior = fit_linear(plan, int(which), x, y) if case == "linear" else fit_network(plan, which, x, y, seed)
    seconds = time.perf_counter() - begun
    scores = posterior.predict(test_x, samples=256)
    start = posterior.model.params()
    return {
        "scales": sum(start[name].numel() for name in posterior.model.hyper_names),
        "log_evidence": float(posterior.log_evidence or math.nan),
        "held_out": -kn.metrics.nll(scores, test_y),
        "seconds": seconds,
        "error": None,
    }


def rows_of(case: str, plan: Plan) -> Sequence[str]:
    """The rows of a case's table."""
    return [str(groups) for groups in plan.groups] if case == "linear" else PRIORS


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All priors on all seeds; ``only`` is a glob of cases. Finished rows are not run again."""
    plan = _QUICK if quick else PLAN
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for case in (case for case in CASES if fnmatch(case, only)):
        found[case] = {which: [] for which in rows_of(case, plan)}
        for seed in range(plan.seeds if case == "linear" else plan.network_seeds):
            for which, row in found[case].items():
                row.append(_row(case, which, plan, seed, rows))
    return describe("empirical_bayes", quick=quick, packages=(), plan=asdict(plan), cases=found)


def _row(case: str, which: str, plan: Plan, seed: int, rows: Rows) -> dict[str, Any]:
    key = f"{case}, {which}, seed {seed}, {plan}"
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row = evaluate(case, which, plan, seed)
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{case}, {which}, seed {seed}: {row['error'] or row}")
    return rows.add(key, row)


# --- tables ----------------------------------------------------------------------------------------------------------


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each case."""
    plan = run["plan"]
    titles = {
        "linear": f"A linear model of {plan['features']} weights from one normal, {plan['rows']} rows",
        "network": f"A network of {plan['hidden']} hidden units, {plan['network_rows']} rows, mean field",
    }
    parts = [
        table(titles[case], _HEADER, [_cells(case, which, each, rows) for which, each in rows.items()],
              f"{_NOTES[case]} {_READ}")
        for case, rows in run["cases"].items()
    ]  # fmt: skip
    return page(run, *parts)


def _cells(case: str, which: str, row: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]) -> list[str]:
    good = [each for each in row if each["error"] is None]
    if not good:
        return ["", which, f"failed: {row[0]['error']}"]
    first = next(iter(rows.values()))
    both = [(one, other) for one, other in zip(row, first, strict=True) if not (one["error"] or other["error"])]
    differences = [one["held_out"] - other["held_out"] for one, other in both]
    return [
        str(good[0]["scales"]),
        _WORDS.get(which, f"{which} groups" if case == "linear" else f"for each {which}"),
        _mean([each["log_evidence"] for each in good], 1),
        _mean([each["held_out"] for each in good], 3),
        _mean(differences, 3) if row is not first else "",
        f"{sum(each['seconds'] for each in good) / len(good):.2g}",
    ]


def _mean(values: Sequence[float], digits: int) -> str:
    mean, error = mean_and_error(list(values))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
