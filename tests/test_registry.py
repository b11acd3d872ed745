"""Tests of methods by name, and of their citations."""

from __future__ import annotations

import dataclasses
import re

import pytest

import knowable as kn
from knowable.core.method import Method
from knowable.registry import METHODS, bibliography, cite, find_method

PUBLIC_METHODS = [
    name for name in kn.__all__ if isinstance(getattr(kn, name), type) and issubclass(getattr(kn, name), Method)
]


@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_every_entry_leads_to_a_public_method_named_by_the_snake_case_of_its_class(entry):
    assert getattr(kn, entry.cls_name) is entry.cls
    assert issubclass(entry.cls, Method)
    assert dataclasses.is_dataclass(entry.cls)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", entry.cls_name).lower()
    assert entry.name == snake
    assert entry.cls.__module__.startswith(f"knowable.inference.{entry.family}")
    assert entry.summary
    assert entry.cls()  # every default works


@pytest.mark.parametrize("name", PUBLIC_METHODS)
def test_every_public_method_has_an_entry(name):
    assert find_method(name).cls is getattr(kn, name)


@pytest.mark.parametrize(
    ("name", "found"),
    [("mean_field_vi", "mean_field_vi"), ("MeanFieldVI", "mean_field_vi"), ("mfvi", "mean_field_vi"),
     ("mean-field-vi", "mean_field_vi"), (" MFVI ", "mean_field_vi"), ("mle", "maximum_likelihood"), ("map", "map")],
)  # fmt: skip
def test_a_method_is_found_by_name_alias_class_and_spelling(name, found):
    assert find_method(name).name == found


def test_no_name_leads_to_two_methods():
    names = [each for e in METHODS.values() for each in {e.name, e.cls_name.lower(), *e.aliases}]
    assert len(set(names)) == len(names)


def test_an_unknown_method_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(
        kn.InvalidArgument, match=r"method 'mfiv' is not known\. Did you mean 'mfvi'\? The methods are: "
    ):
        find_method("mfiv")


@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_every_method_can_be_cited(entry):
    assert entry.references
    assert cite(entry.name) == "\n\n".join(entry.bibtex)
    for key in entry.references:
        assert f"{{{key}," in cite(entry.name)


def test_a_paper_behind_several_methods_is_cited_once():
    text = cite(*METHODS)
    keys = re.findall(r"@\w+\{(\w+),", text)
    assert len(set(keys)) == len(keys)
    assert set(keys) == {key for entry in METHODS.values() for key in entry.references}


def test_no_reference_is_left_over():
    assert bibliography().keys() == {key for entry in METHODS.values() for key in entry.references}
