from __future__ import annotations

import pytest
import torch

from knowable.inference.laplace import function_covariance

F64 = torch.float64


@pytest.mark.parametrize("columns", [1, 4, 7, 15, 512])
@pytest.mark.parametrize("bias", [True, False])
def test_a_heads_covariance_by_blocks_of_columns_is_that_of_its_jacobian(columns, bias, monkeypatch, generator):
    monkeypatch.setattr(function_covariance, "_COLUMNS", columns)
    rows, out, inputs = 5, 3, 4
    size = out * (inputs + bias)
    places = torch.arange(out * inputs).view(out, inputs)  # weights first, then biases, as modules name them
    if bias:
        places = torch.cat([places, (out * inputs + torch.arange(out)).unsqueeze(1)], 1)
    a = torch.randn(rows, inputs + bias, generator=generator, dtype=F64)
    scale_tril = torch.randn(size, size, generator=generator, dtype=F64).tril()
    jacobian = torch.zeros(rows, out, size, dtype=F64)
    for o, own in enumerate(places):
        jacobian[:, o, own] = a
    expected = jacobian @ (scale_tril @ scale_tril.T) @ jacobian.mT
    torch.testing.assert_close(function_covariance._head_covariance(a, places, scale_tril), expected)
