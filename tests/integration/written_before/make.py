"""Write the folders beside this file, and the numbers that whoever reads them must find.

How these files were made: with the code of version 0.1.0, before the rooms of core were made, from the root of the
repository by ``python -m tests.integration.written_before.make``, in about two minutes on one thread. They stand for
the files that users have. So they are not to be made again when a later version reads them otherwise: that is the
mistake which ``tests/integration/test_written_before.py`` looks for. To keep something new, write it beside them.

- ``posteriors/``: one saved posterior for each entry of ``posteriors.py``: every family, likelihood and prior;
- ``unfinished/``: checkpoints of fits that were stopped midway, by a crash or from the keyboard;
- ``estimators/``: saved ``BayesianRegressor`` and ``BayesianClassifier``;
- ``compressed/``: networks saved after ``compress``;
- ``comparison/``: journals, one of ``kn.compare`` that is cut off after half of the fits, one of ``knowable compare``;
- ``runs/``: what ``knowable fit`` wrote (less the pages, which are large), with what ``knowable predict`` said of them;
- ``table.csv``: the table of the estimators and the runs;
- ``expected.safetensors``: all other numbers, by ``kind/name/what``.
"""

from __future__ import annotations

import csv
import json
import shutil
import warnings
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import knowable as kn
from tests.integration.written_before import reading
from tests.integration.written_before.posteriors import posteriors
from tests.integration.written_before.reading import HERE

FOLDERS = ("posteriors", "unfinished", "estimators", "compressed", "comparison", "runs")


# --- tables ----------------------------------------------------------------------------------------------------------


def table(rows: int = 60) -> list[dict[str, str]]:
    """Numbers, a category, a date, yes and no, gaps here and there; an outcome that is a number and one that is not."""
    made = []
    for k in range(rows):
        dose, site = (k * 37 + 11) % 101 / 10, ("north", "south", "west")[k * 5 % 7 % 3]
        response = 20 + 1.5 * dose + 2 * (site == "west") + ((k * 53) % 17 - 8) / 20
        made.append(
            {
                "dose": "" if k % 13 == 5 else f"{dose:.1f}",
                "site": site,
                "day": f"2021-{1 + k % 12:02d}-{1 + k * 7 % 28:02d}",
                "treated": "yes" if k * 3 % 5 < 2 else "no",
                "response": f"{response:.3f}",
                "outcome": "high" if response + k % 3 > 28 else "low",
            }
        )
    return made


