from __future__ import annotations

import pytest

from knowable.testing.checks import precision
from tests.testing.faulty import faulty, rebuilt, sound


def test_sound_method_passes():
    precision.check_dtype_is_kept(sound())


def test_posterior_that_is_always_single_precision_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return rebuilt(posterior, stack={name: value.float() for name, value in posterior.stack.items()})

    with pytest.raises((AssertionError, RuntimeError), match=r"float|dtype"):
        precision.check_dtype_is_kept(faulty(fit))
