"""LeNet-5 on MNIST and on FashionMNIST: how right, how calibrated, and whether what is foreign is noticed.

The posteriors are those of ``image_fits``: MAP, dropout, variational inference, Laplace, SWAG, and ensembles. Each is
scored on the test images; by conformal sets of labels; and by how well its uncertainty tells these images from the test
images of the other set, from themselves turned by 90 degrees, and from noise. Several scores of uncertainty are in the
tables. The one that tells held-out training images from turned ones and from noise best is named: it is chosen without
the test images and without the other set. Thresholds, the temperature and the conformal sets come from the held-out
images too.

Scores are made anew from the fits that are kept in ``fits/`` beside the results, without training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.compression.working import Fits, work_through
from benchmarks.image_fits import METHODS, QUICK, RECIPES, ImageFits, Images, Recipe, load, synthetic
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior
    from knowable.core.prediction.prediction import Prediction

ALPHA = 0.01  # share of labels that conformal sets may miss
OUTSIDE = {"other": "{other}", "turned": "images turned by 90 degrees", "noise": "uniform noise"}
OF_PREDICTIONS = ("entropy", "mutual_information", "max_prob", "variance", "energy")
OF_FEATURES = {  # kind, layer: what goes into the last layer, or the second convolution's channels
    "mahalanobis": ("mahalanobis", None),
    "relative": ("relative_mahalanobis", None),
    "mahalanobis, convolution": ("mahalanobis", "5"),
}
_CHOOSING = 2_000  # held-out images by which a score is chosen
_FEATURE_ROWS = 20_000  # training images whose features are kept


# --- scores of one posterior -----------------------------------------------------------------------------------------


def evaluate(fits: ImageFits, method: str) -> dict[str, Any]:
    """Fit, or take the fit that is kept, and score."""
    posterior = fits.posterior(method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # held-out images that cannot say more than their number allows
        scored = Scored(posterior, fits)
        inside, held_out = scored.predict(fits.images.inside), scored.predict(fits.images.held_out)
        return {
            **_predictive(posterior, fits, inside, held_out),
            **_detection(
                scored, fits.images, scored.of(fits.images.inside, inside), scored.of(fits.images.held_out, held_out)
            ),
        }


def _predictive(posterior: Posterior, fits: ImageFits, inside: Prediction, held_out: Prediction) -> dict[str, Any]:
    """Accuracy, NLL and ECE; NLL and ECE at the temperature that is best on held-out images; conformal sets."""
    import knowable as kn

    images = fits.images
    scores = kn.evaluate(inside, images.inside_y)
    cooled = posterior.recalibrated((images.held_out, images.held_out_y), "temperature")
    again = kn.evaluate(cooled.predict(images.inside, samples=fits.recipe.samples), images.inside_y)
    sets = kn.conformal.prediction_sets(held_out, images.held_out_y, inside, alpha=ALPHA)
    return {
        **{name: (scores[name], scores.standard_errors[name]) for name in ("accuracy", "nll")},
        "ece": scores["ece"],
        "recalibrated": {"nll": (again["nll"], again.standard_errors["nll"]), "ece": again["ece"]},
        "sets": {
            "size": sets.sum(1).double().mean().item(),
            "coverage": sets.gather(1, images.inside_y.unsqueeze(1)).double().mean().item(),
        },
    }


def _detection(
    scored: Scored, images: Images, inside: Mapping[str, Tensor], held_out: Mapping[str, Tensor]
) -> dict[str, Any]:
    """By every score: AUROC, average precision, FPR95, TPR at 5%; and which score held-out images choose."""
    some = images.held_out[:_CHOOSING]
    few = {name: values[: len(some)] for name, values in held_out.items()}
    choosing = [_against(few, scored.of(x)) for x in foreign(images, some, seed=1).values()]
    means = {score: sum(each[score]["auroc"] for each in choosing) / len(choosing) for score in held_out}
    outside = {"other": images.outside, **foreign(images, images.inside, seed=0)}
    return {
        "detection": {name: _against(inside, scored.of(x), held_out) for name, x in outside.items()},
        "held_out_auroc": means,
        "chosen": max(means, key=means.__getitem__),
    }


def foreign(images: Images, x: Tensor, *, seed: int) -> dict[str, Tensor]:
    """Images that are turned by 90 degrees, and as many of uniform noise."""
    pixels = torch.randint(0, 256, x.shape, generator=torch.Generator().manual_seed(seed))
    return {"turned": torch.rot90(x, dims=(2, 3)), "noise": images.in_units(pixels)}


class Scored:
    """All detection scores of a posterior, as functions of images."""

    def __init__(self, posterior: Posterior, fits: ImageFits):
        import knowable as kn

        self.posterior, self.samples = posterior, fits.recipe.samples
        x, y = fits.images.x[:_FEATURE_ROWS], fits.images.y[:_FEATURE_ROWS]
        self.densities = {
            name: kn.FeatureDensity(posterior, x, y, kind=kind, layer=layer)
            for name, (kind, layer) in OF_FEATURES.items()
        }

    def predict(self, x: Tensor) -> Prediction:
        """The posterior's prediction."""
        return self.posterior.predict(x, samples=self.samples)

    def of(self, x: Tensor, prediction: Prediction | None = None) -> dict[str, Tensor]:
        """The scores of every image, by name; without those that the posterior does not have."""
        found = dict(_of_prediction(prediction or self.predict(x)))
        return {**found, **{name: score(x) for name, score in self.densities.items()}}


