from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from tests.decisions.compress.cases import NETWORKS, make, posterior_of, random_masks


def _compressed(name: str, generator: torch.Generator, *, share: float = 0.85, bits=None) -> kn.Compressed:
    net, x = make(name, generator=generator)
    posterior = posterior_of(net, random_masks(net, share, generator=generator))
    return kn.compress(posterior, example=x, bits=bits, repeats=0)


@pytest.mark.parametrize("bits", [None, "posterior", 6])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_bit_comes_back(name, bits, tmp_path, generator):
    compressed = _compressed(name, generator, bits=bits)
    folder = compressed.save(tmp_path / "small")
    again = kn.load_compressed(folder, net=NETWORKS[name][0]())
    ours, theirs = compressed.net.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    with torch.no_grad():
        assert torch.equal(again(compressed._example), compressed.net(compressed._example))
    assert not again.training
    assert sum(file.stat().st_size for file in folder.iterdir()) == compressed.bytes_sparse


@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_a_network_of_plain_layers_needs_no_source(share, tmp_path, generator):
    compressed = _compressed("batch_norm_cnn", generator, share=share)
    again = kn.load_compressed(compressed.save(tmp_path / "small"))
    assert isinstance(again, nn.Sequential)
    with torch.no_grad():
        assert torch.equal(again(compressed._example), compressed.net(compressed._example))


def test_the_original_is_asked_for_where_it_is_needed_and_checked(tmp_path, generator):
    folder = _compressed("residual", generator).save(tmp_path / "small")
    with pytest.raises(kn.InvalidArgument, match=r"\(Residual\) is not made of plain .* load_compressed\(path, net="):
        kn.load_compressed(folder)
    with pytest.raises(kn.InvalidArgument, match="net is not the network that was compressed: parameter"):
        kn.load_compressed(folder, net=nn.Linear(2, 2))
    with pytest.raises(kn.InvalidType, match="net"):
        kn.load_compressed(folder, net="residual")


def test_a_sparse_file_is_smaller_than_the_dense_ones(tmp_path, generator):
    net = nn.Sequential(nn.Linear(200, 150), nn.ReLU(), nn.Linear(150, 10))
    posterior = posterior_of(net, random_masks(net, 0.9, generator=generator))
    plain = kn.compress(posterior, example=torch.randn(4, 200), repeats=0)
    coarse = kn.compress(posterior, example=torch.randn(4, 200), repeats=0, bits=5)
    assert coarse.bytes_sparse < plain.bytes_sparse < plain.bytes_dense.after < plain.bytes_dense.before
    # the original: 4 bytes for each of its numbers, and a header
    assert 0 < plain.bytes_dense.before - 4 * sum(value.numel() for value in net.parameters()) < 1_000


def test_damage_is_noticed(tmp_path, generator):
    folder = _compressed("lenet", generator).save(tmp_path / "small")
    file = next(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    for position in (len(whole) // 2, len(whole) - 1):
        broken = bytearray(whole)
        broken[position] ^= 1
        file.write_bytes(bytes(broken))
        with pytest.raises(kn.DamagedArtifact, match="altered or truncated"):
            kn.load_compressed(folder)
    file.write_bytes(whole[:-10])
    with pytest.raises(kn.DamagedArtifact, match="altered or truncated"):
        kn.load_compressed(folder)
    file.write_bytes(whole)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"Linear"', '"Conv1d"'))
    with pytest.raises(kn.DamagedArtifact, match="altered"):
        kn.load_compressed(folder)


def test_other_folders_are_refused(tmp_path, generator):
    compressed = _compressed("mlp", generator)
    with pytest.raises(kn.DamagedArtifact, match="not a saved folder"):
        kn.load_compressed(tmp_path)
    compressed.save(tmp_path / "small")
    with pytest.raises(kn.DamagedArtifact, match="holds a compressed network, not a posterior"):
        kn.load(tmp_path / "small")
    with pytest.raises(kn.InvalidType, match="path must be the name of a folder"):
        compressed.save(3)  # type: ignore[arg-type]


def test_a_manifest_that_contradicts_the_tensors_is_damage(tmp_path, generator):
    from knowable.core.storage.folder import read_folder, write_folder
    from knowable.decisions.compress.saving import KIND

    folder = _compressed("mlp", generator).save(tmp_path / "small")
    content, tensors = read_folder(folder, KIND)
    for change in ({"plan": {"layers": 3}}, {"dtype": "object"}, {"codes": {}}, {"network": {"structure": {}}}):
        altered = json.loads(json.dumps({**content, **change}))
        write_folder(tmp_path / "altered", KIND, altered, tensors)
        with pytest.raises(kn.DamagedArtifact):
            kn.load_compressed(tmp_path / "altered")


# --- export -----------------------------------------------------------------------------------------------------------


BATCHES = (1, 3, 8)


def _exportable(name: str, generator: torch.Generator) -> kn.Compressed:
    net, x = make(name, generator=generator)
    posterior = posterior_of(net, random_masks(net, 0.7, generator=generator))
    return kn.compress(posterior, example=x[:1], repeats=0)


def _batch(compressed: kn.Compressed, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn((rows, *compressed._example.shape[1:]), generator=generator)


@pytest.mark.parametrize("name", ["residual", pytest.param("lenet", marks=pytest.mark.slow)])
def test_an_onnx_file_gives_the_same_outputs_for_any_batch(name, tmp_path, generator):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    compressed = _exportable(name, generator)
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
    compressed = _exportable(name, generator)
    file = compressed.to_export(tmp_path / "new" / "small.pt2")
    program = torch.export.load(file).module()
    for rows in BATCHES:
        x = _batch(compressed, rows, generator)
        with torch.no_grad():
            torch.testing.assert_close(program(x), compressed.net(x))
    assert [each.name for each in file.parent.iterdir()] == ["small.pt2"]


def test_a_missing_package_names_the_extra(tmp_path, generator, monkeypatch):
    compressed = _exportable("mlp", generator)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(kn.MissingExtra, match=r"need onnxscript: pip install 'knowable\[export\]'"):
        compressed.to_onnx(tmp_path / "small.onnx")


def test_wrong_paths_are_named(tmp_path, generator):
    compressed = _exportable("mlp", generator)
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
