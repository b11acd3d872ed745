"""The plots of sparsity: what they show is what was counted, and what cannot be drawn is refused."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import knowable as kn
from knowable.errors import InvalidArgument, InvalidType, MissingExtra
from knowable.evaluation.sparsity_plots import sparsity_plot, weights_film, weights_plot

HISTORY = [
    {"step": 100, "epoch": 1.5, "loss": 1.0, "sparsity.0.weight": 0.25, "sparsity.2.weight": 0.5},
    {"step": 200, "epoch": 3.0, "loss": 0.5, "sparsity.0.weight": 0.75, "sparsity.2.weight": 0.9},
]


def posterior(epochs: int = 6, shape: tuple[int, ...] = (4, 6)) -> kn.NoisyWeights:
    """Frames in which ever more elements of log alpha are above 3."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn((epochs, 2, *shape), generator=generator)
    frames[:, 1] = -1.0
    for epoch in range(epochs):
        frames[epoch, 1].view(-1)[: 4 * epoch] = 5.0
    model = kn.Model(nn.Linear(6, 4), kn.Gaussian(0.1), random="weight")
    loc = {"weight": torch.ones(4, 6)}
    points = {"bias": torch.zeros(4)}
    return kn.NoisyWeights(model, loc, loc, points=points, watched="weight", frames=frames.to(torch.float16))


def test_curves_are_the_records_in_percent():
    (axes,) = sparsity_plot(HISTORY).axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[1.5, 25.0], [3.0, 75.0]],
        [[1.5, 50.0], [3.0, 90.0]],
    ]
    assert [line.get_label() for line in axes.lines] == ["0.weight, 75.0% at the end", "2.weight, 90.0% at the end"]


def test_a_posterior_is_drawn_from_its_history():
    found = posterior()
    found.diagnostics = kn.Diagnostics(history=HISTORY)
    assert len(sparsity_plot(found).axes[0].lines) == 2


def test_moments_are_evenly_spaced_and_count_what_is_sparse():
    figure = weights_plot(posterior(), moments=3)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    # of 24 elements 4 more in each of epochs 2 to 6; those in the middle are the third of six: round(2.5) is 2
    assert titles == ["epoch 1\n0.0% sparse", "epoch 3\n33.3% sparse", "epoch 6\n83.3% sparse"]
    images = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    np.testing.assert_array_equal(images[2], posterior().frames[5, 0].float())
    np.testing.assert_array_equal(images[5], posterior().frames[5, 1].float())


def test_kernels_and_strips_are_laid_out_without_loss():
    frames = posterior(2, (1, 48)).frames
    image = np.asarray(weights_plot(posterior(2, (1, 48)), moments=1).axes[0].images[0].get_array(), dtype=float)
    assert image.shape == (7, 7) and np.isnan(image).sum() == 1
    assert sorted(image[~np.isnan(image)]) == sorted(frames[0, 0].flatten().double().tolist())
    assert np.asarray(weights_plot(posterior(2, (4, 2, 3)), moments=1).axes[0].images[0].get_array()).shape == (4, 6)


def test_a_film_has_a_picture_for_every_epoch_up_to_the_most(tmp_path):
    with Image.open(weights_film(posterior(), tmp_path / "some" / "film.gif", most=4)) as film:
        assert film.n_frames == 4
    folder = weights_film(posterior(), tmp_path / "stills")
    assert [each.name for each in sorted(folder.iterdir())] == [f"epoch_{i:05d}.png" for i in range(1, 7)]
    with Image.open(folder / "epoch_00001.png") as first, Image.open(folder / "epoch_00006.png") as last:
        assert first.size == last.size and first.tobytes() != last.tobytes()


def test_what_cannot_be_drawn_is_refused(tmp_path):
    unwatched = posterior()
    unwatched.frames = None
    with pytest.raises(InvalidType, match="posterior has no frames"):
        weights_plot(unwatched)
    with pytest.raises(InvalidType, match="posterior must be a fitted posterior"):
        weights_film("posterior", tmp_path / "film.gif")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"path must be a \.gif or a folder, got 'film.mp4'"):
        weights_film(posterior(), tmp_path / "film.mp4")
    with pytest.raises(InvalidArgument, match="moments must be"):
        weights_plot(posterior(), moments=0)
    with pytest.raises(InvalidArgument, match="seconds must be"):
        weights_film(posterior(), tmp_path / "film.gif", seconds=0.0)
    for nothing in ([], [{"step": 100, "epoch": 1.0}]):
        with pytest.raises(InvalidArgument, match="no record of sparsity"):
            sparsity_plot(nothing)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtra, match="pip install"):
        sparsity_plot(HISTORY)
