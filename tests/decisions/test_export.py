"""Posteriors as programs: what they predict is what the posterior predicts, for batches of any size."""

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.errors import InvalidArgument, Unsupported


def fitted(method, likelihood, outputs):
    x = torch.randn(60, 3)
    y = (x[:, 0] > 0).long() if isinstance(likelihood, kn.Categorical) else x.sum(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs))
    return method.fit(kn.Model(net, likelihood), (x, y))


CASES = {
    "point": (kn.MAP(epochs=20), kn.Gaussian(), 1),
    "numbers": (kn.MeanFieldVI(epochs=20), kn.Gaussian(), 1),
    "noise of each row": (kn.DeepEnsemble(3, epochs=20), kn.HeteroscedasticGaussian(), 2),
    "classes": (kn.MeanFieldVI(epochs=20), kn.Categorical(), 2),
}


def parts(prediction):
    names = ("probs", "total") if hasattr(prediction, "probs") else ("mean", "variance")
    return [getattr(prediction, name) for name in (*names, "aleatoric", "epistemic")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_program_predicts_what_the_posterior_does(name, tmp_path):
    posterior = fitted(*CASES[name])
    file = kn.export(posterior, tmp_path / "model.pt2", torch.randn(5, 3), samples=6)
    program = torch.export.load(file).module()
    for rows in (1, 7):
        x = torch.randn(rows, 3)
        for found, expected in zip(program(x), parts(posterior.predict(x, samples=6)), strict=True):
            assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_onnx_file_predicts_what_the_posterior_does(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    posterior = fitted(*CASES[name])
    file = kn.export(posterior, tmp_path / "model.onnx", torch.randn(5, 3), samples=6)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        x = torch.randn(rows, 3)
        found = session.run(None, {"x": x.numpy()})
        for value, expected in zip(found, parts(posterior.predict(x, samples=6)), strict=True):
            assert torch.allclose(torch.from_numpy(value), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_made_of_networks_outputs_is_refused(tmp_path):
    x = torch.randn(60, 3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = kn.Laplace(epochs=50).fit(kn.Model(net, kn.Gaussian()), (x, x.sum(1)))  # predicts by the linearised
    with pytest.raises(Unsupported, match="Distil"):
        kn.export(posterior, tmp_path / "model.pt2", x)
    with pytest.raises(InvalidArgument, match=r"\.pt2"):
        kn.export(fitted(*CASES["point"]), tmp_path / "model.bin", x)
    assert not list(tmp_path.iterdir())
