"""Chromium without a window, spoken to over a pipe in its DevTools protocol; nothing beyond the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--hide-scrollbars",
)  # fmt: skip
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 60.0  # seconds for one answer


def find_chromium() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")


class Browser:
    """One page. Keeps what the page asks for and what it complains about.

    Attributes:
        requests: Addresses asked for, the page's own among them.
        complaints: Errors on the console, exceptions of scripts, violations of the page's policy.
    """

    def __init__(self, profile: Path):
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]  # clear of 3 and 4
        command = [sys.executable, "-c", LAUNCH, *map(str, ends), str(find_chromium()), *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        os.set_blocking(self._from, False)
        self._buffer, self._number, self._session = b"", 0, None
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._attach()

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.bringToFront")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    # --- what a test does ---------------------------------------------------------------------------------------------

    def open(self, page: Path | str, *, width: int = 1100, height: int = 900, mobile: bool = False) -> None:
        """Open a file, or an address, in a window of that size."""
        self.requests.clear()
        self.complaints.clear()
        self._loaded = False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url=address)
        self._wait(lambda: self._loaded)
        end = time.monotonic() + PATIENCE
        place = address.partition("#")[0]  # what comes after it may be changed by the page
        while self.evaluate("document.readyState + location.href.split('#')[0]") != f"complete{place}":
            assert time.monotonic() < end, "the page does not load"

    def evaluate(self, expression: str):
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES.get(key, 0))

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> bytes:
        """A picture of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
        return path.read_bytes()

    def pdf(self) -> bytes:
        """The page on paper."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self._send("Browser.close", {})
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def call(self, method: str, **params):
        """Call a method and wait for its answer."""
        number = self._send(method, params)
        answers: list[dict] = []
        self._wait(lambda: bool(answers), lambda message: message.get("id") == number and answers.append(message))
        assert "error" not in answers[0], (method, answers[0])
        return answers[0]["result"]

    def _send(self, method: str, params: dict) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._number

    def _wait(self, done, take=lambda message: None) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end and self._process.poll() is None, "Chromium does not answer"
            for message in self._messages():
                self._note(message)
                take(message)

    def _messages(self) -> list[dict]:
        try:
            self._buffer += os.read(self._from, 1 << 20)
        except BlockingIOError:
            time.sleep(0.005)
            return []
        *whole, self._buffer = self._buffer.split(b"\0")
        return [json.loads(each) for each in whole]

    def _note(self, message: dict) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])


_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
