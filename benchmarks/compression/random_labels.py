"""Labels that say nothing: sparse variational dropout learns nothing from them, binary dropout learns them by heart.

Zhang et al. (2017) showed that networks fit labels drawn at random as well as true ones, dropout or not. With the
log-uniform prior there is nothing to gain: every weight that carries a label by heart costs more than the label is
worth, and the network ends empty (Molchanov et al., 2017, section 5.5).

A fully connected network is trained on digits and a convolutional one on CIFAR-10, each on the first images of the
training set, with labels drawn uniformly. Judged is the accuracy on these very images: chance is 10 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from benchmarks.compression.architectures import lenet_300_100, seeded, vgg_like
from benchmarks.compression.images import Images, cifar10, mnist, synthetic, with_random_labels
from benchmarks.compression.sparsity import counts, error_percent, kept_weights, pruned
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.method import Method
    from knowable.core.posterior.posterior import Posterior

METHODS = ("sparse", "binary dropout")
_HEADER = ("network, method", "images", "training accuracy %", "weights that stay", "of", "zeros %", "minutes")
_NOTE = (
    "Accuracy of the mean network on the images it was trained on, whose labels were drawn at random; for the sparse "
    "method without the weights whose log alpha is above 3. Chance is 10 %. Minutes: of a fit since it was last taken "
    "up."
)


@dataclass(frozen=True)
class Problem:
    """A network, its images and how it is trained.

    Attributes:
        width: Of the convolutional network, or None for the fully connected one.
        rows: Training images.
        sparse_epochs: Of sparse variational dropout.
        dropout_epochs: Of binary dropout.
        batch_size: Images per step.
        rate: Of binary dropout, on the inputs of all linear layers but the first.
    """

    width: float | None
    rows: int
    sparse_epochs: int
    dropout_epochs: int
    batch_size: int = 100
    rate: float = 0.5

    def build(self) -> nn.Module:
        return lenet_300_100() if self.width is None else vgg_like(self.width)

    def images(self, *, quick: bool) -> Images:
        if quick:
            images = synthetic(self.rows, 10, (28, 28) if self.width is None else (3, 32, 32))
        else:
            images = mnist(self.rows) if self.width is None else cifar10(self.rows)
        return with_random_labels(images, seed=0)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Weights whose inputs binary dropout drops: hidden units of linear layers."""
        layers = [name for name, layer in self.build().named_modules() if isinstance(layer, nn.Linear)]
        return tuple(f"{name}.weight" for name in layers[1:])


PROBLEMS = {
    "LeNet-300-100 on MNIST": Problem(None, rows=5_000, sparse_epochs=60, dropout_epochs=300),
    "VGG-like on CIFAR-10": Problem(0.5, rows=1_000, sparse_epochs=60, dropout_epochs=200, batch_size=50),
}
_QUICK = {
    "LeNet-300-100 on MNIST": Problem(None, rows=20, sparse_epochs=2, dropout_epochs=2, batch_size=10),
    "VGG-like on CIFAR-10": Problem(0.1, rows=20, sparse_epochs=2, dropout_epochs=2, batch_size=10),
}


def method_for(which: str, problem: Problem) -> Method:
    """The fit of that name."""
    import knowable as kn

    if which == "sparse":
        return kn.SparseVariationalDropout(
            epochs=problem.sparse_epochs, batch_size=problem.batch_size, learning_rate=2e-3, initial_scale=0.01
        )
    return kn.MCDropout(
        problem.rate, where=problem.dropped, epochs=problem.dropout_epochs, batch_size=problem.batch_size,
        learning_rate=1e-3,
    )  # fmt: skip


def evaluate(which: str, problem: Problem, name: str, *, quick: bool, fits: Fits) -> dict[str, Any]:
    """Train on random labels and see what was learned of them."""
    import knowable as kn

    images = problem.images(quick=quick)
    model = kn.Model(seeded(problem.build, 0), kn.Categorical(), kn.Flat())
    posterior, minutes = fits.fit(f"random labels, {name}, {which}", method_for(which, problem), model, images.rows)
    return {"images": len(images.y), **learned(posterior, images, sparse=which == "sparse"), "minutes": minutes}


def learned(posterior: Posterior, images: Images, *, sparse: bool) -> dict[str, Any]:
    """Accuracy of the mean network on its own training images, and the weights it has."""
    weights = {name: value.new_ones(value.shape).bool() for name, value in posterior.mean().items() if value.dim() > 1}
    kept = kept_weights(posterior) if sparse else weights
    wrong = error_percent(posterior, pruned(posterior, kept), images.x, images.y, batch=250)
    return {"training_accuracy": 100.0 - wrong, **counts(kept)}


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Both networks with both methods; ``only`` is a glob such as ``"*sparse"``."""
    problems, fits = _QUICK if quick else PROBLEMS, Fits.beside(rows)
    found: dict[str, Any] = {}
    for name, problem in problems.items():
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            f"{name}, {which}": partial(evaluate, which, problem, name, quick=quick, fits=fits) for which in METHODS
        }
        found |= work_through(cases, only=only, rows=rows, recipe=problem, quick=quick)
    described = {name: str(problem) for name, problem in problems.items()}
    return describe("compression_random_labels", quick=quick, packages=(), problems=described, fits=found)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each network and method."""
    rows = [_cells(name, row) for name, row in run["fits"].items()]
    return page(run, table("Trained on random labels", _HEADER, rows, _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    zeros = 100.0 - 100.0 * row["nonzero"] / row["weights"]
    return [
        name, f"{row['images']:,}", f"{row['training_accuracy']:.1f}", f"{row['nonzero']:,}", f"{row['weights']:,}",
        f"{zeros:.3f}", f"{row['minutes']:.1f}",
    ]  # fmt: skip
