"""Tests of saving over what was saved before, and of posteriors with the user's own likelihood or prior."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import knowable as kn
from knowable.core.model.prior import Normal

OWN = """
from dataclasses import dataclass
import knowable as kn

@dataclass(frozen=True)
class Wide(kn.Gaussian):
    factor: float = 2.0
"""


@dataclass(frozen=True)
class Wide(kn.Gaussian):
    factor: float = 2.0


@pytest.fixture
def posterior():
    return kn.MAP(epochs=2).fit(kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1)), (torch.randn(9, 2), torch.randn(9)))


def test_what_was_saved_is_not_overwritten_unless_asked(posterior, tmp_path):
    posterior.save(tmp_path / "p")
    before = (tmp_path / "p" / "manifest.json").read_bytes()
    with pytest.raises(kn.InvalidArgument, match="overwrite=True"):
        posterior.save(tmp_path / "p")
    assert (tmp_path / "p" / "manifest.json").read_bytes() == before
    posterior.seed = 7
    posterior.save(tmp_path / "p", overwrite=True)
    assert kn.load(tmp_path / "p").seed == 7


def test_a_posterior_with_an_own_likelihood_loads_in_a_new_process_with_its_class(tmp_path):
    x, y = torch.randn(9, 2), torch.randn(9)
    posterior = kn.MAP(epochs=2).fit(kn.Model(torch.nn.Linear(2, 1), Wide(0.1, factor=3.0), Normal(1.0)), (x, y))
    with pytest.warns(kn.NeedsClasses, match=r"load\(path, classes=\[Wide\]\)"):
        posterior.save(tmp_path / "p")
    path = str(tmp_path / "p")
    script = (
        f"import knowable as kn\ntry:\n    kn.load({path!r})\nexcept kn.DamagedArtifact as error:\n    print(error)\n"
    )
    script += f"{OWN}\nprint(kn.load({path!r}, classes=[Wide]).model.likelihood.factor)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "likelihood 'Wide'" in said and "classes=[Wide]" in said and said.strip().endswith("3.0")


def test_classes_that_are_none_are_refused(posterior, tmp_path):
    posterior.save(tmp_path / "p")
    with pytest.raises(kn.InvalidType, match="classes must be a list"):
        kn.load(tmp_path / "p", classes=[3])
