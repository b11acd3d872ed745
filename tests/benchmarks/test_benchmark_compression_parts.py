"""The parts that studies of compression share: images, networks, counting, and fits that survive a stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.compression.architectures import Tagger, lenet_5_caffe, lenet_300_100, seeded, vgg_like
from benchmarks.compression.images import HELD_OUT, cifar10, mnist, synthetic, with_random_labels
from benchmarks.compression.pictures import animate_filters, draw_filters, tiled
from benchmarks.compression.sparsity import counts, error_percent, kept_weights, pruned
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows
from PIL import Image

import knowable as kn
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.training.run import TrainingRun


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with noise as MNIST and CIFAR-10."""
    generator = np.random.default_rng(0)
    for name, shape in (("mnist", (28, 28)), ("cifar10_subset", (32, 32, 3))):
        rows = {"train": HELD_OUT + 20 if name == "mnist" else 20, "test": 10}
        arrays = {f"x_{part}": generator.integers(0, 256, (n, *shape), dtype=np.uint8) for part, n in rows.items()}
        arrays |= {f"y_{part}": generator.integers(0, 10, (n,), dtype=np.uint8) for part, n in rows.items()}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    monkeypatch.setenv("KNOWABLE_DATA", str(tmp_path))
    return tmp_path


# --- images and networks ---------------------------------------------------------------------------------------------


def test_held_out_images_are_the_last_of_training_and_no_fit_sees_them(folder):
    images = mnist(20, judged="held out")
    with np.load(folder / "mnist.npz") as file:
        assert torch.equal(images.test_y, torch.from_numpy(file["y_train"][-HELD_OUT:]).long())
        assert torch.equal(mnist(20).test_y, torch.from_numpy(file["y_test"]).long())
    assert images.x.shape == (20, 28, 28) and images.test_x.shape == (HELD_OUT, 28, 28)
    assert images.x.max() <= 1 and images.x.min() >= 0
    with pytest.raises(ValueError, match="leave no 5000 to be held out"):
        mnist(21, judged="held out")


