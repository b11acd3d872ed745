"""A run in a single file does what a run in a folder does; signing and verifying it."""

from __future__ import annotations

import subprocess

import pytest

import knowable as kn
from knowable.core.storage.files import Files, pack
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.conftest import FAST


@pytest.fixture
def packed(runs):
    pack(Files.at(runs / "numbers"), runs / "numbers.knowable")
    return runs


def test_fit_writes_a_single_file_and_replaces_it_only_with_force(runs):
    data, out = runs / "classes.csv", runs / "new" / "run.knowable"
    done = call("fit", data, "--target", "side", "--out", out, *FAST)
    assert done.exit_code in (0, 3), done.stderr
    assert [entry.name for entry in out.parent.iterdir()] == ["run.knowable"]
    assert {"config.json", "estimator.json", "posterior/manifest.json", "report.json"} <= set(Files.at(out).names())
    assert type(kn.load(out)) is kn.BayesianClassifier
    again = call("fit", data, "--target", "side", "--out", out, *FAST)
    assert (again.exit_code, "--force" in again.stderr) == (2, True)


def test_predict_evaluate_and_report_take_the_file(packed):
    for command in ("predict", "evaluate"):
        one, other = (
            call(command, packed / run, packed / "numbers.csv", "--json") for run in ("numbers", "numbers.knowable")
        )
        assert (one.exit_code, other.exit_code) == (0, 0), other.stderr
        assert one.stdout.replace("numbers.knowable", "numbers") == other.stdout.replace("numbers.knowable", "numbers")
    done = call("report", packed / "numbers.knowable")
    assert done.exit_code == 0, done.stderr
    assert (packed / "numbers.html").is_file()


def test_a_run_is_loaded_as_its_estimator(packed):
    assert type(kn.load(packed / "numbers")) is kn.BayesianRegressor
    assert type(kn.load(packed / "numbers.knowable")) is kn.BayesianRegressor


def test_the_service_takes_the_file(packed):
    pytest.importorskip("fastapi")
    from knowable.interfaces.serve.served import Served, Source

    one, other = (Served.load(Source(packed / name)).about for name in ("numbers", "numbers.knowable"))
    assert (one.columns, one.task) == (other.columns, other.task)


def test_another_file_is_no_run(packed):
    (packed / "x.knowable").write_text("mine")
    done = call("predict", packed / "x.knowable", packed / "numbers.csv")
    assert (done.exit_code, "is not a run" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["numbers", "numbers.knowable"])
def test_a_run_is_signed_and_verified(name, packed):
    for command in ("genpkey -algorithm ed25519 -out key.pem", "pkey -in key.pem -pubout -out pub.pem"):
        subprocess.run(["openssl", *command.split()], cwd=packed, check=True, capture_output=True)
    run, public = packed / name, packed / "pub.pem"
    assert "is not signed" in call("verify", run, "--key", public).stderr
    assert call("sign", run, "--key", packed / "key.pem").exit_code == 0
    done = call("verify", run, "--key", public)
    assert (done.exit_code, "all as they were signed" in done.stdout) == (0, True)
    assert kn.load(run, verify=public)
    if run.is_dir():
        (run / "scores.json").write_text("{}")
        done = call("verify", run, "--key", public)
        assert (done.exit_code, "scores.json was altered" in done.stderr) == (2, True)
