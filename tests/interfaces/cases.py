"""Small predictions and reports that the tests of the interfaces share."""

import math

import torch

from knowable.likelihoods import Categorical, HeteroscedasticGaussian
from knowable.report import Citation, Listing, Notice, Report, Section
from knowable.report.panels import (
    Axes,
    BarsPanel,
    DependencePanel,
    ForestPanel,
    Line,
    LinesPanel,
    Response,
    TracesPanel,
)
from knowable.report.prediction_panels import (
    band_panel,
    coverage_panel,
    curves_panel,
    noise_panel,
    pictures_panel,
    reliability_panel,
)
from knowable.report.row_panels import truth_panel
from knowable.report.scores import ScoreColumn, score_table

HOSTILE = "<script>alert('$x^2$ & \"quotes\"')</script>"


def equal_weights(k):
    return torch.full((k,), -math.log(k))


def regression_prediction(rows, draws=5, generator=None):
    """Means and log scales at random, ``(rows, 1)`` outcomes."""
    outputs = torch.randn(draws, rows, 2, generator=generator)
    return HeteroscedasticGaussian().predict(outputs, {}, equal_weights(draws))


def class_prediction(rows, classes=3, draws=5, generator=None):
    return Categorical().predict(torch.randn(draws, rows, classes, generator=generator), {}, equal_weights(draws))


def every_panel(generator, label="method"):
    """One panel of each kind, with ``label`` wherever a name can be."""
    x, axes = torch.linspace(0, 1, 12).unsqueeze(1), Axes(f"{label} x", f"{label} y")
    numbers, y = regression_prediction(12, generator=generator), torch.randn(12, generator=generator)
    classes = class_prediction(12, generator=generator)
    labels = torch.arange(12) % 3
    records = [
        {"step": i, "epoch": float(i), "loss": 1.0 / i, "kl": float(i), "log_likelihood": -1.0} for i in (1, 2, 3)
    ]
    return (
        band_panel(label, x, numbers, axes=axes, data=(x, y), truth=y, caption=label),
        noise_panel(label, x, numbers, axes=axes, data_x=x.flatten(), residuals=y, bins=3, caption=label),
        coverage_panel(label, {label: [(numbers, y)]}, caption=label),
        reliability_panel(label, {label: (classes, labels), "other": (classes, labels)}, caption=label),
        curves_panel(label, {label: records}, caption=label),
        *run_panels(generator, label),
        pictures_panel(
            label,
            classes,
            [3, 0],
            images=torch.rand(12, 4, 4, generator=generator),
            y=labels,
            classes=(label, "b", "c"),
            caption=label,
        ),
    )


def run_panels(generator, label):
    """One panel of each kind that only the report of a run has."""
    axes, line = Axes(f"{label} x", f"{label} y"), Line(label, (0.0, 0.5, 1.0), (1.0, 3.0, 2.0), (0.1, 0.2, 0.1))
    common = {"title": label, "caption": label, "alt": f"{label} against the input, in words", "axes": axes}
    response = Response(label, (1.0, 2.0, 3.0), (0.5, 1.0, 2.0), (1.5, 3.0, 4.0))
    spread = {"level": 0.9, "x": (0.0, 1.0, 2.0), "aleatoric": (0.1, 0.2, 0.3), "epistemic": (0.3, 0.2, 0.1)}
    numbers, y = regression_prediction(9, generator=generator), torch.randn(9, generator=generator)
    return (
        truth_panel(label, numbers, y, range(2, 11)),
        LinesPanel(**common, lines=(line, line), percent=True),
        BarsPanel(**common, names=(label, "b"), values=(2.0, 1.0), errors=(0.1, 0.2)),
        ForestPanel(
            **common,
            names=(label, "b"),
            values=(0.0, 1.0),
            half_widths=(0.0, 0.2),
            zero=True,
            verdicts=("best", "tied"),
            texts=(label, "1.0 ± 0.1"),
        ),
        DependencePanel(
            **common,
            **spread,
            responses=(response,),
            low=(0.0, 0.5, 1.0),
            high=(2.0, 4.0, 5.0),
            unit="sd",
            seen=(0.5, 1.5),
        ),
        DependencePanel(**common, **spread, categories=(label, "b", "c"), responses=(response, response), unit="nats"),
        TracesPanel(**common, groups=((label, (line, line)),)),
    )


def whole_report(generator, label="method"):
    """A report with every part, and ``label`` wherever a user's words can be."""
    column = ScoreColumn("nll", label, help=label)
    table = score_table(
        label,
        {label: {"nll": 1.0}, "other": {"nll": 2.0}},
        [column],
        note=label,
        standard_errors={label: {"nll": 0.1}, "other": {"nll": 0.1}},
    )
    listing = Listing(label, (label, label), ((label, label), ("line 3", label)), label, (2, 3))
    section = Section(label, label, (label,), (table,), every_panel(generator, label), (listing,), (label,))
    return Report(
        title=label,
        lead=label,
        facts=((label, label),),
        notices=(Notice(label, label),),
        sections=(section,),
        reading=((label, label),),
        citations=(Citation(label, label),),
    )
