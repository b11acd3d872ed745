"""R-hat is taken of what data identify: probabilities, not logits with their common shift."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn
from knowable.core.chains.convergence import rhat
from knowable.core.chains.posterior import ChainPosterior
from knowable.core.network.params import Layout
from knowable.inference.sampling.initial_positions import Start
from knowable.inference.sampling.sampler import FunctionMonitor


def test_a_common_shift_of_logits_does_not_count_against_chains(seed):
    """Chains that differ in nothing but the shift of all logits agree in every probability."""
    generator = torch.Generator().manual_seed(seed)
    model = kn.Model(nn.Linear(2, 3), kn.Categorical())
    weight = 0.3 * torch.randn((4, 200, 3, 2), generator=generator)
    bias = 0.3 * torch.randn((4, 200, 3), generator=generator)
    shift = 5.0 * torch.arange(4.0).view(4, 1, 1)  # another one for each chain
    posterior = ChainPosterior(model, {"weight": weight.flatten(0, 1), "bias": (bias + shift).flatten(0, 1)}, 4)
    x = torch.randn((5, 2), generator=generator)
    logits = posterior.function_draws(x)
    assert rhat(logits).min() > 1.5
    found = posterior.function_diagnostics(x)
    probs = logits.double().softmax(-1)
    assert found.rhat["f"].max() < 1.03
    torch.testing.assert_close(found.rhat["f"], rhat(probs), atol=1e-3, rtol=0)  # ranks of rounded numbers
    assert posterior.weight_diagnostics().rhat["bias"].min() > 1.5  # weights, where asked


def test_chains_monitor_probabilities(seed):
    generator = torch.Generator().manual_seed(seed)
    model, x = kn.Model(nn.Linear(2, 3), kn.Categorical()), torch.randn((32, 2), generator=generator)
    layout = Layout.of(model.params())
    positions = torch.randn((5, 4, layout.size), generator=generator)
    start = Start(positions[0], points={}, buffers={})
    found = FunctionMonitor(model, x, torch.zeros(32), start, layout)(positions).unflatten(-1, (32, 3))
    params = layout.views(positions)
    wanted = (x @ params["weight"].mT + params["bias"].unsqueeze(-2)).softmax(-1)
    torch.testing.assert_close(found, wanted)
