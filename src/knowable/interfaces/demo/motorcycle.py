"""Regression with noise that changes along the input: the motorcycle series."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

import knowable as kn
from knowable.comparison.folds import as_splits
from knowable.comparison.report import scores_table
from knowable.comparison.text import troubles
from knowable.core.method import Method
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.datasets import Dataset, Scaler, motorcycle
from knowable.interfaces.demo.fits import Fits, stopping_note
from knowable.report.panels import Axes, NoisePanel
from knowable.report.prediction_panels import band_panel, coverage_panel, curves_panel, noise_panel
from knowable.report.report import Notice, Section
from knowable.report.scores import ScoreTable

HERO = "Laplace"  # the method whose noise is looked at
HIDDEN = 6
STEEPNESS = 5.0  # of the first layer, in standardised time
STEPS = (-1.6, 1.2)  # where its units start, in standardised time
QUIET_UNTIL = 14.0  # ms: before this the impact has not reached the head
SHOWN = ("nll", "rmse", "crps", "coverage_90", "interval_width_90", "seconds")  # scores in the table


class RadialBasis(nn.Module):
    """Fixed bumps along one input: features for a model that is linear in its weights."""

    centres: Tensor

    def __init__(self, count: int = 20, low: float = -2.0, high: float = 2.75):
        super().__init__()
        self.register_buffer("centres", torch.linspace(low, high, count))
        self.width = (high - low) / (count - 1)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 1)`` to ``(batch, count)``."""
        return torch.exp(-0.5 * ((x - self.centres) / self.width) ** 2)


def network_model() -> kn.Model:
    """A small tanh network that says mean and noise.

    Its hidden units start as steps spread along the times at which the curve moves (4 to 41 ms), its outputs at zero
    mean and unit noise. The prior of the first layer is wide enough for steps that steep in standardised time;
    everything else has the default prior.
    """
    hidden, outputs = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, 2)
    with torch.no_grad():
        hidden.weight.fill_(STEEPNESS)
        hidden.bias.copy_(-STEEPNESS * torch.linspace(*STEPS, HIDDEN))
        outputs.weight.zero_()
        outputs.bias.zero_()
    net = nn.Sequential(hidden, nn.Tanh(), outputs)
    return kn.Model(net, kn.HeteroscedasticGaussian(), {"0.*": kn.Normal(STEEPNESS), "*": kn.Normal(1.0)})


def linear_model() -> kn.Model:
    """A linear model on fixed features, with noise of one size."""
    features = RadialBasis()
    return kn.Model(nn.Sequential(features, nn.Linear(len(features.centres), 1)), kn.Gaussian(), kn.Normal(1.0))


def methods(epochs: int | None) -> dict[str, Method]:
    """The five methods; ``epochs`` None lets each stop by itself."""
    return {
        "Maximum likelihood": kn.MaximumLikelihood(epochs=epochs),
        "MAP": kn.MAP(epochs=epochs),
        "Mean-field VI": kn.MeanFieldVI(epochs=epochs),
        HERO: kn.Laplace(structure="full", epochs=epochs),
        "Exact linear": kn.ExactLinear(),
    }


def model_for(method: Method) -> Callable[[], kn.Model]:
    """What builds the model of a method."""
    return linear_model if isinstance(method, kn.ExactLinear) else network_model


class MotorcycleRegressor(BaseEstimator):
    """A method on its model, fitted in standardised units, with the interface that :func:`knowable.compare` takes.

    Args:
        method: The method.
        random_state: Seed of the fit.
        keep: Called with the method and each of its predictions, in original units.
    """

    def __init__(self, method: Any = None, random_state: int = 0, keep: Callable[..., None] | None = None):
        self.method = method
        self.random_state = random_state
        self.keep = keep

    def fit(self, X: np.ndarray, y: np.ndarray) -> MotorcycleRegressor:
        """Fit to ``(rows, 1)`` times and ``(rows,)`` accelerations."""
        data, self.scaler_ = replace(motorcycle(), x=torch.from_numpy(X), y=torch.from_numpy(y)).standardised()
        model = model_for(self.method)()
        self.posterior_ = self.method.fit(model, (data.x, data.y), seed=self.random_state, progress=False)
        return self

    def predict_dist(self, X: np.ndarray) -> RegressionPrediction:
        """The predictive distribution of the acceleration."""
        scaled = self.posterior_.predict(self.scaler_.scale_x(torch.from_numpy(X)))
        prediction = self.scaler_.restore(cast(RegressionPrediction, scaled))
        if self.keep is not None:
            self.keep(self.method, prediction)
        return prediction


@dataclass(frozen=True)
class MotorcycleResult:
    """What was fitted and scored."""

    data: Dataset
    comparison: kn.Comparison
    held_out: Mapping[str, Sequence[tuple[RegressionPrediction, np.ndarray]]]  # by fold, with positions of the rows
    fits: Fits
    scaler: Scaler  # units of those fits
    epochs: int | None  # passes over the data in each fit, or None if each stopped by itself

    def with_outcomes(self, name: str) -> list[tuple[RegressionPrediction, Tensor]]:
        """Held-out predictions of a method, fold by fold, each with its outcomes."""
        return [(prediction, self.data.y[rows]) for prediction, rows in self.held_out[name]]


