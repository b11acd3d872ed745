"""Tests of shifted images against scipy and slow loops, and of scores along a shift."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

import knowable as kn
from knowable import shift


def _images(seed: int = 0, rows: int = 3, channels: int = 1, height: int = 12, width: int = 12) -> torch.Tensor:
    return torch.rand((rows, channels, height, width), generator=torch.Generator().manual_seed(seed)).double()


# --- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [0.0, 17.0, 45.0, 90.0, -130.0])
@pytest.mark.parametrize("width", [12, 9])
def test_rotation_is_that_of_scipy(degrees: float, width: int):
    x = _images(width=width) + 0.2
    for image, moved in zip(x, shift.rotate(x, degrees), strict=True):
        expected = ndimage.rotate(
            image[0].numpy(), degrees, reshape=False, order=1, mode="grid-constant", cval=image.min().item()
        )
        np.testing.assert_allclose(moved[0].numpy(), expected, atol=1e-12)


def test_a_quarter_turn_moves_pixels_and_four_of_them_bring_them_back():
    x = _images(channels=3)
    torch.testing.assert_close(shift.rotate(x, 90), torch.rot90(x, 1, (2, 3)))
    turned = x
    for _ in range(4):
        turned = shift.rotate(turned, 90)
    torch.testing.assert_close(turned, x)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_blur_is_that_of_scipy(severity: int):
    x = _images(height=28, width=28)
    scale = (0.5, 0.8, 1.2, 1.8, 2.5)[severity - 1]
    radius = math.ceil(3 * scale)
    for image, moved in zip(x, shift.corrupt(x, "blur", severity, clip=(0, 1)), strict=True):
        expected = ndimage.gaussian_filter(image[0].numpy(), scale, mode="mirror", radius=radius)
        np.testing.assert_allclose(moved[0].numpy(), expected, atol=1e-12)


def test_contrast_and_brightness_are_what_their_formulas_say():
    x = _images()
    for row, low, bright in zip(
        x, shift.corrupt(x, "contrast", 2, clip=(0, 1)), shift.corrupt(x, "brightness", 2, clip=(0, 1)), strict=True
    ):
        torch.testing.assert_close(low, row.mean() + 0.5 * (row - row.mean()))
        torch.testing.assert_close(bright, (row + 0.2).clamp(0, 1))


def test_pixelate_averages_blocks():
    x = _images()  # 12 pixels to 6
    moved = shift.corrupt(x, "pixelate", 1, clip=(0, 1))
    for i in range(12):
        for j in range(12):
            block = x[:, 0, i - i % 2 : i - i % 2 + 2, j - j % 2 : j - j % 2 + 2]
            torch.testing.assert_close(moved[:, 0, i, j], block.mean((1, 2)))


@pytest.mark.parametrize("severity", shift.SEVERITIES)
def test_occlusion_hides_one_square_of_the_size_of_its_grade(severity: int):
    x = _images() + 0.1
    moved = shift.corrupt(x, "occlusion", severity, clip=(0, 2))
    side = round((0.15, 0.25, 0.35, 0.45, 0.55)[severity - 1] * 12)
    for before, after in zip(x[:, 0], moved[:, 0], strict=True):
        hidden = torch.nonzero(after == 0)
        assert len(hidden) == side**2
        assert (hidden.amax(0) - hidden.amin(0) == side - 1).all()
        torch.testing.assert_close(after[after != 0], before[after != 0])


def test_noise_has_the_standard_deviation_of_its_grade():
    x = torch.full((50, 1, 28, 28), 0.5, dtype=torch.float64)
    noise = shift.corrupt(x, "gaussian_noise", 1, clip=(0.0, 1.0)) - x  # 6 standard deviations within the range
    assert abs(noise.std().item() / 0.08 - 1) < 4 / (2 * noise.numel()) ** 0.5
    assert abs(noise.mean().item()) < 4 * 0.08 / noise.numel() ** 0.5


@pytest.mark.parametrize("kind", shift.CORRUPTIONS)
def test_corruptions_are_repeatable_stay_in_range_and_follow_units(kind: str):
    x = _images(channels=2)
    moved = shift.corrupt(x, kind, 4, clip=(0, 1), seed=3)
    assert torch.equal(moved, shift.corrupt(x, kind, 4, clip=(0, 1), seed=3))
    assert moved.shape == x.shape and moved.min() >= 0 and moved.max() <= 1
    in_other_units = shift.corrupt(3 * x - 1, kind, 4, clip=(-1, 2), seed=3)
    torch.testing.assert_close(in_other_units, 3 * moved - 1)
    torch.testing.assert_close(shift.corrupt(x[:, 0], kind, 4, clip=(0, 1)).unsqueeze(1), shift.corrupt(
        x[:, :1], kind, 4, clip=(0, 1)))  # fmt: skip


@pytest.mark.parametrize("kind", shift.CORRUPTIONS)
def test_higher_grades_change_images_more(kind: str):
    x = _images(rows=40, height=28, width=28)
    x = nn.functional.avg_pool2d(x, 5, 1, 2)  # smooth
    change = [(shift.corrupt(x, kind, grade, clip=(0, 1)) - x).square().mean().item() for grade in shift.SEVERITIES]
    assert change == sorted(change) and change[0] < change[-1]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: shift.rotate(torch.zeros(2, 3), 10), kn.InvalidData, "must be images"),
        (lambda: shift.rotate(torch.zeros(2, 3, 3, dtype=torch.uint8), 10), kn.InvalidType, "float"),
        (lambda: shift.rotate(torch.zeros(2, 3, 3), math.inf), kn.InvalidArgument, "degrees"),
        (lambda: shift.corrupt(torch.full((2, 3, 3), math.nan), "blur"), kn.InvalidData, "row 0"),
        (lambda: shift.corrupt(torch.zeros(2, 3, 3), "fog"), kn.InvalidArgument, "kind must be one of"),
        (lambda: shift.corrupt(torch.zeros(2, 3, 3), "blur", 6), kn.InvalidArgument, "severity"),
        (lambda: shift.corrupt(torch.zeros(2, 3, 3), "blur", clip=(1, 0)), kn.InvalidArgument, "clip"),
        (lambda: shift.shift_plot({}), kn.InvalidArgument, "curves"),
    ],
)
def test_wrong_calls_are_named(call, error, said: str):
    with pytest.raises(error, match=said):
        call()


# --- curves ----------------------------------------------------------------------------------------------------------


def _bright_row() -> tuple[kn.Posterior, torch.Tensor, torch.Tensor]:
    """Images with one bright row of four, whose place is the label, and the network that reads it off."""
    y = torch.arange(40) % 4
    x = 0.3 * torch.rand((40, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    x[torch.arange(40), 0, 2 * y] = 1.0
    weights = torch.zeros(4, 64)
    for label in range(4):
        weights[label].view(8, 8)[2 * label] = 1.0
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    stack = {"1.weight": weights.unsqueeze(0), "1.bias": torch.zeros(1, 4)}
    return kn.Particles(kn.Model(net, kn.Categorical()), stack), x, y


@pytest.mark.parametrize("kind", ["rotation", "gaussian_noise"])
def test_a_curve_has_the_scores_of_predictions_at_shifted_images(kind: str):
    posterior, x, y = _bright_row()
    severities = (10, 90) if kind == "rotation" else (2, 5)
    found = shift.curve(posterior, x, y, kind, severities=severities, clip=(0, 1), seed=1)
    assert found.severities == (0.0, *severities)
    moved = shift.rotate(x, 90) if kind == "rotation" else shift.corrupt(x, kind, 5, clip=(0, 1), seed=1)
    prediction = posterior.predict(moved)
    expected = {
        "accuracy": kn.metrics.accuracy(prediction, y), "nll": kn.metrics.nll(prediction, y),
        "ece": kn.metrics.ece(prediction, y), "entropy": prediction.total.mean().item(),
    }  # fmt: skip
    assert {name: values[-1] for name, values in found.scores.items()} == pytest.approx(expected, rel=1e-5)
    assert found.scores["accuracy"][0] == 1.0
    assert found.scores["nll"][0] < found.scores["nll"][-1]
    assert "ShiftCurve" in repr(found)
    assert len(found.plot().axes) == 4


def test_a_curve_is_of_a_classifier():
    model = kn.Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), kn.Gaussian(0.1))
    posterior = kn.Particles(model, {name: value.unsqueeze(0) for name, value in model.params().items()})
    with pytest.raises(kn.InvalidType, match="classifier"):
        shift.curve(posterior, torch.rand(3, 1, 8, 8), torch.zeros(3), "blur")
    with pytest.raises(kn.InvalidArgument, match="severities"):
        shift.curve(_bright_row()[0], torch.rand(3, 1, 8, 8), torch.zeros(3), "blur", severities=[])
