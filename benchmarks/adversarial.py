"""Adversarial images: does uncertainty give them away, and does it still when the attacker knows the detector?

The posteriors are those of ``image_fits`` on MNIST. Test images are attacked within epsilon of each pixel (of the range
from 0 to 1) by attackers who know the network and all draws of its weights:

- unaware: FGSM, PGD, and PGD on the point estimate alone (transfer);
- aware: PGD with the detector's score in its objective, from several starts; the same on new draws at every step.

The detector flags an image whose score is above the threshold that flags at most 5% of held-out training images: the
mutual information of label and weights, or the entropy where there is one draw only. "New draws" predicts with draws
that the attack has not seen. For every posterior gradients are checked for masking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.compression.working import Fits, work_through
from benchmarks.image_fits import QUICK as QUICK_FITS
from benchmarks.image_fits import RECIPES, ImageFits, Images, load, synthetic
from benchmarks.image_fits import Recipe as FitRecipe
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior
    from knowable.decisions.attack import Robustness
    from knowable.evaluation.detect import Detection

METHODS = ("MAP", "MCDropout", "MeanFieldVI", "Laplace, last layer", "DeepEnsemble", "Ensemble of MeanFieldVI")
ATTACKERS = ("FGSM", "transfer", "PGD", "aware", "aware, new draws", "aware of fresh draws, new draws")
_PIXELS = 255.0


@dataclass(frozen=True)
class Recipe:
    """How images are attacked.

    Attributes:
        fits: How the networks were trained.
        images: Test images attacked.
        validation: Held-out training images that thresholds come from.
        epsilons: Of the attacks in the tables, in the range of pixels from 0 to 1.
        curve: Of FGSM, for accuracy against epsilon.
        samples: Draws in a prediction.
        steps: Of PGD.
        restarts: Of the aware attacker.
        checked: Images on which gradients are checked for masking.
    """

    fits: FitRecipe = RECIPES["MNIST"]
    images: int = 200
    validation: int = 1_000
    epsilons: tuple[float, ...] = (0.1, 0.2)
    curve: tuple[float, ...] = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3)
    samples: int = 10
    steps: int = 20
    restarts: int = 2
    checked: int = 20


RECIPE = Recipe()
QUICK = Recipe(
    fits=QUICK_FITS, images=12, validation=40, epsilons=(0.1, 0.2), curve=(0.1, 0.2), samples=3, steps=4, restarts=2,
    checked=6,
)  # fmt: skip


class Subject:
    """The data, the fits, and the attacks on them.

    Args:
        recipe: How images are attacked.
        quick: Synthetic images in place of MNIST.
        kept: Where fits are kept.
    """

    def __init__(self, recipe: Recipe, quick: bool, kept: Fits):
        self.recipe, self.quick, self.kept = recipe, quick, kept

    @cached_property
    def images(self) -> Images:
        fits = self.recipe.fits
        return synthetic(fits.rows, fits.test) if self.quick else load("MNIST", rows=fits.rows, test=fits.test)

    @cached_property
    def fits(self) -> ImageFits:
        return ImageFits("MNIST", self.images, self.recipe.fits, self.kept)

    @cached_property
    def attacked(self) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        count = self.recipe.images
        return self.images.inside[:count], self.images.inside_y[:count]

    @cached_property
    def clip(self) -> tuple[float, float]:
        """Black and white in the units of the networks."""
        if self.quick:  # noise that is no picture
            return self.images.inside.min().item(), self.images.inside.max().item()
        black, white = self.images.in_units(torch.tensor([0.0, _PIXELS])).tolist()
        return black, white

    def in_units(self, epsilon: float) -> float:
        """A difference of pixels from 0 to 1 in the units of the networks."""
        return epsilon * _PIXELS / self.images.scale

    def posterior(self, method: str) -> Posterior:
        return self.fits.posterior(method)


# --- one posterior under attack --------------------------------------------------------------------------------------


def attack(method: str, subject: Subject) -> dict[str, Any]:
    """Everything about one posterior."""
    import knowable as kn

    begun = time.process_time()
    recipe, posterior = subject.recipe, subject.posterior(method)
    (x, y), validation = subject.attacked, subject.images.held_out[: recipe.validation]
    common: dict[str, Any] = {"clip": subject.clip, "samples": recipe.samples}
    clean, ordinary = (posterior.predict(each, samples=recipe.samples) for each in (x, validation))
    score = "entropy" if len(clean.log_weights) == 1 else "mutual_information"
    detector = kn.detect(clean, clean, score=score, validation=ordinary)
    judge = partial(_judged, posterior, subject, score, ordinary)
    by_fgsm = {each: kn.attack.fgsm(posterior, x, y, subject.in_units(each), **common) for each in recipe.curve}
    curve = {str(epsilon): _share_right(posterior, subject, moved) for epsilon, moved in by_fgsm.items()}
    found = {}
    for epsilon in recipe.epsilons:
        moved = _moved(method, subject, posterior, detector, subject.in_units(epsilon), common)
        found[str(epsilon)] = {
            who: judge(each, new_draws=who.endswith("new draws")) for who, each in moved.items() if each is not None
        }
    masking = kn.attack.check_masking(
        posterior, x[: recipe.checked], y[: recipe.checked], subject.in_units(recipe.epsilons[0]),
        steps=recipe.steps, queries=10 * recipe.steps, surrogate=None if method == "MAP" else subject.fits.mode,
        **common,
    )  # fmt: skip
    return {
        "score": score, "clean": _share_right(posterior, subject, x), "threshold": detector.threshold,
        "false_alarms": detector.fpr_at_threshold(), "curve": curve, "attacks": found,
        "masking": {"passed": masking.passed, "sentences": [each.sentence for each in masking.checks]},
        "clean_scores": _rounded(detector.inside), "minutes": round((time.process_time() - begun) / 60, 1),
    }  # fmt: skip


def _moved(
    method: str, subject: Subject, posterior: Posterior, detector: Detection, epsilon: float, common: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """The images of each attacker; None where there is nothing to attack that way."""
    from knowable import attack as kn_attack

    (x, y), recipe = subject.attacked, subject.recipe
    pgd: Callable[..., Tensor] = partial(kn_attack.pgd, x=x, y=y, epsilon=epsilon, steps=recipe.steps, **common)
    several = detector.score == "mutual_information"
    aware = pgd(posterior, detector=detector, restarts=recipe.restarts)
    drawn_anew = several and method != "DeepEnsemble"  # whose members are its draws
    fresh = pgd(posterior, detector=detector, fresh_draws=True) if drawn_anew else None
    return {
        "FGSM": kn_attack.fgsm(posterior, x, y, epsilon, **common),
        "transfer": None if method == "MAP" else pgd(subject.fits.mode),
        "PGD": pgd(posterior),
        "aware": aware,
        "aware, new draws": aware if drawn_anew else None,
        "aware of fresh draws, new draws": fresh,
    }


def _judged(
    posterior: Posterior, subject: Subject, score: str, ordinary: Any, moved: Tensor, *, new_draws: bool
) -> dict[str, Any]:
    """Accuracy and detection of moved images."""
    from knowable import attack as kn_attack

    (x, y), samples = subject.attacked, subject.recipe.samples
    validation = subject.images.held_out[: len(ordinary)]
    generator = torch.Generator().manual_seed(1) if new_draws else None

    def evaluated(by: str) -> Robustness:
        return kn_attack.evaluate(
            posterior, x, moved, y, score=by, validation=validation, samples=samples, generator=generator
        )

    found = evaluated(score)
    errors = found.detection.standard_errors
    by_entropy = found if score == "entropy" else evaluated("entropy")
    return {
        "accuracy": found.accuracy, "accuracy_error": found.standard_error,
        "auroc": found.detection.auroc, "auroc_error": errors["auroc"],
        "tpr": found.detection.tpr_at_fpr(), "tpr_error": errors["tpr_at_fpr"],
        "fpr": found.detection.fpr_at_threshold(), "undetected": found.undetected,
        "auroc_entropy": by_entropy.detection.auroc, "tpr_entropy": by_entropy.detection.tpr_at_fpr(),
        "undetected_entropy": by_entropy.undetected, "scores": _rounded(found.detection.outside),
    }  # fmt: skip


def _share_right(posterior: Posterior, subject: Subject, x: Tensor) -> float:
    prediction: Any = posterior.predict(x, samples=subject.recipe.samples)
    return (prediction.labels == subject.attacked[1]).double().mean().item()


def _rounded(scores: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in scores.tolist()]


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All posteriors; ``only`` is a glob of methods. The pictures go beside the rows."""
    recipe = QUICK if quick else RECIPE
    subject = Subject(recipe, quick, Fits.beside(rows))
    cases = {method: partial(attack, method, subject) for method in METHODS}
    found = work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    good = {method: row for method, row in found.items() if row["error"] is None}
    if rows.path is not None and good:
        plot(good, recipe, rows.path.parent)
    return describe("adversarial", quick=quick, packages=(), recipe=asdict(recipe), methods=found)