def run(*, seed: int, folds: int, epochs: int | None, progress: bool | None = None) -> MotorcycleResult:
    """Cross-validate every method, then fit each to all rows."""
    data, wanted = motorcycle(), methods(epochs)
    splits = as_splits(folds, len(data), data.y, seed=seed)
    predictions: dict[str, list[RegressionPrediction]] = {repr(method): [] for method in wanted.values()}

    def keep(method: Method, prediction: RegressionPrediction) -> None:
        predictions[repr(method)].append(prediction)

    comparison = kn.compare(
        MotorcycleRegressor(keep=keep), (data.x, data.y), methods=wanted, seed=seed,
        cv=[(split.train, split.test) for split in splits], progress=progress,
    )  # fmt: skip
    fits, (everything, scaler) = Fits("Motorcycle"), data.standardised()
    for name, method in wanted.items():
        fits.fit(name, method, model_for(method), everything, seed=seed)
    tests = [split.test for split in splits]
    held_out = {name: list(zip(predictions[repr(each)], tests, strict=True)) for name, each in wanted.items()}
    return MotorcycleResult(data, comparison, held_out, fits, scaler, epochs)


def notices(result: MotorcycleResult) -> list[Notice]:
    """Warnings of the cross-validation, then those of the fits to all rows that it did not give."""
    found = [Notice(f"Motorcycle, {source}", text) for source, text in troubles(result.comparison)]
    known = {notice.source for notice in found}
    return found + [notice for notice in result.fits.notices() if notice.source not in known]


def section(result: MotorcycleResult) -> Section:
    """The part of the report on this problem."""
    axes = Axes("time after impact (ms)", "head acceleration (g)")
    grid = torch.linspace(0.0, 60.0, 181).unsqueeze(1)
    curves = {name: _on_grid(result, name, grid) for name in result.fits.posteriors}
    data = (result.data.x, result.data.y)
    bands = tuple(
        band_panel(name, grid, curve, axes=axes, data=data, caption=_BAND_CAPTIONS.get(name, ""))
        for name, curve in curves.items()
    )
    noise = noise_panel(
        f"Predicted noise against residuals, {HERO}",
        grid,
        curves[HERO],
        axes=Axes(axes.x, "standard deviation (g)"),
        data_x=torch.cat([result.data.x[rows].flatten() for _, rows in result.held_out[HERO]]),
        residuals=torch.cat([y - each.mean.flatten() for each, y in result.with_outcomes(HERO)]),
        caption="The line is the predicted noise. The points are the root mean square residual of held-out rows, in "
        "groups of neighbours.",
    )
    coverage = coverage_panel(
        "Calibration curve: coverage of intervals",
        {name: result.with_outcomes(name) for name in result.held_out},
        caption="Observed against nominal coverage of central intervals, on held-out rows. Below the diagonal: "
        "overconfident. The grey band is what chance alone allows.",
    )
    training = curves_panel(
        "Training",
        {name: each.diagnostics.history for name, each in result.fits.posteriors.items()},
        caption="Terms of each objective on the scale of the whole data set, for the fits to all rows. Flat at the "
        "end means converged.",
    )
    return Section(
        title="Motorcycle: noise that changes with time",
        lead=f"{result.data.description} {len(result.data)} measurements. Four methods fit one network, a hidden "
        f"layer of {HIDDEN} tanh units that outputs mean and noise. The fifth is exact Bayesian linear regression "
        f"on {len(RadialBasis().centres)} fixed bumps with noise of one size, as a baseline.",
        findings=findings(result, noise),
        tables=(table(result),),
        panels=(*bands, noise, coverage, training),
        listings=(result.fits.listing(),),
        notes=(
            "Figures of the mean and its bands show the fits to all rows; scores, calibration and residuals use "
            "rows left out.",
            "The network was chosen by hand for this series: its size, where its units start, the prior of its first "
            "layer, by the evidence bound and with a look at cross-validated scores, which are therefore a little "
            "optimistic for all four methods that use it. It is small because a mean-field posterior pays for every "
            "weight: with more units the bound falls and the bands become too wide.",
            *stopping_note(result.epochs),
        ),
    )


def table(result: MotorcycleResult) -> ScoreTable:
    """Scores of each method on held-out rows."""
    return scores_table(
        result.comparison, f"Motorcycle, {result.comparison.folds}-fold cross-validation, in units of g", names=SHOWN
    )


def findings(result: MotorcycleResult, noise: NoisePanel) -> tuple[str, ...]:
    """The results in sentences."""
    coverage, best = result.comparison.mean(HERO, "coverage_90"), result.comparison.ranking()[0]
    early = [s for t, s in zip(noise.x, noise.noise, strict=True) if t <= QUIET_UNTIL]
    late = [s for t, s in zip(noise.x, noise.noise, strict=True) if t > QUIET_UNTIL]
    return (
        f"{HERO}: {coverage.folds}-fold cross-validated coverage of the 90% interval is {coverage.mean:.1%} (± "
        f"{coverage.standard_error:.1%}).",
        f"{HERO} predicts a noise standard deviation of {_mean(early):.1f} g on average before {QUIET_UNTIL:.0f} ms "
        f"and {_mean(late):.1f} g after, {max(late):.0f} g at its largest.",
        f"Lowest held-out NLL: {best.method} ({best.score.mean:.3f}).",
    )


_BAND_CAPTIONS = {
    "Maximum likelihood": "One network: it gives the noise, but no doubt about itself.",
    "MAP": "One network again, held back by the prior: still no doubt about itself.",
    "Mean-field VI": "A distribution over networks: where they disagree the inner band is wide.",
    HERO: "The same network as MAP, with a normal distribution around its weights: the noise, and doubt where the "
    "data leave the curve open.",
    "Exact linear": "Exact, but with one noise for all times: far too wide before the impact.",
}


def _on_grid(result: MotorcycleResult, name: str, grid: Tensor) -> RegressionPrediction:
    prediction = result.fits.posteriors[name].predict(result.scaler.scale_x(grid), samples=256)
    return result.scaler.restore(cast(RegressionPrediction, prediction))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
