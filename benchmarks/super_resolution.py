"""Fashion-MNIST from 7 x 7 to 28 x 28 pixels: how sharp, and do intervals for every pixel hold what they promise?

The small images are averages over 4 x 4 pixels. A small convolutional network works at 7 x 7, and what it adds to the
bicubic image, with the logarithm of the noise at each pixel, comes out at 28 x 28 (sub-pixel convolution; Shi et al.,
2016). Noise is normal or Student-t, of a size that the network predicts; never below a grey level, since much of an
image is exactly black. An ensemble adds what networks do not agree on.

Intervals are the model's own, and those of conformal prediction on held-out images (mean plus and minus a multiple of
the standard deviation; the pixels of an image are outside with the promised share on average over images). Black
surroundings are easy, so coverage is also shown for pixels that are not dark in the bicubic image, and intervals are
also made for these alone.

The images are read from ``fashion_mnist.npz`` in the folder that ``KNOWABLE_DATA`` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.compression.working import Fits, work_through
from benchmarks.segmentation import mean_and_error
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior
    from knowable.core.prediction.prediction import RegressionPrediction

FACTOR = 4
GREY = 1 / 255  # a grey level
DARK = 0.05  # bicubic pixels below it are surroundings
METHODS = ("bicubic", "Gaussian", "Student-t", "ensemble of Student-t")
_HEADER = (
    "method", "RMSE", "PSNR dB", "NLL per pixel", "own 90% intervals hold", "width",
    "conformal ones hold", "width", "of pixels not dark", "made for these: hold", "width", "minutes",
)  # fmt: skip
_NOTE = (
    "Mean ± standard error over {test:,} test images, of {train:,} for training and {calibration:,} for conformal "
    "prediction. Widths are means over pixels of what of an interval lies between black, 0, and white, 1; NLL is in "
    "units of these. Minutes are those of the fit on a busy machine."
)


@dataclass(frozen=True)
class Recipe:
    """How everything is trained and scored.

    Attributes:
        train: Training images.
        calibration: Held-out images for conformal prediction, taken from behind them.
        test: Test images.
        channels: Of the hidden layers.
        epochs: Of each network.
        batch_size: Images per step.
        learning_rate: Of each network.
        members: Of the ensemble.
        level: Of the intervals.
    """

    train: int = 20_000
    calibration: int = 2_000
    test: int = 2_000
    channels: int = 48
    epochs: int = 8
    batch_size: int = 64
    learning_rate: float = 2e-3
    members: int = 3
    level: float = 0.9


RECIPE = Recipe()
_QUICK = Recipe(train=64, calibration=32, test=16, channels=8, epochs=2, batch_size=16, members=2)
Pairs = tuple[Tensor, Tensor]
"""Small images ``(n, 1, 7, 7)`` and large ones ``(n, 28, 28)``, from 0 to 1."""


def pairs(large: Tensor) -> Pairs:
    """Large images with their averages over 4 x 4 pixels."""
    return nn.functional.avg_pool2d(large.unsqueeze(1), FACTOR), large


def load(recipe: Recipe) -> tuple[Pairs, Pairs, Pairs]:
    """Images for training, for calibration and for scores."""
    with np.load(data_folder() / "fashion_mnist.npz") as file:
        first, last = file["x_train"][: recipe.train + recipe.calibration], file["x_test"][: recipe.test]
    first, last = (torch.from_numpy(each).float() / 255 for each in (first, last))
    return pairs(first[: recipe.train]), pairs(first[recipe.train :]), pairs(last)


def synthetic(recipe: Recipe) -> tuple[Pairs, Pairs, Pairs]:
    """Shapes, for quick runs."""
    import knowable as kn

    x, _ = kn.datasets.shapes(recipe.train + recipe.calibration + recipe.test, size=28)
    parts = (0.5 + 0.2 * x[:, 0]).clamp(0, 1).split([recipe.train, recipe.calibration, recipe.test])
    return pairs(parts[0]), pairs(parts[1]), pairs(parts[2])


def bicubic(small: Tensor) -> Tensor:
    """Small images enlarged, ``(n, 28, 28)``."""
    large = nn.functional.interpolate(small, scale_factor=FACTOR, mode="bicubic", align_corners=False)
    return large[:, 0].clamp(0.0, 1.0)


class Enlarger(nn.Module):
    """Means and log scales of all pixels, ``(n, 28, 28, 2)``, from small images.

    Args:
        channels: Of the hidden layers.
    """

    def __init__(self, channels: int):
        super().__init__()
        widths = [1, channels, channels, channels, channels]
        layers = [
            part for before, width in pairwise(widths) for part in (nn.Conv2d(before, width, 3, padding=1), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, 2 * FACTOR**2, 3, padding=1), nn.PixelShuffle(FACTOR))

    def forward(self, small: Tensor) -> Tensor:
        """Means are the bicubic image and what is added; scales are at least a grey level."""
        added, scale = self.layers(small - 0.3).unbind(1)
        log_scale = math.log(GREY) + nn.functional.softplus(scale)
        return torch.stack([bicubic(small) + added, log_scale], dim=-1)


class Study:
    """The fits of one run, and their scores.

    Args:
        recipe: How everything is trained and scored.
        parts: Images for training, for calibration and for scores.
        fits: Where fits are kept.
    """

    def __init__(self, recipe: Recipe, parts: tuple[Pairs, Pairs, Pairs], fits: Fits):
        self.recipe, self.fits = recipe, fits
        self.train, self.calibration, self.test = parts

    def posterior(self, method: str) -> Posterior:
        """The posterior by one of :data:`METHODS` but the first."""
        if method != METHODS[-1]:
            return self._network(method, 0)
        from knowable.core.posterior.mixture import Mixture

        members = [self._network("Student-t", seed) for seed in range(self.recipe.members)]
        found = Mixture(members[0].model, members)
        found.target_shape = members[0].target_shape
        return found

    def _network(self, noise: str, seed: int) -> Posterior:
        import knowable as kn

        recipe = self.recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Enlarger(recipe.channels)
        likelihood = kn.HeteroscedasticGaussian() if noise == "Gaussian" else kn.HeteroscedasticStudentT()
        method = kn.MAP(epochs=recipe.epochs, batch_size=recipe.batch_size, learning_rate=recipe.learning_rate)
        name = f"super-resolution {noise} {seed}"
        return self.fits.fit(name, method, kn.Model(network, likelihood), self.train, seed=seed)[0]

    def scores(self, method: str) -> dict[str, Any]:
        """All figures of one method."""
        x, y = self.test
        if method == METHODS[0]:
            return image_scores(bicubic(x), y)
        posterior = self.posterior(method)
        held_out, test = (posterior.predict(each) for each in (self.calibration[0], x))
        low, high = test.interval(self.recipe.level)
        seconds = posterior.diagnostics.seconds if posterior.diagnostics else 0.0
        if method == METHODS[-1]:
            seconds = sum(member.diagnostics.seconds for member in posterior.members)  # type: ignore[attr-defined]
        log_density = torch.logsumexp(test.components.log_prob(y) + test.log_weights.view(-1, 1, 1, 1), 0)
        return {
            **image_scores(test.mean, y),
            "nll": mean_and_error((-log_density).double().mean((1, 2)).tolist()),
            "own": interval_scores(low, high, y, bicubic(x)),
            "conformal": interval_scores(*self._conformal(held_out, test), y, bicubic(x)),
            "not_dark": interval_scores(*self._conformal(held_out, test, dark=False), y, bicubic(x)),
            "minutes": seconds / 60,
        }

    def _conformal(
        self, held_out: RegressionPrediction, new: RegressionPrediction, *, dark: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Intervals for all pixels, or for those that are not dark."""
        import knowable as kn

        alpha = 1 - self.recipe.level
        if dark:
            return kn.conformal.prediction_intervals(held_out, self.calibration[1], new, alpha, score="normalised")
        return intervals_of_bright(held_out, *self.calibration, new, alpha)


