"""Membranes in electron micrographs: how many pixels are right, and whether uncertainty tells where they are wrong.

Thirty slices of a stack (ISBI 2012 challenge; Arganda-Carreras et al., 2015; Cardona et al., 2010), averaged to 256 x
256 pixels. A small U-Net learns from slices 0 to 19, masks get their thresholds on slices 20 to 23, and everything is
scored on slices 24 to 29. Methods: one deterministic network; Laplace of its last layer; MC dropout; an ensemble of
networks, of which the deterministic one is the first; and mean-field VI from its weights. Training sees random crops,
turned by multiples of 90 degrees and flipped; an epoch is as many pixels as the slices have, and these are the number
of rows of the posterior.

The masks miss at most a given share of the membrane, on average over tiles: conformal risk control (Angelopoulos et
al., 2024) with the tiles of slices 20 to 23. Neighbouring slices look alike and slices far apart less so, so that the
guarantee, which is for exchangeable tiles, is put to the test here.

The images are read from ``isbi2012_em_256.npz`` in the folder that ``KNOWABLE_DATA`` names: ``x`` and ``y``, ``(30,
256, 256)`` of bytes, y 1 for membrane.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder
from benchmarks.unet import UNet

if TYPE_CHECKING:
    from knowable.core.model.data import Data
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior
    from knowable.core.prediction.prediction import ClassPrediction

METHODS = ("MAP", "Laplace, last layer", "MCDropout", "DeepEnsemble", "MeanFieldVI")
_HEADER = (
    "method", "pixels right", "NLL per pixel", "ECE", "errors found by entropy, AUROC",
    "by mutual information", "membrane missed by the mask", "pixels in the mask", "minutes",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How everything is trained and scored.

    Attributes:
        train: Slices to learn from, the first ones.
        calibration: Slices that set the thresholds, those behind them; the rest are for scores.
        crop: Side of a training crop.
        batch_size: Crops per step.
        epochs: Of each network; mean-field VI has half as many, since it begins at the deterministic one.
        learning_rate: Of each network.
        channels: Of the U-Net at full resolution.
        depth: Its resolutions.
        members: Of the ensemble.
        rate: Of dropout of whole channels, on the inputs of all layers but the first.
        samples: Draws in a prediction.
        tile: Side of the tiles in which missed membrane is counted.
        missed: Share of the membrane that a mask may miss.
    """

    train: int = 20
    calibration: int = 4
    crop: int = 128
    batch_size: int = 4
    epochs: int = 50
    learning_rate: float = 5e-3
    channels: int = 16
    depth: int = 4
    members: int = 4
    rate: float = 0.1
    samples: int = 32
    tile: int = 64
    missed: float = 0.1


RECIPE = Recipe()
_QUICK = Recipe(
    train=6, calibration=4, crop=16, epochs=2, channels=4, depth=2, members=2, samples=4, tile=16, missed=0.2
)


@dataclass(frozen=True, eq=False)
class Slices:
    """Images ``(rows, 1, height, width)`` and masks ``(rows, height, width)`` of zeros and ones, in three parts."""

    train: tuple[Tensor, Tensor]
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, recipe: Recipe) -> Slices:
        """Cut in this order, and standardised by the first part."""
        first = x[: recipe.train]
        x = ((x - first.mean()) / first.std()).unsqueeze(1)
        cuts = [recipe.train, recipe.calibration, len(x) - recipe.train - recipe.calibration]
        return cls(*zip(x.split(cuts), y.split(cuts), strict=True))


def load(recipe: Recipe) -> Slices:
    """The membranes."""
    with np.load(data_folder() / "isbi2012_em_256.npz") as file:
        x, y = torch.from_numpy(file["x"]).float(), torch.from_numpy(file["y"]).long()
    return Slices.of(x, y, recipe)


def synthetic(recipe: Recipe) -> Slices:
    """Shapes on a background, for quick runs."""
    import knowable as kn

    data = kn.datasets.shapes(recipe.train + recipe.calibration + 4, size=32)
    return Slices.of(data.x[:, 0], (data.y > 0).long(), recipe)


