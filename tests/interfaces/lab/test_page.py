"""The lab in a browser: points, methods, sliders, links, what goes wrong, two tabs, and a lab that comes back."""

import base64
import json
import time
from urllib.parse import urlsplit

import pytest

from tests.interfaces.browser import Browser, needs_chromium
from tests.interfaces.lab.in_thread import at_a_port

pytestmark = [needs_chromium, pytest.mark.slow]
PATIENCE = 180.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def lab():
    with at_a_port() as address:
        yield address


def start(browser, address, methods=("infinite_width", "laplace"), name="gap", **window):
    """The page with an example, and these methods alone."""
    browser.open("about:blank")
    browser.open(f"{address}/#preset={name}", **window)
    browser.evaluate(f"change({{methods: {json.dumps(list(methods))}, judge: null}})")
    until(browser, "slots.every(slot => slot.ended)")


def until(browser, condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not browser.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, f"never: {condition}; {browser.evaluate('document.body.innerText')[-600:]}"
        time.sleep(0.05)


def width_at(browser, x, slot=1):
    """The epistemic standard deviation that is shown at x."""
    left, right = browser.evaluate("state.view.slice(0, 2)")
    place = round((x - left) / (right - left) * 140)
    return browser.evaluate(f"slots[{slot}].data.epistemic[{place}]")


def click_at(browser, x, y, canvas=0):
    """Click a place of the plane with the mouse."""
    browser.evaluate(f"document.querySelectorAll('canvas')[{canvas}].scrollIntoView({{block: 'center'}})")
    place = browser.evaluate(
        f"(() => {{ const box = document.querySelectorAll('canvas')[{canvas}].getBoundingClientRect(),"
        f" frame = new Frame({{width: box.width, height: box.height}}, state.view);"
        f" return [box.left + frame.x({x}), box.top + frame.y({y})]; }})()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)


def test_a_point_in_the_gap_closes_the_band(browser, lab):
    start(browser, lab)
    before, count = width_at(browser, 0.0), browser.evaluate("state.points.length")
    click_at(browser, 0.0, 0.5)
    until(browser, f"state.points.length === {count + 1} && slots.every(slot => slot.ended && slot.data)")
    assert width_at(browser, 0.0) < 0.3 * before
    assert browser.evaluate("slots.every(slot => slot.key === keyOf(slot.method, slot.isJudge))")  # nothing stale
    browser.evaluate("document.getElementById('undo').click()")
    until(browser, f"state.points.length === {count} && slots.every(slot => slot.ended && slot.data)")
    assert width_at(browser, 0.0) == pytest.approx(before)
    assert browser.complaints == []
    assert all(urlsplit(each).netloc == urlsplit(lab).netloc or each.startswith("data:") for each in browser.requests)


def test_old_pictures_go_as_soon_as_something_changes(browser, lab):
    start(browser, lab)
    gone = browser.evaluate("(change({noise: 0.3}), slots.map(slot => slot.data))")
    assert gone == [None, None]
    until(browser, "slots.every(slot => slot.ended)")


def test_a_method_is_switched_and_the_others_stay(browser, lab):
    start(browser, lab)
    kept = browser.evaluate("slots[0].count")
    browser.evaluate(
        "(() => { const select = document.querySelectorAll('.card select')[1]; select.value = 'map';"
        " select.dispatchEvent(new Event('change')); })()"
    )
    until(browser, "slots[1].method === 'map' && slots[1].ended")
    assert width_at(browser, 0.0) == 0.0 and browser.evaluate("slots[0].count") == kept


def test_a_slider_moves_the_bands_by_keyboard_too(browser, lab):
    start(browser, lab)
    before = width_at(browser, 4.0)
    browser.evaluate("document.getElementById('slider-prior').focus()")
    browser.press("ArrowRight")
    until(browser, "state.prior === 1.5 && slots.every(slot => slot.ended)")
    assert width_at(browser, 4.0) > 1.1 * before


def test_points_are_added_by_keyboard(browser, lab):
    start(browser, lab)
    browser.evaluate("document.querySelector('canvas').focus()")
    for key in ("ArrowUp", "ArrowUp", "Enter"):
        browser.press(key)
    until(browser, "state.points.length === 41")
    x, y = browser.evaluate("state.points[40]")
    assert x == 0.0 and y == pytest.approx(2 * 0.025 * 5.2, abs=0.01)
    browser.press("Delete")
    until(browser, "state.points.length === 40 && slots.every(slot => slot.ended)")


def test_a_link_restores_everything(browser, lab):
    start(browser, lab)
    browser.evaluate("change({width: 8, noise: null, panel: 'weights', points: state.points.slice(0, 20)})")
    until(browser, "slots.every(slot => slot.ended)")
    link, kept = browser.evaluate("location.href"), browser.evaluate("state")
    mean = browser.evaluate("slots[1].data.mean")
    browser.open("about:blank")
    browser.open(link)
    until(browser, "slots.length && slots.every(slot => slot.ended)")
    assert browser.evaluate("state") == kept and browser.evaluate("slots[1].data.mean") == mean
    for broken in ("#state=abc", "#preset=nothing", "#state=" + base64.b64encode(b'{"width":"x"}').decode()):
        browser.open("about:blank")
        browser.open(lab + "/" + broken)
        until(browser, "slots.length && !document.getElementById('error').hidden")
        assert "The link" in browser.evaluate("document.getElementById('error').innerText")


def test_wrong_input_is_said_and_does_not_stay(browser, lab):
    start(browser, lab)
    browser.evaluate("document.getElementById('clear').click()")
    until(browser, "!document.getElementById('error').hidden")
    assert "no points yet" in browser.evaluate("document.getElementById('error').innerText")
    click_at(browser, 0.0, 0.0)
    until(browser, "document.getElementById('error').innerText.includes('one point')")
    click_at(browser, 1.0, 0.5)
    until(browser, "document.getElementById('error').hidden && slots.every(slot => slot.ended && slot.data)")


@pytest.mark.parametrize(
    ("text", "task", "rows", "said"),
    [
        ("x,y\n1,2\n2,3\n3,5\nbad,1\n", "regression", 3, "standardised"),
        ("a;b;kind\n1,5;2;cat\n2,5;1;dog\n3;4;cat\n", "classes", 3, "cat, dog"),
        ("only\n1\n2\n", None, 0, "two columns of numbers"),
        ("", None, 0, "empty"),
    ],
)
def test_a_csv_becomes_points_or_a_message(browser, lab, text, task, rows, said):
    start(browser, lab)
    browser.evaluate(f"openFile(new File([{json.dumps(text)}], 'mine.csv'))")
    if task is None:
        assert said in browser.evaluate("document.getElementById('error').innerText")
        return
    until(browser, "slots.every(slot => slot.ended)")
    assert browser.evaluate("[state.task, state.points.length]") == [task, rows]
    assert said in browser.evaluate("document.getElementById('told').innerText")
    assert browser.evaluate("document.getElementById('error').hidden")


def test_questions_are_answered_in_the_pictures(browser, lab):
    start(browser, lab)
    for button, key in (("ask-label", "point"), ("ask-evaluate", "curve"), ("ask-reject", "accept")):
        browser.evaluate(f"document.getElementById('{button}').click()")
        until(browser, f"slots.every(slot => slot.extra && slot.extra.{key})")
    browser.evaluate("quietly({tool: 'attack'})")
    x, y = browser.evaluate("state.points[0]")
    click_at(browser, x, y)
    until(browser, "slots.every(slot => slot.extra && slot.extra.to)")
    assert browser.complaints == []


def test_classes_the_python_and_the_figures(browser, lab):
    start(browser, lab, methods=["map", "laplace"], name="moons")
    assert browser.evaluate("slots.every(slot => slot.data.probs.length === 2)")
    browser.evaluate("document.getElementById('python').click()")
    until(browser, "document.getElementById('program').open")
    assert "kn.Laplace(" in browser.evaluate("document.getElementById('code').innerText")
    browser.evaluate("document.getElementById('program').close()")
    svg = browser.evaluate("asSvg()")
    assert svg.startswith("<svg") and svg.count("<image") == 2 and "Laplace" in svg
    assert browser.evaluate("asPng().toDataURL().length") > 10_000
    assert (
        browser.evaluate("new DOMParser().parseFromString(asSvg(), 'image/svg+xml').querySelector('parsererror')")
        is None
    )


def test_two_tabs_do_not_disturb_each_other(browser, lab, tmp_path):
    start(browser, lab, methods=["laplace"])
    other = Browser(tmp_path)
    try:
        start(other, lab, methods=["laplace", "map"], name="moons")
        browser.evaluate("change({noise: 0.2})")
        other.evaluate("change({width: 6})")
        for each in (browser, other):
            until(each, "slots.every(slot => slot.ended && slot.data)")
        assert browser.evaluate("[state.task, state.width]") == ["regression", 16]
        assert other.evaluate("[state.task, state.width]") == ["classes", 6]
    finally:
        other.close()


def test_a_lab_that_is_started_again_in_the_middle_of_a_fit_goes_on(browser):
    with at_a_port() as address:
        start(browser, address, methods=["laplace"])
        browser.evaluate("change({methods: ['mean_field_vi'], width: 30})")
        until(browser, "slots[0].data && !slots[0].ended")
    until(browser, "document.getElementById('status').innerText.includes('No answer')")
    with at_a_port(urlsplit(address).port):
        until(browser, "slots[0].ended && slots[0].data", 2 * PATIENCE)
        assert browser.evaluate("document.getElementById('status').innerText") == ""


@pytest.mark.parametrize("width", [1280, 820, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_as_wide_as_the_window(browser, lab, width, theme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    start(browser, lab, width=width, mobile=width < 500)
    for panel in ("function", "weights", "terms", "chains"):
        browser.evaluate(f"quietly({{panel: '{panel}'}})")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.evaluate("document.documentElement.dataset.theme") == theme


def test_how_quick_it_is(browser, lab):
    """The first picture of each quick method and the updates while fitting; loose, as the machine may be busy."""
    start(browser, lab, methods=["infinite_width", "exact_linear", "laplace", "mean_field_vi"])
    click_at(browser, 0.3, 0.8)
    until(browser, "state.points.length === 41 && slots.every(slot => slot.ended)")
    first = browser.evaluate("slots.map(slot => slot.first)")
    rate = browser.evaluate("slots[3].count / (slots[3].seconds + 0.2)")
    print("first pictures after", [round(each) for each in first], "ms;", f"{rate:.1f} updates a second of its time")
    assert max(first[:3]) < 20_000 and rate > 5
