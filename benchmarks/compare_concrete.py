"""Eight methods compared on concrete: does it keep its budget, and survive a kill?

``kn.compare`` runs in a process of its own, with one limit of time for all of it. When a third of the fits is done the
process is killed (SIGKILL), and another one takes up what it left. The fits that were finished before the kill must
still be there, to the letter, and the time of both processes together must be within the budget.

The network has one hidden layer; inputs and the strength are standardised on the training rows of each fold by an
estimator that follows the conventions of scikit-learn, so that scores are in MPa. The data is read from the folder that
the environment variable ``KNOWABLE_DATA`` names: ``uci/concrete.npz`` with ``x`` and ``y``. Beside its tables the study
writes the comparison's own page, ``compare_concrete.html``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import nn

from benchmarks.study import Rows, child_environment, describe, last_line, page, say, table

METHODS = ("map", "laplace", "mean_field_vi", "mc_dropout", "deep_ensemble", "swag", "mclmc", "nuts")
_SPARE = 120.0  # seconds over the budget after which a process is taken for stuck
_HEADER = (
    "rank",
    "method",
    "NLL",
    "from the best",
    "CRPS",
    "RMSE",
    "coverage of 90%",
    "width of 90%",
    "fit, s",
    "folds",
)


@dataclass(frozen=True)
class Size:
    """How large the comparison is.

    Attributes:
        hidden: Units of the hidden layer.
        folds: Folds of the cross-validation.
        budget: Seconds for everything.
        epochs: Passes of every trained method, or None to let each stop by itself.
        rows: Rows of made-up data instead of concrete, or None.
    """

    hidden: int = 50
    folds: int = 5
    budget: float = 900.0
    epochs: int | None = None
    rows: int | None = None


FULL = Size()
_QUICK = Size(hidden=3, folds=3, budget=120.0, epochs=300, rows=60)


class ScaledNetwork(BaseEstimator):
    """A network with one hidden layer between standardised units and the user's.

    Args:
        method: A method or its name.
        hidden: Units of the hidden layer.
        samples: Draws of a prediction.
        random_state: Seed of the network's start and of the fit.
    """

    def __init__(self, method: Any = "map", hidden: int = 50, samples: int = 256, random_state: int = 0):
        self.method = method
        self.hidden = hidden
        self.samples = samples
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> ScaledNetwork:
        """Standardise and fit."""
        import knowable as kn
        from knowable.datasets.dataset import Scaler
        from knowable.registry import find_method

        x, targets = torch.from_numpy(X).float(), torch.from_numpy(y).float()
        spread = x.std(0, correction=0)
        self.scaler_ = Scaler(
            x.mean(0), torch.where(spread > 0, spread, 1.0), targets.mean().item(), targets.std(correction=0).item()
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            net = nn.Sequential(nn.Linear(x.shape[1], self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))
        method = find_method(self.method).cls() if isinstance(self.method, str) else self.method
        data = (self.scaler_.scale_x(x), self.scaler_.scale_y(targets).unsqueeze(-1))
        self.posterior_ = method.fit(kn.Model(net, kn.Gaussian()), data, seed=self.random_state, progress=False)
        return self

    def predict_dist(self, X: np.ndarray) -> Any:
        """The predictive distribution in the user's units."""
        x = self.scaler_.scale_x(torch.from_numpy(X).float())
        return self.scaler_.restore(self.posterior_.predict(x, samples=self.samples))


