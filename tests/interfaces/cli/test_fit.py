"""``knowable fit``: from a file to a run."""

import csv
import gzip
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

import knowable as kn
from knowable.core.chains.settings import Mixing
from knowable.inference.sampling import sampler
from knowable.report import verdict
from knowable.tabular import auto
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.conftest import FAST
from tests.interfaces.cli.tables import number_rows, write_csv

FILES = {
    "config.json", "schema.json", "estimator.json", "posterior", "history.csv", "scores.json", "report.json",
    "report.html",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_a_run_has_all_its_files_and_they_can_be_read(kind, runs):
    folder = runs / kind
    assert {each.name for each in folder.iterdir()} == FILES
    config, schema, scores = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("config", "schema", "scores")
    )
    assert config["method"] == "laplace" and config["made"]["method"] == "laplace"
    assert config["made"]["knowable"] == kn.__version__ and len(config["made"]["data_sha256"]) == 64
    assert config["made"]["trained_on"] + config["made"]["held_out"] == {"numbers": 80, "classes": 90}[kind]
    assert [column["kind"] for column in schema["columns"]] == {
        "numbers": ["numeric", "categorical", "date", "boolean"],
        "classes": ["numeric", "numeric"],
    }[kind]
    assert scores["held_out"] and math.isfinite(scores["scores"]["nll"]["value"])
    assert scores["scores"]["nll"]["standard_error"] > 0
    estimator = kn.BayesianRegressor if kind == "numbers" else kn.BayesianClassifier
    assert estimator.load(folder).posterior_.model is not None
    with (folder / "history.csv").open(newline="") as file:
        assert "step" in next(csv.reader(file))


def test_the_fit_is_far_better_than_a_guess_without_inputs(runs):
    # the noise of the outcome has sd 0.3, its spread over rows is above 4: a fit that works explains most of it
    scores = json.loads((runs / "numbers" / "scores.json").read_text())
    assert scores["scores"]["rmse"]["value"] < 0.5 * scores["guess_without_inputs"]["rmse"]["value"]
    labels = json.loads((runs / "classes" / "scores.json").read_text())
    assert labels["scores"]["accuracy"]["value"] > labels["guess_without_inputs"]["accuracy"]["value"]


def test_people_see_the_scores_the_verdict_and_where_the_run_is(made_runs):
    folder, results = made_runs
    printed = results["numbers"].stdout
    for word in (
        "response by Laplace",
        "Baseline without inputs",
        "90% coverage",
        f"Run: {folder / 'numbers'}",
        "Report: ",
    ):
        assert word in printed


def test_nothing_is_overwritten_without_force(runs):
    before = (runs / "numbers" / "config.json").read_bytes()
    result = call("fit", runs / "numbers.csv", "-t", "response", "-o", runs / "numbers", *FAST)
    assert result.exit_code == 2 and "--force" in result.stderr and result.stderr.count("\n") == 1
    assert (runs / "numbers" / "config.json").read_bytes() == before
    again = call("fit", runs / "numbers.csv", "-t", "response", "-o", runs / "numbers", "--seed", "3", "--force", *FAST)
    assert again.exit_code in (0, 3)
    assert json.loads((runs / "numbers" / "config.json").read_text())["seed"] == 3


def test_machines_get_one_json_object_and_standard_input_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write_csv(tmp_path / "n.csv", number_rows(60)).read_text()
    result = call("fit", "-", "--target", "response", "--json", "--quiet", *FAST, stdin=text)
    assert result.exit_code in (0, 3), result.stderr
    found = json.loads(result.stdout)
    assert found["run"] == "knowable-run" and (tmp_path / "knowable-run" / "report.html").is_file()
    assert found["method"] == "laplace" and found["rows"] == 12
    assert found["scores"]["rmse"]["value"] > 0


@pytest.mark.slow  # two fits that the clock does not end
def test_the_configuration_of_a_run_repeats_it(runs):
    first = json.loads((runs / "classes" / "scores.json").read_text())
    config = runs / "classes" / "config.json"
    plain = json.loads(config.read_text())
    (runs / "again.json").write_text(json.dumps({**plain, "method": "map"}))
    for name in ("one", "two"):
        result = call("fit", "--config", runs / "again.json", "--out", runs / name, "--quiet")
        assert result.exit_code in (0, 3), result.stderr
        assert result.stdout == ""
    one, two = (json.loads((runs / name / "scores.json").read_text()) for name in ("one", "two"))
    assert one == two and one["rows"] == first["rows"]


def test_quiet_prints_nothing_and_the_folder_is_named_after_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "trial.csv", number_rows(50))
    (tmp_path / "trial.csv.gz").write_bytes(gzip.compress((tmp_path / "trial.csv").read_bytes()))
    result = call("fit", "trial.csv.gz", "-t", "response", "-q", "--method", "map", "--budget", "quick")
    assert result.exit_code in (0, 3)
    assert result.stdout == "" and (tmp_path / "trial-run" / "config.json").is_file()


