from __future__ import annotations

import torch
from torch import nn

import knowable as kn


def posterior(**about: object) -> kn.NoisyWeights:
    model = kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), random="weight")
    loc, scale = torch.tensor([[1.0, 0.01, 0.0]]), torch.tensor([[0.1, 1.0, 0.5]])
    points = {"bias": torch.zeros(1)}
    return kn.NoisyWeights(model, {"weight": loc}, {"weight": scale}, points=points, **about)  # type: ignore[arg-type]


def test_sparsity_is_the_share_of_weights_above_the_threshold():
    assert posterior().sparsity() == {"weight": 2 / 3}


def test_frames_come_back_from_disk(tmp_path):
    frames = torch.randn(4, 2, 1, 3).to(torch.float16)
    saved = posterior(watched="weight", frames=frames)
    found = kn.load(saved.save(tmp_path / "saved"))
    assert isinstance(found, kn.NoisyWeights) and found.watched == "weight"
    assert torch.equal(found.frames, frames) and torch.equal(found.loc["weight"], saved.loc["weight"])


def test_without_frames_there_are_none_on_disk_either(tmp_path):
    found = kn.load(posterior().save(tmp_path / "saved"))
    assert isinstance(found, kn.NoisyWeights) and found.frames is None and found.watched is None
