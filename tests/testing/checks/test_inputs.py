from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import knowable as kn
from knowable.core.support.checks import check_number
from knowable.testing import Subject
from knowable.testing.checks import inputs
from tests.testing.faulty import faulty, sound

CHECKS = [
    inputs.check_arrays_and_tensor_datasets_are_tensors,
    inputs.check_datasets_and_loaders_are_read,
    inputs.check_unusable_data_is_refused,
    inputs.check_labels_out_of_range_are_refused,
    inputs.check_wrong_types_are_refused,
    inputs.check_bad_settings_are_refused,
    inputs.check_settings_are_shown_and_fixed,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_method_passes(check):
    check(sound())


def test_kind_of_data_that_makes_a_difference_is_found():
    def fit(fit, model, data, **keywords):
        return fit(model, data, **{**keywords, "seed": int(not isinstance(data, tuple))})

    with pytest.raises(AssertionError, match="A fit on a TensorDataset"):
        inputs.check_arrays_and_tensor_datasets_are_tensors(faulty(fit))


def test_missing_values_that_are_filled_silently_are_found():
    def fit(fit, model, data, **keywords):
        x, y = (torch.as_tensor(each).nan_to_num(posinf=0.0) for each in data)
        return fit(model, (x, y), **keywords)

    with pytest.raises(AssertionError, match="x with a missing value should raise InvalidData, but was accepted"):
        inputs.check_unusable_data_is_refused(faulty(fit))


def test_labels_that_are_clamped_silently_are_found():
    def fit(fit, model, data, **keywords):
        return fit(model, (data[0], data[1].clamp(0, 2)), **keywords)

    with pytest.raises(AssertionError, match="Label -1"):
        inputs.check_labels_out_of_range_are_refused(faulty(fit))


def test_network_taken_for_a_model_is_found():
    def fit(fit, model, data, **keywords):
        return fit(kn.Model(model, kn.Gaussian()) if isinstance(model, torch.nn.Module) else model, data, **keywords)

    with pytest.raises(AssertionError, match="A wrong model"):
        inputs.check_wrong_types_are_refused(faulty(fit))


def test_error_that_does_not_name_the_argument_is_found():
    def fit(fit, model, data, **keywords):
        if not isinstance(data, tuple):
            raise kn.InvalidType("something is wrong here")
        return fit(model, data, **keywords)

    with pytest.raises(AssertionError, match="wrong data does not name it"):
        inputs.check_wrong_types_are_refused(faulty(fit))


def test_setting_that_is_not_checked_is_found():
    @dataclass(frozen=True, repr=False)
    class Unchecked(kn.MAP):
        strength: float = 1.0

    with pytest.raises(AssertionError, match="strength should raise KnowableError, but was accepted"):
        inputs.check_bad_settings_are_refused(Subject(Unchecked(epochs=2)))


def test_setting_that_may_have_any_value_is_only_asked_for_its_type():
    @dataclass(frozen=True, repr=False)
    class Shifted(kn.MAP):
        shift: float = 0.0

        def __post_init__(self):
            super().__post_init__()
            if not isinstance(self.shift, float | int):
                check_number("shift", self.shift)

    inputs.check_bad_settings_are_refused(Subject(Shifted(epochs=2), any_value={"shift"}))
    with pytest.raises(AssertionError, match="shift"):
        inputs.check_bad_settings_are_refused(Subject(Shifted(epochs=2)))


def test_settings_that_are_hidden_or_can_be_changed_are_found():
    @dataclass(frozen=True)
    class Silent(kn.MAP):
        def __repr__(self):
            return "Silent()"

    with pytest.raises(AssertionError, match="repr"):
        inputs.check_settings_are_shown_and_fixed(Subject(Silent(epochs=2)))

    @dataclass
    class Loose(kn.core.method.Method):
        epochs: int = 1

        def _fit(self, job):
            return kn.MAP(epochs=self.epochs)._fit(job)

    with pytest.raises(AssertionError, match="can be changed"):
        inputs.check_settings_are_shown_and_fixed(Subject(Loose()))
