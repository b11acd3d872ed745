"""``--engine``: independent fits elsewhere, with the same numbers."""

import json

import pytest

from knowable.core.compiling.workers import Workers
from tests.engines.lossy import Lossy
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import number_rows, write_csv


@pytest.fixture
def lossy(monkeypatch):
    """Workers by that name, which are the same ones at every call."""
    workers = Lossy(2)
    monkeypatch.setitem(Workers.named, "lossy", lambda: workers)
    return workers


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_an_engine_gives_the_same_scores(command, lossy, tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    own = ("--method", "map", "--no-refit") if command == "fit" else ("--methods", "map", "--cv", "2")
    found = []
    for number, engine in enumerate(((), ("--engine", "lossy"))):
        out = ("--out", tmp_path / f"out{number}")
        result = call(command, path, "--target", "response", *own, *out, *engine, "--json", "--quiet")
        assert result.exit_code in (0, 3), result.stderr
        said = json.loads(result.stdout)
        found.append(said["scores"] if command == "fit" else [row["nll"] for row in said["table"]])
    assert found[0] == found[1] and lossy.counts.done == {"fit": 1, "compare": 2}[command]


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_an_engine_that_does_not_exist_is_refused_and_nothing_is_written(command, tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(20))
    result = call(command, path, "--target", "response", "--engine", "spark", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "engine must be" in result.stderr and not (tmp_path / "out").exists()
