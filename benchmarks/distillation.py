"""MNIST: one LeNet-5 that says in one pass what an ensemble says by ten, beside the same network trained alone.

The teacher is the deep ensemble of ``image_fits``. The student learns what the teacher says of the training images and
of copies of them that are moved a little; it sees no label. The other network is the ensemble's first member, which was
trained on the labels. Times are CPU seconds of predictions of 1,000 images, teacher and student in turn. The images are
read from the folder that ``KNOWABLE_DATA`` names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.active_learning import Moved
from benchmarks.compression.working import Fits, work_through
from benchmarks.image_fits import QUICK, RECIPES, ImageFits, Images, lenet5, load, synthetic
from benchmarks.image_fits import Recipe as FitRecipe
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

_HEADER = ("network", "accuracy", "NLL", "ECE", "AUROC against FashionMNIST", "CPU ms for 1,000 images")
_PUBLISHED = (
    "Published: 5 members to 1 loses 0.07 points of accuracy, with a rank correlation of the uncertainty of 0.722 and "
    "6.9 times quicker (an unpublished summary); Bayesian dark knowledge loses 0.036 points (Korattikara et al., 2015)."
)


@dataclass(frozen=True)
class Recipe:
    """How the student is trained.

    Attributes:
        fits: How the teacher was trained.
        test: Test images.
        epochs: Of the student, over all copies.
        copies: Of the training images that the teacher is asked about; in each, every second image is moved.
        batch_size: Images per step.
        learning_rate: Of Adam, constant for half of the epochs, then falling to zero.
        timings: Predictions that are timed.
    """

    fits: FitRecipe = RECIPES["MNIST"]
    test: int = 10_000
    epochs: int = 12
    copies: int = 3
    batch_size: int = 128
    learning_rate: float = 2e-3
    timings: int = 5


RECIPE = Recipe()
_QUICK = Recipe(fits=QUICK, test=40, epochs=1, copies=1, batch_size=32, timings=1)


def moved(x: Tensor) -> Tensor:
    """Images of which every second one is turned, scaled and shifted a little."""
    x = x.clone()
    x[::2] = Moved().train()(x[::2])
    return x


def evaluate(recipe: Recipe, kept: Fits, *, quick: bool) -> dict[str, Any]:
    """Teacher, student and the network alone: their scores, times, and the rank correlations of uncertainty."""
    import knowable as kn

    fits = recipe.fits
    images = synthetic(fits.rows, fits.test) if quick else load("MNIST", rows=fits.rows, test=fits.test)
    taught = ImageFits("MNIST", images, fits, kept)
    teacher, alone = taught.posterior("DeepEnsemble"), taught.mode
    method = kn.MaximumLikelihood(
        epochs=recipe.epochs, batch_size=recipe.batch_size, learning_rate=recipe.learning_rate
    )
    name = f"student, {recipe.copies} copies, {recipe.epochs} epochs"
    student = kn.distill(
        teacher, lenet5(channels=fits.channels, seed=1_000), images.x, augment=moved, copies=recipe.copies,
        method=method, progress=False, checkpoint=None if kept.folder is None else kept.folder / name,
    )  # fmt: skip
    return _compared(teacher, student, alone, images, recipe)


def _compared(teacher: Posterior, student: Any, alone: Posterior, images: Images, recipe: Recipe) -> dict[str, Any]:
    test = images.inside[: recipe.test], images.inside_y[: recipe.test]
    report = student.fidelity(teacher, test, outside=images.outside[: recipe.test], alone=alone)
    some = images.inside[:1_000]
    times: dict[str, list[float]] = {"teacher": [], "student": []}
    for _ in range(recipe.timings):
        for name, posterior in (("teacher", teacher), ("student", student)):
            begin = time.process_time()
            posterior.predict(some)
            times[name].append(time.process_time() - begin)
    ratios = [slow / quick for slow, quick in zip(times["teacher"], times["student"], strict=True)]
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "scores": {name: dict(scores) for name, scores in report.table.items()},
        "correlations": dict(report.correlations),
        "cpu_seconds": seconds,
        "speedup": statistics.median(ratios),
    }


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """One row; the fits are kept in ``fits/`` beside the results."""
    recipe = _QUICK if quick else RECIPE
    fits = Fits.beside(rows)
    cases = {"MNIST": lambda: evaluate(recipe, fits, quick=quick)}
    found = work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    return describe("distillation", quick=quick, packages=(), recipe=asdict(recipe), rows=found)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table, and what the student keeps of its teacher."""
    recipe, parts = run["recipe"], []
    for name, row in run["rows"].items():
        if row["error"] is not None:
            parts.append(f"{name} failed: {row['error']}\n")
            continue
        lines = [_cells(who, scores, row["cpu_seconds"].get(who)) for who, scores in row["scores"].items()]
        ranks = ", ".join(f"{kind} {value:.3f}" for kind, value in row["correlations"].items())
        lost = 100 * (row["scores"]["teacher"]["accuracy"] - row["scores"]["student"]["accuracy"])
        note = (
            f"Points of accuracy lost: {lost:.2f}. Rank correlations of the uncertainty of teacher and student: "
            f"{ranks}. The student is {row['speedup']:.1f} times cheaper than the teacher. {_PUBLISHED}"
        )
        title = (
            f"{name}: an ensemble of {recipe['fits']['members']} LeNet-5 to one ({recipe['epochs']} epochs over "
            f"{recipe['copies']} copies of the images), one training run"
        )
        parts.append(table(title, _HEADER, lines, note))
    return page(run, *parts)


def _cells(name: str, scores: Mapping[str, float], seconds: float | None) -> list[str]:
    return [
        name, f"{scores['accuracy']:.4f}", f"{scores['nll']:.4f}", f"{scores['ece']:.4f}", f"{scores['auroc']:.4f}",
        "" if seconds is None else f"{1000 * seconds:.0f}",
    ]  # fmt: skip
