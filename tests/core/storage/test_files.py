"""Tests of the single file: it holds what the folder holds, is read in its place, and other archives are refused."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.storage import tensor_file
from knowable.core.storage.files import Files, destination, pack
from knowable.core.storage.folder import read_folder, write_folder
from tests.core.cases import atoms, linear_model, same_params

CONTENT, TENSORS = {"a": [1, 2.5]}, {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor([True, False])}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with destination(tmp_path / "x.knowable", overwrite=False) as folder:
        write_folder(folder, "thing", CONTENT, TENSORS)
    return tmp_path / "x.knowable"


def test_a_file_holds_what_a_folder_holds_and_nothing_stays_beside_it(file):
    content, tensors = read_folder(file, "thing")
    assert content == CONTENT
    assert same_params(tensors, TENSORS)
    assert [entry.name for entry in file.parent.iterdir()] == ["x.knowable"]


def test_it_is_an_ordinary_archive_whose_members_lie_aligned_as_they_are(file):
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    files = Files.at(file)
    assert all(files.open(name).start % 64 == 0 for name in files.names())


def test_the_same_files_make_the_same_archive(file, tmp_path):
    again = pack(Files.at(file), tmp_path / "again.knowable")
    assert again.read_bytes() == file.read_bytes()


def test_an_archive_made_by_another_program_is_read(file, tmp_path):
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "other.knowable", "w") as archive:
        for each in sorted((tmp_path / "folder").iterdir()):
            archive.write(each, each.name)
    assert read_folder(tmp_path / "other.knowable", "thing")[0] == CONTENT


def test_members_of_more_than_four_gigabytes_are_written_and_read_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # everything longer than this counts as large
    with destination(tmp_path / "x.knowable", overwrite=False) as folder:
        write_folder(folder, "thing", CONTENT, TENSORS)
    assert same_params(read_folder(tmp_path / "x.knowable", "thing")[1], TENSORS)
    files = Files.at(tmp_path / "x.knowable")
    assert all(files.open(name).start % 64 == 0 for name in files.names())


def test_a_posterior_in_a_file_predicts_the_same_and_is_replaced_only_when_asked(tmp_path):
    posterior, x = atoms(linear_model(), 3), torch.ones(4, 2, dtype=torch.float64)
    path = posterior.save(tmp_path / "p.knowable")
    assert torch.equal(kn.load(path).predict(x).mean, posterior.predict(x).mean)
    with pytest.raises(kn.InvalidArgument, match="overwrite=True"):
        posterior.save(path)
    assert len(kn.load(atoms(linear_model(), 5).save(path, overwrite=True))) == 5


def test_neither_a_folder_nor_a_file_of_another_kind_is_overwritten(tmp_path):
    (tmp_path / "a.knowable").mkdir()
    (tmp_path / "b.knowable").write_text("mine")
    for name, why in (("a", "is a folder"), ("b", "is a file of another kind")):
        with pytest.raises(kn.InvalidArgument, match=why):
            atoms(linear_model(), 3).save(tmp_path / f"{name}.knowable", overwrite=True)
    assert (tmp_path / "b.knowable").read_text() == "mine"


def test_a_reader_keeps_the_file_that_it_began_to_read(file, tmp_path):
    files = Files.at(file)
    with destination(file, overwrite=True) as folder:
        write_folder(folder, "thing", {"new": 1}, {})
    assert read_folder(files, "thing")[0] == CONTENT
    assert read_folder(file, "thing")[0] == {"new": 1}


# --- draws that are mapped -------------------------------------------------------------------------------------------


@pytest.fixture
def chain(monkeypatch) -> kn.Posterior:
    """One whose file, of 8 MB, counts as large."""
    monkeypatch.setattr(tensor_file, "MAPPED_FROM", 2**20)
    model = kn.Model(torch.nn.Linear(2000, 1, bias=False), kn.Gaussian(noise=1.0))
    draws = torch.randn(1000, 1, 2000, generator=torch.Generator().manual_seed(0))
    return kn.core.chains.posterior.ChainPosterior(model, {"weight": draws}, 2)


@pytest.mark.parametrize("name", ["chain", "chain.knowable"])
def test_draws_of_a_large_chain_are_read_when_they_are_used(chain, name, tmp_path, monkeypatch):
    path, x = chain.save(tmp_path / name), torch.ones(3, 2000)
    expected = chain.predict(x, samples=4).mean
    hashed, original = list[int](), hashlib.sha256

    def counting(data: bytes = b"", **options):
        hashed.append(len(data))
        return original(data, **options)

    monkeypatch.setattr(tensor_file.hashlib, "sha256", counting)
    loaded = kn.load(path)
    assert sum(hashed) < 2 * 2**20  # of 8 MB
    assert torch.equal(loaded.predict(x, samples=4).mean, expected)
    assert sum(hashed) < 5 * 2**20
    assert torch.equal(loaded.stack["weight"], chain.stack["weight"])
    assert torch.equal(kn.load(path).mean()["weight"], chain.mean()["weight"])


@pytest.mark.parametrize("name", ["chain", "chain.knowable"])
def test_draws_that_were_altered_are_refused_when_they_are_used(chain, name, tmp_path):
    path = chain.save(tmp_path / name)
    file = next(path.glob("tensors-*")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    loaded = kn.load(path)  # a draw elsewhere is good
    with pytest.raises(kn.DamagedArtifact, match="was altered after it was saved"):
        _ = loaded.stack
    with pytest.raises(kn.DamagedArtifact, match="was altered after it was saved"):
        loaded.predict(torch.ones(3, 2000), samples=1000)


def test_a_chain_that_is_mapped_can_be_copied_to_another_process(chain, tmp_path):
    import pickle

    loaded = kn.load(chain.save(tmp_path / "chain"))
    again = pickle.loads(pickle.dumps(loaded))
    assert torch.equal(again.stack["weight"], chain.stack["weight"])


def test_writing_to_mapped_draws_leaves_the_file_alone(chain, tmp_path):
    path = chain.save(tmp_path / "chain")
    kn.load(path).stack["weight"].zero_()
    assert torch.equal(kn.load(path).stack["weight"], chain.stack["weight"])


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("keys")
    for command in ("genpkey -algorithm ed25519 -out key.pem", "pkey -in key.pem -pubout -out pub.pem"):
        subprocess.run(["openssl", *command.split()], cwd=place, check=True, capture_output=True)
    return place / "key.pem", place / "pub.pem"


@pytest.mark.parametrize("name", ["p", "p.knowable"])
def test_what_was_signed_is_loaded_by_whoever_has_the_public_key(name, keys, tmp_path):
    from knowable.core.storage.signing import sign, verify

    path = atoms(linear_model(), 3).save(tmp_path / name)
    with pytest.raises(kn.NotSigned, match="is not signed"):
        kn.load(path, verify=keys[1])
    sign(path, keys[0])
    assert len(verify(path, keys[1])) == 2
    assert len(kn.load(path, verify=keys[1])) == 3
    atoms(linear_model(), 4).save(path, overwrite=True)  # takes the signature away
    with pytest.raises(kn.NotSigned, match="is not signed"):
        kn.load(path, verify=keys[1])


def test_whatever_is_altered_added_or_removed_after_signing_is_refused(keys, tmp_path):
    from knowable.core.storage.signing import sign, verify
    from tests.core.artifacts import put_tensors

    path = sign(atoms(linear_model(), 3).save(tmp_path / "p"), keys[0])
    other = atoms(linear_model(), 3).save(tmp_path / "other")
    (path / "more.json").write_text("{}")
    with pytest.raises(kn.NotSigned, match=r"more\.json was added"):
        kn.load(path, verify=keys[1])
    with pytest.raises(kn.NotSigned, match=r"more\.json was added"):
        verify(path, keys[1])
    (path / "more.json").unlink()
    (path / "manifest.json").write_bytes((other / "manifest.json").read_bytes() + b" ")
    with pytest.raises(kn.DamagedArtifact, match="altered after it was signed"):
        kn.load(path, verify=keys[1])
    sign(path, keys[0])
    put_tensors(path, next(path.glob("tensors-*")).read_bytes())  # the same ones, and a manifest of other bytes
    with pytest.raises(kn.NotSigned, match=r"manifest\.json was altered"):
        verify(path, keys[1])


def test_the_signature_of_another_key_and_other_kinds_of_keys_are_refused(keys, tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from knowable.core.storage.signing import sign

    path = sign(atoms(linear_model(), 3).save(tmp_path / "p"), ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(kn.NotSigned, match="not by the owner of this key"):
        kn.load(path, verify=keys[1])
    (path / "signature.json").write_text('{"format": 1, "algorithm": "none", "files": {}, "signature": ""}')
    with pytest.raises(kn.NotSigned, match="of a kind that this version does not know"):
        kn.load(path, verify=keys[1])
    (path / "signature.json").write_text('{"format": 1}')
    with pytest.raises(kn.NotSigned, match="cannot be read"):
        kn.load(path, verify=keys[1])
    with pytest.raises(kn.InvalidArgument, match="not a private key in PEM"):
        sign(path, keys[1])
    with pytest.raises(kn.InvalidArgument, match="not a public key in PEM"):
        kn.load(path, verify=keys[0])
    with pytest.raises(kn.InvalidArgument, match="cannot be read"):
        kn.load(path, verify=tmp_path / "nowhere.pem")


def test_the_draws_of_a_signed_chain_are_still_read_when_they_are_used(chain, keys, tmp_path):
    from knowable.core.storage.signing import sign

    path = sign(chain.save(tmp_path / "chain"), keys[0])
    file = next(path.glob("tensors-*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    loaded = kn.load(path, verify=keys[1])
    with pytest.raises(kn.DamagedArtifact, match="was altered"):
        _ = loaded.stack
