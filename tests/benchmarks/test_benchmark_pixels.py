"""The studies of segmentation and super-resolution: their crops, scores and masks, and a whole quick run of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.segmentation import Crops, mask_of, missed_shares, pixel_scores
from benchmarks.study import Rows
from benchmarks.super_resolution import bicubic, image_scores, interval_scores, pairs
from sklearn.metrics import log_loss, roc_auc_score

from benchmarks import segmentation, super_resolution
from knowable.likelihoods.bernoulli import BernoulliPrediction

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 4, 1, 16, 16, generator=GENERATOR)
PREDICTION = BernoulliPrediction(LOGITS, torch.full((3,), 1 / 3).log())
Y = torch.randint(0, 2, (4, 16, 16), generator=GENERATOR)


def test_crops_are_parts_of_the_image_turned_with_their_masks():
    x = torch.arange(12.0 * 12).view(1, 1, 12, 12).repeat(2, 1, 1, 1)
    crops = Crops(x, x[:, 0].long() % 7, 4)
    assert len(crops) == 18
    whole = x[0, 0].unfold(0, 4, 1).unfold(1, 4, 1).flatten(0, 1)
    for number in range(len(crops)):
        image, mask = crops[number]
        assert image.shape == (1, 4, 4) and torch.equal(image[0].long() % 7, mask)
        turned = [each for turns in range(4) for part in (image[0].rot90(turns),) for each in (part, part.flip(-1))]
        assert any((whole == each).all(-1).all(-1).any() for each in turned)


def test_scores_of_pixels_are_those_of_scikit_learn():
    found = pixel_scores(PREDICTION, Y)
    probs, labels = PREDICTION.probs[:, 0].double(), PREDICTION.labels[:, 0]
    losses = [log_loss(y.flatten(), p.flatten()) for y, p in zip(Y, probs, strict=True)]
    errors = [
        roc_auc_score((label != y).flatten(), total.flatten())
        for label, y, total in zip(labels, Y, PREDICTION.total[:, 0], strict=True)
    ]
    for name, values in {"nll": losses, "errors_entropy": errors}.items():
        assert found[name] == pytest.approx([np.mean(values), np.std(values, ddof=1) / 2], rel=1e-6)
    assert found["accuracy"][0] == pytest.approx((labels == Y).double().mean().item())


def test_the_share_that_is_missed_is_counted_in_tiles():
    probs = PREDICTION.probs[:, 0]
    found = missed_shares(probs, Y, 8).view(4, 2, 2)
    for image in range(4):
        for row in range(2):
            for column in range(2):
                cut = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
                inside = Y[image][cut] == 1
                expected = (probs[image][cut][inside] < 0.5).double().mean()
                torch.testing.assert_close(found[image, row, column], expected)


def test_a_mask_of_the_calibration_images_themselves_keeps_the_risk():
    recipe = segmentation.Recipe(tile=8, missed=0.3)
    mask = mask_of(PREDICTION, Y, PREDICTION, recipe)
    assert mask.shape == Y.shape and 0.15 < missed_shares(mask.double(), Y, 8).mean() <= 0.3


def test_small_images_are_averages_and_enlarged_ones_are_as_large():
    small, large = pairs(torch.rand(2, 28, 28, generator=GENERATOR))
    torch.testing.assert_close(small[1, 0, 2, 3], large[1, 8:12, 12:16].mean())
    assert bicubic(small).shape == large.shape
    torch.testing.assert_close(bicubic(torch.full((1, 1, 7, 7), 0.4)), torch.full((1, 28, 28), 0.4))


def test_scores_of_images_and_intervals():
    y = torch.zeros(2, 4, 4)
    mean = torch.tensor([0.1, 0.2]).view(2, 1, 1).expand(2, 4, 4)
    found = image_scores(mean, y)
    assert found["rmse"][0] == pytest.approx((0.05 / 2) ** 0.5)
    assert found["psnr"][0] == pytest.approx((20 - 20 * np.log10(0.2)) / 2)
    low, high = torch.full_like(y, -1.0), torch.full_like(y, 1.0)
    low[:, 0], bright = 0.5, torch.zeros_like(y)
    bright[:, :2] = 1.0  # of which the first half is outside
    scores = interval_scores(low, high, y, bright)
    assert scores["coverage"][0] == 0.75 and scores["coverage_not_dark"][0] == 0.5
    assert scores["width"][0] == pytest.approx(0.25 * 0.5 + 0.75 * 1)  # pixels are between 0 and 1


@pytest.mark.slow
@pytest.mark.parametrize("study", [segmentation, super_resolution])
def test_quick_run_needs_no_data_and_skips_what_is_done(study, tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = study.run(quick=True, only="*", rows=Rows(path))
    assert {method: row["error"] for method, row in first["methods"].items()} == dict.fromkeys(study.METHODS)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert all(f"| {method} | 0." in study.to_markdown(first) for method in study.METHODS)

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(study.Study, "scores", unwanted)
    assert study.run(quick=True, only="*", rows=Rows(path))["methods"].keys() == first["methods"].keys()
