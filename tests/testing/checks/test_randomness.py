from __future__ import annotations

import pytest
import torch

from knowable.testing.checks import predicting as randomness
from tests.testing.faulty import faulty, rebuilt, sound


def test_sound_method_passes():
    randomness.check_same_seed_gives_the_same_bits(sound())
    randomness.check_seed_matters_if_and_only_if_declared(sound())


def test_noise_from_the_global_generator_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return rebuilt(posterior, stack={name: value + torch.rand(()) for name, value in posterior.stack.items()})

    with pytest.raises(AssertionError, match="same seed"):
        randomness.check_same_seed_gives_the_same_bits(faulty(fit))


def test_seed_that_is_ignored_is_found():
    def fit(fit, model, data, *, seed=0, **keywords):
        return fit(model, data, **keywords)

    with pytest.raises(AssertionError, match="is the seed used"):
        randomness.check_seed_matters_if_and_only_if_declared(faulty(fit))


def test_randomness_that_is_denied_is_found():
    with pytest.raises(AssertionError, match="declared without randomness"):
        randomness.check_seed_matters_if_and_only_if_declared(sound(seeded=False))
