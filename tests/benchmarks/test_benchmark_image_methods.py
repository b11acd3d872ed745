from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.image_methods import METHODS, Fits, Recipe, evaluate, lenet5, load, run, synthetic, to_markdown
from benchmarks.study import Rows

from benchmarks import image_methods

TINY = Recipe(rows=64, test=12, epochs=1, batch_size=32, members=2, snapshots=3, samples=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a few dark and bright images as MNIST and FashionMNIST."""
    generator = np.random.default_rng(0)
    for name, brightest in (("mnist", 100), ("fashion_mnist", 256)):
        arrays = {
            f"{kind}_{part}": generator.integers(0, brightest if kind == "x" else 10, shape, dtype=np.uint8)
            for part, rows in (("train", 80), ("test", 20))
            for kind, shape in (("x", (rows, 28, 28)), ("y", (rows,)))
        }
        np.savez(tmp_path / f"{name}.npz", **arrays)
    monkeypatch.setenv("KNOWABLE_DATA", str(tmp_path))


@pytest.mark.usefixtures("folder")
def test_images_are_cut_and_standardised_by_the_training_images():
    images = load(TINY)
    assert images.x.shape == (64, 1, 28, 28) and images.inside.shape == images.outside.shape == (12, 1, 28, 28)
    assert images.y.dtype == torch.long and images.inside_y.shape == (12,)
    assert images.x.mean().item() == pytest.approx(0, abs=1e-4) and images.x.std().item() == pytest.approx(1, rel=1e-3)
    # uniform up to 255 in units of uniform up to 99: the mean is (127.5 - 49.5) / 28.9 = 2.7 sds away
    assert images.outside.mean().item() == pytest.approx(2.7, abs=0.1)


def test_network_is_lenet5_whatever_the_generator():
    net, again = lenet5(seed=1), lenet5(seed=1)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(value.numel() for value in net.parameters()) == 44_426
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_point_estimate_is_trained_once_for_those_that_begin_at_it():
    fits = Fits(synthetic(TINY), TINY)
    assert fits.fit("MAP") is fits.fit("MAP")
    last = fits.fit("Laplace, last layer")
    trained = fits.mode.mean()
    torch.testing.assert_close(last.mean()["0.weight"], trained["0.weight"])  # what is not random stays as it was
    torch.testing.assert_close(last.mean()["11.weight"], trained["11.weight"])  # and the centre is the mode


def test_point_estimate_has_no_mutual_information_and_others_do():
    fits = Fits(synthetic(TINY), TINY)
    assert evaluate("MAP", fits)["auroc_mutual_information"] is None
    row = evaluate("DeepEnsemble", fits)
    assert 0 <= row["auroc_mutual_information"] <= 1 and 0 <= row["auroc_entropy"] <= 1


def test_trained_network_notices_images_without_a_label():
    # a bright row says the label; images without any are outside. Trained on 600, all but a few are told apart
    recipe = Recipe(rows=600, test=60, epochs=10, batch_size=60)
    row = evaluate("MAP", Fits(synthetic(recipe), recipe))
    assert row["accuracy"][0] > 0.9 and row["auroc_entropy"] > 0.9


def test_quick_run_needs_no_data_and_skips_what_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="*", rows=Rows(path))
    assert {method: row["error"] for method, row in first["methods"].items()} == dict.fromkeys(METHODS)
    text = to_markdown(first)
    assert all(f"| {method} | 0." in text for method in METHODS)

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(image_methods, "evaluate", unwanted)
    again = run(quick=True, only="*", rows=Rows(path))["methods"]
    assert all(again[method]["nll"] == list(row["nll"]) for method, row in first["methods"].items())


def test_full_run_without_data_says_so(monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    text = to_markdown(run(quick=False, only="MAP", rows=Rows()))
    assert "| MAP | failed: FileNotFoundError: set KNOWABLE_DATA" in text
