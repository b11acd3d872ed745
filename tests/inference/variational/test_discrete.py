from __future__ import annotations

import math

import pytest
import scipy.optimize
import torch
from torch import nn

import knowable as kn
from knowable.inference.variational.discrete import ESTIMATORS, all_settings
from knowable.testing import LinearGaussian
from tests.inference.variational.gated_regression import GatedRegression
from tests.inference.variational.oracle import flat_moments

# What Adam's last, small steps leave of the bound, in nats: measured below 0.01 with four gates. A gate whose
# probability is off by 0.1 costs 0.02 at one half and more elsewhere.
SLACK = 0.02
QUICK = {"epochs": 600, "learning_rate": 0.05}


def fitted(problem: GatedRegression, estimator: str, seed: int) -> kn.BernoulliNormal:
    return kn.DiscreteVI(**QUICK, estimator=estimator).fit(problem.model(), problem.data, seed=seed)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gates_that_do_not_interact_have_their_exact_posterior(seed, estimator):
    # orthogonal inputs: the posterior is a product, the bound is the evidence
    problem = GatedRegression.make(seed=seed, correlation=0.0)
    posterior = fitted(problem, estimator, seed)
    found = posterior.probabilities["0.gate"]
    assert problem.log_evidence - problem.elbo(found) < SLACK
    evidence = posterior.log_evidence
    assert abs(evidence - problem.log_evidence) < 4 * evidence.standard_error + SLACK
    assert evidence.kind == "bound"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gates_that_interact_reach_the_best_bound_of_independent_ones(seed, estimator):
    # that bound's maximum by counting, from where the fit ended and from where it began
    problem = GatedRegression.make(seed=seed)
    posterior = fitted(problem, estimator, seed)
    found = posterior.probabilities["0.gate"]

    def negative(logits) -> float:
        return -problem.elbo(torch.as_tensor(logits, dtype=torch.float64).sigmoid())

    starts = (found.clamp(1e-6, 1 - 1e-6).logit().numpy(), torch.full((4,), problem.probability).logit().numpy())
    best = min(scipy.optimize.minimize(negative, start, method="Nelder-Mead").fun for start in starts)
    assert -problem.elbo(found) - best < SLACK
    evidence = posterior.log_evidence
    assert abs(evidence - problem.elbo(found)) < 4 * evidence.standard_error
    assert problem.elbo(found) < problem.log_evidence


def test_gates_on_random_weights_bound_the_evidence(seed):
    # two gates on two weights: given the gates the model is linear, so that evidence and bound are sums over four
    # settings of what is known in closed form
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    y = 1.5 * x[:, :1] + 0.5 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    net = nn.Sequential(kn.Gates(2), nn.Linear(2, 1, bias=False)).double()
    model = kn.Model(net, kn.Gaussian(0.5), {"0.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    posterior = kn.DiscreteVI(epochs=800, learning_rate=0.05).fit(model, (x, y), seed=seed)
    gates, loc, scale = posterior.probabilities["0.gate"], posterior.loc["1.weight"][0], posterior.scale["1.weight"][0]
    settings = all_settings(2, like=x)
    q = torch.distributions.Bernoulli(gates).log_prob(settings).sum(1).exp()
    evidence, fits = [], []
    for setting in settings:
        used = x * setting
        covariance = used @ used.T + 0.25 * torch.eye(30, dtype=torch.float64)
        marginal = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), covariance)
        evidence.append(marginal.log_prob(y[:, 0]) + math.log(0.25))
        squares = (y[:, 0] - used @ loc).square() + used.square() @ scale.square()
        fits.append((-0.5 * squares / 0.25 - math.log(0.5) - 0.5 * math.log(2 * math.pi)).sum())
    log_evidence = torch.stack(evidence).logsumexp(0).item()
    kl_of_gates = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(gates), torch.distributions.Bernoulli(torch.full_like(gates, 0.5))
    ).sum()
    bound = (q @ torch.stack(fits) - kl_of_gates - kn.Normal(1.0).kl_from_normal(loc, scale)).item()
    assert abs(posterior.log_evidence - bound) < 4 * posterior.log_evidence.standard_error
    assert posterior.diagnostics["kl_of_gates"] == pytest.approx(kl_of_gates.item(), rel=1e-6)
    # what is missing: correlations, the last tenths of a gate that the data leave no choice, and up to two nats where a
    # superfluous weight has narrowed around zero before its gate closed
    assert log_evidence - 3.0 < bound < log_evidence
    assert gates[0] > 0.95 and abs(loc[0] - 1.5) < 0.5


