from __future__ import annotations

import pytest

import knowable as kn
from knowable.testing.checks import storing
from tests.testing.faulty import faulty, sound


def test_sound_method_passes():
    storing.check_saving_and_loading_changes_nothing(sound())
    storing.check_loading_with_the_network_given(sound())


class Forgetful(kn.Particles):
    """Loses something on the way."""

    family = "forgetful"

    @classmethod
    def _from_tensors(cls, model, tensors, **common):
        return super()._from_tensors(model, {name: value + 1e-6 for name, value in tensors.items()}, **common)


@pytest.mark.parametrize(
    "check", [storing.check_saving_and_loading_changes_nothing, storing.check_loading_with_the_network_given]
)
def test_numbers_that_change_on_the_way_are_found(check):
    def fit(fit, model, data, **keywords):
        source = fit(model, data, **keywords)
        common = {"points": source.points, "buffers": source.buffers, "diagnostics": source.diagnostics}
        return Forgetful(model, source.stack, **common)

    with pytest.raises(AssertionError, match="after loading"):
        check(faulty(fit))
