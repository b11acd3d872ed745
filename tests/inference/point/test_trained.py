"""Tests of posteriors beside the trained weights that they were made from."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.method import FitJob
from knowable.errors import WorseThanNetwork
from knowable.inference.point.own_parameters import integral_over, most_probable
from knowable.inference.point.trained import TrainedWeights, given_point
from knowable.testing import network_case

DTYPE = torch.float64
NOISE = "likelihood.log_noise"


def blobs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % 3
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    return centres[y] + 1.2 * torch.randn(rows, 2, generator=generator), y


def trained(x: Tensor, y: Tensor, steps: int = 400) -> nn.Module:
    """A network as its owner trains it: without a prior, until it fits most rows."""
    outputs = 1 if y.is_floating_point() else 3
    net = nn.Sequential(nn.Linear(x.shape[1], 30), nn.Tanh(), nn.Linear(30, outputs))
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
    return net


def own_nll(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x), y).item()


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("method", [kn.Laplace(), kn.Laplace(structure="diag"), kn.SWAG(snapshots=20)], ids=repr)
def test_a_trained_classifier_is_never_made_worse_by_more_than_a_hundredth(method, random):
    x, y = blobs(150, seed=0)
    test_x, test_y = blobs(3_000, seed=1)
    net = trained(x, y)
    posterior = method.fit(kn.Model(net, kn.Categorical(), random=random), (x, y), start="network")
    terms = posterior.diagnostics
    assert terms["nll_network"] == pytest.approx(own_nll(net, x, y), rel=1e-4)
    assert terms["nll"] <= terms["nll_network"] + 0.0051
    assert -posterior.predict(test_x).log_prob(test_y).mean() < own_nll(net, test_x, test_y) + 0.01


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("method", [kn.Laplace(), kn.SWAG(snapshots=20)], ids=repr)
def test_a_trained_regression_is_never_made_worse_by_more_than_a_hundredth(method, random):
    x = torch.randn(3_200, 3)
    y = torch.sin(x[:, :1]) + 0.3 * torch.randn(3_200, 1)
    net = trained(x[:200], y[:200])
    model = kn.Model(net, kn.Gaussian(), random=random)
    posterior = method.fit(model, (x[:200], y[:200]), start="network")
    point = given_point(FitJob.of(kn.MAP(), model, (x[:200], y[:200])), "network")
    mine, network = (-each.predict(x[200:]).log_prob(y[200:]).mean() for each in (posterior, point))
    assert mine < network + 0.01


def test_a_prior_that_was_not_given_is_chosen_and_said_and_the_evidence_stays():
    x, y = blobs(150, seed=0)
    net = trained(x, y)
    open_scale = kn.Model(net, kn.Categorical(), kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.warns(kn.WorseThanNetwork, match="NLL .* on 150 training rows, .* Leave the prior out"):
        largest = kn.Laplace().fit(open_scale, (x, y), start="network")
    posterior = kn.Laplace().fit(kn.Model(net, kn.Categorical()), (x, y), start="network")
    scale = posterior.diagnostics["prior_scale"]
    assert scale < largest.mean()["prior.*.log_scale"].exp()
    note = f"No prior was given: Normal({scale:.3g}), its scale chosen by the marginal likelihood"
    assert note in repr(posterior.diagnostics)
    assert posterior.log_evidence == pytest.approx(largest.log_evidence)
    given = kn.Model(net, kn.Categorical(), kn.Normal(scale))
    same = kn.Laplace().fit(given, (x, y), start="network")  # what was chosen is the prior of the posterior
    torch.testing.assert_close(same.std()["0.weight"], posterior.std()["0.weight"], rtol=1e-4, atol=0)
    assert "prior_scale" not in same.diagnostics


def test_with_validation_rows_the_prior_predicts_these_best():
    x, y = blobs(150, seed=0)
    held = blobs(500, seed=1)
    model = kn.Model(trained(x, y), kn.Categorical())
    posterior = kn.Laplace().fit(model, (x, y), start="network", validation=held)
    assert "by the NLL of the validation rows" in repr(posterior.diagnostics)
    best = -posterior.predict(held[0]).log_prob(held[1]).mean().item()
    assert posterior.diagnostics["nll"] == pytest.approx(best, rel=1e-4)
    for factor in (0.5, 2.0):  # the neighbours among the scales that are tried
        prior = kn.Normal(factor * posterior.diagnostics["prior_scale"])
        other = kn.Model(model.net, kn.Categorical(), prior)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kn.WorseThanNetwork)
            found = kn.Laplace().fit(other, (x, y), start="network")
        assert best <= -found.predict(held[0]).log_prob(held[1]).mean().item() + 1e-4


def test_the_largest_size_that_does_no_harm_is_found():
    # a point whose spread makes the first of two classes less probable: the NLL grows with the size
    case = network_case("mlp", rows=20, dtype=DTYPE)
    job = FitJob.of(kn.MAP(), case.model(), case.data)
    weights = TrainedWeights.of(job, given_point(job, "network"))
    sizes = [2.0**-number for number in range(12)]
    seen: list[Any] = []

    class Sized(TrainedWeights):
        def losses(self, posterior: Any):
            seen.append(posterior)
            return torch.full((3,), 1.0 + posterior), torch.ones(3)

    sized = Sized(**{name: getattr(weights, name) for name in ("model", "weights", "buffers", "x", "y", "held_out")})
    assert sized.best(lambda size: size, sizes) == 2.0**-8  # type: ignore[arg-type,return-value]  # 0.0039 < 0.005
    assert len(seen) <= 4


def test_the_most_probable_noise_is_the_root_mean_square_under_a_flat_prior():
    case = network_case("mlp", rows=12, dtype=DTYPE)
    model = kn.Model(case.net, kn.Gaussian(), {"likelihood.*": kn.Flat(), "*": kn.Normal(1.0)})
    rows = FitJob.of(kn.MAP(), model, case.data).rows
    found = most_probable(model, rows, model.params(), model.buffers(), [NOISE])[NOISE].exp()
    residual = case.y - case.net(case.x)
    torch.testing.assert_close(found, residual.square().mean().sqrt().detach(), rtol=1e-5, atol=0)


def test_an_integral_over_a_normal_is_exact_and_one_without_a_prior_is_refused():
    # ∫ N(λ | a, s²) N(λ | -1, 2²) dλ = N(a | -1, s² + 2²), and Laplace's method is exact for normals
    model = kn.Model(nn.Linear(1, 1).double(), kn.Gaussian())
    narrow = torch.distributions.Normal(torch.tensor(0.5, dtype=DTYPE), 0.3)
    best = torch.tensor((0.5 / 0.09 - 1.0 / 4.0) / (1 / 0.09 + 1 / 4.0), dtype=DTYPE)
    found, note = integral_over(model, NOISE, narrow.log_prob, best)
    expected = torch.distributions.Normal(-1.0, (0.09 + 4.0) ** 0.5).log_prob(torch.tensor(0.5, dtype=DTYPE))
    torch.testing.assert_close(found, expected)
    assert note == ""
    flat = kn.Model(nn.Linear(1, 1).double(), kn.Gaussian(), {"likelihood.*": kn.Flat(), "*": kn.Normal(1.0)})
    found, note = integral_over(flat, NOISE, narrow.log_prob, best)
    torch.testing.assert_close(found, narrow.log_prob(best))
    assert "not integrated" in note


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_pixels_of_few_images_are_as_many_outcomes_as_rows_of_a_table():
    # a 1 x 1 convolution is a linear layer of every pixel: the same data, so the same scale of the prior
    size = 4
    x = torch.randn(3, 2, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (5 * x[:, 0] + x[:, 1] > 0).long()  # learned without an error, which a wide posterior spoils
    layer, net = nn.Conv2d(2, 1, 1).double(), nn.Linear(2, 1).double()
    layer.load_state_dict({"weight": torch.tensor([20.0, 4.0]).view(1, 2, 1, 1), "bias": torch.tensor([0.3])})
    net.load_state_dict({"weight": torch.tensor([[20.0, 4.0]]), "bias": torch.tensor([0.3])})
    table = x.movedim(1, -1).reshape(-1, 2), y.reshape(-1, 1)
    fits = [
        kn.Laplace(structure="full").fit(kn.Model(each, kn.Bernoulli()), data, start="network")
        for each, data in ((layer, (x, y)), (net, table))
    ]
    assert all("then reduced" in " ".join(fit.diagnostics.notes) for fit in fits)
    scales = [fit.diagnostics["prior_scale"] for fit in fits]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    nlls = [fit.diagnostics["nll"] for fit in fits]
    assert nlls[0] == pytest.approx(nlls[1] * size**2, rel=1e-6)


def through_all_rows(seed):
    """A network that goes through all training rows, and other rows of the same kind."""
    torch.manual_seed(seed)
    x = torch.randn(100, 3)
    y = torch.sin(x[:, :1]) + 0.5 * torch.randn(100, 1)
    net = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 1))
    with torch.no_grad():
        hidden = net[1](net[0](x[:50])).double()
        net[2].weight.copy_(torch.linalg.lstsq(hidden, y[:50].double(), driver="gelsd").solution.T)
        net[2].bias.zero_()
    return net, (x[:50], y[:50]), (x[50:], y[50:])


def test_a_posterior_that_predicts_worse_than_a_guess_is_warned_of(seed):
    """The evidence explains such training rows by a noise that is far wider than the targets."""
    net, rows, _ = through_all_rows(seed)
    with pytest.warns(WorseThanNetwork, match="worse than a guess"):
        kn.Laplace().fit(kn.Model(net, kn.Gaussian()), rows, start="network", seed=seed)


def test_the_noise_of_a_trained_network_is_that_of_held_out_rows(seed):
    net, rows, held_out = through_all_rows(seed)
    job = FitJob.of(kn.Laplace(), kn.Model(net, kn.Gaussian()), rows, held_out, seed, False, None, None)
    noise = given_point(job, "network").mean()["likelihood.log_noise"].exp()
    errors = (net(held_out[0]) - held_out[1]).detach()
    assert noise.item() == pytest.approx(errors.square().mean().sqrt().item(), rel=0.1)  # its prior says a little too
