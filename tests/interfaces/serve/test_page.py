"""The page in a browser: rows are typed or pasted, bands appear, what is wrong is said, and a phone shows it all."""

import json
import time

import pytest

from tests.interfaces.browser import Browser, needs_chromium
from tests.interfaces.serve.in_thread import at_a_port

pytestmark = needs_chromium
CSV = "dose,site,day,treated\n3.0,north,2021-05-05,yes\n9.0,moon,2021-06-05,no\n60,west,,yes\n"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(params=[(1100, False), (390, True)], ids=["desk", "phone"])
def window(request):
    return {"width": request.param[0], "mobile": request.param[1]}


def click(browser, selector):
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
    end = time.monotonic() + 30
    while browser.evaluate("document.getElementById('go').disabled"):
        assert time.monotonic() < end, "the page does not come back"


def paste(browser, text):
    browser.evaluate("document.getElementById('tab-paste').click()")
    browser.evaluate(f"document.getElementById('text').value = {json.dumps(text)}")
    click(browser, "#go")


def text_of(browser, selector):
    return browser.evaluate(f"Array.from(document.querySelectorAll({json.dumps(selector)}), each => each.innerText)")


def shot(browser, tmp_path, name):
    browser.screenshot(tmp_path / f"{name}.png")
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_numbers(browser, numbers, window, tmp_path):
    with at_a_port(numbers) as address:
        browser.open(f"{address}/", **window)
        click(browser, "#go")  # the row of the examples
        assert len(text_of(browser, "li.row")) == 1
        paste(browser, CSV)
        rows = text_of(browser, "li.row")
        assert len(rows) == 3 and all(" between " in each for each in rows)
        assert "'moon'" in rows[1] and "outside the training rows" in rows[2]
        bands = browser.evaluate(
            "Array.from(document.querySelectorAll('svg rect:first-child'), r => +r.getAttribute('width'))"
        )
        assert len(bands) == 3 and bands[2] > bands[0]  # the row far outside has the widest band
        click(browser, "li.row:nth-child(3) button")
        assert any("dose is 60, outside" in each for each in text_of(browser, "li.row:nth-child(3) .why li"))
        shot(browser, tmp_path, "numbers")

        paste(browser, "dose,site,day,treated\nthree,north,2021-05-05,yes\n")
        (said,) = text_of(browser, "#error")
        assert "dose" in said and "three" in said
        assert browser.evaluate("document.getElementById('results').hidden")  # no old answers under a new question
        shot(browser, tmp_path, "wrong")
        allowed = (f"{address}/", "data:")
        assert all(each.startswith(allowed) for each in browser.requests)
        assert all("422" in each for each in browser.complaints)  # the refused request, and nothing else


def test_classes_with_a_certificate(browser, classes, window, tmp_path):
    with at_a_port(classes) as address:
        browser.open(f"{address}/", **window)
        paste(browser, "x,z\n0.1,0.1\n-1.5,1.5\n1.5,-1.5\n0.2,\n")
        rows = text_of(browser, "li.row")
        assert len(rows) == 4 and all("%" in each for each in rows) and any("One of: " in each for each in rows)
        assert not browser.evaluate("document.getElementById('level').checkVisibility()")  # labels have no interval
        assert "promised" in text_of(browser, "#promise")[0]
        shot(browser, tmp_path, "classes")
        assert browser.complaints == []


def test_tensors(browser, tensors, window, tmp_path):
    with at_a_port(tensors) as address:
        browser.open(f"{address}/", **window)
        paste(browser, "[[0.1, 0.2, 0.3], [5, 5, 5]]")
        assert len(text_of(browser, "li.row")) == 2
        shot(browser, tmp_path, "tensors")
        paste(browser, "[[0.1, 0.2")
        assert "not JSON" in text_of(browser, "#error")[0]
