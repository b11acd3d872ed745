"""MNIST: one LeNet-5 that says in one pass what a posterior says by 64, beside the same network trained alone.

The teacher is LeNet-5 with Monte Carlo dropout. The student learns what the teacher says of the training images and of
copies of them that are moved a little; it sees no label. The other network is trained on the labels. Times are CPU
seconds of predictions of 1,000 images, teacher and student in turn. The images are read from the folder that
``KNOWABLE_DATA`` names.
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
from benchmarks.image_fits import Images, lenet5, load, synthetic
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

_OUTSIDE = 1_000  # images of the other set
_HEADER = ("network", "accuracy", "NLL", "ECE", "AUROC against FashionMNIST", "CPU ms for 1,000 images")
_PUBLISHED = (
    "Published: 5 members to 1 loses 0.07 points of accuracy, with a rank correlation of the uncertainty of 0.722 and "
    "6.9 times quicker (an unpublished summary); Bayesian dark knowledge loses 0.036 points (Korattikara et al., 2015)."
)


@dataclass(frozen=True)
class Recipe:
    """How everything is trained.

    Attributes:
        rows: Training images.
        test: Test images, every second one.
        epochs: Of the teacher and of the network that is trained alone.
        student_epochs: Of the student, over all copies.
        copies: Of the training images that the teacher is asked about; in each, every second image is moved.
        batch_size: Images per step.
        learning_rate: Of Adam, constant for half of the epochs, then falling to zero.
        prior: Standard deviation of the normal prior.
        rate: Of dropout.
        asked: Draws of the teacher for the student's targets.
        samples: Draws of the teacher that it is compared with.
        timings: Predictions that are timed.
    """

    rows: int = 55_000
    test: int = 5_000
    epochs: int = 3
    student_epochs: int = 5
    copies: int = 1
    batch_size: int = 128
    learning_rate: float = 2e-3
    prior: float = 0.1
    rate: float = 0.1
    asked: int = 16
    samples: int = 64
    timings: int = 3


RECIPE = Recipe()
_QUICK = Recipe(rows=64, test=40, epochs=1, student_epochs=1, batch_size=32, asked=4, samples=8, timings=1)


def moved(x: Tensor) -> Tensor:
    """Images of which every second one is turned, scaled and shifted a little."""
    x = x.clone()
    x[::2] = Moved().train()(x[::2])
    return x


def evaluate(recipe: Recipe, fits: Fits, *, quick: bool) -> dict[str, Any]:
    """Teacher, student and the network alone: their scores, times, and the rank correlations of uncertainty."""
    import knowable as kn

    images = synthetic(recipe.rows, recipe.test) if quick else load("MNIST", rows=recipe.rows)
    model = kn.Model(lenet5(), kn.Categorical(), kn.Normal(recipe.prior))
    training: dict[str, Any] = {"batch_size": recipe.batch_size, "learning_rate": recipe.learning_rate}
    data = images.x, images.y
    teacher, _ = fits.fit("teacher", kn.MCDropout(recipe.rate, epochs=recipe.epochs, **training), model, data)
    alone, _ = fits.fit("alone", kn.MAP(epochs=recipe.epochs, **training), model, data)
    name = f"student, {recipe.rows} rows, {recipe.student_epochs} epochs, {recipe.asked} draws"
    checkpoint = None if fits.folder is None else fits.folder / name
    student = kn.distill(
        teacher, lenet5(seed=1), images.x, augment=moved, copies=recipe.copies, samples=recipe.asked, progress=False,
        method=kn.MaximumLikelihood(epochs=recipe.student_epochs, **training), checkpoint=checkpoint,
    )  # fmt: skip
    return _compared(teacher, student, alone, images, recipe)


def _compared(teacher: Posterior, student: Any, alone: Posterior, images: Images, recipe: Recipe) -> dict[str, Any]:
    every = max(1, len(images.inside) // recipe.test)
    test = images.inside[::every], images.inside_y[::every]
    report = student.fidelity(teacher, test, outside=images.outside[:_OUTSIDE], alone=alone, samples=recipe.samples)
    some = images.inside[:1_000]
    times: dict[str, list[float]] = {"teacher": [], "student": []}
    for _ in range(recipe.timings):
        for name, posterior in (("teacher", teacher), ("student", student)):
            begin = time.process_time()
            posterior.predict(some, samples=recipe.samples)
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
            f"{ranks}. The student is {row['speedup']:.0f} times cheaper than {recipe['samples']} draws of the "
            f"teacher. {_PUBLISHED}"
        )
        title = (
            f"{name}: MC dropout of LeNet-5 ({recipe['epochs']} epochs) to one LeNet-5 ({recipe['student_epochs']} "
            f"epochs, {recipe['asked']} draws of the teacher), one training run"
        )
        parts.append(table(title, _HEADER, lines, note))
    return page(run, *parts)


def _cells(name: str, scores: Mapping[str, float], seconds: float | None) -> list[str]:
    return [
        name, f"{scores['accuracy']:.4f}", f"{scores['nll']:.4f}", f"{scores['ece']:.4f}", f"{scores['auroc']:.4f}",
        "" if seconds is None else f"{1000 * seconds:.0f}",
    ]  # fmt: skip
