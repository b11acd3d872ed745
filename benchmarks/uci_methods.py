"""Held-out log likelihood and RMSE of the point estimate, Laplace, dropout, ensembles and SWAG on UCI regression.

Five data sets, twenty standard splits, one hidden layer of 50 units, everything standardised on the training rows and
scored in the units of the target. What has to be chosen is chosen on every split anew, without its test rows, by
five-fold cross-validation: each setting of a small grid is fitted to four fifths of the training rows, five times, and
the one with the highest log likelihood of the rows left out is fitted to all of them. SWAG begins at the point estimate
and takes over its choice; dropout, whose fits take longest, is judged by one of the five parts. Laplace
has its noise and prior scales from the evidence and needs no validation rows.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import SPLITS, Split, load, mean_and_error, network, scaler_of, synthetic, validation_parts
from benchmarks.uci_published import PUBLISHED, SOURCES

if TYPE_CHECKING:
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior

DATA = ("bostonHousing", "concrete", "energy", "wine-quality-red", "yacht")
METHODS = ("MAP", "Laplace", "MCDropout", "DeepEnsemble", "SWAG")
_HEADER = (
    "data", "method", "splits", "log likelihood", "published", "reached", "RMSE", "published", "reached", "source",
    "seconds a fit",
)  # fmt: skip
_NOTE = (
    "Mean ± standard error over the splits, in the units of the target. Reached: at least as good as the published "
    "mean, within one standard error of ours. Seconds: of the clock, median over the splits, without the "
    "choice of settings. Splits: so many of the twenty, from the first on; published rows are over all twenty."
)
_CHOSEN_NOTE = (
    "How often each setting was chosen, by cross-validation on the training rows of the split. Noise: one number, or "
    "an output of the network. Prior: standard deviation of the weights. Rate: of dropout. Steps are of all rows at "
    "once. The point estimate chooses for SWAG too. Seconds: median over the splits of all fits that a choice takes."
)


@dataclass(frozen=True)
class Setting:
    """What is chosen on validation rows.

    Attributes:
        noise: ``"constant"``: one number, learned. ``"input"``: a second output of the network.
        prior: Standard deviation of the normal prior on weights.
        epochs: Steps of training, each of all rows.
        rate: Of dropout.
    """

    noise: str = "constant"
    prior: float = 1.0
    epochs: int = 1500
    rate: float | None = None

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.noise} noise, prior {self.prior:g}, {self.epochs} steps{rate}"


@dataclass(frozen=True)
class Recipe:
    """Everything that is the same for all data sets.

    Attributes:
        point: Settings to choose from for the point estimate, ensemble and SWAG.
        dropout: Settings to choose from for dropout.
        laplace: The setting of Laplace, where the evidence begins.
        hidden: Units of the hidden layers.
        activation: ``"tanh"`` or ``"relu"``.
        learning_rate: Of Adam.
        structure: Of Laplace.
        members: Of the ensemble.
        snapshots: Of SWAG.
        samples: Draws in a prediction, where they are drawn.
        folds: Of the training rows, for the choice.
        splits: How many of the twenty; rows that are kept do not depend on it.
    """

    point: tuple[Setting, ...]
    dropout: tuple[Setting, ...]
    laplace: Setting = Setting()
    hidden: tuple[int, ...] = (50,)
    activation: str = "relu"
    learning_rate: float = 0.01
    structure: str = "kron"
    members: int = 5
    snapshots: int = 100
    samples: int = 300
    folds: int = 5
    splits: int = field(default=SPLITS, repr=False)

    def of(self, method: str) -> Recipe:
        """The recipe without what does not concern a method: changing that does not make its rows old."""
        if method in ("MCDropout", "Laplace"):
            return replace(self, point=(), dropout=self.dropout if method == "MCDropout" else ())
        return replace(self, dropout=())

    def turns(self, method: str) -> int:
        """How many of the folds are left out in turn: all, but for dropout, whose fits take longest."""
        return 1 if method == "MCDropout" else self.folds

    def grid(self, method: str) -> tuple[Setting, ...]:
        """What a method chooses from; Laplace has no choice."""
        if method == "Laplace":
            return (self.laplace,)
        return self.dropout if method == "MCDropout" else self.point


_POINT = (
    Setting("constant", 0.3, 200),
    Setting("constant", 0.2, 600),
    Setting("constant", 0.3, 600),
    Setting("input", 0.1, 200),
    Setting("input", 0.15, 100),
    Setting("input", 0.2, 300),
    Setting("input", 0.3, 200),
)
_DROPOUT = (
    Setting("constant", 0.3, 1500, rate=0.2),
    Setting("constant", 0.5, 1500, rate=0.05),
    Setting("constant", 1.0, 1500, rate=0.005),
    Setting("input", 0.3, 600, rate=0.3),
    Setting("input", 1.0, 1500, rate=0.05),
)
RECIPE = Recipe(_POINT, _DROPOUT)
_QUICK = Recipe(
    (Setting(epochs=20), Setting("input", epochs=20)), (Setting(epochs=20, rate=0.1), Setting(epochs=20, rate=0.2)),
    laplace=Setting(epochs=20), hidden=(4,), members=2, snapshots=3, samples=8, splits=1,
)  # fmt: skip


# --- fitting and scoring ---------------------------------------------------------------------------------------------


def model_of(method: str, inputs: int, setting: Setting, recipe: Recipe, *, seed: int) -> Model:
    """Network, likelihood and prior; for Laplace with a prior scale for each tensor that the evidence sets."""
    import knowable as kn

    outputs = 1 if setting.noise == "constant" else 2
    net = network(inputs, hidden=recipe.hidden, activation=recipe.activation, outputs=outputs, seed=seed)
    likelihood = kn.Gaussian() if setting.noise == "constant" else kn.HeteroscedasticGaussian()
    prior = kn.Normal(setting.prior)
    return kn.Model(net, likelihood, kn.EmpiricalBayes(prior, per="parameter") if method == "Laplace" else prior)


def fit(method: str, split: Split, setting: Setting, recipe: Recipe, *, seed: int) -> Posterior:
    """The posterior of the standardised data."""
    import knowable as kn

    scaler = scaler_of(split)
    model = model_of(method, split.x.shape[1], setting, recipe, seed=seed)
    rows = scaler.scale_x(split.x), scaler.scale_y(split.y).unsqueeze(-1)
    common = {"seed": seed, "progress": False}
    training = {"epochs": setting.epochs, "learning_rate": recipe.learning_rate, "batch_size": len(split.x)}
    if method == "Laplace":
        return kn.Laplace(structure=recipe.structure, **training).fit(model, rows, **common)
    if method == "MCDropout":
        return kn.MCDropout(setting.rate, **training).fit(model, rows, **common)
    if method == "DeepEnsemble":
        return kn.DeepEnsemble(recipe.members, **training).fit(model, rows, **common)
    mode = kn.MAP(**training).fit(model, rows, **common)
    if method == "MAP":
        return mode
    return kn.SWAG(start=mode, snapshots=recipe.snapshots).fit(model, rows, **common)  # ten batches in an epoch


def evaluate(method: str, split: Split, setting: Setting, recipe: Recipe, *, seed: int) -> dict[str, float]:
    """Fit and score on the rows to predict."""
    import knowable as kn

    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of steps is fixed, whether the loss has settled or not
        posterior = fit(method, split, setting, recipe, seed=seed)
    seconds = time.perf_counter() - begun
    scaler = scaler_of(split)
    predicted = scaler.restore(posterior.predict(scaler.scale_x(split.test_x), samples=recipe.samples))
    target = split.test_y.unsqueeze(-1)
    return {
        "log_likelihood": -kn.metrics.nll(predicted, target),
        "rmse": kn.metrics.rmse(predicted, target),
        "seconds": seconds,
    }


def choose(method: str, split: Split, recipe: Recipe, *, seed: int) -> dict[str, Any]:
    """The setting with the highest log likelihood in cross-validation; test rows are not looked at."""
    grid, begun = recipe.grid(method), time.perf_counter()
    parts = validation_parts(split, folds=recipe.folds, seed=seed)[: recipe.turns(method)]
    values = []
    for setting in grid:
        scores = [evaluate(method, part, setting, recipe, seed=seed)["log_likelihood"] for part in parts]
        values.append(statistics.fmean(scores))
    best = max(range(len(grid)), key=lambda index: values[index])
    return {"chosen": best, "log_likelihoods": values, "seconds": time.perf_counter() - begun, "error": None}


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods on all splits of all data sets; ``only`` is a glob of data sets. Finished rows are not run again."""
    recipe = _QUICK if quick else RECIPE
    names = [name for name in DATA if fnmatch(name, only)]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {method: [] for method in METHODS} for name in names}
    for number in range(recipe.splits):
        for name in names:
            for method in METHODS:
                found[name][method].append(_row(name, number, method, recipe, quick, rows))
    results = {name: {method: summarise(each) for method, each in found[name].items()} for name in names}
    return describe("uci_methods", quick=quick, packages=(), recipe=asdict(recipe), data=results, splits=found)


