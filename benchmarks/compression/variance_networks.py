"""Variance networks (Neklyudov et al., 2018): a layer whose weights have no mean, and that says what it knows in noise.

LeNet-300-100 on MNIST with Gaussian dropout, once with every weight having a mean, and once with a layer whose weights
are N(0, σ²) with σ learned. The mean network of the second sees nothing behind that layer and is as good as chance; the
average over draws of the weights is right nonetheless, the more draws the better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from benchmarks.compression.architectures import lenet_300_100, seeded
from benchmarks.compression.images import Images, mnist, synthetic
from benchmarks.compression.sparsity import error_percent
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

NETWORKS = {"means everywhere": None, "second layer without means": "3.weight"}
DRAWS = (1, 4, 16, 64)
_HEADER = ("network", "mean network", *(f"{draws} draws" for draws in DRAWS), "largest mean of the layer", "minutes")
_NOTE = (
    "Test errors in percent. Draws: of the weights, the same for all images, predictive probabilities averaged. Chance "
    "is 90 %."
)


@dataclass(frozen=True)
class Plan:
    """How much of it there is.

    Attributes:
        rows: Training images.
        test: Test images.
        epochs: Of the fit.
        alpha: Variance of the noise over the square of the weight, where there are means.
        batch_size: Images per step.
        learning_rate: Of Adam.
    """

    rows: int = 20_000
    test: int = 10_000
    epochs: int = 20
    alpha: float = 0.25
    batch_size: int = 128
    learning_rate: float = 1e-3


PLAN = Plan()
_QUICK = Plan(rows=64, test=20, epochs=2, batch_size=32)


def evaluate(name: str, plan: Plan, *, quick: bool, fits: Fits) -> dict[str, Any]:
    """Train one of the networks and predict with its mean and with draws."""
    import knowable as kn

    images = synthetic(plan.rows, plan.test) if quick else _mnist(plan.rows)
    model = kn.Model(seeded(lenet_300_100, 0), kn.Categorical(), kn.Flat())
    method = kn.GaussianDropout(
        plan.alpha, zero_mean=NETWORKS[name], epochs=plan.epochs, batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
    )  # fmt: skip
    posterior, minutes = fits.fit(f"variance networks, {name}", method, model, images.rows)
    x, y = images.test_x[: plan.test], images.test_y[: plan.test]
    return {
        "mean_error": error_percent(posterior, posterior.mean(), x, y),
        "errors": {str(draws): averaged_error(posterior, images, plan.test, draws) for draws in DRAWS},
        "largest_mean": posterior.mean()["3.weight"].abs().max().item(),
        "minutes": minutes,
    }


def averaged_error(posterior: Posterior, images: Images, test: int, draws: int) -> float:
    """Error in percent of predictive probabilities averaged over draws."""
    labels = posterior.predict(images.test_x[:test], samples=draws, max_memory="500MB").labels
    return 100.0 * (labels != images.test_y[:test]).double().mean().item()


@cache
def _mnist(rows: int) -> Images:
    return mnist(rows)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Both networks; ``only`` is a glob of them."""
    plan, fits = _QUICK if quick else PLAN, Fits.beside(rows)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(evaluate, name, plan, quick=quick, fits=fits) for name in NETWORKS
    }
    found = work_through(cases, only=only, rows=rows, recipe=plan, quick=quick)
    return describe("compression_variance_networks", quick=quick, packages=(), plan=asdict(plan), networks=found)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each network."""
    plan = run["plan"]
    title = f"LeNet-300-100 on {plan['rows']:,} images of MNIST, {plan['epochs']} epochs of Gaussian dropout"
    return page(run, table(title, _HEADER, [_cells(name, row) for name, row in run["networks"].items()], _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    errors = [f"{row['errors'][str(draws)]:.2f}" for draws in DRAWS]
    return [name, f"{row['mean_error']:.2f}", *errors, f"{row['largest_mean']:.2g}", f"{row['minutes']:.1f}"]
