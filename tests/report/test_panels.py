"""Panels are inert data that know their kind."""

import dataclasses
import math

import pytest

from knowable.report.panels import Picture
from tests.interfaces.cases import every_panel


def test_a_panel_cannot_be_changed(generator):
    for panel in every_panel(generator):
        with pytest.raises(dataclasses.FrozenInstanceError):
            panel.title = "other"


def test_every_panel_says_in_words_what_it_shows(generator):
    for panel in every_panel(generator, "my method"):
        assert panel.kind and "my method" in panel.alt and len(panel.alt) > 20


def test_the_largest_entropy_of_a_picture_is_that_of_equal_classes():
    picture = Picture(((0.0,),), "a", "a", (("a", 0.5), ("b", 0.25), ("c", 0.25)), 1.0, 0.5, 0.5)
    assert picture.largest == pytest.approx(math.log(3))
