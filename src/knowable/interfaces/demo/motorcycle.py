"""Regression from few measurements, with noise that changes along the input: the motorcycle series."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import ShuffleSplit
from torch import Tensor, nn

import knowable as kn
from knowable.comparison.report import scores_table
from knowable.comparison.text import troubles
from knowable.core.method import Method
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.datasets import Dataset, Scaler, motorcycle
from knowable.interfaces.demo.fits import Fits, stopping_note
from knowable.report.panels import Axes, NoisePanel
from knowable.report.prediction_panels import band_panel, coverage_panel, curves_panel, noise_panel
from knowable.report.report import Notice, Section
from knowable.report.scores import ScoreTable, with_error

HERO = "Laplace"  # the same network as MAP with a normal around its weights: what it adds is the doubt
POINT = "MAP"
TRAINING_ROWS = 40
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
    """The methods; ``epochs`` None lets each stop by itself."""
    return {
        "Maximum likelihood": kn.MaximumLikelihood(epochs=epochs),
        POINT: kn.MAP(epochs=epochs),
        "Mean-field VI": kn.MeanFieldVI(epochs=epochs),
        HERO: kn.Laplace(structure="full", epochs=epochs),
        "Deep ensemble": kn.DeepEnsemble(10, epochs=epochs),
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
    held_out: Mapping[str, Sequence[tuple[RegressionPrediction, np.ndarray]]]  # by split, with positions of the rows
    shown: np.ndarray  # positions of the training rows of the first split
    fits: Fits  # to those rows
    scaler: Scaler  # units of those fits
    epochs: int | None  # passes over the data in each fit, or None if each stopped by itself

    def with_outcomes(self, name: str) -> list[tuple[RegressionPrediction, Tensor]]:
        """Held-out predictions of a method, split by split, each with its outcomes."""
        return [(prediction, self.data.y[rows]) for prediction, rows in self.held_out[name]]


def run(*, seed: int, folds: int, epochs: int | None, progress: bool | None = None) -> MotorcycleResult:
    """Fit every method to few rows and score it on the others, for several random choices of the few."""
    data, wanted = motorcycle(), methods(epochs)
    splits = list(ShuffleSplit(folds, train_size=TRAINING_ROWS, random_state=seed).split(data.x))
    predictions: dict[str, list[RegressionPrediction]] = {repr(method): [] for method in wanted.values()}

    def keep(method: Method, prediction: RegressionPrediction) -> None:
        predictions[repr(method)].append(prediction)

    comparison = kn.compare(
        MotorcycleRegressor(keep=keep), (data.x, data.y), methods=wanted, seed=seed,
        cv=splits, progress=progress,
    )  # fmt: skip
    shown = splits[0][0]
    fits, (few, scaler) = Fits("Motorcycle"), data.rows(torch.from_numpy(shown)).standardised()
    for name, method in wanted.items():
        fits.fit(name, method, model_for(method), few, seed=seed)
    tests = [test for _, test in splits]
    held_out = {name: list(zip(predictions[repr(each)], tests, strict=True)) for name, each in wanted.items()}
    return MotorcycleResult(data, comparison, held_out, shown, fits, scaler, epochs)


def notices(result: MotorcycleResult) -> list[Notice]:
    """Warnings of the comparison, then those of the fits in the figures that it did not give."""
    found = [Notice(f"Motorcycle, {source}", text) for source, text in troubles(result.comparison)]
    known = {notice.source for notice in found}
    return found + [notice for notice in result.fits.notices() if notice.source not in known]


def section(result: MotorcycleResult) -> Section:
    """The part of the report on this problem."""
    axes = Axes("time after impact (ms)", "head acceleration (g)")
    grid = torch.linspace(0.0, 60.0, 181).unsqueeze(1)
    curves = {name: _on_grid(result, name, grid) for name in result.fits.posteriors}
    data = (result.data.x[result.shown], result.data.y[result.shown])
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
        caption="Terms of each objective on the scale of the whole data set, for the first split. Flat at the end "
        "means converged.",
    )
    return Section(
        title=f"Motorcycle: {TRAINING_ROWS} measurements",
        lead=f"{result.data.description} {len(result.data)} measurements, of which {TRAINING_ROWS} are fitted and the "
        f"others held out, for {result.comparison.folds} random choices of the {TRAINING_ROWS}. Five methods fit one "
        f"network, a hidden layer of {HIDDEN} tanh units that outputs mean and noise. The sixth is exact Bayesian "
        f"linear regression on {len(RadialBasis().centres)} fixed bumps with noise of one size, as a baseline.",
        findings=findings(result, noise),
        tables=(table(result),),
        panels=(*bands, noise, coverage, training),
        listings=(result.fits.listing(),),
        notes=(
            f"Figures of the mean and its bands show the fits to the {TRAINING_ROWS} rows of the first split, which "
            "are drawn; scores, calibration and residuals are of rows left out, over all splits.",
            "The network was chosen by hand for this series, with a look at cross-validated scores: its size, where "
            "its units start, the prior of its first layer. The scores of the methods that use it are therefore a "
            "little optimistic. Members of the ensemble, all but the first, start at random weights instead.",
            *stopping_note(result.epochs),
        ),
    )


def table(result: MotorcycleResult) -> ScoreTable:
    """Scores of each method on held-out rows."""
    return scores_table(
        result.comparison,
        f"Motorcycle, {TRAINING_ROWS} measurements to learn from, {len(result.data) - TRAINING_ROWS} held out, in "
        "units of g",
        names=SHOWN,
    )


def findings(result: MotorcycleResult, noise: NoisePanel) -> tuple[str, ...]:
    """The results in sentences."""
    coverage = {name: result.comparison.mean(name, "coverage_90") for name in (POINT, HERO)}
    gain = result.comparison.difference(HERO, POINT)
    early = [s for t, s in zip(noise.x, noise.noise, strict=True) if t <= QUIET_UNTIL]
    late = [s for t, s in zip(noise.x, noise.noise, strict=True) if t > QUIET_UNTIL]
    held = ", of ".join(f"{name} {with_error(100 * c.mean, 100 * c.standard_error)}%" for name, c in coverage.items())
    return (
        f"90% intervals should hold 90% of the rows left out: those of {held}.",
        f"NLL of {HERO} less that of {POINT}, in pairs over held-out rows: "
        f"{with_error(gain.mean, gain.standard_error)}.",
        f"{HERO} predicts a noise standard deviation of {_mean(early):.1f} g on average before {QUIET_UNTIL:.0f} ms "
        f"and {_mean(late):.1f} g after, {max(late):.0f} g at its largest.",
    )


_BAND_CAPTIONS = {
    "Maximum likelihood": "One network: it gives the noise, but no doubt about itself.",
    POINT: "One network again, held back by the prior: still no doubt about itself.",
    "Mean-field VI": "A distribution over networks: where they disagree the inner band is wide.",
    HERO: "The same network as MAP, with a normal distribution around its weights: the noise, and doubt where the "
    "data leave the curve open.",
    "Deep ensemble": "Ten networks from different starts: where they disagree the data has not decided.",
    "Exact linear": "Exact, but with one noise for all times: far too wide before the impact.",
}


def _on_grid(result: MotorcycleResult, name: str, grid: Tensor) -> RegressionPrediction:
    prediction = result.fits.posteriors[name].predict(result.scaler.scale_x(grid), samples=256)
    return result.scaler.restore(cast(RegressionPrediction, prediction))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
