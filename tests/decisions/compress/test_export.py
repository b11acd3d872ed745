"""Tests of exported networks; what they were exported from is the oracle."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from tests.decisions.compress.cases import make, posterior_of, random_masks

BATCHES = (1, 3, 8)


def _compressed(name: str, generator: torch.Generator) -> kn.Compressed:
    net, x = make(name, generator=generator)
    posterior = posterior_of(net, random_masks(net, 0.7, generator=generator))
    return kn.compress(posterior, example=x[:1], repeats=0)


def _batch(compressed: kn.Compressed, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn((rows, *compressed._example.shape[1:]), generator=generator)


@pytest.mark.parametrize("name", ["residual", pytest.param("lenet", marks=pytest.mark.slow)])
def test_an_onnx_file_gives_the_same_outputs_for_any_batch(name, tmp_path, generator):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    compressed = _compressed(name, generator)
    file = compressed.to_onnx(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["x", "y"]
    for rows in BATCHES:
        x = _batch(compressed, rows, generator)
        (found,) = session.run(None, {"x": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(found, compressed.net(x).numpy(), rtol=1e-4, atol=1e-4)
    assert [each.name for each in tmp_path.iterdir()] == ["small.onnx"]


@pytest.mark.parametrize("name", ["dense", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_program_gives_the_same_outputs_for_any_batch(name, tmp_path, generator):
    compressed = _compressed(name, generator)
    file = compressed.to_export(tmp_path / "new" / "small.pt2")
    program = torch.export.load(file).module()
    for rows in BATCHES:
        x = _batch(compressed, rows, generator)
        with torch.no_grad():
            torch.testing.assert_close(program(x), compressed.net(x))
    assert [each.name for each in file.parent.iterdir()] == ["small.pt2"]


def test_a_missing_package_names_the_extra(tmp_path, generator, monkeypatch):
    compressed = _compressed("mlp", generator)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(kn.MissingExtra, match=r"need onnxscript: pip install 'knowable\[export\]'"):
        compressed.to_onnx(tmp_path / "small.onnx")


def test_wrong_paths_are_named(tmp_path, generator):
    compressed = _compressed("mlp", generator)
    with pytest.raises(kn.InvalidArgument, match=r"path must end in \.onnx"):
        compressed.to_onnx(tmp_path / "small.pt2")
    with pytest.raises(kn.InvalidArgument, match=r"path must end in \.pt2"):
        compressed.to_export(tmp_path / "small")
    with pytest.raises(kn.InvalidType, match="path must be the name of a file"):
        compressed.to_export(None)  # type: ignore[arg-type]


def test_a_network_whose_layers_have_columns_chosen_is_exported(tmp_path, generator):
    net = nn.Sequential(nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 3))
    masks = random_masks(net, 0.2, generator=generator)
    masks["0.weight"][:, 5:] = False
    compressed = kn.compress(posterior_of(net, masks), example=torch.randn(4, 60), repeats=0)
    assert "0.0.index" in dict(compressed.net.named_buffers())
    program = torch.export.load(compressed.to_export(tmp_path / "small.pt2")).module()
    x = torch.randn((7, 60), generator=generator)
    torch.testing.assert_close(program(x), compressed.net(x))
