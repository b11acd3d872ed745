"""Panels become SVG that can stand inside a page."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from knowable.errors import MissingExtra, Unsupported
from knowable.report.drawing import draw
from knowable.report.panels import Panel
from tests.interfaces.cases import HOSTILE, every_panel

KINDS = range(12)  # all panels that matplotlib draws


@pytest.fixture(scope="module")
def drawn():
    """Every panel with its drawing."""
    panels = every_panel(torch.Generator().manual_seed(0))[:-1]
    return [(panel, draw(panel, key="here").svg) for panel in panels]


@pytest.mark.parametrize("kind", KINDS)
def test_every_panel_draws_as_well_formed_svg_with_its_text_alternative(kind, drawn):
    panel, text = drawn[kind]
    drawing = ElementTree.fromstring(text)
    assert drawing.tag == "svg"
    assert drawing.get("role") == "img" and drawing.get("aria-label") == panel.alt
    assert "width" not in drawing.attrib and "viewBox" in drawing.attrib
    assert len(list(drawing.iter("path"))) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_identifiers_carry_the_key_and_every_reference_has_its_target(kind, drawn):
    _, text = drawn[kind]
    made = set(re.findall(r'\bid="([^"]+)"', text))
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert made and all(name.startswith("here-") for name in made)
    assert used and used <= made


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_labels_are_drawn_and_not_obeyed(kind, generator):
    text = draw(every_panel(generator, HOSTILE)[kind], key="k").svg
    ElementTree.fromstring(text)
    assert "<script" not in text


def test_a_drawing_names_no_address_on_the_network(drawn):
    assert not any("http" in text for _, text in drawn)


def test_the_same_panel_gives_the_same_drawing(drawn):
    panel, text = drawn[0]
    assert draw(panel, key="here").svg == text


def test_drawing_leaves_the_settings_of_matplotlib_alone(generator):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(every_panel(generator)[0], key="k")
    assert dict(matplotlib.rcParams) == before


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(
        Unsupported, match="band, bars, calibration, curves, dependence, forest, lines, noise, traces, truth"
    ):
        draw(Panel("t", "c", "a", "pie"), key="k")


def test_without_matplotlib_the_extra_to_install_is_named(generator, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'knowable\[report\]'"):
        draw(every_panel(generator)[0], key="k")