def test_all_rows_can_be_fitted_and_the_report_warns_that_scores_do_not_count(tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--holdout", "0", *FAST)
    assert result.exit_code in (0, 3), result.stderr
    assert "too good to be true" in result.stderr
    assert not json.loads((tmp_path / "run" / "scores.json").read_text())["held_out"]


def test_a_fit_that_did_not_converge_is_code_3_and_leaves_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr("knowable.core.training.schedule._LONGEST", 100)
    path = write_csv(tmp_path / "n.csv", number_rows(60))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--method", "mfvi", "--no-refit")
    assert result.exit_code == 3, result.stderr
    assert "did not converge" in result.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["made"]["converged"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "said"), [(0.002, 0, "Monte Carlo error that is small"), (0.02, 3, "did not converge")]
)
def test_chains_that_disagree_are_code_3_only_where_predictions_are_not_known(tmp_path, monkeypatch, error, code, said):
    few = replace(auto.BUDGETS["quick"], warmup=5, gradients=1200)  # some ten draws
    monkeypatch.setitem(auto.BUDGETS, "quick", few)
    monkeypatch.setattr(sampler.Sampler, "network_mixing", Mixing(rhat=0.5))  # no chains are good enough
    monkeypatch.setattr(verdict, "FAIR_RHAT", 0.5)
    monkeypatch.setattr(sampler, "prediction_error", lambda scores: error)
    path = write_csv(tmp_path / "n.csv", number_rows(60))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--budget", "quick")
    assert result.exit_code == code, result.stderr
    assert result.stdout.count(said) == 2, "of the fit that was scored, and of the one to all rows"
    assert ("did not converge" in result.stderr) is (code == 3)
    assert (tmp_path / "run" / "report.html").read_text().count(said) >= 2


def test_a_fit_that_its_time_limit_ends_is_good_and_says_that_it_had_not_settled(tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(60))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--method", "flow_vi", "--time-limit", "2")
    assert result.exit_code == 0, result.stderr
    assert "time limit" in result.stderr and "ended before it converged" in result.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["made"]["converged"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "mean_feild_vi"], "Did you mean 'mean_field_vi'?"),
        (["--seed", "-1"], "seed must be"),
        (["--budget", "0"], "budget must be one of"),
        (["--time-limit", "0"], "time_limit must be"),
        (["--holdout", "2"], "holdout must be"),
        (["--task", "guess"], "--task must be"),
        (["--kind", "dose"], "COLUMN=KIND"),
        (["--kind", "doze=numeric"], "Did you mean 'dose'?"),
        (["--drop", "doze"], "Did you mean 'dose'?"),
        (["--samples", "1"], "samples must be"),
    ],
)
def test_a_bad_option_is_one_line_and_code_2_and_nothing_is_written(options, message, tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", *options)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["n.csv"]


def test_an_interrupt_while_the_run_is_written_leaves_nothing(tmp_path, monkeypatch):
    from knowable.interfaces.cli import fit as fitting

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting.run_folder, "write_history", interrupt)
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--method", "map", "--budget", "quick")
    assert result.exit_code == 130
    assert [each.name for each in tmp_path.iterdir()] == ["n.csv"]


def test_a_second_fit_that_is_stopped_at_once_leaves_the_model_that_was_scored(tmp_path, monkeypatch):
    fit, calls = kn.BayesianRegressor.fit, []

    def interrupted(self, *arguments):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(self, *arguments)

    monkeypatch.setattr(kn.BayesianRegressor, "fit", interrupted)
    monkeypatch.setitem(sys.modules, "jinja2", None)  # no page, which takes its time
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--method", "map", "--budget", "quick")
    assert result.exit_code in (0, 3), result.stderr
    assert "the run has the model that was scored" in result.stderr
    assert (tmp_path / "run" / "scores.json").is_file()


def test_ctrl_c_while_the_package_is_imported_ends_quietly(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from knowable_command import main; main()"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None and command.stdout.readline() == "importing\n"
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=30)
    assert command.returncode == 130
    assert said == "knowable: stopped from the keyboard\n"


def test_without_the_extra_for_reports_a_run_is_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    path = write_csv(tmp_path / "n.csv", number_rows(40))
    result = call("fit", path, "-t", "response", "-o", tmp_path / "run", "--method", "map", "--budget", "quick")
    assert result.exit_code in (0, 3), result.stderr
    assert "pip install 'knowable[report]'" in result.stderr
    assert (tmp_path / "run" / "report.json").is_file() and not (tmp_path / "run" / "report.html").exists()