def _row(name: str, number: int, method: str, recipe: Recipe, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{name}, split {number}, {method}, {recipe.of(method)}" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    row: dict[str, Any] = {"split": number, "error": None}
    try:
        split = synthetic() if quick else load(name, number)
        choice = _choice(name, number, method, split, recipe, quick, rows)
        setting = recipe.grid(method)[choice["chosen"]]
        row |= {"setting": str(setting), "choosing": choice["seconds"]}
        row |= evaluate(method, split, setting, recipe, seed=number)
    except Exception as error:
        row = {"split": number, "error": one_line(error)}
    say(f"{name}, split {number}, {method}: {row['error'] or _words(row)}")
    return rows.add(key, row)


def _words(row: Mapping[str, Any]) -> str:
    scores = f"log likelihood {row['log_likelihood']:.3f}, RMSE {row['rmse']:.3f}"
    return f"{scores}, {row['seconds']:.1f} s, {row['setting']}"


def _choice(
    name: str, number: int, method: str, split: Split, recipe: Recipe, quick: bool, rows: Rows
) -> dict[str, Any]:
    """The choice for a method on a split; that for SWAG is the point estimate's."""
    if len(recipe.grid(method)) == 1:
        return {"chosen": 0, "seconds": 0.0}
    judge = "MAP" if method == "SWAG" else method
    key = f"{name}, split {number}, choice of {judge}, {recipe.of(judge)}" + ", quick" * quick
    return rows.get(key) or rows.add(key, choose(judge, split, recipe, seed=number))


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and standard errors over the splits that worked, and why others did not."""
    good = [row for row in rows if row["error"] is None]
    errors = sorted({row["error"] for row in rows if row["error"] is not None})
    if not good:
        return {"splits": 0, "error": errors[0]}
    ends = {name: mean_and_error([row[name] for row in good]) for name in ("log_likelihood", "rmse")}
    medians = {name: statistics.median(row[name] for row in good) for name in ("seconds", "choosing")}
    chosen = dict(Counter(row["setting"] for row in good).most_common())
    return {"splits": len(good), "error": errors[0] if errors else None, **ends, **medians, "chosen": chosen}


# --- tables ----------------------------------------------------------------------------------------------------------


def reached(ours: Sequence[float], published: Sequence[float], *, higher: bool) -> bool:
    """Whether ours is at least as good as the published mean, within one standard error of ours."""
    (mean, error), goal = ours, published[0]
    error = error if error == error else 0.0  # a single split has none
    return mean + error >= goal if higher else mean - error <= goal


def to_markdown(run: Mapping[str, Any]) -> str:
    """A row for each data set and method, what was chosen, and the sources."""
    recipe, data = run["recipe"], run["data"]
    layers = "-".join(map(str, recipe["hidden"]))
    every = [(name, method, row) for name, methods in data.items() for method, row in methods.items()]
    results = table(
        f"One network of {layers} {recipe['activation']} units", _HEADER, [_cells(*e) for e in every], _NOTE
    )
    judged = [(n, m, row) for n, m, row in every if m in ("MAP", "MCDropout", "DeepEnsemble") and row["splits"]]
    chosen = table(
        "What was chosen", ("data", "method", "settings", "seconds a choice"), [_chosen(*e) for e in judged],
        _CHOSEN_NOTE,
    )  # fmt: skip
    sources = "\n".join(f"- {method}: {source.label}: {source.text}." for method, source in SOURCES.items())
    return page(run, results, chosen, f"## Sources of the published rows\n\n{sources}\n")


def _cells(name: str, method: str, row: Mapping[str, Any]) -> list[str]:
    if not row["splits"]:
        return [name, method, "0", f"failed: {row['error']}"]
    published = PUBLISHED[method][name]
    splits = f"{row['splits']}" + (f" (others: {row['error']})" if row["error"] else "")
    both = (("log_likelihood", published.log_likelihood, True), ("rmse", published.rmse, False))
    scores = []
    for which, goal, higher in both:
        mean, error = row[which]
        verdict = "yes" if reached(row[which], goal, higher=higher) else "no"
        scores += [f"{mean:.3f} ± {error:.3f}", f"{goal[0]:.2f} ± {goal[1]:.3f}", verdict]
    return [name, method, splits, *scores, SOURCES[method].label, f"{row['seconds']:.1f}"]


def _chosen(name: str, method: str, row: Mapping[str, Any]) -> list[str]:
    settings = "; ".join(f"{setting}: {count}" for setting, count in row["chosen"].items())
    return [name, method, settings, f"{row['choosing']:.1f}"]
