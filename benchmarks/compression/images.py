"""The images of these studies: MNIST and a part of CIFAR-10, a part held out for choosing, and noise for quick runs.

Files are read from the folder that ``KNOWABLE_DATA`` names: ``mnist.npz`` and ``cifar10_subset.npz`` with ``x_train``,
``y_train``, ``x_test`` and ``y_test``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.uci_data import data_folder

CLASSES = 10
HELD_OUT = 5_000


@dataclass(frozen=True, eq=False)
class Images:
    """Images to learn from, and those to be judged by."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y


def mnist(rows: int = 60_000, *, judged: str = "test") -> Images:
    """MNIST with pixels from 0 to 1, ``(N, 28, 28)``.

    Args:
        rows: Training images, the first of them.
        judged: What the result is judged by: ``"test"``, or ``"held out"``: the last 5,000 training images, which must
            not be among the first ``rows``. Test images are not looked at then.
    """
    with np.load(data_folder() / "mnist.npz") as file:
        x, y = file["x_train"], file["y_train"]
        test_x, test_y = (file["x_test"], file["y_test"]) if judged == "test" else (x[-HELD_OUT:], y[-HELD_OUT:])
    if judged != "test" and rows > len(x) - HELD_OUT:
        raise ValueError(f"{rows} training images of {len(x)} leave no {HELD_OUT} to be held out")
    return Images(_pixels(x[:rows]), _labels(y[:rows]), _pixels(test_x), _labels(test_y))


def cifar10(rows: int = 10_000) -> Images:
    """The subset of CIFAR-10, ``(N, 3, 32, 32)``, each channel standardised by the training images.

    Its rows are sorted by nothing, so that the first ones are as good as any.
    """
    with np.load(data_folder() / "cifar10_subset.npz") as file:
        x, test_x = (_pixels(file[f"x_{part}"]).permute(0, 3, 1, 2) for part in ("train", "test"))
        y, test_y = (_labels(file[f"y_{part}"]) for part in ("train", "test"))
    mean, scale = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return Images((x[:rows] - mean) / scale, y[:rows], (test_x - mean) / scale, test_y)


def synthetic(rows: int, test: int, shape: tuple[int, ...] = (28, 28)) -> Images:
    """Dim noise with a bright row whose place is the label, for quick runs."""
    generator = torch.Generator().manual_seed(0)
    x = 0.2 * torch.rand(rows + test, *shape, generator=generator)
    y = torch.arange(len(x)) % CLASSES
    x[torch.arange(len(x)), ..., 2 * y, :] += 0.7
    return Images(x[:rows], y[:rows], x[rows:], y[rows:])


def with_random_labels(images: Images, *, seed: int) -> Images:
    """The same images with labels drawn uniformly, which say nothing about them (Zhang et al., 2017)."""
    generator = torch.Generator().manual_seed(seed)
    y, test_y = (torch.randint(CLASSES, each.shape, generator=generator) for each in (images.y, images.test_y))
    return replace(images, y=y, test_y=test_y)


def _pixels(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).float().div(255)


def _labels(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).long()
