"""Active learning on MNIST: how many labels it takes to be right about 90% and 95% of the test images.

From 20 images, two of each digit, ten labels are asked for at a time (the protocol of BatchBALD, Kirsch et al., 2019).
Everything else is the same for all acquisitions: the network, a LeNet-5 that sees its training images turned, scaled
and shifted a little; the posterior, a deep ensemble, fitted anew after every query; and the first images of a run.
RepeatedMNIST has every image three times, each with noise of its own. The time is that of the CPU, of one query of ten
from 60,000 images. The images are read from the folder that ``KNOWABLE_DATA`` names.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import one_line
from benchmarks.image_fits import lenet5
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

ACQUISITIONS = ("batch_bald", "random", "epig", "bald", "variation_ratio")
REPEATED = ("batch_bald", "bald", "random")
LEVELS = (0.9, 0.95)
_HEADER = ("acquisition", "runs", "labels to 90%", "labels to 95%", "accuracy at the end", "each run: labels to 95%")
_PUBLISHED = (
    "Median over the runs, between fits by linear interpolation; a level counts as reached where accuracy stays above "
    "it. Published, ten labels a query: BatchBALD 110 to 90% and 240 to 95%, BALD 170 and 290 (laaos_results of "
    "BlackHC/BatchBALD); from another protocol, BALD 145 and 335, variation ratios 120 and 295, random 255 and 835 "
    "(Gal et al., 2017). These use dropout and do not change their training images."
)
_PUBLISHED_REPEATED = (
    "Published: BatchBALD 140 to 90% and 270 to 95%; random 245, BALD 290, both not at 95% by 290 labels "
    "(laaos_results of BlackHC/BatchBALD)."
)


@dataclass(frozen=True)
class Recipe:
    """What is the same for all acquisitions.

    Attributes:
        pool: Images without labels.
        test: Test images that each fit is scored on, every second one.
        start: Labels at the beginning.
        budget: Labels at the end, of MNIST and of RepeatedMNIST.
        batch: Labels of a query.
        members: Of the ensemble.
        epochs: Passes of a member over the labelled images.
        batch_size: Images in a step, at most.
        learning_rate: Of Adam.
        candidates: Images of the pool that a query looks at, drawn at random.
        runs: First images and first weights.
    """

    pool: int = 60_000
    test: int = 5_000
    start: int = 20
    budget: tuple[int, int] = (180, 180)
    batch: int = 10
    members: int = 5
    epochs: int = 60
    batch_size: int = 32
    learning_rate: float = 4e-3
    candidates: int = 4_000
    runs: int = 3


RECIPE = Recipe()
_QUICK = Recipe(pool=80, test=40, budget=(40, 30), members=2, epochs=2, candidates=40, runs=1)


class Moved(nn.Module):
    """In training, images turned by up to 10 degrees, scaled by up to a tenth and shifted by up to two pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """The images."""
        if not self.training:
            return x
        turn, scale, right, down = (2.0 * torch.rand(4, len(x), device=x.device) - 1.0).unbind()
        turn, scale = turn * 10.0 * torch.pi / 180.0, 1.0 + 0.1 * scale
        cosine, sine = turn.cos() / scale, turn.sin() / scale
        first = torch.stack([cosine, -sine, right * 2.0 / 14.0], 1)
        second = torch.stack([sine, cosine, down * 2.0 / 14.0], 1)
        grid = functional.affine_grid(torch.stack([first, second], 1), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


@dataclass(frozen=True, eq=False)
class Images:
    """The pool with its labels, and test images."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(recipe: Recipe, *, quick: bool, repeated: bool) -> Images:
    """MNIST, standardised; ``repeated``: every image three times, with noise of 0.1 of the range of a pixel."""
    if quick:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(recipe.pool + recipe.test, 1, 28, 28, generator=generator), None
        y = torch.arange(len(x)) % 10
        x[torch.arange(len(x)), 0, 2 * y] += 3.0
        return Images(x[: recipe.pool], y[: recipe.pool], x[recipe.pool :], y[recipe.pool :])
    with np.load(data_folder() / "mnist.npz") as file:
        x, test_x = (torch.from_numpy(file[f"x_{part}"]).float().unsqueeze(1) / 255 for part in ("train", "test"))
        y, test_y = (torch.from_numpy(file[f"y_{part}"]).long() for part in ("train", "test"))
    x, y = x[: recipe.pool], y[: recipe.pool]
    mean, scale = x.mean(), x.std()
    every = max(1, len(test_x) // recipe.test)
    test_x, test_y = (test_x[::every] - mean) / scale, test_y[::every]
    if repeated:
        noise = torch.randn(3 * len(x), 1, 28, 28, generator=torch.Generator().manual_seed(0))
        x, y = x.repeat(3, 1, 1, 1) + 0.1 * noise, y.repeat(3)
    return Images((x - mean) / scale, y, test_x, test_y)


def learner(images: Images, acquisition: str, seed: int, recipe: Recipe, **settings: Any) -> Any:
    """The learner with its first labels: as many of each digit, the same for every acquisition."""
    import knowable as kn

    model = kn.Model(nn.Sequential(Moved(), lenet5(seed=seed)), kn.Categorical(), kn.Normal(1.0))
    method = kn.DeepEnsemble(
        recipe.members, epochs=recipe.epochs, batch_size=recipe.batch_size, learning_rate=recipe.learning_rate
    )
    made = kn.ActiveLearner(
        model, method, images.x, acquisition, test=(images.test_x, images.test_y), samples=recipe.members, seed=seed,
        **settings,
    )  # fmt: skip
    order = torch.randperm(len(images.y), generator=torch.Generator().manual_seed(seed))
    first = torch.cat([order[images.y[order] == digit][: recipe.start // 10] for digit in range(10)])
    if not made.indices:
        made.label(first, images.y[first])
    return made


def evaluate(acquisition: str, seed: int, recipe: Recipe, *, quick: bool, repeated: bool) -> dict[str, Any]:
    """One run: the accuracy after each query, and the labels that reach each level (None: not reached)."""
    images = load(recipe, quick=quick, repeated=repeated)
    made = learner(images, acquisition, seed, recipe, candidates=recipe.candidates)
    begin = time.process_time()
    made.run(images.y, recipe.budget[repeated], batch=recipe.batch)
    reached = [made.labels_to_reach(level) for level in LEVELS]
    return {
        "labels": [each.labels for each in made.history],
        "accuracy": [each.score for each in made.history],
        "reached": [each if each < float("inf") else None for each in reached],
        "seconds": time.process_time() - begin,
    }


def time_of_a_query(recipe: Recipe, *, quick: bool) -> dict[str, Any]:
    """CPU seconds of one query by BatchBALD that looks at the whole pool, beside those of the fit."""
    images = load(recipe, quick=quick, repeated=False)
    made = learner(images, "batch_bald", 0, recipe)
    begin = time.process_time()
    _ = made.posterior
    fitted = time.process_time()
    made.query(recipe.batch)
    return {"fit": fitted - begin, "query": time.process_time() - fitted, "pool": made.left, "draws": recipe.members}


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Seed by seed, all acquisitions; ``only`` is a glob of ``MNIST: bald, 0``, ``RepeatedMNIST: ...`` and ``time``."""
    recipe = _QUICK if quick else RECIPE
    found: dict[str, dict[str, Any]] = {"MNIST": {}, "RepeatedMNIST": {}}
    for seed in range(recipe.runs):
        for name, acquisitions in (("MNIST", ACQUISITIONS), ("RepeatedMNIST", REPEATED)):
            for acquisition in acquisitions:
                title = f"{name}: {acquisition}, {seed}"
                if fnmatch(title, only):
                    made = partial(evaluate, acquisition, seed, recipe, quick=quick, repeated=name != "MNIST")
                    found[name].setdefault(acquisition, []).append(_row(title, made, recipe, quick, rows))
    timed = None
    if fnmatch("time", only):
        timed = _row("time", partial(time_of_a_query, recipe, quick=quick), recipe, quick, rows)
    return describe("active_learning", quick=quick, packages=(), recipe=asdict(recipe), sets=found, time=timed)


def _row(title: str, make: Callable[[], dict[str, Any]], recipe: Recipe, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{title}, {replace(recipe, runs=0)}" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
            row: dict[str, Any] = {"error": None, **make()}
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{title}: {row if row['error'] else row.get('reached', row)}")
    return rows.add(key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each set of images, and the time of a query."""
    recipe = run["recipe"]
    settings = (
        f"an ensemble of {recipe['members']} LeNet-5 on moved images, {recipe['start']} labels at first, "
        f"{recipe['batch']} a query"
    )
    notes = {"MNIST": _PUBLISHED, "RepeatedMNIST": _PUBLISHED_REPEATED}
    parts = [
        table(f"{name}: {settings}", _HEADER, [_cells(*each) for each in rows.items()], notes[name])
        for name, rows in run["sets"].items()
        if rows
    ]
    timed = run["time"]
    if timed is not None and timed["error"] is None:
        parts.append(
            f"One query of {recipe['batch']} by BatchBALD that looks at all {timed['pool']:,} images: "
            f"{timed['query']:.1f} s of CPU time, {timed['draws']} draws; the fit before it {timed['fit']:.1f} s.\n"
        )
    return page(run, *parts)


def _cells(acquisition: str, rows: list[Mapping[str, Any]]) -> list[str]:
    failed = [row["error"] for row in rows if row["error"] is not None]
    if failed:
        return [acquisition, f"failed: {failed[0]}"]
    end = f"{statistics.median(row['accuracy'][-1] for row in rows):.4f} at {rows[0]['labels'][-1]}"
    each = ", ".join(_labels(row["reached"][1]) for row in rows)
    return [acquisition.replace("_", " "), str(len(rows)), *(_median(rows, level) for level in range(2)), end, each]


def _median(rows: list[Mapping[str, Any]], level: int) -> str:
    reached = sorted(float("inf") if row["reached"][level] is None else row["reached"][level] for row in rows)
    middle = statistics.median_high(reached)
    return _labels(None if middle == float("inf") else middle)


def _labels(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.0f}"
