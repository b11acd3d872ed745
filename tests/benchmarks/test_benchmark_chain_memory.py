from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from benchmarks.chain_memory import (
    FULL,
    LIMIT,
    Size,
    _kill_in_the_middle,
    images,
    peak_memory,
    run,
    to_markdown,
    verdict,
)
from benchmarks.study import Rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")


def test_full_size_is_the_one_promised():
    assert (FULL.chains, FULL.inputs, FULL.hidden, FULL.rows, LIMIT) == (16, 784, 100, 2000, 2 * 2**30)
    weights = 784 * 100 + 100 + 100 * 10 + 10
    # nearly all of the default budget for draws, 1 GB
    assert 0.95e9 < FULL.draws * FULL.chains * weights * 4 <= 1e9


def test_images_are_rows_with_labels(monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    x, y = images(Size(rows=30, inputs=9))
    assert x.shape == (30, 9) and x.dtype == np.float32 and x.min() >= 0 and x.max() <= 1
    assert y.shape == (30,) and set(y) <= set(range(10))


def test_peak_memory_sees_what_was_allocated():
    code = (
        "from benchmarks.chain_memory import peak_memory\nimport numpy as np\n"
        "before = peak_memory()\nx = np.ones(25_000_000)\ndel x\nprint(peak_memory() - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert int(said.stdout) == pytest.approx(200e6, rel=0.1)  # 25 million doubles, though gone by then
    assert peak_memory("no such process") == 0


def test_process_is_killed_after_its_second_save(tmp_path):
    code = (
        "import pathlib, sys, time\nfile = pathlib.Path(sys.argv[1])\n"
        "for number in range(1000):\n    part = file.with_suffix('.part')\n    part.write_text(str(number))\n"
        "    part.replace(file)\n    time.sleep(0.05)"
    )
    process = _python(code, str(tmp_path / "saved"))
    killed = _kill_in_the_middle(process, tmp_path / "saved", 0.0)
    assert "error" not in killed and killed["peak"] > 1e6 and process.returncode == -9
    assert 1 <= int((tmp_path / "saved").read_text()) < 999


def test_process_that_ends_by_itself_was_not_killed(tmp_path):
    killed = _kill_in_the_middle(_python("pass"), tmp_path / "saved", 0.0)
    assert "error" in killed


def test_verdict_needs_memory_and_the_same_draws():
    good = {"peak": 100, "seconds": 1.0, "draws": 3, "digest": "a"}
    assert verdict({"undisturbed": good, "killed": good, "resumed": good}) == {
        "error": None, "within_limit": True, "same_draws": True,
    }  # fmt: skip
    other, large = {**good, "digest": "b"}, {**good, "peak": LIMIT + 1}
    assert verdict({"undisturbed": good, "killed": good, "resumed": other})["same_draws"] is False
    assert verdict({"undisturbed": good, "killed": large, "resumed": good})["within_limit"] is False
    assert verdict({"undisturbed": {"error": "no"}, "killed": good, "resumed": good})["error"] == "undisturbed: no"


@pytest.mark.slow
def test_quick_run_is_killed_and_resumed_to_the_same_draws():
    found = run(quick=True, only="*", rows=Rows())
    assert found["error"] is None and found["same_draws"] and found["within_limit"]
    assert found["runs"]["resumed"]["draws"] == found["size"]["draws"]
    assert "the resumed run ended with the same draws" in to_markdown(found)


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _environment() -> dict[str, str]:
    from benchmarks.study import child_environment

    return child_environment("")
