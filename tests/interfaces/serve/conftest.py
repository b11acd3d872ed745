"""Models to serve, made once: of numbers and of classes in tables, and of tensors."""

import io

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.interfaces.serve.served import Served, Source
from knowable.tabular.csv_file import read_csv
from tests.interfaces.cli.tables import class_rows, number_rows, write_csv


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder with ``numbers``, ``classes`` (with a certificate) and ``tensors``."""
    folder = tmp_path_factory.mktemp("served")
    for name, rows, target, estimator in (
        ("numbers", number_rows(), "response", kn.BayesianRegressor(kn.MeanFieldVI(epochs=30), random_state=0)),
        ("classes", class_rows(400), "side", kn.BayesianClassifier(kn.DeepEnsemble(3, epochs=40), random_state=0)),
    ):
        table = read_csv(write_csv(folder / f"{name}.csv", rows).read_bytes(), "rows")
        fitted = table.rows(range(min(len(table), 200)))
        estimator.fit(fitted, target).save(folder / name)
        if name == "classes":
            held = table.rows(range(200, 400))
            x = torch.from_numpy(estimator.schema_.encode(held))
            y = torch.from_numpy(estimator.schema_.targets.codes(held.frame[target].to_numpy()))
            kn.certify(estimator.posterior_, (x, y)).save(folder / name / "certificate")
    x = torch.randn(60, 3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    kn.MeanFieldVI(epochs=20).fit(kn.Model(net, kn.Gaussian()), (x, x.sum(1))).save(folder / "tensors")
    return folder


@pytest.fixture(scope="session")
def numbers(saved):
    """The run of numbers, loaded."""
    return Served.load(Source(saved / "numbers"))


@pytest.fixture(scope="session")
def classes(saved):
    """The run of classes, with a certificate."""
    return Served.load(Source(saved / "classes"))


@pytest.fixture(scope="session")
def tensors(saved):
    """The posterior of a network of three inputs."""
    return Served.load(Source(saved / "tensors"))


def arrow_of(columns, **options):
    """Columns as an Arrow stream."""
    pa = pytest.importorskip("pyarrow")
    table, sink = pa.table(columns), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_table(table)
    return sink.getvalue()
