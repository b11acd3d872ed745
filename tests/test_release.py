"""What a release promises: one version, a changelog from fragments, types that others can use."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import knowable as kn

ROOT = Path(__file__).parents[1]
USES = """
from typing import assert_type

import torch

import knowable as kn

x, y = torch.zeros(4, 1), torch.zeros(4, 1)
model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(), kn.Normal(1.0))
posterior: kn.Posterior = kn.MeanFieldVI(epochs=1).fit(model, (x, y), seed=0)
draws = posterior.sample(3)
assert_type(draws, dict[str, torch.Tensor])
prediction: kn.Prediction = posterior.predict(x, samples=8)
assert isinstance(prediction, kn.RegressionPrediction)
assert_type(prediction.mean, torch.Tensor)
scores: kn.Scores = kn.evaluate(prediction, y)
assert_type(scores["nll"], float)
chains: kn.Samples = kn.NUTS(chains=2).sample(lambda params: -(params["z"] ** 2).sum(), {"z": torch.zeros(2)})
comparison: kn.Comparison = kn.compare(model, (x, y), methods=[kn.MAP()])
certificate: kn.Certificate = kn.certify(posterior, (x, y))
kn.MeanFieldVI(epoch=1)  # expected: no such setting
kn.Normal("wide")  # expected: not a number
"""


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {kn.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {kn.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture
def join() -> Any:
    spec = importlib.util.spec_from_file_location("join", ROOT / "changes" / "join.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fragments_are_joined_by_heading_under_the_version(join: Any):
    first = join.joined("1.0", "2030-01-01", "", ["### Fixed\n\n- a\n", "### Added\n\n- b, see [c](../docs/c.md)\n"])
    assert first.endswith("## 1.0 (2030-01-01)\n\n### Added\n\n- b, see [c](docs/c.md)\n\n### Fixed\n\n- a\n")
    again = join.joined("1.0", "2030-01-02", first, ["### Added\n\n- d\n"])  # what came before the tag
    assert "- b, see [c](docs/c.md)\n- d\n" in again and again.count("## 1.0") == 1
    later = join.joined("1.1", "2030-02-01", again, ["### Removed\n\n- a\n"])
    assert later.index("## 1.1 (2030-02-01)") < later.index("## 1.0 (2030-01-02)") and "- d\n" in later


def test_a_fragment_with_an_unknown_heading_is_refused(join: Any):
    with pytest.raises(ValueError, match="Improved"):
        join.parts("### Improved\n\n- a\n")


@pytest.mark.slow
def test_the_types_of_the_public_names_reach_other_projects(tmp_path: Path):
    """Checked by pyright in a folder of its own: the two lines that are wrong are the only ones it finds."""
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed (group lint)")
    (tmp_path / "uses.py").write_text(USES)
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, "uses.py"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    wrong = [each["range"]["start"]["line"] for each in json.loads(found.stdout)["generalDiagnostics"]]
    expected = [number for number, line in enumerate(USES.splitlines()) if "# expected" in line]
    assert wrong == expected, found.stdout


@pytest.mark.slow
def test_the_import_takes_less_than_three_seconds_of_the_processor():
    code = "import time, torch; begun = time.process_time(); import knowable; print(time.process_time() - begun)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 3.0
