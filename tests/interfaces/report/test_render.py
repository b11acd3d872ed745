"""The page is self-contained, escaped and accessible."""

import itertools
import os
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

from knowable.errors import MissingExtra
from knowable.interfaces.report import Report, render, write
from tests.interfaces.cases import HOSTILE, whole_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Collects elements with their attributes, and checks that they nest."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page():
    return render(whole_report(torch.Generator().manual_seed(0), "label"))


def test_nothing_is_loaded_from_the_network(page):
    reader = Reader(page)
    for tag, attributes in reader.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "video", "audio")
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            assert attributes.get(name, "#").startswith("#"), (tag, name)
    assert "@import" not in page and "@font-face" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)'\"]*)", page))
    assert "http:" not in page and "https:" not in page


def test_words_from_outside_are_escaped_wherever_they_appear(generator):
    page = render(whole_report(generator, HOSTILE))
    assert "<script" not in page.lower()
    assert HOSTILE in "".join(Reader(page).text)


def test_identifiers_are_unique_and_references_resolve(page):
    reader = Reader(page)
    identifiers = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for _, attributes in reader.elements:
        for name in ("href", "aria-labelledby"):
            if name in attributes:
                assert attributes[name].removeprefix("#") in identifiers


def test_figures_tables_and_headings_can_be_read_aloud(page):
    reader = Reader(page)
    assert reader.all("html")[0]["lang"] == "en"
    assert all(each.get("aria-label") for each in reader.all("svg"))
    assert all(each.get("scope") in ("row", "col") for each in reader.all("th"))
    assert len(reader.all("caption")) == len(reader.all("table")) > 0
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_the_page_adapts_to_phones_and_paper(page):
    assert 'name="viewport"' in page and "@media print" in page and "@media (max-width" in page


def test_warnings_come_before_results(page):
    reader = "".join(Reader(page).text)
    assert reader.index("Warnings") < reader.index("Method")


def test_a_report_without_warnings_says_so():
    assert "No warnings" in render(Report("t", "l"))


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "report.html"
    write(Report("first", "l"), path)
    assert write(Report("second", "l"), path) == path
    assert "second" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["report.html"]


def test_a_failed_write_leaves_no_debris(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write(Report("t", "l"), tmp_path / "report.html")
    assert os.listdir(tmp_path) == ["report.html"]


def test_without_jinja_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install knowable\[report\]"):
        render(Report("t", "l"))
