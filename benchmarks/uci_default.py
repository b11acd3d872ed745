"""Test log likelihood on nine UCI sets for one method that was fixed beforehand: ``BayesianRegressor()`` as it comes.

Nothing is chosen by data set: the estimator sees the training rows of a standard split and has its default budget of
work (not of time: a busy machine changes nothing); its log density of the test rows is the result. Beside it stand
published rows of probabilistic backpropagation, dropout, deep ensembles and Gaussian processes. ``--case`` is a glob of
data sets; a run that is stopped goes on with the next split.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import SPLITS, Split, load, mean_and_error, synthetic

FEWER = {"protein-tertiary-structure": 5}
"""Sets with fewer than twenty standard splits."""
_NAMES = (
    "bostonHousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "power-plant",
    "protein-tertiary-structure", "wine-quality-red", "yacht",
)  # fmt: skip
_SOURCES = {
    "PBP": "Hernández-Lobato and Adams (2015), table 1",
    "MC dropout": "Gal and Ghahramani (2016), one layer, as repeated in 2018 with a grid search on validation rows",
    "MC dropout, 2 layers": "the same repository, two layers",
    "deep ensemble": "Lakshminarayanan et al. (2017), table 1; deviations over the splits divided by √20",
    "SVGP": "bayesian_benchmarks (Salimbeni), ten random splits; deviations divided by √10",
    "deep GP": "the same, two layers",
}
_ROWS: dict[str, tuple[tuple[float, float], ...]] = {  # in the order of the names: mean, standard error (0: not known)
    "PBP": ((-2.574, 0.089), (-3.161, 0.019), (-2.042, 0.019), (0.896, 0.006), (3.731, 0.006), (-2.837, 0.009),
            (-2.973, 0.003), (-0.968, 0.014), (-1.634, 0.016)),
    "MC dropout": ((-2.40, 0.042), (-2.94, 0.025), (-1.21, 0.005), (1.14, 0.007), (4.45, 0.002), (-2.81, 0.009),
                   (-2.87, 0.001), (-0.93, 0.013), (-1.25, 0.015)),
    "MC dropout, 2 layers": ((-2.34, 0.02), (-2.82, 0.02), (-1.48, 0.0), (1.10, 0.0), (4.32, 0.0), (-2.67, 0.01),
                             (-2.70, 0.0), (-0.90, 0.01), (-1.37, 0.02)),
    "deep ensemble": ((-2.41, 0.056), (-3.06, 0.040), (-1.38, 0.049), (1.20, 0.004), (5.63, 0.011), (-2.79, 0.009),
                      (-2.83, 0.004), (-0.94, 0.027), (-1.18, 0.047)),
    "SVGP": ((-2.398, 0.020), (-3.168, 0.017), (-1.084, 0.013), (1.128, 0.0), (9.353, 0.005), (-2.799, 0.011),
             (-2.901, 0.003), (-0.949, 0.021), (-0.774, 0.045)),
    "deep GP": ((-2.408, 0.0), (-3.175, 0.0), (-0.721, 0.0), (1.291, 0.0), (6.746, 0.0), (-2.790, 0.0),
                (-2.846, 0.0), (-0.954, 0.0), (-0.458, 0.0)),
}  # fmt: skip


def published(name: str) -> list[dict[str, Any]]:
    """The published rows of a data set, the best first."""
    place = _NAMES.index(name)
    rows = [{"method": who, "log_likelihood": row[place][0], "error": row[place][1]} for who, row in _ROWS.items()]
    return sorted(rows, key=lambda row: -row["log_likelihood"])


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All splits of all data sets, the first split of each before the second of any; finished rows are kept."""
    names = [name for name in _NAMES if fnmatch(name, only)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1 if quick else SPLITS):
        for name in names:
            if number < FEWER.get(name, SPLITS):
                found[name].append(_row(name, number, quick, rows))
    return describe(
        "uci_default",
        quick=quick,
        packages=("scikit-learn",),
        data={name: summarise(each) for name, each in found.items()},
        published={name: published(name) for name in names},
    )


def fitted(split: Split, seed: int, quick: bool) -> np.ndarray:
    """Log density of the rows held out."""
    import knowable as kn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        model = kn.BayesianRegressor(**({"budget": "quick"} if quick else {}), random_state=seed)
        model.fit(split.x.numpy(), split.y.numpy())
        return model.predict_dist(split.test_x.numpy()).log_prob(split.test_y.double()).numpy()


def _row(name: str, number: int, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{name}, split {number}{', quick' * quick}"
    known = rows.get(key)
    if known is not None:
        return known
    begun = time.process_time()
    try:
        log_density = fitted(synthetic() if quick else load(name, number), number, quick)
        row: dict[str, Any] = {"error": None, "log_likelihood": float(np.mean(log_density))}
    except Exception as error:
        row = {"error": one_line(error)}
    row["seconds"] = time.process_time() - begun
    say(f"{key}: {row.get('log_likelihood', row['error'])}, {row['seconds']:.0f} s")
    return rows.add(key, row)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error over the splits that worked."""
    good = [row["log_likelihood"] for row in rows if row["error"] is None]
    errors = [row["error"] for row in rows if row["error"] is not None]
    seconds = float(np.median([row["seconds"] for row in rows]))
    found = {"splits": len(good), "error": errors[0] if errors else None, "seconds": seconds}
    return found | ({"log_likelihood": mean_and_error(good)} if good else {})


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table, the best published row in its own column."""
    header = ("data", "splits", "log likelihood", "best published", *_ROWS, "CPU seconds")
    title = "BayesianRegressor as it comes"
    lines = [_cells(name, row, run["published"][name]) for name, row in run["data"].items()]
    sources = "\n".join(f"- {who}: {text}." for who, text in _SOURCES.items())
    note = "Mean ± standard error over the splits of the mean log density of the test rows, in the units of the target."
    return page(run, table(title, header, lines, note), f"## Sources\n\n{sources}\n")


def _cells(name: str, row: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    if not row["splits"]:
        return [name, "0", f"failed: {row['error']}"]
    mean, error = row["log_likelihood"]
    by = {each["method"]: each["log_likelihood"] for each in rows}
    best = f"{rows[0]['log_likelihood']:.3f} ({rows[0]['method']})"
    shown = [f"{by[who]:.3f}" for who in _ROWS]
    return [name, str(row["splits"]), f"{mean:.3f} ± {error:.3f}", best, *shown, f"{row['seconds']:.0f}"]