class Crops(Dataset):
    """Random crops, turned and flipped at random; as many as cover the images once.

    Args:
        x: Images.
        y: Their masks.
        size: Side of a crop.
    """

    def __init__(self, x: Tensor, y: Tensor, size: int):
        self.x, self.y, self.size = x, y, size
        self.each = (x.shape[-2] // size) * (x.shape[-1] // size)

    def __len__(self) -> int:
        return len(self.x) * self.each

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.x[index // self.each], self.y[index // self.each]
        top, left = (int(torch.randint(side - self.size + 1, ())) for side in y.shape)
        turns, flipped = int(torch.randint(4, ())), bool(torch.randint(2, ()))

        def cut(image: Tensor) -> Tensor:
            image = image[..., top : top + self.size, left : left + self.size].rot90(turns, (-2, -1))
            return (image.flip(-1) if flipped else image).contiguous()

        return cut(x), cut(y)


class Study:
    """The fits of one run, and their scores.

    Args:
        recipe: How everything is trained and scored.
        slices: The data.
        fits: Where fits are kept.
    """

    def __init__(self, recipe: Recipe, slices: Slices, fits: Fits):
        self.recipe, self.slices, self.fits = recipe, slices, fits

    @cached_property
    def crops(self) -> Data:
        """The training data: random crops, as an epoch sees them."""
        import knowable as kn

        crops = Crops(*self.slices.train, self.recipe.crop)
        return kn.Data(DataLoader(crops, batch_size=self.recipe.batch_size, shuffle=True))

    @cached_property
    def networks(self) -> list[Posterior]:
        """Deterministic networks from different initial weights; the first is the reference, all are the ensemble."""
        return [self._map(seed) for seed in range(self.recipe.members)]

    def _map(self, seed: int) -> Posterior:
        import knowable as kn

        return self._fit(f"MAP {seed}", kn.MAP(**self._training), seed=seed)

    def posterior(self, method: str) -> Posterior:
        """The posterior by one of :data:`METHODS`."""
        import knowable as kn
        from knowable.core.posterior.mixture import Mixture

        if method == "MAP":
            return self._map(0)
        if method == "Laplace, last layer":
            model = self._model(prior=kn.EmpiricalBayes(kn.Normal(1.0)), random="last_layer")
            return kn.Laplace(structure="full").fit(model, self.crops, start=self._map(0), progress=False)
        if method == "MCDropout":
            return self._fit(method, kn.MCDropout(self.recipe.rate, **self._training))
        if method == "DeepEnsemble":
            return Mixture(self._model(), self.networks)
        model = self._model(prior=kn.EmpiricalBayes(kn.Normal(0.1), per="parameter"))
        model.net.load_state_dict({**self._map(0).mean(), **self._map(0).buffers})
        training = {**self._training, "epochs": max(1, self.recipe.epochs // 2)}
        return self._fit(method, kn.MeanFieldVI(**training), model)

    def _fit(self, name: str, method: Any, model: Model | None = None, *, seed: int = 0) -> Posterior:
        model = self._model(seed=seed) if model is None else model
        return self.fits.fit(f"segmentation {name}", method, model, self.crops, seed=seed)[0]

    @property
    def _training(self) -> dict[str, Any]:
        recipe = self.recipe
        return {"epochs": recipe.epochs, "learning_rate": recipe.learning_rate, "batch_size": recipe.batch_size}

    def _model(self, *, prior: Any = None, random: str = "*", seed: int = 0) -> Model:
        import knowable as kn

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = UNet(self.recipe.channels, self.recipe.depth)
        return kn.Model(network, kn.Bernoulli(), kn.Normal(1.0) if prior is None else prior, random=random)

    def scores(self, method: str) -> dict[str, Any]:
        """All figures of one method."""
        posterior, recipe = self.posterior(method), self.recipe
        (held_out, known), (x, y) = self.slices.calibration, self.slices.test
        calibration, test = (posterior.predict(each, samples=recipe.samples) for each in (held_out, x))
        mask = mask_of(calibration, known, test, recipe)
        missed = missed_shares(mask.double(), y, recipe.tile).view(len(y), -1).mean(1)
        seconds = posterior.diagnostics.seconds if posterior.diagnostics else 0.0
        if method == "DeepEnsemble":
            seconds = sum(each.diagnostics.seconds for each in self.networks)
        return {
            **pixel_scores(test, y),
            "missed": mean_and_error(missed.tolist()),
            "masked": mean_and_error(mask.double().mean((1, 2)).tolist()),
            "minutes": seconds / 60,
        }


# --- scores ----------------------------------------------------------------------------------------------------------


def pixel_scores(prediction: ClassPrediction, y: Tensor) -> dict[str, Any]:
    """Mean and standard error over images of what is scored pixel by pixel, for yes/no predictions of masks ``y``."""
    import knowable as kn

    probs, labels = prediction.probs.double().reshape(y.shape), prediction.labels.reshape(y.shape)
    kinds = {"entropy": prediction.total, "mutual_information": prediction.epistemic}
    right = labels == y
    chosen = torch.where(y == 1, probs, 1 - probs).clamp_min(1e-30)
    found: dict[str, Any] = {
        "accuracy": mean_and_error(right.double().mean((1, 2)).tolist()),
        "nll": mean_and_error((-chosen.log()).mean((1, 2)).tolist()),
        "ece": _jackknife(lambda rows: kn.metrics.ece(probs[rows].flatten(), y[rows].flatten()), len(y)),
    }
    for name, uncertainty in kinds.items():
        per_image = [
            kn.metrics.auroc(each[ok], each[~ok]) if not ok.all() else math.nan
            for each, ok in zip(uncertainty.reshape(y.shape), right, strict=True)
        ]
        several = uncertainty.max() > 1e-9  # one network has nothing to disagree with
        found[f"errors_{name}"] = mean_and_error([each for each in per_image if each == each]) if several else None
    return found


def _jackknife(score: Any, count: int) -> list[float]:
    """A score of all images, and its standard error from leaving out each in turn."""
    without = [score([row for row in range(count) if row != left]) for left in range(count)]
    spread = sum((each - statistics.fmean(without)) ** 2 for each in without)
    return [score(list(range(count))), math.sqrt((count - 1) / count * spread)]


def mean_and_error(values: list[float]) -> list[float]:
    """Mean and its standard error."""
    if not values:
        return [math.nan, math.nan]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return [statistics.fmean(values), error]


# --- masks with a bounded risk ---------------------------------------------------------------------------------------


def mask_of(calibration: ClassPrediction, known: Tensor, new: ClassPrediction, recipe: Recipe) -> Tensor:
    """Masks ``(images, height, width)`` that miss at most ``recipe.missed`` of the membrane, on average over tiles."""
    import knowable as kn

    grid = torch.linspace(1.0, 0.0, 1001)
    losses = missed_shares(calibration.probs.reshape(known.shape), known, recipe.tile, grid)
    threshold = grid[kn.conformal.control_risk(losses, recipe.missed).index]
    return new.probs.reshape(-1, *known.shape[1:]) >= threshold


def missed_shares(probs: Tensor, y: Tensor, tile: int, grid: Tensor | None = None) -> Tensor:
    """Share of the membrane below each threshold of the ``grid`` (1/2 if none is given) in each tile."""
    import knowable as kn

    grid = torch.tensor([0.5]) if grid is None else grid
    return kn.conformal.missed_shares(_tiles(probs, tile), _tiles(y, tile), grid)


def _tiles(images: Tensor, side: int) -> Tensor:
    """``(images * tiles, side, side)``, all tiles of the first image first."""
    return images.unfold(1, side, side).unfold(2, side, side).flatten(0, 2)


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods; ``only`` is a glob of methods. Finished rows are not run again, finished fits are taken up."""
    recipe = _QUICK if quick else RECIPE
    study = Study(recipe, synthetic(recipe) if quick else load(recipe), Fits.beside(rows))
    cases = {method: partial(study.scores, method) for method in METHODS}
    found = work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    if rows.path is not None and only == "*":
        say(f"written: {draw(study, rows.path.with_suffix('.png'))}")
    return describe("segmentation", quick=quick, packages=(), recipe=asdict(recipe), methods=found)


def draw(study: Study, path: Path) -> Path:
    """Pictures of a held-out slice by the ensemble."""
    import knowable as kn

    (held_out, known), (x, y) = study.slices.calibration, (each[:1] for each in study.slices.test)
    posterior = study.posterior("DeepEnsemble")
    new = posterior.predict(x)
    mask = mask_of(posterior.predict(held_out), known, new, study.recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    maps = {f"misses at most {study.recipe.missed:.0%}": mask}
    kn.pixel_plot(new, x, y, maps=maps).savefig(path, dpi=110)
    return path


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each method."""
    recipe = run["recipe"]
    title = (
        f"Membranes: U-Net of {recipe['channels']} channels and {recipe['depth']} resolutions, "
        f"{recipe['epochs']} epochs on {recipe['train']} slices"
    )
    note = (
        f"Mean ± standard error over the test slices, for one training run. Ensemble of {recipe['members']}, dropout "
        f"{recipe['rate']:g}, {recipe['samples']} draws. AUROC: the probability that a pixel labelled wrong is more "
        f"uncertain than one labelled right. Masks were to miss at most {recipe['missed']:g} of the membrane, on "
        f"average over tiles of {recipe['tile']} x {recipe['tile']} pixels. Minutes are those of the fit on a busy "
        f"machine; Laplace and mean-field VI add theirs to those of MAP."
    )
    lines = [_cells(name, row) for name, row in run["methods"].items()]
    picture = "![a slice, its membrane, the uncertainty of both kinds and the mask](segmentation.png)\n"
    return page(run, table(title, _HEADER, lines, note), picture)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    keys = ("accuracy", "nll", "ece", "errors_entropy", "errors_mutual_information", "missed", "masked")
    found = [("" if row[key] is None else f"{row[key][0]:.4f} ± {row[key][1]:.4f}") for key in keys]
    return [name, *found, f"{row['minutes']:.1f}"]
