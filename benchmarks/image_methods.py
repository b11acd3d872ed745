"""MNIST inside, FashionMNIST outside: how right, how calibrated, and whether the outside is noticed.

A LeNet-5 is trained on MNIST by the point estimate, by dropout and as an ensemble; Laplace and SWAG begin at the point
estimate. All are scored on the test images of MNIST, and by how well their uncertainty tells these from the test images
of FashionMNIST: by the entropy of the predictive distribution, and by the mutual information of label and weights,
which a point estimate does not have. Nothing is chosen on test images: settings are the library's defaults or fixed
beforehand, and Laplace has its prior scales from the evidence.

The images are read from the folder that ``KNOWABLE_DATA`` names: ``mnist.npz`` and ``fashion_mnist.npz`` with
``x_train``, ``y_train``, ``x_test`` and ``y_test``. Pixels are standardised by MNIST's training images.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

if TYPE_CHECKING:
    from knowable.core.model.model import Model
    from knowable.core.posterior.particles import Particles
    from knowable.core.posterior.posterior import Posterior

METHODS = ("MAP", "Laplace, last layer", "Laplace, kron", "MCDropout", "DeepEnsemble", "SWAG")
_HEADER = ("method", "accuracy", "NLL", "ECE", "AUROC by entropy", "AUROC by mutual information")
_NOTE = (
    "Mean ± standard error over the test images of MNIST, for one training run. AUROC: the probability that an image "
    "of FashionMNIST scores higher than one of MNIST."
)


@dataclass(frozen=True)
class Recipe:
    """How everything is trained.

    Attributes:
        rows: Training images.
        test: Test images, of each data set.
        epochs: Of every network.
        batch_size: Images per step.
        prior: Standard deviation of the normal prior on weights (of Laplace where the evidence begins).
        rate: Of dropout, on the inputs of all layers but the first.
        members: Of the ensemble.
        snapshots: Of SWAG, each an epoch.
        samples: Draws in a prediction.
    """

    rows: int = 60_000
    test: int = 10_000
    epochs: int = 5
    batch_size: int = 128
    prior: float = 1.0
    rate: float = 0.1
    members: int = 5
    snapshots: int = 20
    samples: int = 50


RECIPE = Recipe()
_QUICK = Recipe(rows=64, test=16, epochs=1, batch_size=32, members=2, snapshots=3, samples=4)


@dataclass(frozen=True, eq=False)
class Images:
    """Training and test images of one data set, test images of the other."""

    x: Tensor
    y: Tensor
    inside: Tensor
    inside_y: Tensor
    outside: Tensor


def load(recipe: Recipe) -> Images:
    """MNIST and FashionMNIST as numbers; FashionMNIST in MNIST's units."""
    with np.load(data_folder() / "mnist.npz") as file:
        x, y = file["x_train"][: recipe.rows], file["y_train"][: recipe.rows]
        inside, inside_y = file["x_test"][: recipe.test], file["y_test"][: recipe.test]
    with np.load(data_folder() / "fashion_mnist.npz") as file:
        outside = file["x_test"][: recipe.test]
    mean, scale = float(x.mean()), float(x.std())
    x, inside, outside = ((_tensor(each).float() - mean).div(scale).unsqueeze(1) for each in (x, inside, outside))
    return Images(x, _tensor(y).long(), inside, _tensor(inside_y).long(), outside)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def synthetic(recipe: Recipe) -> Images:
    """Noise with a bright row whose place is the label, and noise without, for quick runs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(recipe.rows + 2 * recipe.test, 1, 28, 28, generator=generator)
    y = torch.arange(recipe.rows + recipe.test) % 10
    x[torch.arange(len(y)), 0, 2 * y] += 3.0
    return Images(x[: recipe.rows], y[: recipe.rows], x[recipe.rows : len(y)], y[recipe.rows :], x[len(y) :])


def lenet5(*, seed: int = 0) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling: 44,426 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5),  # (B, 6, 24, 24)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),  # (B, 16, 8, 8)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),  # (B, 256)
            nn.Linear(256, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


class Fits:
    """The fits of one run; the point estimate is trained once, for all methods that begin at it.

    Args:
        images: The data.
        recipe: How everything is trained.
    """

    def __init__(self, images: Images, recipe: Recipe):
        self.images, self.recipe = images, recipe
        self._rows = images.x, images.y

    @cached_property
    def mode(self) -> Particles:
        """The point estimate."""
        import knowable as kn

        return kn.MAP(**self._training).fit(self._model(), self._rows, progress=False)

    def fit(self, method: str) -> Posterior:
        """The posterior by one of :data:`METHODS`."""
        import knowable as kn

        if method == "MAP":
            return self.mode
        if method == "Laplace, last layer":
            model = self._model(tuned=True, random="last_layer")
            return kn.Laplace(structure="full").fit(model, self._rows, start=self.mode, progress=False)
        if method == "Laplace, kron":
            return kn.Laplace(structure="kron").fit(
                self._model(tuned=True), self._rows, start=self.mode, progress=False
            )
        if method == "MCDropout":
            return kn.MCDropout(self.recipe.rate, **self._training).fit(self._model(), self._rows, progress=False)
        if method == "DeepEnsemble":
            ensemble = kn.DeepEnsemble(self.recipe.members, vectorise=False, **self._training)
            return ensemble.fit(self._model(), self._rows, progress=False)
        swag = kn.SWAG(start=self.mode, snapshots=self.recipe.snapshots, batch_size=self.recipe.batch_size)
        return swag.fit(self._model(), self._rows, progress=False)

    @property
    def _training(self) -> dict[str, Any]:
        return {"epochs": self.recipe.epochs, "batch_size": self.recipe.batch_size}

    def _model(self, *, tuned: bool = False, random: str = "*") -> Model:
        import knowable as kn

        prior = kn.Normal(self.recipe.prior)
        prior = kn.EmpiricalBayes(prior, per="parameter") if tuned else prior
        return kn.Model(lenet5(), kn.Categorical(), prior, random=random)


def evaluate(method: str, fits: Fits) -> dict[str, Any]:
    """Fit and score."""
    import knowable as kn

    images, samples = fits.images, fits.recipe.samples
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
        posterior = fits.fit(method)
    inside, outside = (posterior.predict(x, samples=samples) for x in (images.inside, images.outside))
    scores = kn.evaluate(inside, images.inside_y)
    several = inside.samples.shape[0] > 1
    return {
        "accuracy": (scores["accuracy"], scores.standard_errors["accuracy"]),
        "nll": (scores["nll"], scores.standard_errors["nll"]),
        "ece": scores["ece"],
        "auroc_entropy": kn.metrics.auroc(inside, outside),
        "auroc_mutual_information": kn.metrics.auroc(inside.epistemic, outside.epistemic) if several else None,
    }


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods; ``only`` is a glob of methods. Finished rows are not run again."""
    recipe = _QUICK if quick else RECIPE
    found, fits = {}, _LazyFits(recipe, quick)
    for method in METHODS:
        if fnmatch(method, only):
            found[method] = _row(method, fits, recipe, quick, rows)
    return describe("image_methods", quick=quick, packages=(), recipe=asdict(recipe), methods=found)