def test_without_gates_it_is_mean_field_inference(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    posterior = kn.DiscreteVI(epochs=800, learning_rate=0.03).fit(problem.model(), problem.data, seed=seed)
    assert problem.elbo() - problem.elbo(*flat_moments(problem, posterior)) < 0.15  # as in test_mean_field.py


def test_network_with_gated_units_is_fitted_saved_and_loaded(seed, tmp_path):
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    net = kn.gated(nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)), "0")
    model = kn.Model(net, kn.Gaussian(), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    posterior = kn.DiscreteVI(epochs=300).fit(model, (x, torch.sin(3 * x)), seed=seed)
    drawn = posterior.sample(50)["0.1.gate"]
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    assert {"kl_of_gates", "kl", "elbo"} <= set(posterior.diagnostics)
    posterior.save(tmp_path / "gated")
    again = kn.load(tmp_path / "gated", net=net)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_layers_can_be_gated_as_a_whole():
    net = kn.gated(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), ["0", "2"], per="layer")
    model = kn.Model(net, kn.Gaussian(0.5), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    x = torch.randn(20, 1)
    posterior = kn.DiscreteVI(epochs=20, estimator="enumerate").fit(model, (x, x))
    assert {name: value.shape for name, value in posterior.probabilities.items()} == {
        "0.1.gate": (1,), "2.1.gate": (1,),
    }  # fmt: skip


def test_fit_goes_on_from_another():
    net = kn.gated(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), "0")
    model = kn.Model(net, kn.Gaussian(0.5), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    x = torch.randn(20, 1)
    first = kn.DiscreteVI(epochs=60, learning_rate=0.05).fit(model, (x, x))
    second = kn.DiscreteVI(epochs=1, learning_rate=1e-9, start=first).fit(model, (x, x))
    wanted = first.mean()
    wanted["0.1.gate"] = wanted["0.1.gate"].clamp(0.05, 0.95)
    torch.testing.assert_close(second.mean(), wanted, rtol=1e-5, atol=1e-5)


def test_too_many_settings_to_enumerate_are_refused():
    net = kn.gated(nn.Sequential(nn.Linear(1, 11), nn.Tanh(), nn.Linear(11, 1)), "0")
    model = kn.Model(net, kn.Gaussian(0.5), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    x = torch.randn(20, 1)
    with pytest.raises(kn.Unsupported, match=r"all 2\^11 settings .* up to 10"):
        kn.DiscreteVI(estimator="enumerate").fit(model, (x, x))


def test_few_gates_are_compared_one_by_one_and_many_by_draws():
    def objective(units: int, **knobs):
        net = kn.gated(nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)), "0")
        model = kn.Model(net, kn.Gaussian(0.5), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
        return kn.DiscreteVI(**knobs).objective(model, torch.zeros(4, 1), 10)

    assert [(each.estimator, each.draws) for each in (objective(16), objective(17), objective(17, draws=1))] == [
        ("local_expectation", 1), ("score", 8), ("score", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "wanted"),
    [
        ({"estimator": "concrete"}, "estimator must be one of"),
        ({"draws": 0}, "draws"),
        ({"draws": 1, "estimator": "score"}, "draws must be >= 2 with estimator='score'"),
        ({"initial_probability": 1.0}, "initial_probability must be a finite number > 0 and < 1"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"start": "map"}, "start must be 'network' or a posterior"),
        ({"kl_warmup": 60, "epochs": 100}, "kl_warmup must be at most half of epochs=100"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(knobs, wanted):
    with pytest.raises(kn.InvalidArgument, match=wanted):
        kn.DiscreteVI(**knobs)