@pytest.mark.usefixtures("folder")
def test_colours_are_standardised_by_the_training_images():
    images = cifar10()
    assert images.x.shape == (20, 3, 32, 32) and images.test_x.shape == (10, 3, 32, 32)
    torch.testing.assert_close(images.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.x.std((0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


def test_random_labels_replace_labels_and_nothing_else():
    images = synthetic(400, 10)
    other = with_random_labels(images, seed=0)
    assert other.x is images.x
    # 400 labels right with probability 1/10: 40 with a standard deviation of 6
    assert abs((other.y == images.y).sum().item() - 40) < 30
    assert torch.equal(other.y, with_random_labels(images, seed=0).y)


@pytest.mark.parametrize(("build", "weights"), [(lenet_300_100, 266_200), (lenet_5_caffe, 430_500)])
def test_lenets_have_the_weights_of_the_paper(build, weights):
    net = seeded(build, 3)
    assert sum(value.numel() for value in net.parameters() if value.dim() > 1) == weights
    assert net(torch.zeros(2, 28, 28)).shape == (2, 10)
    assert torch.equal(next(net.parameters()), next(seeded(build, 3).parameters()))


def test_wider_networks_have_more_weights():
    sizes = [sum(value.numel() for value in vgg_like(width).parameters()) for width in (0.25, 0.5, 1.0)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert vgg_like(0.25)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_tagger_answers_every_place(cell):
    assert Tagger(5, 3, cell=cell, hidden=4)(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 3, 7)


# --- counting --------------------------------------------------------------------------------------------------------


def posterior_with(loc: list[list[float]], scale: list[list[float]]) -> DiagonalNormal:
    model = kn.Model(torch.nn.Linear(2, 2), kn.Categorical(), {"weight": kn.LogUniform(), "*": kn.Flat()}, random="w*")
    bias = {"bias": torch.tensor([0.0, 0.5])}
    return DiagonalNormal(model, {"weight": torch.tensor(loc)}, {"weight": torch.tensor(scale)}, points=bias)


def test_weights_whose_variance_is_twenty_times_their_square_go():
    # exp(3) = 20.0855: a deviation of 4.48 goes on a mean of 1 stays, 4.49 goes; a mean of zero always goes
    posterior = posterior_with([[1.0, 1.0], [0.0, -2.0]], [[4.48, 4.49], [1e-6, 1.0]])
    kept = kept_weights(posterior)
    assert kept.keys() == {"weight"} and kept["weight"].tolist() == [[True, False], [False, True]]
    found = counts(kept)
    assert found == {"sparsity": {"weight": 50.0}, "weights": 4, "nonzero": 2, "compression": 2.0}
    assert counts({"weight": torch.zeros(2, 2, dtype=torch.bool)})["compression"] is None
    params = pruned(posterior, kept)
    assert params["weight"].tolist() == [[1.0, 0.0], [0.0, -2.0]] and params["bias"].tolist() == [0.0, 0.5]


def test_error_is_that_of_the_network_with_these_parameters():
    posterior = posterior_with([[1.0, 1.0], [0.0, -2.0]], [[0.1, 0.1], [0.1, 0.1]])
    x = torch.tensor([[1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])  # outputs (1, 0.5), (-1, 2.5), (-1, 0.5)
    error = error_percent(posterior, posterior.mean(), x, torch.tensor([0, 1, 0]), batch=2)
    assert error == pytest.approx(100 / 3)


# --- fits and rows ---------------------------------------------------------------------------------------------------


def test_finished_fit_is_taken_up_and_another_method_fits_anew(tmp_path):
    model = kn.Model(torch.nn.Linear(2, 2), kn.Categorical(), kn.Flat())
    data = torch.randn(20, 2), torch.zeros(20, dtype=torch.long)
    fits = Fits(tmp_path)
    first, _ = fits.fit("a fit", kn.MaximumLikelihood(epochs=3), model, data)
    again, _ = fits.fit("a fit", kn.MaximumLikelihood(epochs=3), model, data)
    assert torch.equal(again.mean()["weight"], first.mean()["weight"])
    other, _ = fits.fit("a fit", kn.MaximumLikelihood(epochs=30), model, data)
    assert not torch.equal(other.mean()["weight"], first.mean()["weight"])
    assert len(list(tmp_path.iterdir())) == 2


def test_fits_that_start_from_different_ones_are_different(tmp_path):
    model = kn.Model(torch.nn.Linear(2, 2), kn.Categorical(), kn.Flat())
    data = torch.randn(20, 2), torch.zeros(20, dtype=torch.long)
    fits = Fits(tmp_path)
    starts = [fits.fit("first", kn.MaximumLikelihood(epochs=epochs), model, data)[0] for epochs in (3, 30)]
    for start in starts:
        fits.fit("second", kn.SparseVariationalDropout(epochs=1, start=start), model, data)
    assert len(list(tmp_path.glob("second*"))) == 2


def test_fit_that_was_interrupted_is_not_taken_for_finished(tmp_path, monkeypatch):
    model = kn.Model(torch.nn.Linear(2, 2), kn.Categorical(), kn.Flat())
    data = torch.randn(20, 2), torch.zeros(20, dtype=torch.long)
    whole = kn.MaximumLikelihood(epochs=30).fit(model, data, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "epoch_of_steps", interrupting_after(10, TrainingRun.epoch_of_steps))
        with pytest.raises(KeyboardInterrupt):
            Fits(tmp_path).fit("a fit", kn.MaximumLikelihood(epochs=30), model, data)
    assert [path.name for path in tmp_path.glob("*/*")] == ["checkpoint"]
    posterior, _ = Fits(tmp_path).fit("a fit", kn.MaximumLikelihood(epochs=30), model, data)
    assert torch.equal(posterior.mean()["weight"], whole.mean()["weight"])


def interrupting_after(epochs: int, epoch_of_steps):
    """Epochs of steps, after so many of which the user presses Ctrl-C."""
    done = []

    def epoch(run, saver, bar):
        done.append(epoch_of_steps(run, saver, bar))
        if len(done) == epochs:
            raise KeyboardInterrupt

    return epoch


def test_rows_that_are_known_are_not_worked_again_and_failures_are_rows():
    calls = []

    def case():
        calls.append(1)
        return {"value": 3}

    def broken():
        raise ValueError("no\nway")

    rows = Rows()
    for _ in range(2):
        found = work_through({"one": case, "two": broken, "3": case}, only="?*o*", rows=rows, recipe=1, quick=True)
    assert found == {"two": {"error": "ValueError: no"}}
    for _ in range(2):
        found = work_through({"one": case}, only="*", rows=rows, recipe=1, quick=True)
    assert found == {"one": {"error": None, "value": 3}} and len(calls) == 1


# --- pictures --------------------------------------------------------------------------------------------------------


def test_filters_lie_side_by_side_with_lines_between():
    sheet = tiled(torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 2, 2), columns=2)
    assert sheet.shape == (5, 5)
    assert sheet[:2, :2].eq(0).all() and sheet[:2, 3:].eq(1).all() and sheet[3:, :2].eq(2).all()
    assert sheet[2].isnan().all() and sheet[:, 2].isnan().all() and sheet[3:, 3:].isnan().all()


def test_pictures_are_written_and_small(tmp_path):
    frames = torch.randn(50, 2, 4, 1, 3, 3).half()
    frames[:, 1] = torch.inf  # as where a mean is zero
    draw_filters(frames, tmp_path / "filters.png", moments=(1, 50))
    animate_filters(frames, tmp_path / "filters.gif")
    assert all(0 < path.stat().st_size < 500_000 for path in tmp_path.iterdir())
    with Image.open(tmp_path / "filters.gif") as animation:
        assert animation.n_frames == 25  # every second of fifty
