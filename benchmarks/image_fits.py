"""LeNet-5 on MNIST and on FashionMNIST by every method of ``image_methods``: the data, the settings, the fits.

Networks learn from the first 55,000 training images; the other 5,000 are held out, for all that is chosen or
calibrated. Members of the ensembles are fits of their own, from seeds of their own; the first is the single method's.

The images are read from the folder that ``KNOWABLE_DATA`` names: ``mnist.npz`` and ``fashion_mnist.npz`` with
``x_train``, ``y_train``, ``x_test`` and ``y_test``. Pixels are standardised by the training images of the set that is
learned, images of other sets by the same mean and scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.compression.working import Fits
from benchmarks.study import say
from benchmarks.uci_data import data_folder

if TYPE_CHECKING:
    from knowable.core.method import Method
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior

SETS = {"MNIST": "mnist", "FashionMNIST": "fashion_mnist"}
METHODS = (
    "MAP",
    "MCDropout",
    "MeanFieldVI",
    "Laplace, last layer",
    "Laplace, kron",
    "SWAG",
    "DeepEnsemble",
    "Ensemble of MeanFieldVI",
)


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one data set, and test images of the other.

    Attributes:
        x: Training images, ``(N, 1, 28, 28)``.
        y: Their labels.
        held_out: Training images that no fit sees.
        held_out_y: Their labels.
        inside: Test images.
        inside_y: Their labels.
        outside: Test images of the other set, in the units of this one.
        mean: Mean of the pixels of the training images, which run from 0 to 255.
        scale: Their standard deviation.
    """

    x: Tensor
    y: Tensor
    held_out: Tensor
    held_out_y: Tensor
    inside: Tensor
    inside_y: Tensor
    outside: Tensor
    mean: float
    scale: float

    def in_units(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 255 as the networks take them."""
        return (pixels.float() - self.mean) / self.scale


def load(name: str = "MNIST", *, rows: int = 55_000, test: int = 10_000) -> Images:
    """One of :data:`SETS`: its first ``rows`` training images, its last 5,000, and test images of both."""
    (other,) = (each for each in SETS if each != name)
    with np.load(data_folder() / f"{SETS[name]}.npz") as file:
        x, y, inside, inside_y = (_tensor(file[each]) for each in ("x_train", "y_train", "x_test", "y_test"))
    with np.load(data_folder() / f"{SETS[other]}.npz") as file:
        outside = _tensor(file["x_test"])
    last = min(5_000, len(x) - rows)
    known, held_out = x[:rows], x[len(x) - last :]
    mean, scale = known.float().mean().item(), known.float().std().item()
    parts = ((each.float() - mean).div(scale).unsqueeze(1) for each in (known, held_out, inside[:test], outside[:test]))
    known, held_out, inside, outside = parts
    y, inside_y = y.long(), inside_y.long()
    return Images(known, y[:rows], held_out, y[len(y) - last :], inside, inside_y[:test], outside, mean, scale)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def synthetic(rows: int, test: int) -> Images:
    """Noise with a bright row whose place is the label, and noise without, for quick runs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + 3 * test, 1, 28, 28, generator=generator)
    y = torch.arange(rows + 2 * test) % 10
    x[torch.arange(len(y)), 0, 2 * y] += 3.0
    sizes = (rows, test, test)
    (known, held_out, inside, outside), labels = x.split((*sizes, test)), y.split(sizes)
    return Images(known, labels[0], held_out, labels[1], inside, labels[2], outside, 128.0, 64.0)


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How everything on one data set is trained: fixed beforehand.

    Attributes:
        rows: Training images.
        test: Test images, of each data set.
        channels: Of the two convolutions; LeNet-5 has 6 and 16.
        epochs: Of point estimates and members of the ensemble.
        noisy_epochs: Of dropout, whose gradients are noisier.
        variational_epochs: Of variational fits, which begin at the point estimate of the same seed.
        batch_size: Images per step.
        learning_rate: Of Adam; constant for half of the epochs, then falling to zero.
        prior: Standard deviation of the normal prior on weights (of Laplace where the evidence begins).
        rate: Of dropout, on the inputs of all layers but the first.
        members: Of the ensemble.
        variational_members: Of the ensemble of variational fits.
        snapshots: Of SWAG, each an epoch.
        samples: Draws in a prediction.
    """

    rows: int = 55_000
    test: int = 10_000
    channels: tuple[int, int] = (6, 16)
    epochs: int = 5
    noisy_epochs: int = 6
    variational_epochs: int = 3
    batch_size: int = 128
    learning_rate: float = 2e-3
    prior: float = 0.3
    rate: float = 0.1
    members: int = 10
    variational_members: int = 3
    snapshots: int = 10
    samples: int = 20


RECIPES = {"MNIST": Recipe(), "FashionMNIST": Recipe(channels=(16, 32))}
QUICK = Recipe(
    rows=64, test=100, epochs=1, noisy_epochs=1, variational_epochs=1, batch_size=32, members=2, variational_members=2,
    snapshots=3, samples=4,
)  # fmt: skip


def lenet5(*, channels: tuple[int, int] = (6, 16), seed: int = 0) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling: 44,426 weights with 6 and 16 channels."""
    first, second = channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, first, 5),  # (B, 6, 24, 24)
            nn.MaxPool2d(2),
            nn.ReLU(),  # after pooling: the same numbers, and fewer of them
            nn.Conv2d(first, second, 5),  # (B, 16, 8, 8)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),  # (B, 256)
            nn.Linear(16 * second, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


# --- fits ------------------------------------------------------------------------------------------------------------


class ImageFits:
    """The posteriors on one data set, each fitted once and kept in a folder.

    Args:
        name: One of :data:`SETS`.
        images: The data.
        recipe: How everything is trained.
        kept: Where fits are kept.
    """

    def __init__(self, name: str, images: Images, recipe: Recipe, kept: Fits):
        self.name, self.images, self.recipe, self.kept = name, images, recipe, kept

    def posterior(self, method: str) -> Posterior:
        """The posterior by one of :data:`METHODS`."""
        import knowable as kn

        if method == "MAP":
            return self.mode
        if method == "MCDropout":
            return self._fit(method, kn.MCDropout(self.recipe.rate, **self._training(self.recipe.noisy_epochs)))
        if method == "MeanFieldVI":
            return self._variational(0)
        if method == "Laplace, last layer":
            return self._fit(method, kn.Laplace(structure="full", start=self.mode), tuned=True, random="last_layer")
        if method == "Laplace, kron":
            return self._fit(method, kn.Laplace(structure="kron", start=self.mode), tuned=True)
        if method == "SWAG":
            swag = kn.SWAG(start=self.mode, snapshots=self.recipe.snapshots, batch_size=self.recipe.batch_size)
            return self._fit(method, swag)
        if method == "DeepEnsemble":
            atoms = [self._point(seed).mean() for seed in range(self.recipe.members)]
            return kn.Particles(self.model(), {name: torch.stack([each[name] for each in atoms]) for name in atoms[0]})
        members = [self._variational(seed) for seed in range(self.recipe.variational_members)]
        return kn.Mixture(self.model(), members)

    @cached_property
    def mode(self) -> Posterior:
        """The point estimate."""
        return self._point(0)

    def model(self, *, seed: int = 0, tuned: bool = False, random: str = "*") -> Model:
        """The network with its prior; ``tuned``: with a scale for each of its tensors, which the evidence chooses."""
        import knowable as kn

        prior = kn.Normal(self.recipe.prior)
        prior = kn.EmpiricalBayes(prior, per="parameter") if tuned else prior
        return kn.Model(lenet5(channels=self.recipe.channels, seed=seed), kn.Categorical(), prior, random=random)

    def _point(self, seed: int) -> Posterior:
        import knowable as kn

        return self._fit("MAP", kn.MAP(**self._training(self.recipe.epochs)), seed=seed)

    def _variational(self, seed: int) -> Posterior:
        import knowable as kn

        model = self.model(seed=seed)
        model.net.load_state_dict(self._point(seed).mean())  # where it begins
        method = kn.MeanFieldVI(**self._training(self.recipe.variational_epochs))
        return self._fit(f"MeanFieldVI after {self.recipe.epochs} epochs", method, seed=seed, model=model)

    def _fit(
        self, title: str, method: Method, *, seed: int = 0, model: Model | None = None, **settings: Any
    ) -> Posterior:
        wanted = f"{self.name}, {title}, seed {seed}, prior {self.recipe.prior:g}, channels {self.recipe.channels}"
        rows = self.images.x, self.images.y
        model = self.model(seed=seed, **settings) if model is None else model
        return self.kept.fit(wanted, method, model, rows, seed=seed)[0]

    def _training(self, epochs: int) -> Mapping[str, Any]:
        recipe = self.recipe
        return {"epochs": epochs, "batch_size": recipe.batch_size, "learning_rate": recipe.learning_rate}


def slug(method: str) -> str:
    """The folder of a method's posterior: ``"Laplace, last layer"`` is in ``laplace_last_layer``."""
    return method.replace(",", "").replace(" ", "_").lower()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what is not yet there, and save every posterior as ``out/<set>/<method>``, for ``kn.load``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_fits", description=main.__doc__)
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="which sets (default: both)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the posteriors, and of fits to take up again"
    )
    parser.add_argument("--method", default="*", help="glob of methods")
    options = parser.parse_args(arguments)
    for name in options.sets or SETS:
        recipe = RECIPES[name]
        images = load(name, rows=recipe.rows, test=recipe.test)
        fits = ImageFits(name, images, recipe, Fits(options.out / "fits"))
        for method in METHODS:
            if fnmatch(method, options.method):
                fits.posterior(method).save(options.out / "posteriors" / name / slug(method), overwrite=True)
                say(f"{name}, {method}: saved")


if __name__ == "__main__":
    main()
