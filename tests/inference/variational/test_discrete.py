from __future__ import annotations

import itertools
import math

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.discrete import ESTIMATORS, DiscreteObjective, all_settings
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


@pytest.mark.slow
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
        ({"draws": 1, "estimator": "score"}, "draws must be >= 2 with estimator='score'"),
        ({"start": "map"}, "start must be 'network' or a posterior"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(knobs, wanted):
    with pytest.raises(kn.InvalidArgument, match=wanted):
        kn.DiscreteVI(**knobs)


# --- discrete objective ----------------------------------------------------------------------------------------------


def objective_of(problem: GatedRegression, estimator: str, *, draws: int = 4, logits: Tensor | None = None, **knobs):
    objective = DiscreteObjective(problem.model(), len(problem.x), estimator=estimator, draws=draws, **knobs)
    if logits is not None:
        with torch.no_grad():
            objective.logits.copy_(logits)
    return objective


def gradients(objective: DiscreteObjective, data: tuple[Tensor, Tensor], repeats: int) -> Tensor:
    found = [torch.autograd.grad(objective(*data)[0], objective.logits)[0] for _ in range(repeats)]
    return torch.stack(found)


LOGITS = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.float64)


def test_settings_are_all_there_are():
    found = all_settings(3, like=torch.zeros(1))
    assert sorted(map(tuple, found.tolist())) == sorted(itertools.product([0.0, 1.0], repeat=3))


def test_enumerated_loss_is_the_bound_written_out(seed):
    problem = GatedRegression.make(seed=seed)
    objective = objective_of(problem, "enumerate", logits=LOGITS)
    loss, terms = objective(*problem.data)
    assert loss.item() == pytest.approx(-problem.elbo(LOGITS.sigmoid()) / len(problem.x), rel=1e-10)
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(logits=LOGITS),
        torch.distributions.Bernoulli(torch.full_like(LOGITS, problem.probability)),
    )
    assert terms["kl"].item() == terms["kl_of_gates"].item() == pytest.approx(divergence.sum().item(), rel=1e-10)


def test_beta_and_temperature_weigh_divergence_and_entropy():
    # of gates and one weight, whose entropies are those of torch's distributions
    net = kn.gated(nn.Sequential(nn.Linear(1, 1, bias=False)), "0").double()
    model = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    x = torch.randn(6, 1, dtype=torch.float64)
    losses, entropy, kl = {}, 0.0, 0.0
    for knobs in ((1.0, 1.0), (3.0, 1.0), (1.0, 0.5)):
        beta, temperature = knobs
        objective = DiscreteObjective(
            model, 6, beta=beta, temperature=temperature, initial_scale=0.4, initial_probability=0.3
        )
        torch.manual_seed(0)
        losses[knobs] = objective(x, x)[0].item()
        kl = objective.kl_divergence().item()
        parts = torch.distributions.Bernoulli(torch.tensor(0.3)), torch.distributions.Normal(0.0, 0.4)
        entropy = sum(float(part.entropy()) for part in parts)
        assert objective.entropy().item() == pytest.approx(entropy, rel=1e-6)
    assert losses[3.0, 1.0] - losses[1.0, 1.0] == pytest.approx(2 * kl / 6, rel=1e-9)
    assert losses[1.0, 0.5] - losses[1.0, 1.0] == pytest.approx(0.5 * entropy / 6, rel=1e-6)


def test_log_probability_is_that_of_independent_bernoullis(seed):
    objective = objective_of(GatedRegression.make(seed=seed), "score", logits=LOGITS)
    settings = all_settings(4, like=LOGITS)
    expected = torch.distributions.Bernoulli(logits=LOGITS).log_prob(settings).sum(1)
    torch.testing.assert_close(objective.log_probability(settings).detach(), expected)
    assert objective.log_probability(settings).exp().sum().item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("estimator", ["score", "local_expectation"])
def test_estimated_gradient_is_that_of_the_enumerated_bound(seed, estimator):
    # four coordinates, the mean of 300 gradients within 4.5 standard errors
    problem = GatedRegression.make(seed=seed)
    (expected,) = gradients(objective_of(problem, "enumerate", logits=LOGITS), problem.data, 1)
    torch.manual_seed(seed)
    found = gradients(objective_of(problem, estimator, logits=LOGITS), problem.data, 300)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error + 1e-12).all()


