"""A student network answers where a request asks for it; the posterior answers everybody else."""

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.errors import InvalidArgument
from knowable.interfaces.serve.served import Served, Source
from tests.interfaces.serve.test_app import predict

X = torch.linspace(-2, 2, 80).unsqueeze(1).expand(-1, 2).contiguous()
Y = (X[:, 0] > 0).long()


def net(width=8):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    posterior = kn.MeanFieldVI(epochs=100).fit(kn.Model(net(), kn.Categorical()), (X, Y))
    return posterior, posterior.save(tmp_path_factory.mktemp("students") / "teacher")


def answers(folder, student):
    served = Served.load(Source(folder, student=student))
    rows = {"rows": [[0.5, 0.5], [-1.0, -1.0]]}
    slow, fast = predict(served, rows, {**rows, "fast": True})
    assert slow.status_code == fast.status_code == 200, fast.text
    return slow.json()["predictions"], fast.json()["predictions"]


def test_a_distilled_student(teacher, tmp_path):
    posterior, folder = teacher
    student = kn.distill(posterior, net(4), X, method=kn.MaximumLikelihood(epochs=200))
    student.save(tmp_path / "student")
    slow, fast = answers(folder, tmp_path / "student")
    assert all(row["draws"] == 1 for row in fast) and all(row["draws"] > 1 for row in slow)
    expected = student.predict(torch.tensor([[0.5, 0.5], [-1.0, -1.0]]))
    assert [row["probability"] for row in fast] == pytest.approx(expected.probs.amax(1).tolist(), rel=1e-5)
    assert all(row["epistemic"] >= 0 for row in fast)


def test_a_compressed_student(teacher, tmp_path):
    posterior, folder = teacher
    compressed = kn.compress(posterior, example=X[:2])
    compressed.save(tmp_path / "small")
    slow, fast = answers(folder, tmp_path / "small")
    expected = compressed.net(torch.tensor([[0.5, 0.5], [-1.0, -1.0]])).softmax(1)
    assert [row["probability"] for row in fast] == pytest.approx(expected.amax(1).tolist(), rel=1e-4)
    assert [row["label"] for row in fast] == [row["label"] for row in slow]


def test_another_posterior_is_no_student(teacher):
    with pytest.raises(InvalidArgument, match="--student"):
        Served.load(Source(teacher[1], student=teacher[1]))
