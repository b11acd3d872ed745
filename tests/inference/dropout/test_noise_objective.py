from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.dropout.noise_dropout import NoiseObjective
from knowable.inference.dropout.sparse_variational_dropout import with_log_uniform
from tests.inference.dropout.networks import CellLoop
from tests.inference.dropout.noise_oracle import NoiseRegression


def build(**settings: object) -> NoiseObjective:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    target = with_log_uniform(kn.Model(net, kn.Gaussian(0.1)), ["0.weight", "2.weight"])
    return NoiseObjective(target, torch.randn(5, 3, dtype=torch.float64), 5, alpha=0.4, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [None, "layer", "neuron", "weight"])
def test_divergence_is_that_of_the_normals_it_describes(generator, share):
    objective = build(share=share)
    with torch.no_grad():
        objective.logits.normal_(generator=generator)
    loc, scale = objective.loc_and_scale()
    expected = sum(kn.LogUniform().kl_from_normal(loc[name], scale[name]).item() for name in loc)
    assert objective.kl_divergence().item() == pytest.approx(expected, rel=1e-10)
    alpha = (scale["0.weight"] / loc["0.weight"]).square()
    assert (alpha <= 0.4 * (1 + 1e-9)).all()
    if share is None:
        torch.testing.assert_close(alpha, torch.full_like(alpha, 0.4))
        assert not objective.kl_divergence().requires_grad and objective.summary() == {}
    else:
        assert objective.summary()["alpha.0.weight"] == pytest.approx(alpha.mean().item(), rel=1e-9)


def test_learned_strength_starts_at_a_quarter_of_the_largest():
    objective = build(share="layer")
    assert {name: round(value.exp().item(), 6) for name, value in objective.log_alphas().items()} == {
        "0.weight": 0.1, "2.weight": 0.1,
    }  # fmt: skip


def test_weights_without_a_mean_have_a_scale_alone_and_cost_nothing():
    objective = build(zero_mean=("0.weight",))
    loc, scale = objective.loc_and_scale()
    first = objective.model.params()["0.weight"]
    assert (loc["0.weight"] == 0).all()
    torch.testing.assert_close(scale["0.weight"], first.square().mean().sqrt().expand(4, 3))
    only = kn.LogUniform().kl_from_normal(loc["2.weight"], scale["2.weight"])
    torch.testing.assert_close(objective.kl_divergence(), only)
    assert build(zero_mean=("0.weight", "2.weight")).kl_divergence().item() == 0.0


def test_a_layer_of_zeros_gets_a_scale_to_begin_with():
    net = nn.Linear(2, 1)
    nn.init.zeros_(net.weight)
    target = with_log_uniform(kn.Model(net, kn.Gaussian(0.1)), ["weight"])
    objective = NoiseObjective(target, torch.zeros(3, 2), 3, alpha=0.1, zero_mean=("weight",))
    assert objective.loc_and_scale()[1]["weight"].flatten().tolist() == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize("settings", [{}, {"share": "weight"}, {"zero_mean": ("weight",)}], ids=repr)
def test_loss_is_the_closed_form_bound_of_a_linear_model(seed, settings):
    # the mean of 400 losses, within 4.5 standard errors
    problem = NoiseRegression.make(seed)
    target = with_log_uniform(problem.model(), ["weight"])
    objective = NoiseObjective(target, problem.x, len(problem.y), alpha=0.4, **settings)
    loc, scale = (each["weight"][0].detach() for each in objective.loc_and_scale())
    expected = problem.expected_log_likelihood(loc, scale.square()) - objective.kl_divergence().item()
    losses = torch.stack([objective(*problem.data)[0].detach() for _ in range(400)]) * -len(problem.y)
    assert abs(losses.mean().item() - expected) < 4.5 * losses.std().item() / 20


def test_weights_in_a_loop_are_drawn_with_the_right_moments(seed):
    # the mean of 4,000 draws errs by sd / 63, the variance by its √(2 / 4,000): 5 of those
    target = with_log_uniform(kn.Model(CellLoop().double(), kn.Gaussian(0.1)), ["cell.weight_hh", "head.weight"])
    objective = NoiseObjective(target, torch.randn(4, 3, 2, dtype=torch.float64), 4, alpha=0.4, draws=4000)
    assert "cell.weight_hh" in objective.drawn.names
    _, draws = objective.draw(torch.randn(4000, objective.drawn.size, dtype=torch.float64))
    found = torch.stack([draw["cell.weight_hh"] for draw in draws]).detach()
    loc, scale = (each["cell.weight_hh"].detach() for each in objective.loc_and_scale())
    assert ((found.mean(0) - loc).abs() < 5 * scale / math.sqrt(4000)).all()
    assert ((found.var(0) / scale.square() - 1).abs() < 5 * math.sqrt(2 / 4000)).all()