def intervals_of_bright(
    held_out: RegressionPrediction, x: Tensor, y: Tensor, new: RegressionPrediction, alpha: float
) -> tuple[Tensor, Tensor]:
    """Intervals outside of which lies at most a share ``alpha`` of the pixels that are not dark, image by image."""
    import knowable as kn

    scores = kn.conformal.normalised_scores(held_out.mean, held_out.std, y)
    scores = scores.masked_fill(bicubic(x) < DARK, math.nan)
    grid = torch.linspace(0.0, 20.0, 2001)
    losses = kn.conformal.outside_shares(scores, grid)
    times = grid[kn.conformal.control_risk(losses, alpha).index]
    return new.mean - times * new.std, new.mean + times * new.std


def image_scores(mean: Tensor, y: Tensor) -> dict[str, Any]:
    """Root mean squared error and peak signal-to-noise ratio, each with its standard error over images."""
    squared = (mean - y).double().square().mean((1, 2))
    value, error = mean_and_error(squared.tolist())
    return {
        "rmse": [math.sqrt(value), error / (2 * math.sqrt(value))],
        "psnr": mean_and_error((-10 * squared.clamp_min(1e-12).log10()).tolist()),
    }


def interval_scores(low: Tensor, high: Tensor, y: Tensor, enlarged: Tensor) -> dict[str, list[float]]:
    """Share of pixels inside, of those not dark, and the widths, with standard errors over images."""
    inside, width = ((y >= low) & (y <= high)).double(), _width(low, high).double()
    bright = (enlarged >= DARK).double()

    def of_bright(values: Tensor) -> list[float]:
        images = bright.sum((1, 2)) > 0
        return mean_and_error(((values * bright).sum((1, 2))[images] / bright.sum((1, 2))[images]).tolist())

    return {
        "coverage": mean_and_error(inside.mean((1, 2)).tolist()),
        "width": mean_and_error(width.mean((1, 2)).tolist()),
        "coverage_not_dark": of_bright(inside),
        "width_not_dark": of_bright(width),
    }


