from __future__ import annotations

import numpy as np
import torch
from benchmarks.targets import TARGETS, smaller
from torch import nn


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
