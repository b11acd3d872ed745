"""Noise around trained weights: its scale is the largest that does no harm, and adapters get it in their product."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.posterior.normal import KroneckerNormal
from knowable.errors import ConvergenceWarning, InvalidArgument, InvalidType
from knowable.inference.variational.training_free import largest_scale, unit_blocks

WITHIN = 1.05  # of the search


def one_weight(seed: int, rows: int = 8) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """A weight w of 1 in y = w x + noise, with x = ±1 and residuals that are exactly of the noise's size, 0.5."""
    torch.manual_seed(seed)
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    x = torch.ones(rows, 1)
    x[::2] = -1
    residuals = 0.5 * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(rows // 4).unsqueeze(1)
    return kn.Model(net, kn.Gaussian(noise=0.5)), (x, x + residuals)


def test_scale_is_that_of_the_closed_form(seed):
    # predictions are N(w x, 0.25 + scale²): the loss per row is 0.5 (log(1 + t) + 1 / (1 + t) - 1) above the network's,
    # with t = scale² / 0.25. 5,000 draws leave an error of 0.8% in the density, of 5% in the scale: four of them
    model, data = one_weight(seed)
    tolerance = 0.1
    posterior = kn.TrainingFreeBayes(tolerance=tolerance, samples=5_000).fit(model, data, seed=seed)

    def rise(scale: float) -> float:
        ratio = scale**2 / 0.25
        return 0.5 * (math.log1p(ratio) + 1 / (1 + ratio) - 1)

    scale = posterior.diagnostics["scale"]
    assert rise(scale / 1.2) < tolerance < rise(scale * 1.2 * WITHIN)
    torch.testing.assert_close(posterior.std()["weight"], torch.tensor([[scale]]))
    assert posterior.mean()["weight"].item() == 1.0


def test_a_larger_scale_predicts_worse_than_allowed_and_the_chosen_one_does_not(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(100, 2)
    y = (x.sum(1) > 0).long()
    model = kn.Model(net, kn.Categorical())
    method = kn.TrainingFreeBayes(tolerance=0.02, samples=30)
    point = kn.MAP(epochs=60).fit(model, (x, y), seed=seed)
    posterior = method.fit(model, (x, y), start=point, seed=seed)
    network = -point.predict(x).log_prob(y).mean().item()

    def loss(factor: float) -> float:
        blocks = [replace(each, precision=each.precision / factor**2) for each in posterior.normal.blocks]
        other = KroneckerNormal(
            posterior.model, posterior.mean(), blocks, points=posterior.points, buffers=posterior.buffers,
            seed=posterior.seed,
        )  # fmt: skip
        return -other.predict(x, samples=30).log_prob(y).mean().item()

    assert loss(1.0) == pytest.approx(posterior.diagnostics["nll"], rel=1e-4)
    assert network == pytest.approx(posterior.diagnostics["nll_network"], rel=1e-4)
    assert loss(1.0) <= network + 0.02 + 1e-5
    assert loss(WITHIN) > min(network, loss(1.0)) + 0.02 - 1e-5


@pytest.mark.parametrize("first", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("best", [0.0, 0.3, 2.0])
def test_search_finds_the_largest_scale_within_the_tolerance_of_the_lowest(best, first):
    met = [best**2]

    def loss(scale: float) -> float:
        met.append((scale - best) ** 2)
        return met[-1]

    found = largest_scale(loss, best**2, 0.04, first)
    largest = best + (min(met) + 0.04) ** 0.5
    assert largest >= found >= largest / WITHIN
    assert min(met) <= (0.5 * best) ** 2  # one scale in every factor of two around the best is tried
    assert len(met) < 60


def test_noise_that_never_does_harm_or_always_does_is_warned_of():
    with pytest.warns(ConvergenceWarning, match="does not rise above"):
        largest_scale(lambda scale: 1.0, 1.0, 0.01, 0.1)
    with pytest.warns(ConvergenceWarning, match="is above the network's"):
        largest_scale(lambda scale: math.nan, 1.0, 0.01, 0.1)


def product_covariance(block, other: torch.Tensor, *, first: bool) -> torch.Tensor:
    """Covariance of the elements of B A, row by row, where one factor has the block's noise, by its definition."""
    covariance = torch.linalg.inv(block.dense())
    rank, width = block.precision.shape if first else reversed(block.precision.shape)
    if first:  # vec(B dA) = (B ⊗ I) vec(dA)
        along = torch.kron(other, torch.eye(width, dtype=other.dtype))
    else:  # vec(dB A) = (I ⊗ Aᵀ) vec(dB)
        along = torch.kron(torch.eye(width, dtype=other.dtype), other.mT.contiguous())
    assert rank == min(other.shape)
    return along @ covariance @ along.T


def test_noise_of_an_adapter_is_isotropic_where_its_product_can_move(seed):
    torch.manual_seed(seed)
    a, b = torch.randn(2, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    weights = {"q.lora_A.weight": a, "q.lora_B.weight": b}
    of_a, of_b = unit_blocks(weights, list(weights), weights)
    reach = b @ torch.linalg.pinv(b)  # the projection on what B can reach
    expected = torch.kron(reach, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(product_covariance(of_a, b, first=True), expected)
    reach = torch.linalg.pinv(a) @ a
    expected = torch.kron(torch.eye(4, dtype=torch.float64), reach)
    torch.testing.assert_close(product_covariance(of_b, a, first=False), expected)


def test_other_weights_and_untrained_adapters_have_the_plain_scale():
    weights = {"lora_A": torch.randn(2, 5), "lora_B": torch.zeros(4, 2), "head.bias": torch.randn(3)}
    plain_a, of_b, bias = unit_blocks(weights, list(weights), weights)
    assert plain_a.out_basis is None and bias.out_basis is None and of_b.in_basis is not None
    assert (plain_a.precision == 1).all() and bias.precision.shape == (1, 3)


def test_held_out_rows_give_an_overconfident_network_noise_that_helps(seed):
    torch.manual_seed(seed)
    x = torch.randn(400, 4)
    y = (x[:, 0] + 1.5 * torch.randn(400) > 0).long()
    net = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2))
    model = kn.Model(net, kn.Categorical())
    point = kn.MaximumLikelihood(epochs=600, learning_rate=0.02).fit(model, (x[:60], y[:60]), seed=seed)
    plain, held_out = (
        kn.TrainingFreeBayes(samples=50).fit(model, (x[:60], y[:60]), start=point, seed=seed, validation=validation)
        for validation in (None, (x[60:200], y[60:200]))
    )
    assert held_out.diagnostics["scale"] > plain.diagnostics["scale"]
    nll = [-each.predict(x[200:]).log_prob(y[200:]).mean().item() for each in (point, held_out)]
    assert nll[1] < nll[0] - 0.1


@pytest.mark.parametrize("random", ["*", "last_layer", "*lora_A*", "*lora_*"])
def test_any_weights_may_be_random(random):
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(3, 4).requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base(x) + self.lora_B(self.lora_A(x))

    net = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(30, 3)
    model = kn.Model(net, kn.Categorical(), random=random)
    posterior = kn.TrainingFreeBayes().fit(model, (x, (x[:, 0] > 0).long()))
    draws = posterior.sample(3)
    for name, value in dict(net.named_parameters()).items():
        moved = name in draws and not torch.equal(draws[name][0], draws[name][1])
        assert moved == (name in model.random_names)
        assert name not in posterior.mean() or torch.equal(posterior.mean()[name], value.detach())


def test_bad_settings_are_refused():
    with pytest.raises(InvalidArgument, match="tolerance"):
        kn.TrainingFreeBayes(tolerance=0.0)
    with pytest.raises(InvalidArgument, match="samples"):
        kn.TrainingFreeBayes(samples=1)
    with pytest.raises(InvalidArgument, match="start"):
        kn.TrainingFreeBayes(start="map")
    with pytest.raises(InvalidType, match="a posterior, a network"):
        kn.TrainingFreeBayes(start=3)
