from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from knowable.core.prediction.components import NormalComponents


def _components(scale_shape: tuple[int, ...]) -> NormalComponents:
    loc = torch.randn(3, 5, 2, dtype=torch.float64)
    return NormalComponents(loc, torch.rand(scale_shape, dtype=torch.float64) + 0.1)


def test_densities_and_distribution_functions_match_scipy_for_every_component():
    for shape in ((), (3, 1, 1), (3, 5, 2)):
        components = _components(shape)
        y = torch.randn(5, 2, dtype=torch.float64)
        oracle = stats.norm(components.loc.numpy(), components.scale.numpy())
        np.testing.assert_allclose(components.log_prob(y), oracle.logpdf(y.numpy()), rtol=1e-12)
        np.testing.assert_allclose(components.cdf(y), oracle.cdf(y.numpy()), rtol=1e-11)
        np.testing.assert_allclose(components.variance, np.broadcast_to(oracle.var(), (3, 5, 2)), rtol=1e-12)


def test_the_lower_tail_keeps_its_digits_in_float32():
    components = NormalComponents(torch.zeros(1, 3), torch.ones(()))
    y = torch.tensor([-4.0, -7.0, -10.0])
    np.testing.assert_allclose(components.cdf(y)[0], stats.norm.cdf(y.numpy()), rtol=1e-4)


def test_samples_come_from_the_component_that_the_index_names(generator: torch.Generator):
    loc = torch.tensor([[0.0], [100.0]], dtype=torch.float64)
    components = NormalComponents(loc, torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    n = 20_000
    index = torch.arange(2).repeat(n)[:, None]
    drawn = components.sample(index, generator=generator)[:, 0]
    for k, scale in ((0, 1.0), (1, 3.0)):
        mine = drawn[index[:, 0] == k]
        assert abs(mine.mean() - loc[k, 0]) < 4 * scale / n**0.5
        assert abs(mine.var() / scale**2 - 1) < 4 * (2 / n) ** 0.5
