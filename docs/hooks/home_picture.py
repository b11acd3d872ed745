"""Draws the picture of the home page: ``python docs/hooks/home_picture.py`` writes docs/assets/home.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import knowable as kn

PLACE = Path(__file__).parents[1] / "assets" / "home.svg"
FITS = {"Ordinary training": kn.MaximumLikelihood(), "The same network, Bayesian": kn.Laplace()}


def fit(method: Any, data: kn.datasets.Dataset) -> Any:
    """The network of the page, fitted with a seed of its own."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    return method.fit(kn.Model(net, kn.Gaussian()), (data.x, data.y), progress=False)


def draw(axes: Any, title: str, grid: torch.Tensor, prediction: Any, data: kn.datasets.Dataset) -> None:
    """Mean, epistemic band and 90 % interval along the input, with the data."""
    line, middle = grid.flatten(), prediction.mean.flatten()
    low, high = (side.flatten() for side in prediction.interval(0.9))
    doubt = 1.645 * prediction.epistemic.sqrt().flatten()
    axes.fill_between(line, low, high, color="tab:blue", alpha=0.2, lw=0, label="90 % interval")
    axes.fill_between(line, middle - doubt, middle + doubt, color="tab:orange", alpha=0.5, lw=0, label="ignorance")
    axes.plot(line, middle, color="black", lw=1.2, label="prediction")
    axes.plot(line, data.truth.mean(grid), color="black", lw=1, ls=":", label="truth")
    axes.plot(data.x, data.y, ".", color="gray", ms=4)
    axes.set(title=title, ylim=(-1.8, 1.8), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def main() -> None:
    """Fit twice, draw side by side."""
    data, grid = kn.datasets.sine_with_gap(), torch.linspace(-3.2, 3.2, 300).unsqueeze(1)
    plt.rcParams |= {"svg.hashsalt": "knowable", "svg.fonttype": "path", "font.size": 9}
    figure, both = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
    for axes, (title, method) in zip(both, FITS.items(), strict=True):
        draw(axes, title, grid, fit(method, data).predict(grid, samples=256), data)
    figure.legend(*both[1].get_legend_handles_labels(), ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(PLACE, metadata={"Date": None})


if __name__ == "__main__":
    main()
