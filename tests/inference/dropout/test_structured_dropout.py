from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import knowable as kn
from knowable.inference.dropout.structured_dropout import StructuredDropoutObjective, normal_divergence
from tests.inference.dropout.networks import Recurrent, images, perceptron

PRIORS = ["log_uniform", "horseshoe"]
NOISE = 0.2
QUICK = {"epochs": 600, "learning_rate": 0.05}


def linear_data(seed: int, rows: int = 100) -> tuple[Tensor, Tensor]:
    """Six inputs, of which the first two matter; the sample says exactly nothing of the others.

    Inputs are orthogonal to each other, to the constant and to the noise, so that no irrelevant input is related to the
    outputs by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = torch.cat([torch.ones(rows, 1), torch.randn((rows, 7), generator=generator)], 1)
    basis = torch.linalg.qr(columns).Q[:, 1:] * math.sqrt(rows)
    x, noise = basis[:, :6], basis[:, 6:]
    return x, x[:, :1] - 0.5 * x[:, 1:2] + NOISE * noise


@functools.cache
def linear_fit(seed: int, prior: str) -> kn.NoisyUnits:
    torch.manual_seed(seed)
    model = kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE))
    return kn.StructuredDropout(prior, **QUICK).fit(model, linear_data(seed), seed=seed)


# --- what it finds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
def test_inputs_that_do_not_matter_are_noise_and_the_others_are_not(prior, seed):
    posterior = linear_fit(seed, prior)
    ratios = posterior.signal_to_noise()["weight"].squeeze(0)
    assert (ratios[:2] > 5).all() and (ratios[2:] < 1).all()
    kept = posterior.mean()["weight"] * (ratios > 1)
    # the posterior mean of a weight that has all the data: off by a share σ² / N of it under a prior of order one
    assert (kept - torch.tensor([[1.0, -0.5, 0, 0, 0, 0]])).abs().max() < 0.05


@pytest.mark.parametrize("prior", PRIORS)
def test_the_reported_likelihood_is_that_of_the_posteriors_moments(prior, seed):
    posterior = linear_fit(seed, prior)
    report = posterior.diagnostics
    assert report["elbo"] == report["expected_log_likelihood"] - report["kl"]
    # inputs are orthogonal, so that weights that depend on each other give no other sum than independent ones
    x, y = linear_data(seed)
    mean, std = posterior.mean(), posterior.std()
    away = (y - x @ mean["weight"].T - mean["bias"]).square() + x.square() @ std["weight"].T.square()
    exact = -0.5 * (away / NOISE**2).sum().item() - 100 * math.log(NOISE * math.sqrt(2 * math.pi))
    # 256 draws, each with a sum of squares of some seven weights, of half a nat each
    assert abs(report["expected_log_likelihood"] - exact) < 6 * math.sqrt(7 * 0.5 / 256)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_a_layer_that_is_too_wide_loses_neurons_and_not_its_accuracy(prior, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2, 2, 200).unsqueeze(1)
    truth = torch.tanh(2 * x)
    y = truth + NOISE * torch.randn(truth.shape, generator=generator)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    method = kn.StructuredDropout(prior, epochs=500, learning_rate=0.05)
    posterior = method.fit(kn.Model(net, kn.Gaussian(NOISE)), (x, y), seed=seed)
    ratios = posterior.signal_to_noise()
    kept = {name: value * (ratios[name] >= 1) for name, value in posterior.mean().items()}
    assert 1 <= (posterior.unit_signal_to_noise()["2.weight"] >= 1).sum() <= 10
    # a curve of few units from 200 rows: its error is a fraction of NOISE / √(200 / 10)
    assert (posterior.model.forward(kept, x) - truth).square().mean().sqrt() < NOISE / math.sqrt(20) + 0.02
    assert posterior.diagnostics["kept.2.weight"] <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_channels_that_do_not_matter_are_noise(prior, seed):
    means, y = linear_data(seed)
    ripple = torch.randn((100, 6, 5), generator=torch.Generator().manual_seed(seed))
    x = means.unsqueeze(2) + ripple - ripple.mean(2, keepdim=True)
    net = nn.Sequential(nn.Conv1d(6, 1, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    posterior = kn.StructuredDropout(prior, **QUICK).fit(kn.Model(net, kn.Gaussian(NOISE)), (x, y), seed=seed)
    ratios = posterior.unit_signal_to_noise()["0.weight"]
    assert (ratios[:2] > 5).all() and (ratios[2:] < 1).all()
    assert posterior.signal_to_noise()["0.weight"].shape == (1, 6, 1)


class SumOfSteps(nn.Module):
    """A recurrent layer without a bend, whose state is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 3, nonlinearity="relu", batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_inputs_of_a_recurrent_network_that_do_not_matter_are_noise(prior, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((1000, 3, 4), generator=generator)
    y = x[..., :2].sum((1, 2)).unsqueeze(1) + NOISE * torch.randn((1000, 1), generator=generator)
    method = kn.StructuredDropout(prior, epochs=1500, learning_rate=0.02, start="map")
    posterior = method.fit(kn.Model(SumOfSteps(), kn.Gaussian(NOISE)), (x - 0.5, y - 3.0), seed=seed)
    ratios = posterior.unit_signal_to_noise()
    assert set(ratios) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"}
    assert (ratios["rnn.weight_ih_l0"][:2] > 3).all()
    assert ratios["rnn.weight_ih_l0"][2:].max() < ratios["rnn.weight_ih_l0"][:2].min() / 3


# --- where noise is --------------------------------------------------------------------------------------------------


def sites_of(net: nn.Module, x: Tensor, **settings) -> list[str]:
    objective = kn.StructuredDropout(**settings).objective(kn.Model(net, kn.Gaussian(0.1)), x, len(x))
    return [site.name for site in objective.placement.sites]


def test_inputs_of_the_network_have_noise_but_not_the_few_channels_of_images():
    assert sites_of(perceptron(0.2), torch.randn(4, 3)) == ["0.weight", "3.weight", "6.weight"]
    assert sites_of(images(), torch.randn(4, 1, 8, 8)) == ["4.weight", "8.weight"]
    assert sites_of(images(), torch.randn(4, 1, 8, 8), where="*") == ["0.weight", "4.weight", "8.weight"]
    many = nn.Sequential(nn.Conv1d(4, 2, 3), nn.Flatten(), nn.Linear(6, 1))
    assert sites_of(many, torch.randn(4, 4, 5)) == ["0.weight", "2.weight"]
    assert sites_of(perceptron(None), torch.randn(4, 3), where=("2.*",)) == ["2.weight"]


def test_an_image_without_other_layers_has_noise_on_its_channels():
    net = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten())
    assert sites_of(net, torch.randn(4, 1, 3, 3)) == ["0.weight"]


