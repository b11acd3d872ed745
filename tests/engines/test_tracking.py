"""Figures of a fit in TensorBoard and MLflow, read back by these themselves."""

from __future__ import annotations

import sys

import pytest
import torch

import knowable as kn


def fit(tracker, method=None):
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(0.1))
    return (method or kn.MAP(epochs=150)).fit(model, (x, 2 * x), progress=tracker)


def test_tensorboard_has_the_terms_of_every_record(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    posterior = fit(kn.TensorBoard(tmp_path))
    written = accumulator.EventAccumulator(str(tmp_path / "MAP"))
    written.Reload()
    records = posterior.diagnostics.history
    for name in ("loss", "log_likelihood", "log_prior", "learning_rate"):
        found = [(each.step, each.value) for each in written.Scalars(name)]
        assert found == [(each["step"], pytest.approx(each[name], rel=1e-6)) for each in records]


def test_chains_report_blocks_and_at_the_end_their_diagnostics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    method = kn.HMC(chains=2, draws=60, warmup=20, start="network")
    posterior = fit(kn.TensorBoard(tmp_path), method)
    written = accumulator.EventAccumulator(str(tmp_path / "HMC"))
    written.Reload()
    assert [each.step for each in written.Scalars("acceptance")] == [20, 70, 80, 80]  # and once more over all
    (rhat,) = written.Scalars("rhat")
    assert rhat.value == pytest.approx(posterior.diagnostics["rhat"], rel=1e-6)


def test_mlflow_has_a_run_with_the_terms_of_every_record(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database or a server needs more packages
    uri = (tmp_path / "runs").as_uri()
    posterior = fit(kn.MLflow(uri, experiment="lines"))
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lines").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "MAP"
    found = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
    assert found == [(each["step"], each["loss"]) for each in posterior.diagnostics.history]


@pytest.mark.parametrize(
    ("tracker", "module"),
    [(kn.TensorBoard("there"), "torch.utils.tensorboard.writer"), (kn.MLflow(), "mlflow.tracking")],
)
def test_without_the_package_the_error_names_the_extra(tracker, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kn.MissingExtra, match=r"knowable\[track\]"):
        fit(tracker)