class _LazyFits:
    """Data that is read when the first row needs it."""

    def __init__(self, recipe: Recipe, quick: bool):
        self.recipe, self.quick = recipe, quick

    @cached_property
    def fits(self) -> Fits:
        return Fits(synthetic(self.recipe) if self.quick else load(self.recipe), self.recipe)


def _row(method: str, fits: _LazyFits, recipe: Recipe, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{method}, {recipe}" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row: dict[str, Any] = {"error": None, **evaluate(method, fits.fits)}
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{method}: {row}")
    return rows.add(key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each method."""
    recipe = run["recipe"]
    title = (
        f"LeNet-5 on {recipe['rows']:,} images of MNIST, {recipe['epochs']} epochs, {recipe['members']} members, "
        f"dropout {recipe['rate']:g}, {recipe['snapshots']} snapshots, {recipe['samples']} draws"
    )
    return page(run, table(title, _HEADER, [_cells(name, row) for name, row in run["methods"].items()], _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    (accuracy, accuracy_error), (nll, nll_error) = row["accuracy"], row["nll"]
    by_information = row["auroc_mutual_information"]
    return [
        name, f"{accuracy:.4f} ± {accuracy_error:.4f}", f"{nll:.4f} ± {nll_error:.4f}", f"{row['ece']:.4f}",
        f"{row['auroc_entropy']:.4f}", "" if by_information is None else f"{by_information:.4f}",
    ]  # fmt: skip
