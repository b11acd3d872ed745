from __future__ import annotations

import dataclasses

import pytest

import knowable as kn

KINDS = [name for name in kn.families.__all__ if name != "Family"]


@pytest.mark.parametrize("name", KINDS)
def test_every_family_is_a_frozen_dataclass_that_works_without_settings(name):
    family = getattr(kn.families, name)()
    assert isinstance(family, kn.families.Family) and dataclasses.is_dataclass(family)
    assert family == getattr(kn.families, name)()
    assert repr(family).startswith(name)
    for each in dataclasses.fields(family):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(family, each.name, 1)
