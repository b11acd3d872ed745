"""The plots of chains: what they show is what was counted, and what cannot be drawn is refused."""

from __future__ import annotations

import builtins
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import knowable as kn
from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.errors import InvalidArgument, InvalidType, MissingExtra
from knowable.evaluation.chain_plots import kernel_density, rank_counts, rank_plot, trace_plot


def draws(chains: int = 4, count: int = 100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        "a": torch.randn((chains, count), generator=generator, dtype=torch.float64),
        "w": torch.randn((chains, count, 2, 2), generator=generator),
    }
    found["w"][0, :, 1, 0] += 2  # one chain stands apart
    return found


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def notes(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_the_worst_quantity_comes_first_with_its_figures(plot):
    figure = plot(draws(), most=3)
    shown = titles(figure)
    assert shown[0] == "w[1, 0]" and len(shown) == 3
    expected = kn.metrics.rhat(draws()["w"])[1, 0].item()
    assert f"R-hat {expected:.3f}" in notes(figure)[0] and "ess" in notes(figure)[0]


@pytest.mark.parametrize("plot", [trace_plot, pytest.param(rank_plot, marks=pytest.mark.slow)])
def test_all_that_holds_chains_can_be_drawn(plot, tmp_path):
    given = draws()
    samples = Samples(given, torch.zeros(4, 100), ChainDiagnostics.of(given))
    assert titles(plot(samples)) == titles(plot(given)) == titles(plot({k: v.numpy() for k, v in given.items()}))
    assert titles(plot(given, names="a")) == ["a"]
    assert set(titles(plot(given, names=["w"]))) == {"w[0, 0]", "w[0, 1]", "w[1, 0]", "w[1, 1]"}
    file = tmp_path / "plot.png"
    plot(given).savefig(file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_a_networks_weights_or_outputs_are_drawn(plot):
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.5))
    generator = torch.Generator().manual_seed(0)
    stack = {name: torch.randn((80, *value.shape), generator=generator) for name, value in model.params().items()}
    posterior = ChainPosterior(model, stack, 4)
    assert set(titles(plot(posterior))) == {"weight[0, 0]", "weight[0, 1]", "bias[0]"}
    assert set(titles(plot(posterior, x=torch.zeros(2, 2)))) == {"f[0, 0]", "f[1, 0]"}


def test_traces_hold_every_draw_of_every_chain():
    given = draws()
    figure = trace_plot(given, names="a")
    lines = figure.axes[0].get_lines()
    assert len(lines) == 4
    for chain, line in zip(given["a"], lines, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), chain.numpy())
    assert len(trace_plot({"a": torch.randn(2, 9000)}).axes[0].get_lines()[0].get_ydata()) <= 2250


def test_ranks_are_counted_as_by_hand_and_the_band_holds_what_it_says(seed):
    generator = torch.Generator().manual_seed(seed)
    small = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    counts, expected, _, _ = rank_counts(small, 4)
    assert counts.tolist() == [[2, 2, 0, 0], [0, 0, 2, 2]] and expected == 1
    inside = []
    for _ in range(50):  # 4000 bars: the share outside 95% has a standard error below 0.005
        counts, expected, low, high = rank_counts(torch.randn((4, 500), generator=generator), 20)
        assert counts.sum(1).tolist() == [500] * 4 and counts.sum(0).tolist() == [100] * 20
        inside.append(((counts >= low) & (counts <= high)).double().mean().item())
    exact = stats.hypergeom(2000, 500, 100)  # the whole numbers within the band
    share = exact.cdf(math.floor(high)) - exact.cdf(math.ceil(low) - 1)
    assert abs(np.mean(inside) - share) < 4 * 0.005 and abs(share - 0.95) < 0.02


def test_equal_values_are_ranked_evenly():
    counts, _, low, high = rank_counts(torch.zeros(4, 500), 10)
    assert ((counts >= low) & (counts <= high)).double().mean() > 0.8


def test_bars_are_the_counts_and_those_outside_the_band_are_dark():
    given = {"w": draws()["w"][:, :, 1, 0]}
    figure = rank_plot(given, bins=10)
    counts, _, low, high = rank_counts(given["w"].double(), 10)
    assert len(figure.axes) == 4
    for chain, axes in enumerate(figure.axes):
        bars = [patch for patch in axes.patches if patch.get_width() < 0.2]
        heights = {round(bar.get_x() * 10): (bar.get_height(), bar.get_alpha()) for bar in bars}
        assert [heights[i][0] for i in range(10)] == counts[chain].tolist()
        assert all((heights[i][1] > 0.9) == (not low <= counts[chain, i] <= high) for i in range(10))


def test_of_many_chains_the_least_even_are_shown():
    many = torch.randn((12, 200), generator=torch.Generator().manual_seed(1))
    many[10] += 3
    labels = [axes.get_ylabel() for axes in rank_plot({"x": many}).axes]
    assert len(labels) == 8 and "chain 11" in labels


def test_density_integrates_to_one_and_is_that_of_a_normal(generator):
    at = torch.linspace(-5, 5, 400, dtype=torch.float64)
    found = kernel_density(torch.randn(4000, generator=generator, dtype=torch.float64), at)
    assert torch.trapezoid(found, at).item() == pytest.approx(1, abs=0.01)
    assert np.abs(found.numpy() - stats.norm.pdf(at.numpy())).max() < 0.05
    assert torch.isfinite(kernel_density(torch.full((50,), 0.5, dtype=torch.float64), at)).all()


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_what_never_moved_or_is_not_finite_is_drawn_too(plot):
    still = {"x": torch.zeros(3, 20, 2)}
    still["x"][0, 3, 1] = math.nan
    figure = plot(still)
    figure.canvas.draw()
    assert notes(figure).count("never moved") == 2


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_nothing_global_is_touched(plot):
    before = dict(mpl.rcParams)
    plot(draws(), most=1)
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_what_cannot_be_drawn_is_refused(plot):
    with pytest.raises(InvalidType, match="samples must be Samples, a ChainPosterior or a dict"):
        plot(torch.zeros(4, 100))
    with pytest.raises(InvalidArgument, match="at least 4 draws"):
        plot({"a": torch.zeros(4, 3)})
    with pytest.raises(InvalidArgument, match="same numbers of chains"):
        plot({"a": torch.zeros(4, 10), "b": torch.zeros(2, 10)})
    with pytest.raises(InvalidArgument, match="names must be of 'a', 'w'"):
        plot(draws(), names="b")
    with pytest.raises(InvalidArgument, match="x needs a ChainPosterior"):
        plot(draws(), x=torch.zeros(1, 1))
    with pytest.raises(InvalidArgument, match="most"):
        plot(draws(), most=0)
    with pytest.raises(InvalidArgument, match="bins"):
        rank_plot(draws(), bins=1)


def test_a_missing_matplotlib_is_named(monkeypatch):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"knowable\[report\]"):
        trace_plot(draws())
