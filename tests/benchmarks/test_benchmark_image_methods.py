from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.image_fits import METHODS, QUICK, RECIPES, Images, lenet5, load, main, slug
from benchmarks.image_methods import OUTSIDE, _against, foreign, run, to_markdown
from benchmarks.study import Rows

import knowable as kn
from benchmarks import image_fits, image_methods


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a few dark and bright images as MNIST and FashionMNIST."""
    generator = np.random.default_rng(0)
    for name, brightest in (("mnist", 100), ("fashion_mnist", 256)):
        arrays = {
            f"{kind}_{part}": generator.integers(0, brightest if kind == "x" else 10, shape, dtype=np.uint8)
            for part, rows in (("train", 120), ("test", 40))
            for kind, shape in (("x", (rows, 28, 28)), ("y", (rows,)))
        }
        np.savez(tmp_path / f"{name}.npz", **arrays)
    monkeypatch.setenv("KNOWABLE_DATA", str(tmp_path))


@pytest.mark.usefixtures("folder")
def test_images_are_cut_and_standardised_by_the_training_images():
    images = load("MNIST", rows=64, test=12)
    assert images.x.shape == (64, 1, 28, 28) and images.inside.shape == images.outside.shape == (12, 1, 28, 28)
    assert images.y.dtype == torch.long and images.inside_y.shape == (12,)
    assert images.x.mean().item() == pytest.approx(0, abs=1e-4) and images.x.std().item() == pytest.approx(1, rel=1e-3)
    # uniform up to 255 in units of uniform up to 99: the mean is (127.5 - 49.5) / 28.9 = 2.7 sds away
    assert images.outside.mean().item() == pytest.approx(2.7, abs=0.1)
    assert load("FashionMNIST", rows=64, test=12).outside.mean().item() == pytest.approx(-1.05, abs=0.1)


@pytest.mark.usefixtures("folder")
def test_held_out_images_are_not_among_those_that_are_learned():
    images = load("MNIST", rows=80, test=12)
    assert len(images.held_out) == len(images.held_out_y) == 40  # of 120, all that are left of the last 5,000
    learned, held = images.x.flatten(1), images.held_out.flatten(1)
    assert (torch.cdist(learned, held) > 0).all()
    known = np.load(image_fits.data_folder() / "mnist.npz")
    assert images.held_out_y.tolist() == known["y_train"][80:].tolist()
    assert torch.allclose(images.held_out[:, 0], images.in_units(torch.from_numpy(known["x_train"][80:])))


def test_foreign_images_are_turned_or_noise_in_the_same_units():
    x = torch.arange(2 * 28 * 28.0).view(2, 1, 28, 28)
    none = torch.zeros(0)
    images = Images(none, none, none, none, none, none, none, mean=127.5, scale=255 / 12**0.5)
    found = foreign(images, x, seed=0)
    assert torch.equal(found["turned"][1, 0], torch.from_numpy(np.rot90(x[1, 0].numpy()).copy()))
    # uniform from 0 to 255 in units of its own standard deviation; standard errors 0.025 and less
    assert found["noise"].mean().item() == pytest.approx(0, abs=0.13)
    assert found["noise"].std().item() == pytest.approx(1, abs=0.1)


def test_thresholds_come_from_the_held_out_images():
    inside, outside, held_out = torch.arange(100.0), torch.arange(50.0, 150.0), torch.arange(0.0, 200.0, 2)
    (found,) = _against({"entropy": inside}, {"entropy": outside}, {"entropy": held_out}).values()
    assert found["tpr"] == 0.0 and found["fpr"] == 0.0  # 5% of the held-out scores lie above 188
    (found,) = _against({"entropy": inside}, {"entropy": outside}).values()
    assert found["tpr"] == pytest.approx((outside > 94).double().mean().item())
    assert found["auroc"] == pytest.approx(kn.metrics.auroc(inside, outside))


def test_a_wider_network_has_more_channels_and_the_narrow_one_is_lenet5():
    assert sum(each.numel() for each in lenet5().parameters()) == 44_426
    wide = lenet5(channels=RECIPES["FashionMNIST"].channels)
    assert [each.shape[0] for each in wide.parameters() if each.dim() == 4] == list(RECIPES["FashionMNIST"].channels)
    assert wide(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_command_saves_posteriors_that_load_and_takes_up_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(image_fits, "RECIPES", {"MNIST": QUICK})
    out = tmp_path / "out"
    main(["MNIST", "--out", str(out)])
    saved = {method: kn.load(out / "posteriors" / "MNIST" / slug(method)) for method in METHODS}
    x = torch.zeros(3, 1, 28, 28)
    first = saved["Ensemble of MeanFieldVI"].members[0]
    assert torch.equal(first.mean()["0.weight"], saved["MeanFieldVI"].mean()["0.weight"])
    assert torch.equal(saved["DeepEnsemble"].stack["0.weight"][0], saved["MAP"].mean()["0.weight"])
    assert all(posterior.predict(x, samples=2).probs.shape == (3, 10) for posterior in saved.values())

    def unwanted(*_, **__):
        raise AssertionError("fitted again")

    monkeypatch.setattr(kn.MAP, "fit", unwanted)
    main(["MNIST", "--out", str(out), "--method", "*Ensemble*"])


@pytest.mark.slow
def test_quick_run_needs_no_data_and_skips_what_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="*", rows=Rows(path))
    assert {name: row["error"] for name, row in first["rows"].items()} == dict.fromkeys(
        f"{name}: {method}" for name in RECIPES for method in METHODS
    )
    row = first["rows"]["MNIST: DeepEnsemble"]
    assert set(row["detection"]) == set(OUTSIDE) and row["chosen"] in row["held_out_auroc"]
    text = to_markdown(first)
    assert all(f"| {method} | " in text for method in METHODS)
    assert text.count("\n## ") == 2 * (2 + len(OUTSIDE))

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(image_methods, "evaluate", unwanted)
    again = run(quick=True, only="*", rows=Rows(path))["rows"]
    assert all(again[name]["nll"] == list(row["nll"]) for name, row in first["rows"].items())
