"""Effective samples per second: our samplers and those of NumPyro, BlackJAX and Pyro on the same posteriors.

Every run is a process of its own (see effective_samples_peers), timed from the first call to the last draw. What it
leaves, the function values of all draws, is judged here by the same code for everybody: the least bulk effective sample
size and the largest R-hat over the function values, both by ArviZ. A run whose R-hat is above 1.05 does not count.

Chain counts were chosen once, for every sampler among two, on a seed of its own for that: what stands in the list is
the better one. (A sampler that is given several tries them on that seed, and runs on the seeds of the table with the
best.) Runs are long enough for warm-up and compiling to weigh no more than for the others: most take about a minute,
and what cannot mix in a minute may take longer.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.effective_samples_peers import Settings
from benchmarks.study import Rows, describe, own_process, page, say, table
from benchmarks.targets import TARGETS

SEEDS = (0, 1, 2)
TRIAL = 100  # the seed on which chain counts are chosen; none of the table's
MOST_RHAT = 1.05
_TIMEOUT = 240.0
_PACKAGES = ("jax", "numpyro", "blackjax", "pyro-ppl", "arviz-stats")
_HEADER = (
    "sampler", "chains x (warm-up + draws)", "effective samples/s", "least–most", "seconds", "least ESS", "R-hat",
    "gradients/s", "ESS per 1,000 gradients", "disagreement",
)  # fmt: skip
_NOTE = (
    "Median over the seeds; seconds include compiling, starting and warm-up. Gradients count every chain's, warm-up "
    f"included. Runs with R-hat above {MOST_RHAT} give no effective samples. Disagreement: largest difference of a "
    "function's mean from that of all other exact samplers together, in standard errors (30 to 40 function values: "
    "about 3 is chance). * has no Metropolis step and therefore a bias that its effective samples do not show."
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A sampler with the lengths of run it may choose from.

    Attributes:
        name: In the table.
        sampler: In :data:`~benchmarks.effective_samples_peers.SAMPLERS`.
        settings: By target, one for each chain count to try.
        options: What else the sampler takes, beside its settings.
        exact: Whether a Metropolis step makes it exact in the limit.
    """

    name: str
    sampler: str
    settings: Mapping[str, Sequence[Settings]]
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


def _ours(method: str, settings: Mapping[str, Sequence[Settings]], *, exact: bool = True, **options: Any) -> Contender:
    name = " ".join([f"knowable {method}", *(key for key, value in options.items() if value is True)])
    options = {"method": method, "mode": "compiled", "start": "prior", **options}
    return Contender(name, "knowable", settings, options, exact)


