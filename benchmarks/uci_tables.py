"""Held-out negative log likelihood on UCI regression: the estimator with ``method="auto"`` beside its neighbours.

The neighbours are scikit-learn's Gaussian process (a radial kernel with a length for each input, and noise) and
Bayesian ridge, and NGBoost, each as its documentation has it. All get the training rows of the standard splits of
Hernández-Lobato and Adams (2015); the score is that of the target in its own units.

The data is read as in the study of chains.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_chains import Split, load, mean_and_error, synthetic

DATA = ("bostonHousing", "concrete", "energy", "wine-quality-red", "yacht")
SPLITS = 5
BUDGET = 60.0
_NOTE = (
    "Mean ± standard error over the splits of the negative log density of a held-out row, in the units of the target: "
    "lower is better. Seconds: the median time of a fit and its predictions."
)
LogDensity = Callable[[Split, int, bool], np.ndarray]


def auto(split: Split, seed: int, quick: bool) -> np.ndarray:
    """Log density of the rows held out, under the estimator of this library."""
    import knowable as kn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)  # fits that the budget ends
        model = kn.BayesianRegressor("auto", time_limit=5.0 if quick else BUDGET, random_state=seed)
        model.fit(split.x.numpy(), split.y.numpy())
        return model.predict_dist(split.test_x.numpy()).log_prob(split.test_y.double()).numpy()


def gaussian_process(split: Split, seed: int, quick: bool) -> np.ndarray:
    """The same, under scikit-learn's Gaussian process."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel() * RBF(np.ones(split.x.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=0 if quick else 2, random_state=seed
    )
    return _normal(model, split)


def bayesian_ridge(split: Split, seed: int, quick: bool) -> np.ndarray:
    """The same, under scikit-learn's Bayesian ridge regression."""
    from sklearn.linear_model import BayesianRidge

    return _normal(BayesianRidge(), split)


def ngboost(split: Split, seed: int, quick: bool) -> np.ndarray:
    """The same, under NGBoost."""
    from ngboost import NGBRegressor

    model = NGBRegressor(n_estimators=10 if quick else 500, random_state=seed, verbose=False)
    model.fit(split.x.numpy(), split.y.numpy())
    return model.pred_dist(split.test_x.numpy()).logpdf(split.test_y.numpy())


CONTENDERS: dict[str, LogDensity] = {
    "knowable, auto": auto,
    "scikit-learn, Gaussian process": gaussian_process,
    "scikit-learn, Bayesian ridge": bayesian_ridge,
    "NGBoost": ngboost,
}


def _normal(model: Any, split: Split) -> np.ndarray:
    """Log density under a model that predicts normals, on inputs that are standardised."""
    centre, scale = split.x.mean(0), split.x.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    x, test_x = (((each - centre) / scale).double().numpy() for each in (split.x, split.test_x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optimisers that stop at a bound
        mean, std = model.fit(x, split.y.double().numpy()).predict(test_x, return_std=True)
    return -0.5 * ((split.test_y.numpy() - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All splits of all data sets for all contenders; ``only`` is a glob of data sets. Finished rows are kept."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in DATA:
        if fnmatch(name, only):
            numbers = range(1 if quick else SPLITS)
            found[name] = {who: [_row(name, number, who, quick, rows) for number in numbers] for who in CONTENDERS}
    results = {name: {who: summarise(each) for who, each in every.items()} for name, every in found.items()}
    packages = ("scikit-learn", "ngboost")
    return describe("uci_tables", quick=quick, packages=packages, budget=BUDGET, data=results, splits=found)


def _row(name: str, number: int, who: str, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{name}, split {number}, {who}, {BUDGET:g} s" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    begun = time.perf_counter()
    try:
        scores = CONTENDERS[who](synthetic() if quick else load(name, number), number, quick)
        row: dict[str, Any] = {"error": None, "nll": -float(np.mean(scores)), "seconds": time.perf_counter() - begun}
    except Exception as error:
        row = {"error": one_line(error)}
    said = row["error"] or f"{row['nll']:.3f} nats, {row['seconds']:.0f} s"
    say(f"{name}, split {number}, {who}: {said}")
    return rows.add(key, row)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error over the splits that worked, and why others did not."""
    good = [row for row in rows if row["error"] is None]
    errors = sorted({row["error"] for row in rows if row["error"] is not None})
    if not good:
        return {"splits": 0, "error": errors[0]}
    return {
        "splits": len(good),
        "error": errors[0] if errors else None,
        "nll": mean_and_error([row["nll"] for row in good]),
        "seconds": float(np.median([row["seconds"] for row in good])),
    }


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each data set, a column for each contender."""
    header = ("data", *CONTENDERS, "seconds of auto")
    lines = [[name, *(_cell(every[who]) for who in CONTENDERS), _seconds(every)] for name, every in run["data"].items()]
    return page(run, table(f"Negative log likelihood, budget {run['budget']:g} s", header, lines, _NOTE))


def _cell(row: Mapping[str, Any]) -> str:
    if not row["splits"]:
        return f"failed: {row['error']}"
    mean, error = row["nll"]
    return f"{mean:.3f} ± {error:.3f}"


def _seconds(every: Mapping[str, Mapping[str, Any]]) -> str:
    first = every["knowable, auto"]
    return f"{first['seconds']:.0f}" if first["splits"] else ""
