from __future__ import annotations

import json
import math

import pytest
import torch

import knowable as kn
from knowable.inference.dropout.augmentation import augmentation_from

ALL = [kn.InputNoise(0.3), kn.Shift(2), kn.Shift(1, dims=(-1,)), kn.Flip(), kn.Flip((-2, -1))]


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_one_change_is_made_to_all_rows(augment, generator):
    x = torch.randn((1, 2, 5, 6), generator=generator, dtype=torch.float64)
    for _ in range(5):
        state = generator.get_state()
        one = augment(x, generator)
        generator.set_state(state)
        many = augment(x.expand(4, -1, -1, -1), generator)
        assert torch.equal(many, one.expand(4, -1, -1, -1)) and many.dtype == x.dtype


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_an_augmentation_survives_json(augment):
    assert augmentation_from(json.loads(json.dumps(augment.to_json()))) == augment


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_inputs_are_not_written_to(augment, generator):
    x = torch.randn((3, 2, 5, 6), generator=generator)
    before = x.clone()
    for _ in range(5):
        augment(x, generator)
    assert torch.equal(x, before)


def test_noise_has_its_scale(generator):
    noise = kn.InputNoise(0.3)(torch.zeros(1, 20_000), generator)
    assert abs(noise.std() - 0.3) < 5 * 0.3 / math.sqrt(2 * 20_000)
    assert abs(noise.mean()) < 5 * 0.3 / math.sqrt(20_000)


def test_noise_on_whole_numbers_is_refused(generator):
    with pytest.raises(kn.Unsupported, match="Whole numbers"):
        kn.InputNoise()(torch.zeros(2, 3, dtype=torch.long), generator)


def test_images_move_by_up_to_so_many_pixels_and_zeros_come_in(generator):
    x = torch.arange(1.0, 26.0).view(1, 1, 5, 5)
    seen = set()
    for _ in range(300):
        moved = kn.Shift(1)(x, generator)
        found = []
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
                expected = padded[..., 1 - down : 6 - down, 1 - right : 6 - right]
                found += [(down, right)] if torch.equal(moved, expected) else []
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 9


def test_a_move_further_than_the_image_leaves_nothing(generator):
    x = torch.ones(1, 1, 2, 2)
    found = {kn.Shift(3, dims=(-1,))(x, generator).sum().item() for _ in range(100)}
    assert found == {0.0, 2.0, 4.0}


def test_images_are_mirrored_every_other_time(generator):
    x = torch.arange(6.0).view(1, 1, 2, 3)
    flipped = [torch.equal(kn.Flip()(x, generator), x.flip(-1)) for _ in range(400)]
    assert abs(sum(flipped) - 200) < 5 * math.sqrt(100)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: kn.InputNoise(0.0), "scale"),
        (lambda: kn.Shift(0), "pixels"),
        (lambda: kn.Shift(1, dims=(0,)), "dims"),
        (lambda: kn.Shift(1, dims=-1), "dims"),
        (lambda: kn.Flip(()), "dims"),
    ],
)
def test_augmentations_that_make_no_sense_are_refused(make, named):
    with pytest.raises(kn.KnowableError, match=named):
        make()