def _width(low: Tensor, high: Tensor) -> Tensor:
    """Of the part that pixels can have, from black to white."""
    return high.clamp(0.0, 1.0) - low.clamp(0.0, 1.0)


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods; ``only`` is a glob of methods. Finished rows are not run again, finished fits are taken up."""
    recipe = _QUICK if quick else RECIPE
    study = Study(recipe, synthetic(recipe) if quick else load(recipe), Fits.beside(rows))
    cases = {method: partial(study.scores, method) for method in METHODS}
    found = work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    if rows.path is not None and only == "*":
        say(f"written: {draw(study, rows.path.with_suffix('.png'))}")
    return describe("super_resolution", quick=quick, packages=(), recipe=asdict(recipe), methods=found)


def draw(study: Study, path: Path, images: tuple[int, ...] = (0, 1, 8)) -> Path:
    """Pictures of some test images by the ensemble, with the widths of their intervals and where these are wrong."""
    import knowable as kn

    x, y = (each[list(images)] for each in study.test)
    posterior = study.posterior(METHODS[-1])
    new = posterior.predict(x)
    low, high = study._conformal(posterior.predict(study.calibration[0]), new)
    maps = {"width of 90% interval": _width(low, high), "truth outside it": (y < low) | (y > high)}
    path.parent.mkdir(parents=True, exist_ok=True)
    kn.pixel_plot(new, x, y, rows=range(len(images)), maps=maps).savefig(path, dpi=80)
    return path


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each method."""
    recipe = run["recipe"]
    title = f"Fashion-MNIST from 7 x 7 to 28 x 28, {recipe['epochs']} epochs, {recipe['members']} networks"
    lines = [_cells(name, row) for name, row in run["methods"].items()]
    picture = "![images, means, interval widths and where the truth is outside](super_resolution.png)\n"
    return page(run, table(title, _HEADER, lines, _NOTE.format(**recipe)), picture)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    cells = [name, f"{row['rmse'][0]:.4f} ± {row['rmse'][1]:.4f}", f"{row['psnr'][0]:.2f} ± {row['psnr'][1]:.2f}"]
    if "own" not in row:
        return cells
    own, conformal, bright = row["own"], row["conformal"], row["not_dark"]
    shares = [
        own["coverage"], own["width"], conformal["coverage"], conformal["width"], conformal["coverage_not_dark"],
        bright["coverage_not_dark"], bright["width_not_dark"],
    ]  # fmt: skip
    nll = f"{row['nll'][0]:.3f} ± {row['nll'][1]:.3f}"
    return [*cells, nll, *(f"{value:.3f} ± {error:.3f}" for value, error in shares), f"{row['minutes']:.1f}"]
