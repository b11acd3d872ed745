"""The empirical neural tangent kernel against Jacobians taken row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.errors import InvalidType, Unsupported
from knowable.inference.functional import tangent_kernel as module
from knowable.testing import network_case


def _by_rows(function, params, x):
    """Gradients of every output of every row, ``(rows, outputs, D)``."""
    found = []
    for row in x:
        outputs = function(row.unsqueeze(0)).flatten()
        each = [torch.autograd.grad(output, params, retain_graph=True, materialize_grads=True) for output in outputs]
        found.append(torch.stack([torch.cat([g.flatten() for g in grads]) for grads in each]))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "transformer"])
def test_it_is_the_product_of_jacobians(name, monkeypatch):
    case = network_case(name, rows=5, dtype=torch.float64)
    jacobian = _by_rows(case.net.eval(), list(case.net.parameters()), case.x)
    expected = torch.einsum("nod,mpd->nmop", jacobian, jacobian)
    torch.testing.assert_close(kn.empirical_ntk(case.net, case.x), expected)
    torch.testing.assert_close(kn.empirical_ntk(case.net, case.x, case.x[2:]), expected[:, 2:])
    monkeypatch.setattr(module, "_NUMBERS_AT_ONCE", 2 * jacobian[0].numel())  # two rows at a time
    torch.testing.assert_close(kn.empirical_ntk(case.net, case.x), expected)


def test_weights_count_with_the_variance_of_their_prior():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(), {"weight": kn.Normal(3.0), "*": kn.Normal(0.5)})
    x = torch.randn(4, 2)
    found = kn.empirical_ntk(model, x)[..., 0, 0]
    torch.testing.assert_close(found, 9.0 * x @ x.T + 0.25)
    with pytest.raises(Unsupported, match="needs a normal prior on 'weight'"):
        kn.empirical_ntk(kn.Model(nn.Linear(2, 1), kn.Gaussian(), kn.Flat()), x)
    with pytest.raises(InvalidType, match="net must be"):
        kn.empirical_ntk("net", x)
