"""The parts that studies of compression share: images, networks, counting, and fits that survive a stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.compression.images import HELD_OUT, mnist
from benchmarks.compression.sparsity import counts, kept_weights, pruned
from benchmarks.compression.working import Fits

import knowable as kn
from knowable.core.posterior.normal import DiagonalNormal


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


# --- pictures --------------------------------------------------------------------------------------------------------
