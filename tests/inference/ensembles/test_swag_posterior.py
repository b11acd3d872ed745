"""Tests of the posterior of SWAG apart from its fit."""

from __future__ import annotations

import torch

import knowable as kn
from knowable.core.model.structured_normal import DiagonalPlusLowRank
from knowable.core.network.params import Layout
from tests.core.cases import DTYPE, batch_norm_net


def _posterior(inputs: torch.Tensor | None) -> kn.SWAGPosterior:
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1))
    layout = Layout.of(model.params())
    loc, diagonal = torch.randn(layout.size, dtype=DTYPE), torch.rand(layout.size, dtype=DTYPE)
    factor = torch.randn(layout.size, 2, dtype=DTYPE)
    normal = DiagonalPlusLowRank.of_covariance(layout, loc, diagonal, factor)
    return kn.SWAGPosterior.of(model, normal, inputs=inputs)


def test_draws_in_blocks_have_the_statistics_of_draws_at_once():
    posterior = _posterior(torch.randn(30, 2, dtype=DTYPE))
    whole = posterior.buffer_block(0, 6, 6, 4)
    parts = [posterior.buffer_block(first, first + 2, 6, 4) for first in (0, 2, 4)]
    assert set(whole) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_without_inputs_all_draws_share_the_buffers():
    posterior, x = _posterior(None), torch.randn(4, 2, dtype=DTYPE)
    assert posterior.buffer_block(0, 6, 6, 4) == {}
    draws = posterior.draw_block(0, 2, 2, posterior.seed)
    first = {name: value[0] for name, value in draws.items()}
    expected = posterior.model.forward(first, x, buffers=posterior.buffers)
    torch.testing.assert_close(posterior.predict(x, samples=2).samples[0], expected)


def test_inputs_are_saved_with_it(tmp_path):
    for number, inputs in enumerate((torch.randn(30, 2, dtype=DTYPE), None)):
        posterior = _posterior(inputs)
        loaded = kn.load(posterior.save(tmp_path / str(number)))
        assert type(loaded) is kn.SWAGPosterior
        assert (loaded.inputs is None) if inputs is None else torch.equal(loaded.inputs, inputs)