def _of_prediction(prediction: Prediction) -> Iterator[tuple[str, Tensor]]:
    import knowable as kn
    from knowable.evaluation.detect import uncertainty_score

    for name in OF_PREDICTIONS:
        if name in ("mutual_information", "variance") and prediction.samples.shape[0] == 1:
            continue
        try:
            yield name, uncertainty_score(name)(prediction)
        except kn.errors.Unsupported:  # energy, where predictions have no logits
            continue


def _against(
    inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], validation: Mapping[str, Tensor] | None = None
) -> dict[str, dict[str, float]]:
    import knowable as kn

    found = {}
    for name, scores in inside.items():
        each = kn.detect(scores, outside[name], validation=None if validation is None else validation[name])
        found[name] = {
            "auroc": each.auroc, "ap": each.aupr, "fpr95": each.fpr95,
            "tpr": each.tpr_at_fpr(0.05), "fpr": each.fpr_at_threshold(0.05),
        }  # fmt: skip
    return found


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods on both sets; ``only`` is a glob of rows such as ``"MNIST: *"``. Finished rows are not run again."""
    kept, found = Fits.beside(rows), {}
    for name, recipe in RECIPES.items():
        recipe = QUICK if quick else recipe
        lazy = _LazyFits(name, recipe, kept, quick)
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            f"{name}: {method}": partial(_case, lazy, method) for method in METHODS
        }
        found |= work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    recipes = {name: asdict(QUICK if quick else recipe) for name, recipe in RECIPES.items()}
    return describe("image_methods", quick=quick, packages=(), recipes=recipes, rows=found)


class _LazyFits:
    """Data that is read when the first row needs it."""

    def __init__(self, name: str, recipe: Recipe, kept: Fits, quick: bool):
        self.name, self.recipe, self.kept, self.quick = name, recipe, kept, quick

    @cached_property
    def fits(self) -> ImageFits:
        recipe = self.recipe
        size = {"rows": recipe.rows, "test": recipe.test}
        return ImageFits(self.name, synthetic(**size) if self.quick else load(self.name, **size), recipe, self.kept)


def _case(lazy: _LazyFits, method: str) -> dict[str, Any]:
    return evaluate(lazy.fits, method)


# --- tables ----------------------------------------------------------------------------------------------------------

PUBLISHED = {  # READMEs of google/uncertainty-baselines (baselines/mnist) and conformal_training; the papers named
    "MNIST": (
        "uncertainty-baselines, LeNet-5: accuracy 0.991 and NLL 0.037 of one network; 0.994, 0.016 and ECE 0.005 of an "
        "ensemble of 10; 0.985 and 0.048 of variational inference. Conformal sets of a linear model at alpha 0.01 "
        "have 2.24 labels (conformal_training). FashionMNIST as the other set: average precision 0.970 (PostNet)."
    ),
    "FashionMNIST": (
        "uncertainty-baselines, LeNet-5: accuracy 0.910 and NLL 0.321 of one network; 0.932, 0.200 and ECE 0.010 of an "
        "ensemble of 10; 0.895 and 0.292 of variational inference. MNIST as the other set: AUROC 0.955 (DUQ)."
    ),
}
_SETTINGS = (
    "{rows:,} training images, convolutions of {channels[0]} and {channels[1]} channels, prior scale {prior:g}, "
    "{epochs} epochs ({noisy_epochs} of dropout; {variational_epochs} more of variational fits), {members} members "
    "({variational_members} of the variational ensemble), dropout {rate:g}, {snapshots} snapshots, {samples} draws"
)
_PREDICTIVE = (
    "method", "accuracy", "NLL", "ECE", "NLL at the held-out temperature", "ECE there",
    f"labels in conformal sets, alpha {ALPHA:g}", "their coverage",
)  # fmt: skip
_FOREIGN = ("method", "against", "score", "AUROC", "average precision", "FPR95", "TPR at FPR 5%", "FPR there")
_FOREIGN_NOTE = (
    "Two scores for each method: the entropy of the predictive distribution, and the one that tells held-out training "
    "images from the same turned by 90 degrees and from noise best. The threshold for TPR is that at which 5% of the "
    "held-out images are flagged; FPR there: the share of test images that it flags."
)
_SCORES_NOTE = "Mutual information and variance need several draws. Energy is that of the logits, averaged over draws."


def to_markdown(run: Mapping[str, Any]) -> str:
    """For each set: predictions, detection, and AUROC by every score."""
    parts = []
    for name, recipe in run["recipes"].items():
        rows = {key.removeprefix(f"{name}: "): row for key, row in run["rows"].items() if key.startswith(f"{name}: ")}
        if not rows:
            continue
        (other,) = (each for each in run["recipes"] if each != name)
        notes = f"Mean ± standard error over the test images. Published: {PUBLISHED[name]}"
        parts += [
            table(
                f"{name}: {_SETTINGS.format(**recipe)}",
                _PREDICTIVE,
                [_predictive_cells(*each) for each in rows.items()],
                notes,
            ),
            table(f"{name}: what is foreign", _FOREIGN, _foreign_rows(rows, other), _FOREIGN_NOTE),
            *(_score_table(name, place, rows, other) for place in OUTSIDE),
        ]
    return page(run, *parts)


def _predictive_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    again = row["recalibrated"]
    return [
        name, _with_error(row["accuracy"]), _with_error(row["nll"]), f"{row['ece']:.4f}", _with_error(again["nll"]),
        f"{again['ece']:.4f}", f"{row['sets']['size']:.3f}", f"{row['sets']['coverage']:.4f}",
    ]  # fmt: skip


def _foreign_rows(rows: Mapping[str, Any], other: str) -> Iterator[list[str]]:
    for name, row in rows.items():
        for place, title in OUTSIDE.items() if row["error"] is None else ():
            for score in dict.fromkeys(("entropy", row["chosen"])):
                found = row["detection"][place][score]
                yield [
                    name, title.format(other=other), score.replace("_", " "),
                    *(f"{found[each]:.4f}" for each in ("auroc", "ap", "fpr95", "tpr", "fpr")),
                ]  # fmt: skip


def _score_table(name: str, place: str, rows: Mapping[str, Any], other: str) -> str:
    scores = (*OF_PREDICTIONS, *OF_FEATURES)
    cells = [
        [method, *(_number(row["detection"][place].get(score, {}).get("auroc")) for score in scores)]
        for method, row in rows.items()
        if row["error"] is None
    ]
    title = f"{name}: AUROC against {OUTSIDE[place].format(other=other)}, by score"
    return table(title, ("method", *(score.replace("_", " ") for score in scores)), cells, _SCORES_NOTE)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _with_error(pair: tuple[float, float]) -> str:
    return "{:.4f} ± {:.4f}".format(*pair)