CONTENDERS = (  # tried besides: 32, 8, 32 and 32 chains on diabetes, 32, 8, 64 and 32 on the toy for ours
    _ours("HMC", {"diabetes": [Settings(16, 300, 1500)], "toy": [Settings(64, 300, 500)]}),
    _ours("NUTS", {"diabetes": [Settings(16, 150, 100)], "toy": [Settings(16, 100, 60)]}),
    _ours("MCLMC", {"diabetes": [Settings(16, 300, 4000)], "toy": [Settings(128, 300, 1000)]}, exact=False,
          adjusted=False),
    _ours("MCLMC", {"diabetes": [Settings(16, 300, 600)], "toy": [Settings(64, 300, 300)]}, adjusted=True),
    # 16 chains each run into the limit of time, as do 4 chains of Pyro; MCLMC is slower with 4 and 16
    Contender("NumPyro NUTS", "numpyro_nuts", {"diabetes": [Settings(4, 300, 300)], "toy": [Settings(4, 300, 500)]}),
    Contender("BlackJAX NUTS", "blackjax_nuts", {"diabetes": [Settings(4, 300, 300)], "toy": [Settings(4, 300, 500)]}),
    Contender("BlackJAX MCLMC", "blackjax_mclmc",
              {"diabetes": [Settings(16, 0, 1000, 10)], "toy": [Settings(64, 0, 1000, 20)]}, exact=False),
    Contender("Pyro NUTS", "pyro_nuts", {"diabetes": [Settings(2, 200, 250)], "toy": [Settings(2, 150, 200)]}),
)  # fmt: skip
_QUICK = Settings(2, 20, 20)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All contenders on all targets and seeds; ``only`` is a glob of targets."""
    found: dict[str, dict[str, list[Row]]] = {}
    for target in TARGETS:
        if fnmatch(target, only):
            found[target] = {each.name: _runs_of(each, target, quick, rows) for each in CONTENDERS}
    results = {target: summarise(each) for target, each in found.items()}
    return describe("effective_samples", quick=quick, packages=_PACKAGES, targets=results, runs=found)


def _runs_of(contender: Contender, target: str, quick: bool, rows: Rows) -> list[Row]:
    """The table's seeds, with the chain count that is best on the trial's; no more of them where time has run out."""
    if quick:
        return [_row(contender, target, _QUICK, SEEDS[0], quick, rows)]
    settings = contender.settings[target]
    seed = TRIAL if len(settings) > 1 else SEEDS[0]
    trials = [_row(contender, target, each, seed, quick, rows) for each in settings]
    if all(row["error"] for row in trials):
        return trials
    best, _ = max(zip(settings, trials, strict=True), key=lambda pair: _merit(pair[1]))
    return [_row(contender, target, best, seed, quick, rows) for seed in SEEDS]


def _merit(row: Row) -> tuple[bool, float]:
    return (row["error"] is None, row["ess_per_second"] if row["error"] is None else 0.0)


def _row(contender: Contender, target: str, settings: Settings, seed: int, quick: bool, rows: Rows) -> Row:
    if quick and "mode" in contender.options:  # without compiling
        contender = replace(contender, options={**contender.options, "mode": "traced"})
    key = (
        f"{target}, {contender.name}, {settings.label}, seed {seed}, {json.dumps(contender.options)}"
        + ", quick" * quick
    )
    known = rows.get(key)
    if known is not None:
        return known
    row = {"settings": asdict(settings), "label": settings.label, "seed": seed, "exact": contender.exact}
    row |= measure(contender, target, settings, seed, quick=quick)
    said = row["error"] or f"{row['ess_per_second']:.1f} effective samples/s, R-hat {row['rhat']:.3f}"
    say(f"{target}: {contender.name} {settings.label}, seed {seed}: {said}")
    return rows.add(key, row)


def measure(contender: Contender, target: str, settings: Settings, seed: int, *, quick: bool = False) -> Row:
    """One run in a process of its own, judged."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.npy"
        arguments = [
            contender.sampler,
            target,
            str(seed),
            json.dumps(asdict(settings)),
            json.dumps(dict(contender.options)),
        ]
        said = own_process(
            "benchmarks.effective_samples_peers", [*arguments, str(file), *["--quick"] * quick], timeout=_TIMEOUT
        )
        if "error" in said:
            return said
        return judge(np.load(file), said["seconds"], said["gradients"])


def judge(functions: np.ndarray, seconds: float, gradients: int) -> Row:
    """Effective samples of function values ``(chains, draws, M)``, and what they cost."""
    from arviz_stats.base import array_stats

    values = functions.astype(np.float64)
    if not np.isfinite(values).all():
        return {"error": "a draw is not finite"}
    ess = array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk")
    rhat = float(np.max(array_stats.rhat(values, chain_axis=0, draw_axis=1)))
    least = float(np.min(ess))
    mixed = rhat <= MOST_RHAT
    return {
        "error": None,
        "seconds": seconds,
        "gradients": gradients,
        "rhat": rhat,
        "ess": least,
        "ess_per_second": least / seconds if mixed else 0.0,
        "gradients_per_second": gradients / seconds,
        "ess_per_thousand_gradients": 1000 * least / gradients if mixed else 0.0,
        "mean": np.round(values.mean((0, 1)), 6).tolist(),
        "error_of_mean": np.round(values.std((0, 1)) / np.sqrt(ess), 6).tolist(),
    }


def summarise(runs: Mapping[str, list[Row]]) -> dict[str, Row]:
    """Every contender over the seeds, and how far it is from the others."""
    everything = [row for each in runs.values() for row in each]
    exact = [row for row in everything if row["error"] is None and row["exact"] and row["ess_per_second"]]
    return {name: _summary(each, exact) for name, each in runs.items()}