def load(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Concrete, or a noisy plane for quick runs."""
    if size.rows is not None:
        generator = np.random.default_rng(0)
        x = generator.standard_normal((size.rows, 3))
        return x, 30.0 + 10.0 * x.sum(1) + generator.standard_normal(size.rows)
    folder = os.environ.get("KNOWABLE_DATA")
    if not folder:
        raise FileNotFoundError("set KNOWABLE_DATA to the folder that holds uci/*.npz")
    with np.load(Path(folder) / "uci" / "concrete.npz") as file:
        return file["x"], file["y"]


def methods_of(size: Size) -> Any:
    """All eight by their names; for quick runs a few short ones."""
    if size.epochs is None:
        return list(METHODS)
    import knowable as kn

    short = {"epochs": size.epochs}
    return {
        "map": kn.MAP(**short),
        "mean_field_vi": kn.MeanFieldVI(**short),
        "deep_ensemble": kn.DeepEnsemble(members=2, **short),
    }


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Kill, resume, and say what came out. A study that is stopped goes on with the fits that it had finished."""
    size = _QUICK if quick else FULL
    key = json.dumps(asdict(size))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as spare:
        folder = Path(spare) if rows.path is None else rows.path.parent
        fits = folder / "compare_concrete.fits.jsonl"
        killed = rows.get(f"killed {key}") or rows.add(f"killed {key}", kill_one(size, fits, spare))
        say(f"killed: {killed}")
        found = rows.get(f"resumed {key}") or rows.add(f"resumed {key}", take_up(size, fits, killed, spare))
        say(f"resumed: {found.get('error') or found['text']}")
        if found.get("error") is None:
            fits.unlink(missing_ok=True)
    return describe("compare_concrete", quick=quick, packages=("scikit-learn",), size=asdict(size), killed=killed,
                    found=found)  # fmt: skip


def kill_one(size: Size, fits: Path, cache: str) -> dict[str, Any]:
    """Run a comparison and kill it when a third of its fits is done; what it had finished by then."""
    count = len(methods_of(size)) * size.folds
    begun = time.monotonic()
    process = _process(size, fits, cache)
    while len(finished(fits)) < max(1, count // 3):
        if process.poll() is not None or time.monotonic() - begun > size.budget + _SPARE:
            process.kill()
            output, errors = process.communicate()
            return {"error": "ended before it could be killed", **last_line(output, process.returncode, errors)}
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return {"error": None, "fits": len(finished(fits)), "of": count, "seconds": time.monotonic() - begun}


def take_up(size: Size, fits: Path, killed: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """Go on from what a killed run left, to the end."""
    if killed["error"] is not None:
        return {"error": "nothing to take up"}
    before = finished(fits)
    process = _process(size, fits, cache)
    try:
        output, errors = process.communicate(timeout=size.budget + _SPARE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"took more than {size.budget + _SPARE:.0f} s"}
    said = last_line(output, process.returncode, errors)
    if said.get("error") is not None:
        return said
    return {**said, "kept": finished(fits)[: len(before)] == before}


def finished(fits: Path) -> list[str]:
    """Whole lines of a comparison's file, but for the first, which says what it is of."""
    try:
        lines = fits.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    return lines[1:-1]


def _process(size: Size, fits: Path, cache: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.compare_concrete", json.dumps(asdict(size)), str(fits)]
    environment = {**child_environment(cache), "OMP_NUM_THREADS": "1"}  # so small a network gains nothing from two
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def to_markdown(run: Mapping[str, Any]) -> str:
    """The ranking, and whether it kept its promises."""
    found, killed, size = run["found"], run["killed"], run["size"]
    why = killed.get("error") or found.get("error")
    if why is not None:
        return page(run, f"failed: {why}\n")
    seconds = killed["seconds"] + found["seconds"]
    said = (
        f"Killed after {killed['fits']} of {killed['of']} fits and taken up again: finished fits were "
        f"{'kept' if found['kept'] else '**lost**'}. Both processes together took {seconds:.0f} s of a budget of "
        f"{size['budget']:.0f} s; {len(found['not_run'])} fits were not run for want of time."
    )
    title = f"{len(found['table'])} methods on {found['rows']:,} rows, {size['folds']} folds"
    note = "Mean ± standard error over folds, in MPa where it has a unit; differences are paired, fold by fold."
    return page(run, table(title, _HEADER, [_cells(row) for row in found["table"]], note), said + "\n")


def _cells(row: Mapping[str, Any]) -> list[str]:
    def shown(name: str) -> str:
        value, error = row.get(name), row.get(f"{name}_se")
        if not isinstance(value, float):
            return "–" if value is None else str(value)
        return f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")

    names = ("crps", "rmse", "coverage_90", "interval_width_90", "seconds")
    return [
        str(row["rank"] or "–"),
        row["method"],
        shown("nll"),
        shown("nll_difference"),
        *map(shown, names),
        str(row["folds"]),
    ]


# --- the process that is killed --------------------------------------------------------------------------------------


def compare(size: Size, fits: Path) -> dict[str, Any]:
    """The comparison, its page beside its file, and what it took."""
    import knowable as kn

    begun = time.monotonic()
    x, y = load(size)
    found = kn.compare(
        ScaledNetwork(hidden=size.hidden), (x, y), methods=methods_of(size), cv=size.folds, budget=size.budget,
        out=fits, progress=False,
    )  # fmt: skip
    found.to_html(fits.with_name("compare_concrete.html"))
    plain = json.loads(found.to_json())
    return {
        "error": None, "seconds": time.monotonic() - begun, "rows": len(x), "best": found.best, "table": plain["table"],
        "not_run": plain["not_run"], "text": repr(found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="One comparison, as a line of JSON.")
    parser.add_argument("size", type=json.loads)
    parser.add_argument("fits", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(compare(Size(**arguments.size), arguments.fits)))


if __name__ == "__main__":
    main()
