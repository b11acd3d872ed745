"""The motorcycle part of the demonstration scores every row once and shows noise that follows the data."""

from dataclasses import replace

import pytest
import torch

import knowable as kn
from knowable.datasets import motorcycle as motorcycle_data
from knowable.interfaces.cli.messages import ticking
from knowable.interfaces.demo import motorcycle
from knowable.interfaces.demo.contenders import Watch


class Counter:
    def __init__(self):
        self.begun = []

    def begin(self, what):
        self.begun.append(what)


@pytest.fixture(scope="module")
def rough():
    """A short run with two folds."""
    watch, counter = Watch("Motorcycle"), Counter()
    return motorcycle.run(watch, counter, seed=0, folds=2, epochs=30), watch, counter


def test_every_row_is_predicted_once_by_every_method(rough):
    result, _, _ = rough
    assert set(result.predictions) == {"Maximum likelihood", "MAP", "Mean-field VI", "Exact linear"}
    assert sorted(result.data.y.tolist()) == sorted(motorcycle_data().y.tolist())
    assert all(len(prediction) == 133 for prediction in result.predictions.values())


def test_progress_announces_as_many_fits_as_there_are(rough):
    result, watch, counter = rough
    assert len(counter.begun) == motorcycle.number_of_fits(result.folds) == sum(watch.fits.values()) == 12


def test_held_out_predictions_are_in_original_units(rough):
    result, _, _ = rough
    fold = motorcycle_data().folds(2, seed=0)[0]
    scaled, scaler = fold[0].standardised()
    posterior = kn.ExactLinear().fit(motorcycle.linear_model(), (scaled.x, scaled.y))
    expected = posterior.predict(scaler.scale_x(fold[1].x)).mean * scaler.y_scale + scaler.y_mean
    got = result.predictions["Exact linear"].mean[: len(fold[1])]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_the_table_holds_the_scores_of_evaluate(rough):
    result, watch, _ = rough
    table = motorcycle.table(result, watch)
    for name, prediction in result.predictions.items():
        scores = kn.evaluate(prediction, result.data.y)
        cell = table.cell(name, "coverage_90")
        assert cell.value == scores["coverage_90"]
        assert cell.standard_error == scores.standard_errors["coverage_90"]


def test_the_section_has_a_band_for_each_method_and_says_the_coverage(rough):
    result, watch, _ = rough
    section = motorcycle.section(result, watch)
    assert [panel.kind for panel in section.panels] == ["band"] * 4 + ["noise", "calibration", "curves"]
    assert f"{result.scores['Mean-field VI']['coverage_90']:.1%}" in section.findings[0]
    assert any("30 passes" in note for note in section.notes)
    assert not any("passes" in note for note in motorcycle.section(replace(result, epochs=None), watch).notes)


def test_radial_basis_is_one_at_its_centres_and_falls_as_a_bell():
    basis = motorcycle.RadialBasis(count=5, low=0.0, high=4.0)
    features = basis(torch.tensor([[2.0], [3.0]]))
    torch.testing.assert_close(features[0, 2], torch.tensor(1.0))
    torch.testing.assert_close(features[1, 2], torch.exp(torch.tensor(-0.5)))


@pytest.mark.slow
def test_ten_fold_coverage_of_the_90_percent_interval_is_near_90_percent_and_noise_follows_the_data(monkeypatch, seed):
    only = [each for each in motorcycle.contenders(700) if each.name == motorcycle.HERO]
    monkeypatch.setattr(motorcycle, "contenders", lambda epochs: tuple(only))
    watch = Watch("Motorcycle")
    with ticking("", 11, show=False) as ticker:
        result = motorcycle.run(watch, ticker, seed=seed, folds=10, epochs=700)
    assert 0.85 <= result.scores[motorcycle.HERO]["coverage_90"] <= 0.95
    noise = next(panel for panel in motorcycle.section(result, watch).panels if panel.kind == "noise")
    early = [s for t, s in zip(noise.x, noise.noise, strict=True) if 2.4 <= t <= 12]
    late = [s for t, s in zip(noise.x, noise.noise, strict=True) if 16 <= t <= 40]
    assert max(early) < 8 and min(late) > 15  # the data: 1 to 3 g before the impact, 17 to 39 g after
