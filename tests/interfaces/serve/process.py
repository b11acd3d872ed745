"""``knowable serve`` as a process of its own, its log read line by line."""

import json
import os
import queue
import subprocess
import sys
import threading
import time

PATIENCE = 120.0


class Process:
    """A service that was started, and what it says."""

    def __init__(self, *arguments, environment=None):
        command = [sys.executable, "-m", "knowable", "serve", *map(str, arguments), "--port", "0"]
        variables = {name: value for name, value in os.environ.items() if name != "KNOWABLE_TOKEN"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**variables, **(environment or {})},
        )  # fmt: skip
        self.lines, self._new = [], queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            self._new.put(line)
        self._new.put(None)

    def until(self, event):
        """What the log says of the next event of that name."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            line = self._new.get(timeout=PATIENCE)
            assert line is not None, f"it ended: {''.join(self.lines)}"
            found = json.loads(line)
            if found["event"] == event:
                return found
        raise AssertionError(f"it does not say {event!r}")

    @property
    def text(self):
        """All that was said."""
        return "".join(self.lines)

    def end(self):
        """Its exit code, once it has ended; it is killed if it does not."""
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.process.kill()
        self._thread.join(10)
        self.process.stderr.close()
        return code

    def __enter__(self):
        listening = self.until("listening")
        self.address = f"http://127.0.0.1:{listening['port']}"
        self.workers = listening["workers"]
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.end()
