from __future__ import annotations

import pytest

import knowable as kn
from knowable.testing.checks import predicting as precision
from tests.testing.faulty import faulty, sound


class Single(kn.Particles):
    """Draws in single precision, whatever the model's."""

    def _atoms(self, index):
        return {name: value.float() for name, value in super()._atoms(index).items()}


def test_sound_method_passes():
    precision.check_dtype_is_kept(sound())


def test_posterior_that_is_always_single_precision_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return Single(model, posterior.stack, buffers=posterior.buffers)

    with pytest.raises((AssertionError, RuntimeError), match=r"float|dtype"):
        precision.check_dtype_is_kept(faulty(fit))
