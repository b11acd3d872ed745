from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.targets import TARGETS, smaller
from torch import nn


@pytest.mark.parametrize("name", TARGETS)
def test_target_has_finite_data_and_is_asked_at_its_own_rows(name):
    target = TARGETS[name]()
    assert target.x.shape == (len(target.y), target.widths[0]) and target.x.dtype == target.y.dtype == np.float32
    assert np.isfinite(target.x).all() and np.isfinite(target.y).all()
    rows = {row.tobytes() for row in target.x}
    assert 20 <= len(target.at) <= 50 and all(row.tobytes() in rows for row in target.at)


def test_diabetes_is_standardised():
    target = TARGETS["diabetes"]()
    assert target.x.shape == (442, 10) and target.dimension == 10 * 16 + 16 + 16 * 16 + 16 + 16 + 1
    np.testing.assert_allclose(target.x.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(target.x.std(0), 1.0, atol=1e-4)
    np.testing.assert_allclose([target.y.mean(), target.y.std()], [0.0, 1.0], atol=1e-5)


def test_functions_are_those_of_the_torch_network_with_these_weights():
    target = smaller(TARGETS["diabetes"](), units=4)
    positions = target.starts(6, 0).reshape(2, 3, -1)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(target.widths[:-1], target.widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    found = target.functions(positions, block=4)
    assert found.shape == (2, 3, len(target.at))
    for chain in range(2):
        for draw in range(3):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(positions[chain, draw]), net.parameters())
            expected = net(torch.from_numpy(target.at)).squeeze(-1).detach().numpy()
            np.testing.assert_allclose(found[chain, draw], expected, atol=2e-6)  # float32 in both


def test_starts_are_standard_normal_and_differ_between_seeds():
    target = TARGETS["diabetes"]()
    starts = target.starts(40, 3)
    count = starts.size  # 18,600 numbers: standard errors 0.0073 of the mean, 0.0104 of the variance
    assert abs(starts.mean()) < 5 / np.sqrt(count) and abs(starts.var() - 1) < 5 * np.sqrt(2 / count)
    assert not np.allclose(starts, target.starts(40, 4)) and np.array_equal(starts, target.starts(40, 3))
