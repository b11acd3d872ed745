"""The page is self-contained, escaped and accessible."""

import base64
import hashlib
import itertools
import json
import re
import sys

import pytest
import torch

from knowable.errors import MissingExtra
from knowable.report import Report, render, write
from tests.interfaces.cases import HOSTILE, whole_report
from tests.report.pages import Reader, check_golden


@pytest.fixture(scope="module")
def page():
    return render(whole_report(torch.Generator().manual_seed(0), "label"))


def test_nothing_is_loaded_from_the_network(page):
    reader = Reader(page)
    for tag, attributes in reader.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "video", "audio")
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            assert attributes.get(name, "#").startswith("#"), (tag, name)
    assert "@import" not in page and "@font-face" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)'\"]*)", page))
    assert "http:" not in page and "https:" not in page


def test_the_page_forbids_every_request_and_every_script_but_its_own(page):
    reader = Reader(page)
    (policy,) = [meta["content"] for meta in reader.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy and policy.count("unsafe-inline") == 1  # of styles


def test_a_page_with_nothing_to_read_off_has_no_script():
    page = render(Report("t", "l"))
    assert "<script" not in page and "script-src 'none'" in page


def test_words_from_outside_are_escaped_wherever_they_appear(generator):
    page = render(whole_report(generator, HOSTILE))
    assert page.lower().count("<script") == 1 and "alert('" not in page
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


def test_figures_carry_what_can_be_read_off_them_and_tables_the_lines_of_their_rows(page):
    reader = Reader(page)
    plots = [attributes for _, attributes in reader.elements if "data-marks" in attributes]
    assert len(plots) == 12 and all(plot["role"] == "group" and plot["aria-label"] for plot in plots)
    for plot in plots:
        for mark in json.loads(plot["data-marks"]):
            assert len(mark) in (3, 4) and isinstance(mark[2], str)
    assert [cell["data-row"] for cell in reader.all("th") if "data-row" in cell] == ["2", "3"]


@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        ("#1a1a1a", "#ffffff"),
        ("#595959", "#ffffff"),
        ("#0b4f7d", "#ffffff"),
        ("#a03a00", "#ffffff"),
        ("#1a1a1a", "#fff6e8"),
        ("#1a1a1a", "#fbe7f4"),
        ("#595959", "#e3f0f8"),
    ],
)
def test_words_stand_out_from_their_background(ink, paper, page):
    assert ink in page and (paper in page or paper == "#ffffff")

    # WCAG 2.2, level AA: a contrast of at least 4.5 for text
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = luminance(paper) + 0.05, luminance(ink) + 0.05
    assert light / dark >= 4.5


def test_the_page_says_what_it_said_before(page):
    check_golden(page, "report")


def test_a_report_without_warnings_says_so():
    assert "No warnings" in render(Report("t", "l"))


def test_writing_returns_where_the_page_is(tmp_path):
    path = tmp_path / "new" / "report.html"
    assert write(Report("title", "l"), path) == path and "title" in path.read_text(encoding="utf-8")


def test_without_jinja_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install 'knowable\[report\]'"):
        render(Report("t", "l"))
