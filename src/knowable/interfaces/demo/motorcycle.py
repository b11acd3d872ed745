"""Regression with noise that changes along the input: the motorcycle series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.datasets import Dataset, Scaler, motorcycle
from knowable.interfaces.cli.messages import Ticker
from knowable.interfaces.demo.contenders import Contender, Watch, stopping_note
from knowable.interfaces.demo.cross_validation import join
from knowable.report.panels import Axes, NoisePanel
from knowable.report.prediction_panels import band_panel, coverage_panel, curves_panel, noise_panel
from knowable.report.report import Column, ScoreTable, Section, score_table

HERO = "Mean-field VI"  # the method whose noise is looked at
HIDDEN = 6
STEEPNESS = 5.0  # of the first layer, in standardised time
STEPS = (-1.6, 1.2)  # where its units start, in standardised time
QUIET_UNTIL = 14.0  # ms: before this the impact has not reached the head

COLUMNS = (
    Column(
        "nll",
        "NLL",
        help="Negative log predictive density, in nats a row: how little probability was given to what then happened.",
    ),
    Column("rmse", "RMSE (g)", decimals=1, help="Typical distance of the predicted mean from the outcome."),
    Column(
        "crps",
        "CRPS (g)",
        decimals=2,
        help="Distance between the whole predictive distribution and the outcome; the absolute error for a bare "
        "number.",
    ),
    Column(
        "coverage_90",
        "90% coverage",
        better="target",
        target=0.9,
        decimals=1,
        percent=True,
        help="How often the 90% interval held the outcome. Less than 90% is overconfident, more is too cautious.",
    ),
    Column("interval_width_90", "Width (g)", better="none", decimals=1, help="Mean width of the 90% interval."),
    Column("seconds", "Seconds", better="none", decimals=1, help="Mean time of one fit."),
)


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


def contenders(epochs: int | None) -> tuple[Contender, ...]:
    """The four methods; ``epochs`` None lets each stop by itself."""
    return (
        Contender("Maximum likelihood", kn.MaximumLikelihood(epochs=epochs), network_model),
        Contender("MAP", kn.MAP(epochs=epochs), network_model),
        Contender(HERO, kn.MeanFieldVI(epochs=epochs), network_model),
        Contender("Exact linear", kn.ExactLinear(), linear_model),
    )


@dataclass(frozen=True)
class MotorcycleResult:
    """What was fitted and scored.

    Attributes:
        data: The series, rows in the order of ``predictions``.
        predictions: Out-of-fold predictions of each method in original units.
        scores: Their scores, with the seconds of a fit.
        fitted: Each method's posterior given all rows.
        scaler: Units of those posteriors.
        folds: Number of folds.
        epochs: Passes over the data in each fit, or None if each stopped by itself.
    """

    data: Dataset
    predictions: Mapping[str, RegressionPrediction]
    scores: Mapping[str, kn.Scores]
    fitted: Mapping[str, Posterior]
    scaler: Scaler
    folds: int
    epochs: int | None


def number_of_fits(folds: int) -> int:
    """How many pieces of work :func:`run` announces."""
    return len(contenders(1)) * (folds + 1)


def run(watch: Watch, ticker: Ticker, *, seed: int, folds: int, epochs: int | None) -> MotorcycleResult:
    """Cross-validate every method, then fit each to all rows."""
    data = motorcycle()
    parts = data.folds(folds, seed=seed)
    predictions: dict[str, list[RegressionPrediction]] = {}
    fitted: dict[str, Posterior] = {}
    everything, scaler = data.standardised()
    for contender in contenders(epochs):
        for number, (train, held_out) in enumerate(parts, start=1):
            ticker.begin(f"{contender.name}, fold {number} of {folds}")
            predictions.setdefault(contender.name, []).append(_held_out(watch, contender, train, held_out, seed=seed))
        ticker.begin(f"{contender.name}, all rows")
        fitted[contender.name] = watch.fit(contender, everything, seed=seed)
    rows = replace(data, x=torch.cat([held.x for _, held in parts]), y=torch.cat([held.y for _, held in parts]))
    joined = {name: join(each) for name, each in predictions.items()}
    scores = {name: kn.evaluate(each, rows.y) for name, each in joined.items()}
    return MotorcycleResult(rows, joined, scores, fitted, scaler, folds, epochs)


def _held_out(
    watch: Watch, contender: Contender, train: Dataset, held_out: Dataset, *, seed: int
) -> RegressionPrediction:
    """Fit to the training rows in their own units, and predict the others in original units."""
    scaled, scaler = train.standardised()
    posterior = watch.fit(contender, scaled, seed=seed)
    return scaler.restore(cast(RegressionPrediction, posterior.predict(scaler.scale_x(held_out.x))))


def section(result: MotorcycleResult, watch: Watch) -> Section:
    """The part of the report on this problem."""
    axes = Axes("time after impact (ms)", "head acceleration (g)")
    grid = torch.linspace(0.0, 60.0, 181).unsqueeze(1)
    curves = {name: _on_grid(result, name, grid) for name in result.fitted}
    data = (result.data.x, result.data.y)
    bands = tuple(
        band_panel(name, grid, curve, axes=axes, data=data, caption=_BAND_CAPTIONS.get(name, ""))
        for name, curve in curves.items()
    )
    noise = noise_panel(
        f"Does the noise follow the data? {HERO}",
        grid,
        curves[HERO],
        axes=Axes(axes.x, "standard deviation (g)"),
        data_x=result.data.x.flatten(),
        residuals=result.data.y - result.predictions[HERO].mean.flatten(),
        caption="The line is what the model says the noise is. The points are the spread of outcomes around "
        "predictions made without them, in groups of neighbours.",
    )
    coverage = coverage_panel(
        "Are the intervals honest?",
        {name: (each, result.data.y) for name, each in result.predictions.items()},
        caption="Each curve shows how often intervals of a promised level held the outcome. Below the diagonal: "
        "overconfident. The grey band is what chance alone allows.",
    )
    training = curves_panel(
        "Training",
        {name: each.diagnostics.history for name, each in result.fitted.items()},
        caption="Terms of each objective on the scale of the whole data set, for the fits to all rows. Flat at the "
        "end means settled.",
    )
    return Section(
        title="Motorcycle: noise that changes with time",
        lead=f"{result.data.description} {len(result.data)} measurements. Three methods fit one network, a hidden "
        f"layer of {HIDDEN} tanh units that outputs mean and noise. The fourth is exact Bayesian linear regression "
        f"on {len(RadialBasis().centres)} fixed bumps with noise of one size, as a baseline.",
        findings=findings(result, noise),
        tables=(table(result, watch),),
        panels=(*bands, noise, coverage, training),
        listings=(watch.listing(result.fitted),),
        notes=(
            "Figures of the mean and its bands show the fits to all rows; scores, calibration and residuals use "
            "rows left out.",
            "The network was chosen by hand for this series: its size, where its units start, the prior of its first "
            "layer, by the evidence bound and with a look at cross-validated scores, which are therefore a little "
            "optimistic for all three methods that use it. It is small because a mean-field posterior pays for every "
            "weight: with more units the bound falls and the bands become too wide.",
            *stopping_note(result.epochs),
        ),
    )


def table(result: MotorcycleResult, watch: Watch) -> ScoreTable:
    """Scores of each method on rows it has not seen."""
    return score_table(
        f"Motorcycle, {result.folds}-fold cross-validation",
        {name: {**each, "seconds": watch.mean_seconds(name)} for name, each in result.scores.items()},
        COLUMNS,
        note=f"Every one of the {len(result.data)} rows is predicted by a fit to the other folds.",
        standard_errors={name: each.standard_errors for name, each in result.scores.items()},
    )


def findings(result: MotorcycleResult, noise: NoisePanel) -> tuple[str, ...]:
    """What came out, in sentences."""
    hero = result.scores[HERO]
    best = min(result.scores, key=lambda name: result.scores[name]["nll"])
    early = [s for t, s in zip(noise.x, noise.noise, strict=True) if t <= QUIET_UNTIL]
    late = [s for t, s in zip(noise.x, noise.noise, strict=True) if t > QUIET_UNTIL]
    return (
        f"{HERO}: {result.folds}-fold cross-validated coverage of the 90% interval is {hero['coverage_90']:.1%} (± "
        f"{hero.standard_errors['coverage_90']:.1%}).",
        f"{HERO} says the noise is {_mean(early):.1f} g on average before {QUIET_UNTIL:.0f} ms and {_mean(late):.1f} "
        f"g after, {max(late):.0f} g at its largest.",
        f"Best held-out density: {best} (NLL {result.scores[best]['nll']:.3f}).",
    )


_BAND_CAPTIONS = {
    "Maximum likelihood": "One network: it gives the noise, but no doubt about itself.",
    "MAP": "One network again, held back by the prior: still no doubt about itself.",
    HERO: "A distribution over networks: where they disagree the inner band is wide.",
    "Exact linear": "Exact, but with one noise for all times: far too wide before the impact.",
}


def _on_grid(result: MotorcycleResult, name: str, grid: Tensor) -> RegressionPrediction:
    prediction = result.fitted[name].predict(result.scaler.scale_x(grid), samples=256)
    return result.scaler.restore(cast(RegressionPrediction, prediction))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