def test_differences_are_exact_where_gates_do_not_interact(seed):
    # orthogonal inputs: the log likelihood is a sum over gates, so that what a gate adds does not depend on the others
    problem = GatedRegression.make(seed=seed, correlation=0.0)
    (expected,) = gradients(objective_of(problem, "enumerate", logits=LOGITS), problem.data, 1)
    found = gradients(objective_of(problem, "local_expectation", draws=1, logits=LOGITS), problem.data, 5)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-8, atol=1e-10)


def test_noise_falls_from_score_to_differences_to_enumeration(seed):
    # at four draws each. The score has the noise of all gates, a difference only that of what interacts with its own
    problem = GatedRegression.make(seed=seed)
    torch.manual_seed(seed)
    noise = [
        gradients(objective_of(problem, each, logits=LOGITS), problem.data, 100).var(0).sum().item()
        for each in ESTIMATORS
    ]
    assert noise[0] > 2 * noise[1] > noise[2] and noise[2] < 1e-20  # some 4 times; a variance is known to 15%


def test_baseline_takes_out_what_all_draws_share(seed):
    # a constant added to the log likelihood (other units of the target) leaves the gradient as it is
    problem = GatedRegression.make(seed=seed)
    objective = objective_of(problem, "score", logits=LOGITS)
    found, original = [], type(objective.model).score
    for shift in (0.0, 1000.0):
        objective.model.score = lambda *args, shift=shift: original(objective.model, *args) + shift  # type: ignore[method-assign]
        torch.manual_seed(seed)
        found.append(gradients(objective, problem.data, 1)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_have_the_gradient_of_the_expected_likelihood(seed, estimator):
    # of one weight w and its gate z: E[log p] = π E_w[log p(y | w x)] + (1 - π) log p(y | 0), and the derivative of the
    # bound in the mean of w in closed form. The mean of 300 gradients within 4.5 standard errors
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    net = kn.gated(nn.Sequential(nn.Linear(1, 1, bias=False)), "0").double()
    model = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    objective = DiscreteObjective(model, 6, estimator=estimator, draws=4, initial_scale=0.4)
    with torch.no_grad():
        objective.logits.fill_(0.4)
    torch.manual_seed(seed)
    found = torch.stack([torch.autograd.grad(objective(x, y)[0], objective.q)[0][:, 0] for _ in range(300)])
    loc, log_scale = (each.detach().clone().requires_grad_() for each in objective.q[:, 0])
    spread = log_scale.exp() ** 2
    squares = (y - loc * x).square() + spread * x.square()
    value = -torch.tensor(0.4).sigmoid() * squares.mean() / (2 * 0.7**2)
    kl = kn.Normal(1.0).kl_from_normal(loc, log_scale.exp())
    expected = torch.stack(torch.autograd.grad(-value + kl / 6, (loc, log_scale)))
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()


def test_probabilities_begin_at_the_prior_or_where_they_are_told():
    problem = GatedRegression.make()
    assert objective_of(problem, "score").logits.sigmoid().tolist() == pytest.approx([problem.probability] * 4)
    told = objective_of(problem, "score", initial_probability=0.9)
    assert told.logits.sigmoid().tolist() == pytest.approx([0.9] * 4)
    net = kn.gated(nn.Sequential(nn.Linear(1, 1)), "0")
    rare = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(1e-4), "*": kn.Normal(1.0)})
    assert DiscreteObjective(rare, 6).logits.sigmoid().item() == pytest.approx(0.05)


def test_without_binary_parameters_it_is_the_bound_of_normals(seed):
    # within 4.5 standard errors of the closed form
    problem = kn.testing.LinearGaussian.make(n=20, seed=seed)
    objective = DiscreteObjective(problem.model(), 20, initial_scale=0.2)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([objective(*problem.data)[0] for _ in range(200)])
    loc, scale = (problem.as_flat(each) for each in objective.loc_and_scale())
    assert abs(losses.mean().item() + problem.elbo(loc, scale) / 20) < 4.5 * losses.std().item() / math.sqrt(200)


