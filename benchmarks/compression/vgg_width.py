"""Wider and wider: error and compression of a VGG-like network on CIFAR-10 as its width grows.

Molchanov et al. (2017, figure 2) widen a VGG-like network and see that sparse variational dropout keeps its error and
takes out an ever larger share of the weights. Here the same on a small scale: six convolutions and two linear layers
without batch normalisation, a subset of the images, few epochs. The dense network is trained by maximum likelihood,
the sparse one begins at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from benchmarks.compression.architectures import seeded, vgg_like
from benchmarks.compression.images import Images, cifar10, synthetic
from benchmarks.compression.sparsity import counts, error_percent, kept_weights, pruned
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, table

_HEADER = ("width", "weights", "dense error %", "sparse error %", "sparsity of layers %", "compression", "minutes")
_NOTE = (
    "Errors on 2,000 test images. Sparse: the mean network without the weights whose log alpha is above 3. Minutes: of "
    "the sparse fit, on one shared core."
)


@dataclass(frozen=True)
class Plan:
    """How much of it there is.

    Attributes:
        widths: Factors on the channels of all layers.
        rows: Training images.
        dense_epochs: Of maximum likelihood.
        epochs: Of sparse variational dropout, from there.
        kl_warmup: Epochs over which the KL gets its full weight.
        batch_size: Images per step.
        learning_rate: Of Adam.
    """

    widths: tuple[float, ...] = (0.25, 0.5, 1.0)
    rows: int = 5_000
    dense_epochs: int = 8
    epochs: int = 15
    kl_warmup: int = 3
    batch_size: int = 50
    learning_rate: float = 1e-3


PLAN = Plan()
_QUICK = Plan((0.1, 0.2), rows=30, dense_epochs=1, epochs=2, kl_warmup=1, batch_size=15)


def evaluate(width: float, plan: Plan, *, quick: bool, fits: Fits) -> dict[str, Any]:
    """Train a network of that width both ways, and compare."""
    import knowable as kn

    images = synthetic(plan.rows, 10, (3, 32, 32)) if quick else _cifar10(plan.rows)
    model = kn.Model(seeded(partial(vgg_like, width), 0), kn.Categorical(), kn.Flat())
    training = {"batch_size": plan.batch_size, "learning_rate": plan.learning_rate}
    plain = kn.MaximumLikelihood(epochs=plan.dense_epochs, **training)
    dense, _ = fits.fit(f"width {width}, dense", plain, model, images.rows)
    method = kn.SparseVariationalDropout(
        epochs=plan.epochs, kl_warmup=plan.kl_warmup, initial_scale=0.01, start=dense, **training
    )
    sparse, minutes = fits.fit(f"width {width}, sparse", method, model, images.rows)
    kept = kept_weights(sparse)
    judged = images.test_x, images.test_y
    return {
        "dense_error": error_percent(dense, dense.mean(), *judged, batch=250),
        "sparse_error": error_percent(sparse, pruned(sparse, kept), *judged, batch=250),
        **counts(kept),
        "minutes": minutes,
    }


@cache
def _cifar10(rows: int) -> Images:
    return cifar10(rows)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All widths; ``only`` is a glob such as ``"1.0"``."""
    plan, fits = _QUICK if quick else PLAN, Fits.beside(rows)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        str(width): partial(evaluate, width, plan, quick=quick, fits=fits) for width in plan.widths
    }
    found = work_through(cases, only=only, rows=rows, recipe=plan, quick=quick)
    return describe("compression_vgg_width", quick=quick, packages=(), plan=asdict(plan), widths=found)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each width."""
    plan = run["plan"]
    title = (
        f"A VGG-like network on {plan['rows']:,} images of CIFAR-10, {plan['dense_epochs']} + {plan['epochs']} epochs"
    )
    return page(run, table(title, _HEADER, [_cells(name, row) for name, row in run["widths"].items()], _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    compression = "all gone" if row["compression"] is None else f"{row['compression']:.0f}"
    return [
        name, f"{row['weights']:,}", f"{row['dense_error']:.1f}", f"{row['sparse_error']:.1f}",
        "-".join(f"{value:.1f}" for value in row["sparsity"].values()), compression, f"{row['minutes']:.1f}",
    ]  # fmt: skip
