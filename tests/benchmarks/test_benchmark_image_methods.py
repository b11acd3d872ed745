from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.image_methods import METHODS, Recipe, load, run, to_markdown
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


@pytest.mark.slow
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
