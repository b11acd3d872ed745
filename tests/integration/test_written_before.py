"""Folders that version 0.1.0 wrote are read, and say what they said then: posteriors, runs, checkpoints and the rest.

How they were made is said in ``tests/integration/written_before/make.py``. What is kept in double precision must agree
to a millionth, which leaves room for the last bits of another processor and for nothing else.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import knowable as kn
from tests.integration.written_before import reading

HERE = reading.HERE
TOLERANCES = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-5, 1e-6)}  # relative, absolute; all else exactly
DIGITS = 1e-6  # relative, of numbers that a command prints
OTHER_FORMULA = {"prediction", "uncertainty", "epistemic"}  # probabilities of normal logits are computed otherwise now
NORMAL_LOGITS = {"laplace_diagonal", "laplace_kronecker_images", "laplace_kronecker_last_layer"}


def _folders(kind: str) -> list[str]:
    return sorted(each.name for each in (HERE / kind).iterdir() if each.is_dir())


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(HERE / "expected.safetensors")


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], place: str) -> None:
    known = {key.removeprefix(f"{place}/"): value for key, value in expected.items() if key.startswith(f"{place}/")}
    assert found.keys() == known.keys() != set()
    for name, value in known.items():
        if name in OTHER_FORMULA and place.split("/")[-1] in NORMAL_LOGITS:
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=0.05)
            continue
        relative, absolute = TOLERANCES.get(value.dtype, (0.0, 0.0))
        torch.testing.assert_close(
            found[name],
            value,
            rtol=relative,
            atol=absolute,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("kind", ["posteriors", "unfinished", "estimators", "compressed"])
def test_there_is_a_folder_for_all_that_was_kept(kind, expected):
    assert set(_folders(kind)) == {key.split("/")[1] for key in expected if key.startswith(f"{kind}/")} != set()


# --- posteriors ------------------------------------------------------------------------------------------------------


def _load(name: str, folder: Path) -> kn.Posterior:
    return kn.load(folder, reading.NETWORKS[name]() if name in reading.NETWORKS else None)


@pytest.mark.parametrize("name", _folders("posteriors"))
def test_a_posterior_is_the_same(name, tmp_path, expected):
    x, place = expected[f"posteriors/{name}/x"], f"posteriors/{name}"
    posterior = _load(name, HERE / place)
    _assert_same(reading.looked_at(posterior, x), expected, place)
    again = _load(name, posterior.save(tmp_path / "again"))  # as this version writes it
    _assert_same(reading.looked_at(again, x), expected, place)


@pytest.mark.parametrize("name", _folders("posteriors"))
def test_what_a_posterior_says_of_its_fit_is_the_same(name):
    posterior = _load(name, HERE / "posteriors" / name)
    saved = json.loads((HERE / "posteriors" / name / "manifest.json").read_text())["body"]["content"]
    about = posterior.diagnostics
    assert posterior.seed == saved["seed"]
    assert posterior.model.random_names == saved["random"]
    assert sorted(posterior.model.frozen_names) == saved["frozen"]
    assert {name: about[name] for name in about} == saved["diagnostics"]["terms"]
    assert about.history == saved["diagnostics"]["history"]
    assert list(about.notes) == saved["diagnostics"]["notes"]
    for field in ("method", "converged", "interrupted", "message", "seconds", "out_of_time"):
        assert getattr(about, field) == saved["diagnostics"][field]


def test_a_posterior_whose_network_is_not_made_of_plain_layers_asks_for_it():
    with pytest.raises(kn.InvalidArgument, match="net="):
        kn.load(HERE / "posteriors" / "mean_field_vi_recurrent")


# --- fits that were stopped midway -----------------------------------------------------------------------------------


def _go_on(name: str, folder: Path) -> tuple[kn.Posterior, int] | str:
    """The posterior, and how often the network was run for it; or why the fit does not go on."""
    try:
        return reading.UNFINISHED[name].fit(folder)
    except kn.KnowableError as error:
        return str(error).replace(str(folder), "")


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("name", _folders("unfinished"))
def test_a_fit_that_was_stopped_midway_goes_on_or_says_why_not(name, tmp_path, expected):
    folder = tmp_path / "begun"
    shutil.copytree(HERE / "unfinished" / name, folder)
    found = _go_on(name, folder)
    if isinstance(found, str):
        assert "checkpoint" in found
        return
    posterior, runs = found
    whole = int(expected[f"unfinished/{name}/runs"])
    assert 0 < runs < whole  # it did not begin again
    numbers = {
        "mean": reading.flat(posterior.mean()),
        "std": reading.flat(posterior.std()),
        "runs": torch.tensor(whole),
    }
    _assert_same(numbers, expected, f"unfinished/{name}")
    assert not posterior.diagnostics.interrupted


# --- estimators and compressed networks ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _folders("estimators"))
def test_an_estimator_is_the_same(name, tmp_path, expected):
    kind: Any = kn.BayesianClassifier if name.startswith("classifier") else kn.BayesianRegressor
    rows = reading.read_table().drop(columns=["response", "outcome"])[:12]
    estimator = kind.load(HERE / "estimators" / name)
    if name == "classifier":  # by Laplace: see OTHER_FORMULA
        before = expected["estimators/classifier/probs"]
        torch.testing.assert_close(reading.estimates(estimator, rows)["probs"], before, rtol=0.0, atol=0.05)
        return
    _assert_same(reading.estimates(estimator, rows), expected, f"estimators/{name}")
    estimator.save(tmp_path / "again")
    _assert_same(reading.estimates(kind.load(tmp_path / "again"), rows), expected, f"estimators/{name}")


@pytest.mark.parametrize("name", _folders("compressed"))
def test_a_compressed_network_is_the_same(name, expected):
    x = expected[f"compressed/{name}/x"]
    output = kn.load_compressed(HERE / "compressed" / name)(x).detach()
    _assert_same({"x": x, "output": output}, expected, f"compressed/{name}")


# --- runs and comparisons --------------------------------------------------------------------------------------------


def _assert_close(found: Any, expected: Any, what: str = "") -> None:
    """Plain values, in dicts and lists: what was there is there, with the same numbers. What was null may be known."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            _assert_close(found[key], value, f"{what}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_close(one, other, f"{what}[{place}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=DIGITS), what
    elif expected is not None:
        assert found == expected, what


@pytest.mark.parametrize("name", ["numbers", pytest.param("classes", marks=pytest.mark.slow)])
def test_a_run_predicts_the_same(name):
    found = json.loads(reading.knowable("predict", f"runs/{name}", "table.csv", "--json", "--quiet"))
    _assert_close(found[:12], json.loads((HERE / "runs" / f"{name}_predictions.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(reading.RUNS))
def test_a_run_has_the_same_scores(name):
    found = json.loads(reading.knowable("evaluate", f"runs/{name}", "table.csv", "--json", "--quiet"))
    expected = json.loads((HERE / "runs" / f"{name}_scores.json").read_text())
    del expected["warnings"]  # there was none that these are rows of training
    _assert_close(found, expected)


@pytest.mark.slow
def test_a_run_without_its_page_gets_one(tmp_path):
    shutil.copytree(HERE / "runs" / "numbers", tmp_path / "run")
    reading.knowable("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert "response" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_a_comparison_that_was_cut_off_goes_on(tmp_path, expected):
    before = (HERE / "comparison" / "cut_off.jsonl").read_text()
    (tmp_path / "fits.jsonl").write_text(before)
    comparison = reading.compare(tmp_path / "fits.jsonl")
    after = (tmp_path / "fits.jsonl").read_text()
    assert after.startswith(before)  # what was finished stays, to the letter
    assert len(after.splitlines()) == 1 + 2 * reading.FINISHED
    found = {name: value for name, value in reading.scores_of(comparison).items() if not name.endswith(".mean_std")}
    _assert_same(found, expected, "comparison/cut_off")  # what was written before had no such score


def test_a_comparison_of_the_command_line_is_found_finished(tmp_path):
    shutil.copytree(HERE / "comparison" / "finished", tmp_path / "out")
    reading.knowable("compare", "table.csv", *reading.COMPARED, "--out", tmp_path / "out", "--quiet")
    folders = (HERE / "comparison" / "finished", tmp_path / "out")
    before, after = ((folder / "comparison.jsonl").read_text() for folder in folders)
    assert after == before
    table, again = (pandas.read_csv(folder / "comparison.csv") for folder in folders)
    pandas.testing.assert_frame_equal(again.drop(columns="not_converged"), table)  # a column that it had not then