def test_weights_without_factors_are_points_under_the_models_prior():
    model = kn.Model(perceptron(None), kn.Gaussian(0.1), random=("4.*",))
    posterior = kn.StructuredDropout("horseshoe", epochs=3).fit(model, (torch.randn(8, 3), torch.randn(8, 1)))
    assert [site.name for site in posterior.sites] == ["4.weight"]
    std = posterior.std()
    assert (std["4.weight"] > 0).all() and all((std[name] == 0).all() for name in std if name != "4.weight")


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
def test_the_report_says_what_the_bound_is_and_what_was_kept(prior, seed):
    posterior = linear_fit(seed, prior)
    report = posterior.diagnostics
    assert posterior.log_evidence is None and report.bayes
    assert report["kept.weight"] == pytest.approx(2 / 6)
    assert any("Horseshoe" in note for note in report.notes) is (prior == "horseshoe")


def test_a_factor_on_the_divergence_is_said():
    model, data = kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE)), linear_data(0)
    assert not kn.StructuredDropout(epochs=2, beta=0.5).fit(model, data).diagnostics.bayes


def test_a_fit_begins_where_it_is_told():
    data = linear_data(0)
    model = kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE))
    first = kn.MAP(epochs=200, learning_rate=0.05).fit(model, data)
    for prior in PRIORS:
        objective = kn.StructuredDropout(prior).objective(model, data[0], 100, start=first.mean())
        assert torch.equal(objective.means()["weight"], first.mean()["weight"])
    warm = kn.StructuredDropout(epochs=1, learning_rate=1e-4, start=first).fit(model, data)
    assert torch.allclose(warm.mean()["weight"], first.mean()["weight"], atol=0.05)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_names_that_match_nothing_are_refused():
    with pytest.raises(kn.errors.InvalidArgument, match="where"):
        kn.StructuredDropout(where="nowhere*").fit(kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE)), linear_data(0))