def small(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def estimators() -> dict[str, Any]:
    """New estimators by name."""
    short = {"epochs": 20}
    likelihood, prior = kn.StudentT(5.0), {"*.bias": kn.Normal(2.0), "*": kn.LaplacePrior(0.5)}
    return {
        "regressor": kn.BayesianRegressor(kn.MeanFieldVI(**short), random_state=0, samples=8),
        "regressor_of_ones_own": kn.BayesianRegressor(
            kn.EnsembleOf(kn.MAP(**short), 2), network=small, likelihood=likelihood, prior=prior, random_state=1,
            kinds={"site": ["west", "south", "north"]},
        ),
        "regressor_updated": kn.BayesianRegressor(kn.MeanFieldVI(**short), network=small, random_state=2),
        "regressor_laplace": kn.BayesianRegressor(kn.Laplace(**short), network=small, random_state=3),
        "classifier": kn.BayesianClassifier(kn.Laplace(**short), network=small, random_state=4),
        "classifier_nuts": kn.BayesianClassifier(
            kn.NUTS(**reading.CHAINS, max_depth=2), network=small, likelihood=kn.Bernoulli(), random_state=5, samples=8
        ),
    }  # fmt: skip


# --- compressed networks ---------------------------------------------------------------------------------------------


def compressed() -> dict[str, tuple[Any, Tensor]]:
    """Compressed networks by name, and inputs for them: some of their units are known to be zero."""
    x, pixels = reading.numbers()[0], reading.pictures()[0]
    return {
        "network": (kn.compress(_sparse(reading.mlp(hidden=6)), example=x, repeats=0), x),
        "network_in_few_bits": (kn.compress(_sparse(reading.mlp(hidden=6)), example=x, bits="posterior", repeats=0), x),
        "network_of_images": (kn.compress(_sparse(reading.images()), example=pixels, bits=6, repeats=0), pixels),
    }


def _sparse(net: nn.Module) -> kn.Posterior:
    model = kn.Model(net, kn.Gaussian(0.2))
    mean = {name: reading.even(*value.shape) for name, value in model.params().items()}
    for value in mean.values():
        if value.dim() > 1:
            value[value.abs() < 0.4] = 0.0
            value[-1] = value[-1] * 0 if len(value) > 3 else value[-1]
    return kn.DiagonalNormal(model, mean, {name: torch.full_like(value, 0.05) for name, value in mean.items()})


# --- writing ---------------------------------------------------------------------------------------------------------


def make() -> None:
    """Write everything anew."""
    for name in FOLDERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
    expected = {
        **_named("posteriors", _posteriors()),
        **_named("unfinished", _unfinished()),
        **_named("compressed", _compressed()),
        **_named("comparison", {"cut_off": _comparison()}),
    }
    _write_table()
    expected |= _named("estimators", _estimators())
    _runs()
    save_file(expected, HERE / "expected.safetensors")


def _named(kind: str, numbers: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{kind}/{name}/{what}": value.clone() for name, each in numbers.items() for what, value in each.items()}


def _posteriors() -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, saved in posteriors().items():
        posterior = saved.fit()
        posterior.save(HERE / "posteriors" / name)
        found[name] = reading.looked_at(posterior, saved.rows())
    return found


def _unfinished() -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, fit in reading.UNFINISHED.items():
        whole, runs = fit.fit()
        try:
            stopped, _ = fit.fit(HERE / "unfinished" / name, stop_at=int(fit.share * runs))
            assert stopped.diagnostics.interrupted
        except reading.Stopped:
            pass
        found[name] = {"mean": reading.flat(whole.mean()), "std": reading.flat(whole.std()), "runs": torch.tensor(runs)}
    return found


def _compressed() -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, (small_one, x) in compressed().items():
        small_one.save(HERE / "compressed" / name)
        found[name] = {"x": x, "output": small_one.net(x).detach()}
    return found


def _comparison() -> dict[str, Tensor]:
    place = HERE / "comparison" / "cut_off.jsonl"
    comparison = reading.compare(place)
    place.write_text("".join(place.read_text().splitlines(keepends=True)[: 1 + reading.FINISHED]))
    return reading.scores_of(comparison)


def _write_table() -> None:
    rows = table()
    with (HERE / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _estimators() -> dict[str, dict[str, Tensor]]:
    table, found = reading.read_table(), {}
    for name, estimator in estimators().items():
        target, other = ("outcome", "response") if "classifier" in name else ("response", "outcome")
        x, y = table.drop(columns=[target, other]), table[target]
        estimator.fit(x[:40], y[:40])
        if name.endswith("updated"):
            estimator.partial_fit(x[40:], y[40:])
        estimator.save(HERE / "estimators" / name)
        found[name] = reading.estimates(estimator, x[:12])
    return found


def _runs() -> None:
    for name, options in reading.RUNS.items():
        reading.knowable("fit", "table.csv", *options, "--samples", 8, "--out", f"runs/{name}", "--quiet")
        (HERE / "runs" / name / "report.html").unlink()
        predictions = reading.knowable("predict", f"runs/{name}", "table.csv", "--json", "--quiet")
        (HERE / "runs" / f"{name}_predictions.json").write_text(json.dumps(json.loads(predictions)[:12], indent=1))
        scores = reading.knowable("evaluate", f"runs/{name}", "table.csv", "--json", "--quiet")
        (HERE / "runs" / f"{name}_scores.json").write_text(scores)
    reading.knowable("compare", "table.csv", *reading.COMPARED, "--out", "comparison/finished", "--quiet")
    (HERE / "comparison" / "finished" / "comparison.html").unlink()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fits are far too short
        make()
