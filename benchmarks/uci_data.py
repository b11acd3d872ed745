"""UCI regression as the studies on it share it: the twenty standard splits, scaling, the network, means and errors.

The splits are those of Hernández-Lobato and Adams (2015). The data is read from the folder that the environment
variable ``KNOWABLE_DATA`` names: ``uci/<name>.npz`` with ``x``, ``y`` and ``test_mask`` (splits, rows).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from knowable.datasets.dataset import Scaler

SPLITS = 20
_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


@dataclass(frozen=True, eq=False)
class Split:
    """Rows to learn from and rows to predict, in original units."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def data_folder() -> Path:
    """The folder with the data, or an error that says how to name it."""
    folder = os.environ.get("KNOWABLE_DATA")
    if not folder:
        raise FileNotFoundError("set KNOWABLE_DATA to the folder that holds the data (uci/*.npz, mnist.npz, ...)")
    return Path(folder)


def load(name: str, number: int) -> Split:
    """A standard split of a data set."""
    with np.load(data_folder() / "uci" / f"{name}.npz") as file:
        return cut(file["x"], file["y"], file["test_mask"][number])


def cut(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> Split:
    """Rows by a mask that is true for those to predict."""
    tensors = (torch.from_numpy(each).float() for each in (x[~test], y[~test], x[test], y[test]))
    return Split(*tensors)


def synthetic() -> Split:
    """A noisy plane, for quick runs."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 3))
    y = 100.0 + 10.0 * x.sum(1) + generator.standard_normal(40)
    return cut(x, y, np.arange(40) % 4 == 0)


def validation_parts(split: Split, *, folds: int, seed: int) -> list[Split]:
    """The rows to learn from, cut ``folds`` times: each is predicted once, by the others. No test row is used."""
    order = torch.randperm(len(split.x), generator=torch.Generator().manual_seed(seed))
    held = [order[number::folds] for number in range(folds)]
    rest = [torch.cat(held[:number] + held[number + 1 :]) for number in range(folds)]
    return [Split(split.x[r], split.y[r], split.x[h], split.y[h]) for r, h in zip(rest, held, strict=True)]


def scaler_of(split: Split) -> Scaler:
    """Standardises inputs and targets by the rows to learn from."""
    from knowable.datasets.dataset import Scaler

    scale = split.x.std(0, correction=0)
    return Scaler(
        split.x.mean(0), torch.where(scale > 0, scale, 1.0), split.y.mean().item(), split.y.std(correction=0).item()
    )


def network(inputs: int, *, hidden: Sequence[int], activation: str, outputs: int, seed: int) -> nn.Module:
    """A fully connected network, its weights drawn with ``seed``; the global generator is left as it was."""
    widths, layers = (inputs, *hidden), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for first, second in pairwise(widths):
            layers += [nn.Linear(first, second), _ACTIVATIONS[activation]()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the mean (nan for one value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error