@pytest.mark.parametrize("prior", PRIORS)
def test_a_prior_whose_scale_is_learned_is_refused(prior):
    model = kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE), kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="scale"):
        kn.StructuredDropout(prior).fit(model, linear_data(0))


def test_the_horseshoe_refuses_a_prior_over_all_weights():
    data = linear_data(0)
    before = kn.FullRankVI(epochs=2).fit(kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE)), data)
    model = kn.Model(nn.Linear(6, 1), kn.Gaussian(NOISE), prior=before)
    with pytest.raises(kn.Unsupported, match="log_uniform"):
        kn.StructuredDropout("horseshoe").fit(model, data)
    assert kn.StructuredDropout(epochs=2).fit(model, data).diagnostics["log_prior_of_points"] != 0


def test_a_network_without_layers_is_refused():
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] + self.by

    with pytest.raises(kn.Unsupported, match="nothing to drop"):
        kn.StructuredDropout().fit(kn.Model(Shift(), kn.Gaussian(NOISE)), linear_data(0))


# --- structured objective ---------------------------------------------------------------------------------------------


ROWS = 12


def objective_for(net: nn.Module, x: Tensor, prior: str, **settings) -> StructuredDropoutObjective:
    """With noise that is wide, and not the same on all units."""
    model = kn.Model(net, kn.Gaussian(0.5), kn.Normal(2.0))
    objective = kn.StructuredDropout(prior, **settings).objective(model, x, len(x))
    with torch.no_grad():
        for value in [*objective.noises.parameters(), *objective.log_scales]:  # type: ignore[attr-defined]
            value.copy_(-0.8 * torch.rand_like(value) - 0.2)
    return objective


def linear_problem() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 1).double(), torch.randn(ROWS, 3).double(), torch.randn(ROWS, 1).double()


def exact_log_likelihood(objective: StructuredDropoutObjective, x: Tensor, y: Tensor) -> Tensor:
    """Over independent factors of the units, from mean and variance of each weight."""
    posterior = objective.posterior()
    mean, std = posterior.mean(), posterior.std()
    away = (y - x @ mean["weight"].T - mean["bias"]).square()
    return Normal(0, 0.5).log_prob(torch.zeros(()).double()) - (away + x.square() @ std["weight"].T.square()) / 0.5


@pytest.mark.parametrize("prior", PRIORS)
def test_the_loss_of_a_linear_model_is_the_exact_bound(prior, seed):
    net, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    if prior == "horseshoe":  # factors of units are independent if that of the layer is a point
        with torch.no_grad():
            next(iter(objective.noises)).global_log_scale.fill_(-20.0)  # type: ignore[operator]
    with torch.no_grad():
        kl, prior_of_points = objective.kl_divergence(), objective(x, y)[1]["log_prior_of_points"]
        expected = -exact_log_likelihood(objective, x, y).mean() + (kl - prior_of_points) / ROWS
        found = torch.stack([objective(x.repeat(50, 1), y.repeat(50, 1))[0] for _ in range(40)])
    assert (found.mean() - expected).abs() < 5.5 * found.std() / math.sqrt(len(found))


