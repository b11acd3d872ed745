from __future__ import annotations

from pathlib import Path

import pytest
import torch

import knowable as kn

from .test_certify import classes, numbers


@pytest.mark.parametrize("groups", [None, "label"])
def test_a_saved_certificate_says_and_does_the_same(tmp_path: Path, groups: str | None):
    posterior, x, y = classes()
    certificate = kn.certify(posterior, (x[:400], y[:400]), score="aps", groups=groups)
    certificate.save(tmp_path / "c")
    loaded = kn.load(tmp_path / "c")
    before, after = certificate.predict(x[400:]), loaded.predict(x[400:])
    assert torch.equal(before.set, after.set)
    assert torch.equal(before.accept, after.accept)
    assert torch.equal(before.p_value, after.p_value)
    assert loaded.summary() == certificate.summary()
    assert repr(loaded) == repr(certificate)
    assert loaded.rejection == certificate.rejection
    assert loaded.guarantees == certificate.guarantees
    assert loaded.plot().axes


def test_numbers_with_and_without_groups_come_back(tmp_path: Path):
    posterior, x, y = numbers()
    groups = ["b" if each > 0 else "a" for each in x[:, 0]]
    for name, certificate in {
        "plain": kn.certify(posterior, (x[:9], y[:9])),  # a rule that no row tested: its risk is not a number
        "groups": kn.certify(posterior, (x[:400], y[:400]), groups=groups[:400]),
    }.items():
        certificate.save(tmp_path / name)
        loaded = kn.load(tmp_path / name)
        given = groups if name == "groups" else None
        for one, other in zip(
            certificate.predict(x, groups=given).interval, loaded.predict(x, groups=given).interval, strict=True
        ):
            assert torch.equal(one, other)
        assert loaded.summary() == certificate.summary()


def test_a_folder_is_replaced_only_when_asked_and_keeps_one_posterior(tmp_path: Path):
    posterior, x, y = classes()
    first = kn.certify(posterior, (x[:400], y[:400]))
    first.save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match="overwrite=True"):
        first.save(tmp_path)
    kn.certify(*numbers()[:1], numbers()[1:]).save(tmp_path, overwrite=True)
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == 1
    assert kn.load(tmp_path).score == "normalised"
    with pytest.raises(kn.InvalidArgument, match="something else in it"):
        posterior.save(tmp_path, overwrite=True)


def test_another_posterior_in_its_place_is_refused(tmp_path: Path):
    posterior, x, y = classes()
    kn.certify(posterior, (x[:400], y[:400])).save(tmp_path)
    inside = next(each for each in tmp_path.iterdir() if each.is_dir())
    numbers()[0].save(inside, overwrite=True)
    with pytest.raises(kn.DamagedArtifact, match="not the posterior that this certificate is about"):
        kn.load(tmp_path)
    for file in inside.iterdir():
        file.unlink()
    with pytest.raises(kn.DamagedArtifact):
        kn.load(tmp_path)