def _summary(rows: list[Row], exact: list[Row]) -> Row:
    good = [row for row in rows if row["error"] is None]
    common = {"label": rows[0]["label"], "exact": rows[0]["exact"], "seeds": len(rows)}
    if not good:
        return {**common, "error": rows[0]["error"]}

    def median(name: str) -> float:
        return statistics.median(row[name] for row in good)

    names = ("seconds", "rhat", "ess", "ess_per_second", "gradients_per_second", "ess_per_thousand_gradients")
    rates = [row["ess_per_second"] for row in good]
    return {
        **common,
        "error": None if len(good) == len(rows) else f"{len(rows) - len(good)} of {len(rows)} runs failed",
        **{name: median(name) for name in names},
        "range": [min(rates), max(rates)],
        "disagreement": disagreement(good, [row for row in exact if row not in good]),
    }


def disagreement(rows: list[Row], others: list[Row]) -> float | None:
    """Largest difference of a function's mean between two groups of runs, in standard errors; None without others."""
    if not others:
        return None
    mean, error = _pooled(rows)
    other_mean, other_error = _pooled(others)
    return float(np.max(np.abs(mean - other_mean) / np.sqrt(error**2 + other_error**2)))


def _pooled(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Means weighted by their precision, and their standard errors."""
    means, errors = (np.array([row[name] for row in rows]) for name in ("mean", "error_of_mean"))
    precision = 1 / np.maximum(errors, 1e-9) ** 2
    return (precision * means).sum(0) / precision.sum(0), precision.sum(0) ** -0.5


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each target, and what the best of ours is ahead by."""
    return page(run, *(_table(target, each) for target, each in run["targets"].items()))


def _table(target: str, summaries: Mapping[str, Row]) -> str:
    rows = [_cells(name, each) for name, each in summaries.items()]
    return table(TARGETS[target]().title, _HEADER, rows, f"{_NOTE}\n\n{verdict(summaries)}")


def _cells(name: str, row: Row) -> list[str]:
    name += "" if row["exact"] else " *"
    if "seconds" not in row:
        return [name, row["label"], f"failed: {row['error']}"]
    rate = _digits(row["ess_per_second"]) if row["ess_per_second"] else f"none (R-hat {row['rhat']:.2f})"
    far = row["disagreement"]
    return [
        name, row["label"], rate + (f" ({row['error']})" if row["error"] else ""),
        "–".join(map(_digits, row["range"])), f"{row['seconds']:.1f}", f"{row['ess']:.0f}",
        f"{row['rhat']:.3f}", f"{row['gradients_per_second']:,.0f}", f"{row['ess_per_thousand_gradients']:.3g}",
        "" if far is None or math.isnan(far) else f"{far:.1f}",
    ]  # fmt: skip


def _digits(value: float) -> str:
    """Three significant digits, without exponents."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def verdict(summaries: Mapping[str, Row]) -> str:
    """The best of ours over the best JAX peer and over Pyro, in effective samples per second; the exact ones apart."""
    exact = {name: row for name, row in summaries.items() if row["exact"]}
    found = _ahead("Best of ours", summaries)
    return found if len(exact) == len(summaries) else f"{found} {_ahead('Best of ours that is exact', exact)}"


def _ahead(title: str, summaries: Mapping[str, Row]) -> str:
    rates = {name: row.get("ess_per_second", 0.0) for name, row in summaries.items()}

    def best(*beginnings: str) -> tuple[str, float]:
        belong = [(name, rate) for name, rate in rates.items() if name.startswith(beginnings)]
        return max(belong, key=lambda pair: pair[1], default=("", 0.0))

    ours, our_rate = best("knowable")
    if not our_rate:
        return f"{title}: none has mixed."
    parts = [
        f"{our_rate / rate:.2f} times {name}" for name, rate in (best("NumPyro", "BlackJAX"), best("Pyro")) if rate
    ]
    return f"{title}: {ours}" + (f", {' and '.join(parts)}." if parts else "; no peer has mixed.")