@pytest.mark.parametrize("prior", PRIORS)
def test_examples_and_weight_draws_have_the_same_expectation(prior, seed):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    _, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    n = 400
    with torch.no_grad():
        many = [objective(x.repeat(20, 1), y.repeat(20, 1))[1]["expected_log_likelihood"] for _ in range(n // 20)]
        by_example = torch.stack(many)
        draws = objective.draw_weights(n)
        by_weight = torch.stack([objective.model.log_likelihood(draw, x, y).sum() for draw in draws])
    error = math.sqrt(by_example.var() / len(by_example) + by_weight.var() / n)
    assert abs(by_example.mean() - by_weight.mean()) < 6 * error  # of twenty batches, and of many draws


def test_the_divergence_of_normals_is_the_closed_form():
    loc, log_scale, of_prior = torch.randn(3, 20).double().unbind()
    own, prior = Normal(loc, log_scale.exp()), Normal(torch.zeros_like(loc), of_prior.exp())
    assert torch.allclose(normal_divergence(loc, log_scale, of_prior), kl_divergence(own, prior))


def test_the_divergence_of_the_horseshoe_does_not_depend_on_the_coordinates():
    # KL of u = z̄ v to N(0, z̄²) is that of v to N(0, 1): what the paper writes
    net, x, _ = linear_problem()
    objective = objective_for(net, x, "horseshoe")
    (noise,) = objective.noises
    median = noise.log_prior_scale().exp()  # type: ignore[union-attr]
    v = objective.means()["weight"] / median, objective.scales()["weight"] / median
    expected = noise.total_divergence([noise]) + kl_divergence(Normal(*v), Normal(0.0, 1.0)).sum()
    assert torch.isclose(objective.kl_divergence(), expected)


@pytest.mark.parametrize("prior", PRIORS)
def test_point_estimates_have_the_models_prior(prior):
    net, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    own = Normal(torch.tensor(0.0).double(), 2.0)
    expected = own.log_prob(net.bias).sum()
    if prior == "log_uniform":
        expected = expected + own.log_prob(net.weight).sum()
    assert torch.isclose(objective(x, y)[1]["log_prior_of_points"], expected)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("net", [perceptron(0.5), Recurrent()], ids=["dropout layers", "recurrent"])
def test_without_noise_the_network_is_itself_and_its_dropout_off(prior, net):
    x = torch.randn(5, 3) if isinstance(net, nn.Sequential) else torch.randn(5, 4, 2)
    objective = objective_for(net, x, prior)
    with torch.no_grad():
        for noise in objective.noises:
            for name, value in noise.named_parameters():
                value.fill_(-20.0 if "log_scale" in name else 0.0)
        for value in objective.log_scales:
            value.fill_(-20.0)
        y = objective.model.forward(objective.model.params(), x)
        found = objective(x, y)[1]["expected_log_likelihood"]
        expected = objective.model.log_likelihood(objective.model.params(), x, y).sum()
    assert torch.isclose(found, expected, atol=1e-3)


def test_several_draws_are_averaged(seed):
    net, x, y = linear_problem()
    one, four = (objective_for(net, x, "log_uniform", draws=draws) for draws in (1, 4))
    four.load_state_dict(one.state_dict())
    torch.manual_seed(seed)
    each = torch.stack([one(x, y)[0] for _ in range(4)])
    torch.manual_seed(seed)
    assert torch.isclose(four(x, y)[0], each.mean())


@pytest.mark.parametrize("prior", PRIORS)
def test_every_parameter_has_a_gradient(prior):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    _, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    objective(x, y)[0].backward()
    assert all(value.grad is not None and torch.isfinite(value.grad).all() for value in objective.parameters())
