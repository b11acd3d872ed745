"""The page in a browser: nothing is asked of the network, nothing complains, and figures answer pointer and keys."""

import json
import zlib
from pathlib import Path

import pytest

from knowable.report import write
from knowable.tabular.fit_report import fit_report
from tests.interfaces.browser import Browser, needs_chromium
from tests.report.fitted import class_fit, linear_fit

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write(fit_report(linear_fit()), folder / "numbers.html")
    write(fit_report(class_fit()), folder / "classes.html")
    return folder


def readout(browser, figure):
    return browser.evaluate(f"document.querySelectorAll('.plot .readout')[{figure}].textContent")


def place_of(browser, kind):
    """Which of the page's figures has marks of rows."""
    marks = browser.evaluate("Array.from(document.querySelectorAll('.plot'), p => p.dataset.marks)")
    return next(i for i, each in enumerate(marks) if (len(json.loads(each)[0]) == 4) == (kind == "truth"))


@pytest.mark.parametrize("name", ["numbers", "classes"])
@pytest.mark.parametrize(("width", "mobile"), [(1100, False), (390, True)])
def test_nothing_leaves_the_page_and_nothing_complains(name, width, mobile, browser, pages, tmp_path):
    page = pages / f"{name}.html"
    browser.open(page, width=width, mobile=mobile)
    picture = browser.screenshot(tmp_path / "page.png")
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.complaints == []
    assert len(set(zlib.decompress(idat(picture))[:200_000])) > 4  # not a blank sheet
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    assert browser.evaluate("getComputedStyle(document.body).fontSize") == "16px"


def test_a_request_that_a_page_tried_would_be_stopped_and_seen(browser, pages):
    browser.open(pages / "numbers.html")
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'})), 1")
    browser.evaluate("new Promise(done => setTimeout(() => done(1), 200))")
    assert any("Content Security Policy" in each for each in browser.complaints)


def test_the_pointer_reads_values(browser, pages):
    browser.open(pages / "numbers.html")
    figure = place_of(browser, "truth")
    browser.evaluate(f"document.querySelectorAll('.plot svg')[{figure}].scrollIntoView({{block: 'center'}}), 1")
    box = browser.evaluate(
        f"(r => [r.left, r.top, r.width, r.height])(document.querySelectorAll('.plot svg')[{figure}]"
        ".getBoundingClientRect())"
    )
    marks = json.loads(browser.evaluate(f"document.querySelectorAll('.plot')[{figure}].dataset.marks"))
    width = browser.evaluate(f"document.querySelectorAll('.plot svg')[{figure}].viewBox.baseVal.width")
    x, y, text, _ = marks[len(marks) // 2]
    scale = box[2] / width
    browser.move(box[0] + scale * x, box[1] + scale * y)
    assert readout(browser, figure) == text
    browser.move(1, 1)
    assert readout(browser, figure).startswith("Point at the figure")


def test_the_arrow_keys_read_values_and_escape_ends_it(browser, pages):
    browser.open(pages / "numbers.html")
    figure = place_of(browser, "truth")
    marks = json.loads(browser.evaluate(f"document.querySelectorAll('.plot')[{figure}].dataset.marks"))
    browser.evaluate(f"document.querySelectorAll('.plot')[{figure}].focus(), 1")
    browser.press("ArrowRight")
    assert readout(browser, figure) == marks[0][2]
    browser.press("ArrowRight")
    assert readout(browser, figure) == marks[1][2]
    browser.press("End")
    assert readout(browser, figure) == marks[-1][2]
    browser.press("ArrowRight")
    assert readout(browser, figure) == marks[-1][2]
    browser.press("Escape")
    assert readout(browser, figure).startswith("Point at the figure")


def test_every_figure_can_be_reached_with_the_keyboard(browser, pages):
    browser.open(pages / "numbers.html")
    assert browser.evaluate("Array.from(document.querySelectorAll('.plot')).every(p => p.tabIndex === 0)")
    assert browser.evaluate("document.querySelectorAll('.readout[hidden]').length") == 0


def test_a_row_of_a_table_is_shown_in_the_figure_and_the_other_way_round(browser, pages):
    browser.open(pages / "numbers.html")
    figure = place_of(browser, "truth")
    line = browser.evaluate("document.querySelector('th[data-row] button').closest('th').dataset.row")
    browser.evaluate("document.querySelector('th[data-row] button').click(), 1")
    assert readout(browser, figure).startswith(f"line {line}:")
    assert browser.evaluate("document.querySelector('th[data-row] button').getAttribute('aria-pressed')") == "true"
    assert browser.evaluate("document.querySelectorAll('tr.chosen').length") == 1
    browser.evaluate("document.querySelector('th[data-row] button').click(), 1")
    assert browser.evaluate("document.querySelectorAll('tr.chosen').length") == 0


def test_the_page_prints(browser, pages):
    browser.open(pages / "classes.html")
    assert browser.pdf().startswith(b"%PDF-")


def idat(png: bytes) -> bytes:
    """The compressed pixels of a PNG file."""
    place, data = 8, b""
    while place < len(png):
        size = int.from_bytes(png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += 12 + size
    return data


def test_screenshots_are_read_as_they_are_written(tmp_path: Path):
    pixels = zlib.compress(b"\0abc")
    chunk = len(pixels).to_bytes(4) + b"IDAT" + pixels + b"crc!"
    assert zlib.decompress(idat(b"\x89PNG\r\n\x1a\n" + chunk)) == b"\0abc"
