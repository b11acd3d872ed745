"""Tests of loading in another process, where nothing of the fit is known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import knowable as kn
from tests.core.cases import atoms, diagonal_posterior, full_posterior, linear_data, linear_model, mlp

SCRIPT = """
import json, sys, torch, knowable as kn
x = torch.tensor(json.loads(sys.argv[1]), dtype=torch.float64)
for path in sys.argv[2:]:
    posterior = kn.load(path)
    prediction = posterior.predict(x, 5)
    numbers = [each.flatten().tolist() for each in (prediction.mean, prediction.total)]
    print(json.dumps([type(posterior).__name__, *numbers]))
"""


def _posteriors() -> list[kn.Posterior]:
    data = linear_data()
    network = kn.Model(
        mlp().double(), kn.StudentT(), {"*.bias": kn.Flat(), "*": kn.Horseshoe(1.0)}, random="last_layer"
    )
    return [
        kn.ExactLinear().fit(linear_model(), data),
        kn.MeanFieldVI(epochs=2).fit(linear_model(noise=None, prior=kn.EmpiricalBayes(kn.Normal())), data),
        diagonal_posterior(network),
        atoms(network, 3),
        full_posterior(network),
        kn.Mixture(
            network, [diagonal_posterior(network), atoms(network, 3)], points=diagonal_posterior(network).points
        ),
    ]


def test_another_process_loads_every_family_and_predicts_the_same_bits(tmp_path):
    x = linear_data(4)[0]
    posteriors = _posteriors()
    paths = [str(posterior.save(tmp_path / str(k))) for k, posterior in enumerate(posteriors)]
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps(x.tolist()), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for posterior, line in zip(posteriors, done.stdout.splitlines(), strict=True):
        name, mean, total = json.loads(line)
        prediction = posterior.predict(x, 5)
        assert name == type(posterior).__name__
        assert mean == prediction.mean.flatten().tolist()
        assert total == prediction.total.flatten().tolist()


def test_a_posterior_from_a_double_net_is_loaded_in_double(tmp_path):
    posterior = diagonal_posterior(linear_model())
    assert kn.load(posterior.save(tmp_path)).model.dtype == torch.float64


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(kn.DamagedArtifact, match="There is no folder"):
        kn.load(tmp_path / "nowhere")
