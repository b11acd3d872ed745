"""The motorcycle part of the demonstration scores rows left out and shows noise that follows the data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.datasets import motorcycle as motorcycle_data
from knowable.interfaces.demo import motorcycle


@pytest.fixture(scope="module")
def rough():
    """A short run with two splits."""
    return motorcycle.run(seed=0, folds=2, epochs=30, progress=False)


@pytest.mark.slow
def test_all_but_forty_rows_are_predicted_in_every_split_by_every_method(rough):
    assert set(rough.held_out) == {
        "Maximum likelihood", "MAP", "Mean-field VI", "Laplace", "Deep ensemble", "Exact linear"
    }  # fmt: skip
    assert sorted([*rough.shown, *rough.held_out["MAP"][0][1]]) == list(range(133))
    for parts in rough.held_out.values():
        assert [len(set(rows)) for _, rows in parts] == [93, 93]
        assert all(len(prediction) == len(rows) for prediction, rows in parts)


@pytest.mark.slow
def test_held_out_predictions_are_in_original_units_and_the_table_holds_their_scores(rough):
    prediction, rows = rough.held_out["Exact linear"][0]
    training = motorcycle_data().rows(torch.from_numpy(np.setdiff1d(np.arange(133), rows)))
    scaled, scaler = training.standardised()
    posterior = kn.ExactLinear().fit(motorcycle.linear_model(), (scaled.x, scaled.y))
    expected = posterior.predict(scaler.scale_x(rough.data.x[rows])).mean * scaler.y_scale + scaler.y_mean
    torch.testing.assert_close(prediction.mean, expected, rtol=1e-4, atol=1e-3)
    scores = [kn.evaluate(each, y)["crps"] for each, y in rough.with_outcomes("Exact linear")]
    assert motorcycle.table(rough).cell("Exact linear", "crps").value == pytest.approx(np.mean(scores), rel=1e-5)


@pytest.mark.slow
def test_the_section_has_a_band_for_each_method_and_says_the_coverage(rough):
    section = motorcycle.section(rough)
    assert [panel.kind for panel in section.panels] == ["band"] * 6 + ["noise", "calibration", "curves"]
    held = {name: rough.comparison.mean(name, "coverage_90").mean for name in (motorcycle.POINT, motorcycle.HERO)}
    said = [float(part.split(" ±")[0].rsplit(" ", 1)[-1]) for part in section.findings[0].split(": ")[1].split(", of ")]
    assert said == pytest.approx([100 * share for share in held.values()], abs=0.5)
    assert any("30 passes" in note for note in section.notes)
    assert not any("passes" in note for note in motorcycle.section(replace(rough, epochs=None)).notes)


def test_radial_basis_is_one_at_its_centres_and_falls_as_a_bell():
    basis = motorcycle.RadialBasis(count=5, low=0.0, high=4.0)
    features = basis(torch.tensor([[2.0], [3.0]]))
    torch.testing.assert_close(features[0, 2], torch.tensor(1.0))
    torch.testing.assert_close(features[1, 2], torch.exp(torch.tensor(-0.5)))


@pytest.mark.slow
def test_laplace_beats_one_network_on_few_measurements_and_noise_follows_the_data(monkeypatch, seed):
    chosen = {"Maximum likelihood", motorcycle.POINT, motorcycle.HERO}
    every = motorcycle.methods
    monkeypatch.setattr(motorcycle, "methods", lambda e: {name: m for name, m in every(e).items() if name in chosen})
    result = motorcycle.run(seed=seed, folds=5, epochs=700, progress=False)
    scores = {name: result.comparison.mean(name, "nll").mean for name in chosen}
    assert min(scores, key=scores.__getitem__) == motorcycle.HERO
    coverage = {name: result.comparison.mean(name, "coverage_90").mean for name in chosen}
    assert coverage[motorcycle.POINT] < coverage[motorcycle.HERO] < 0.95
    noise = next(panel for panel in motorcycle.section(result).panels if panel.kind == "noise")
    early = [s for t, s in zip(noise.x, noise.noise, strict=True) if 2.4 <= t <= 12]
    late = [s for t, s in zip(noise.x, noise.noise, strict=True) if 16 <= t <= 40]
    assert sum(early) / len(early) < 0.6 * sum(late) / len(
        late
    )  # the data: 1 to 3 g before the impact, 17 to 39 g after