# --- tables and pictures ---------------------------------------------------------------------------------------------

_HEADER = (
    "posterior", "attacker", "accuracy", "AUROC", "TPR at FPR 5%", "wrong and not flagged", "AUROC by entropy",
    "wrong and not flagged, by entropy",
)  # fmt: skip
_NOTE = (
    "± standard errors over the images. AUROC: of the detector's score (mutual information; entropy for MAP), attacked "
    "images against the same images before. TPR: share of the attacked images flagged, at the threshold that flags 5% "
    "of held-out images. Wrong and not flagged: what the attacker gets through. The entropy is a detector that the "
    "aware attacker here did not attack."
)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each epsilon, accuracy against epsilon, and the checks of gradients."""
    methods, recipe = run["methods"], run["recipe"]
    good = {method: row for method, row in methods.items() if row["error"] is None}
    failed = [f"{method} failed: {row['error']}\n" for method, row in methods.items() if row["error"] is not None]
    parts = [
        table(f"Epsilon {epsilon:g} of the range of pixels, {recipe['images']} images", _HEADER,
              [line for method, row in good.items() for line in _lines(method, row, str(epsilon))], _NOTE)
        for epsilon in recipe["epsilons"]
    ]  # fmt: skip
    header = ("posterior", "no attack", *(f"FGSM {each:g}" for each in recipe["curve"]), "false alarms")
    lines = [
        (
            method,
            f"{row['clean']:.1%}",
            *(f"{share:.1%}" for share in row["curve"].values()),
            f"{row['false_alarms']:.1%}",
        )
        for method, row in good.items()
    ]
    parts.append(table("Accuracy against epsilon", header, lines, "False alarms: of the images before the attack."))
    parts.append("## Are gradients masked?\n")
    for method, row in good.items():
        said = "no sign of it" if row["masking"]["passed"] else "**there are signs of it**"
        parts.append(f"**{method}**: {said}. " + " ".join(row["masking"]["sentences"]) + "\n")
    pictures = ["![accuracy against epsilon](adversarial_accuracy.png)\n", "![scores](adversarial_scores.png)\n"]
    return page(run, *failed, *parts, *(pictures if good else []))


def _lines(method: str, row: Mapping[str, Any], epsilon: str) -> list[tuple[str, ...]]:
    return [
        (
            method, who, f"{each['accuracy']:.1%} ± {each['accuracy_error']:.1%}",
            f"{each['auroc']:.3f} ± {each['auroc_error']:.3f}", f"{each['tpr']:.1%} ± {each['tpr_error']:.1%}",
            f"{each['undetected']:.1%}", f"{each['auroc_entropy']:.3f}", f"{each['undetected_entropy']:.1%}",
        )
        for who, each in row["attacks"][epsilon].items()
    ]  # fmt: skip


def plot(methods: Mapping[str, Mapping[str, Any]], recipe: Recipe, folder: Path) -> None:
    """Accuracy against epsilon; and histograms of scores before and after the attacks."""
    from knowable.core.support.figure import COLOURS, new_figure
    from knowable.evaluation.detect import draw_histograms

    def accuracy(figure: Any) -> None:
        axes = figure.add_subplot()
        for index, (method, row) in enumerate(methods.items()):
            colour = COLOURS[index]
            epsilons = [0.0, *map(float, row["curve"])]
            axes.plot(
                epsilons, [row["clean"], *row["curve"].values()], color=colour, marker="o", markersize=3, label=method
            )
            pairs = [(float(each), attacks["PGD"]["accuracy"]) for each, attacks in row["attacks"].items()]
            axes.plot(*zip(*pairs, strict=True), color=colour, marker="v", markersize=5, linestyle="none")
        axes.set(xlabel="epsilon (of the range of pixels)", ylabel="accuracy", ylim=(-0.02, 1.02))
        axes.set_title("FGSM (lines) and PGD (triangles)")
        axes.legend(loc="upper right")

    def histograms(figure: Any) -> None:
        grid = figure.subplots(len(methods), len(recipe.epsilons), squeeze=False)
        for places, (method, row) in zip(grid, methods.items(), strict=True):
            for axes, epsilon in zip(places, recipe.epsilons, strict=True):
                attacks = row["attacks"][str(epsilon)]
                groups = {"before": row["clean_scores"]}
                groups |= {who: attacks[who]["scores"] for who in ("FGSM", "PGD", "aware")}
                tensors = {who: torch.tensor(each, dtype=torch.float64) for who, each in groups.items()}
                draw_histograms(axes, tensors, row["threshold"], row["score"])
                axes.set_title(f"{method}, epsilon {epsilon:g}")
                if method != next(iter(methods)):
                    axes.get_legend().remove()

    new_figure(5.6, 3.8, accuracy).savefig(folder / "adversarial_accuracy.png")
    height = 2.3 * len(methods)
    new_figure(4.6 * len(recipe.epsilons), height, histograms).savefig(folder / "adversarial_scores.png")