def test_warm_up_raises_the_divergence_to_its_full_weight(seed):
    problem = GatedRegression.make(seed=seed)
    plain, warming = (objective_of(problem, "enumerate", logits=LOGITS, kl_warmup=each) for each in (0, 4))
    loss, terms = plain(*problem.data)
    shares = []
    for epoch in (0.0, 1.5, 4.0, 100.0):
        warming.epoch = epoch
        shares.append(1 + len(problem.x) * (warming(*problem.data)[0] - loss).item() / terms["kl"].item())
    assert shares == pytest.approx([0.2, 0.5, 1.0, 1.0], rel=1e-6)
    assert warming.settles_from == 4.0


# --- discrete posterior ----------------------------------------------------------------------------------------------


PROBABILITIES = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)


def model_of() -> kn.Model:
    net = kn.gated(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), "0").double()
    return kn.Model(net, kn.Gaussian(0.1), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})


def posterior_of(model: kn.Model) -> kn.BernoulliNormal:
    start = model.params()
    names = [name for name in model.random_names if not name.endswith("gate")]
    loc = {name: start[name] for name in names}
    scale = {name: 0.1 + start[name].abs() for name in names}
    return kn.BernoulliNormal(model, {"0.1.gate": PROBABILITIES}, loc, scale)


def test_draws_have_the_probabilities_and_moments(generator):
    # 4,000 draws: frequencies and means within 4.5 standard errors
    posterior = posterior_of(model_of())
    drawn, mean, std = posterior.sample(4000, generator), posterior.mean(), posterior.std()
    assert set(drawn["0.1.gate"].unique().tolist()) == {0.0, 1.0}
    for name, value in drawn.items():
        assert ((value.mean(0) - mean[name]).abs() < 4.5 * std[name] / math.sqrt(4000)).all(), name
    torch.testing.assert_close(mean["0.1.gate"], PROBABILITIES)
    torch.testing.assert_close(std["0.1.gate"], (PROBABILITIES * (1 - PROBABILITIES)).sqrt())


def test_log_prob_is_that_of_bernoullis_and_normals(generator):
    posterior = posterior_of(model_of())
    drawn = posterior.sample(5, generator)
    expected = torch.distributions.Bernoulli(PROBABILITIES).log_prob(drawn["0.1.gate"]).sum(1)
    for name, loc in posterior.loc.items():
        each = torch.distributions.Normal(loc, posterior.scale[name]).log_prob(drawn[name])
        expected = expected + each.flatten(1).sum(1)
    torch.testing.assert_close(posterior.log_prob(drawn), expected)
    between = {**drawn, "0.1.gate": drawn["0.1.gate"] + 0.5}
    assert (posterior.log_prob(between) == -math.inf).all()
    with pytest.raises(kn.InvalidArgument, match="params lacks"):
        posterior.log_prob({"0.1.gate": drawn["0.1.gate"]})


def test_posterior_of_gates_alone_has_a_density_too(generator):
    net = nn.Sequential(kn.Gates(3), nn.Linear(3, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.1), {"0.gate": kn.BernoulliPrior(0.5)}, frozen="1.*")
    posterior = kn.BernoulliNormal(model, {"0.gate": PROBABILITIES}, {}, {})
    drawn = posterior.sample(6, generator)
    expected = torch.distributions.Bernoulli(PROBABILITIES).log_prob(drawn["0.gate"]).sum(1)
    torch.testing.assert_close(posterior.log_prob(drawn), expected)


def test_saving_and_loading_changes_nothing(tmp_path, generator):
    model = model_of()
    posterior, x = posterior_of(model), torch.randn(4, 2, dtype=torch.float64)
    posterior.save(tmp_path / "gates")
    again = kn.load(tmp_path / "gates", net=model.net)
    assert isinstance(again, kn.BernoulliNormal)
    assert torch.equal(again.predict(x, samples=20).samples, posterior.predict(x, samples=20).samples)
    assert torch.equal(again.probabilities["0.1.gate"], PROBABILITIES)


def test_it_cannot_be_a_prior_and_says_what_can():
    with pytest.raises(kn.Unsupported, match="Freeze the gates"):
        kn.Model(model_of().net, kn.Gaussian(0.1), posterior_of(model_of()))
