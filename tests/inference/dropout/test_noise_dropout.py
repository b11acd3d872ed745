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

METHODS = pytest.mark.parametrize("method", [kn.GaussianDropout, kn.VariationalDropout])
QUICK = {"epochs": 2, "batch_size": 8}


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, 3)
    return x, x[:, :1]


@METHODS
def test_noise_is_on_weights_and_all_else_are_points(method, data):
    posterior = method(**QUICK).fit(kn.Model(perceptron(), kn.Gaussian()), data)
    assert set(posterior.loc) == {"0.weight", "2.weight"}
    assert set(posterior.points) == {"0.bias", "2.bias", "likelihood.log_noise"}
    assert posterior.model.prior.prior_of("0.weight") == kn.LogUniform()
    assert {"elbo", "kl"} <= posterior.diagnostics.terms.keys() and posterior.log_evidence is None
    assert any("by the log-uniform prior" in note for note in posterior.diagnostics.notes)


@METHODS
def test_weights_can_be_named(method, data):
    posterior = method(**QUICK, where=["2.weight"]).fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    assert set(posterior.loc) == {"2.weight"}


@METHODS
def test_a_posterior_is_where_it_begins(method, data):
    mode = kn.MAP(epochs=40).fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    model = kn.Model(perceptron(), kn.Gaussian(0.1))
    posterior = method(epochs=1, learning_rate=1e-7, start=mode).fit(model, data)
    for name, value in posterior.mean().items():
        torch.testing.assert_close(value, mode.mean()[name], rtol=0, atol=1e-5)


# --- noise objective --------------------------------------------------------------------------------------------------


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
    draws = objective.draw(torch.randn(4000, objective.drawn.size, dtype=torch.float64))
    found = torch.stack([draw["cell.weight_hh"] for draw in draws]).detach()
    loc, scale = (each["cell.weight_hh"].detach() for each in objective.loc_and_scale())
    assert ((found.mean(0) - loc).abs() < 5 * scale / math.sqrt(4000)).all()
    assert ((found.var(0) / scale.square() - 1).abs() < 5 * math.sqrt(2 / 4000)).all()


# --- gaussian dropout -------------------------------------------------------------------------------------------------


ALPHA = 0.3
# how close a fit comes to the maximum of its bound, in nats: what Adam's last, small steps leave
SLACK = 0.2


@pytest.mark.parametrize("batch_size", [None, 20], ids=["all rows", "batches"])
def test_on_a_linear_model_it_is_ridge_regression_with_a_penalty_from_the_data(seed, batch_size):
    problem = NoiseRegression.make(seed)
    method = kn.GaussianDropout(ALPHA, epochs=400, learning_rate=0.05, batch_size=batch_size)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    log_alpha = torch.full((3,), ALPHA, dtype=torch.float64).log()
    best = problem.bound(problem.best_weights(ALPHA), log_alpha)
    assert 0 <= best - problem.bound(posterior.loc["weight"][0], log_alpha) < SLACK
    no_noise = problem.bound(problem.best_weights(0.0), log_alpha)
    assert best - no_noise > 2 * SLACK  # the slack would not hide that there is noise


def test_noise_is_alpha_times_the_squared_mean(seed):
    problem = NoiseRegression.make(seed)
    posterior = kn.GaussianDropout(ALPHA, epochs=3).fit(problem.model(), problem.data)
    torch.testing.assert_close(posterior.scale["weight"], ALPHA**0.5 * posterior.loc["weight"].abs())
    assert posterior.diagnostics.terms["kl"] == pytest.approx(
        kn.LogUniform().kl_from_normal(posterior.loc["weight"], posterior.scale["weight"]).item()
    )
    assert posterior.log_evidence is None  # the prior is improper
    assert any("prior of weight by the log-uniform" in note for note in posterior.diagnostics.notes)


def test_model_that_is_log_uniform_already_needs_no_note(seed):
    problem = NoiseRegression.make(seed)
    posterior = kn.GaussianDropout(epochs=1).fit(problem.model(prior=kn.LogUniform()), problem.data)
    assert not any("log-uniform" in note for note in posterior.diagnostics.notes)


def digits_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10))


@pytest.mark.slow
def test_variance_network_predicts_although_a_layer_has_no_mean(seed):
    # chance is 0.1, with a standard error of 0.016 on these rows; seed 0 gave 0.84
    train, test = kn.datasets.digits().split(seed)
    model = kn.Model(digits_network(), kn.Categorical())
    posterior = kn.GaussianDropout(epochs=80, zero_mean="2.weight").fit(model, (train.x, train.y), seed=seed)
    assert (posterior.mean()["2.weight"] == 0).all() and (posterior.std()["2.weight"] > 0).all()

    def accuracy(samples: int) -> float:
        return (posterior.predict(test.x, samples=samples).labels == test.y).float().mean().item()

    assert accuracy(64) > 0.6
    assert accuracy(64) > accuracy(1)
    means = posterior.model.forward(posterior.mean(), test.x, buffers=posterior.buffers)
    assert (means == means[:1]).all()  # the mean weights know nothing


def test_signal_in_the_variance_alone_is_found(seed):
    # y = 1 where |x| is large: what a weight of mean 0 does to x has that variance
    x = torch.linspace(-2, 2, 200).unsqueeze(1)
    y = (x.squeeze(1).abs() > 1).long()
    net = nn.Sequential(nn.Linear(1, 30, bias=False), nn.ReLU(), nn.Linear(30, 2))
    method = kn.GaussianDropout(epochs=200, zero_mean="0.weight", learning_rate=0.03)
    posterior = method.fit(kn.Model(net, kn.Categorical()), (x, y), seed=seed)
    assert (posterior.loc["0.weight"] == 0).all()
    found = posterior.predict(x, samples=64).labels
    assert (found == y).float().mean() > 0.85


def test_zero_mean_is_a_choice_among_the_noisy_weights():
    model = kn.Model(digits_network(), kn.Categorical())
    data = torch.zeros(10, 64), torch.arange(10)
    for method in (kn.GaussianDropout(zero_mean="2.bias"), kn.GaussianDropout(zero_mean="2.weight", where="0.weight")):
        with pytest.raises(kn.InvalidArgument, match=r"zero_mean='2.(bias|weight)' matches no parameter"):
            method.fit(model, data)


# --- variational dropout ----------------------------------------------------------------------------------------------


def test_learned_strength_is_the_best_of_a_linear_model(seed):
    problem = NoiseRegression.make(seed)
    method = kn.VariationalDropout(epochs=600, learning_rate=0.05)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    best_alpha = problem.best_alpha(1.0)
    best = problem.bound(problem.best_weights(best_alpha), torch.full((3,), best_alpha, dtype=torch.float64).log())
    found = problem.bound(posterior.loc["weight"][0], posterior.log_alpha()["weight"][0])
    assert 0 <= best - found < SLACK
    start = problem.bound(problem.best_weights(0.25), torch.full((3,), 0.25, dtype=torch.float64).log())
    assert best - start > 2 * SLACK  # alpha has moved a long way to get there
    terms = posterior.diagnostics.terms
    assert terms["alpha.weight"] == pytest.approx(posterior.log_alpha()["weight"].exp().mean().item(), rel=1e-6)


@pytest.mark.parametrize(("share", "count"), [("layer", 1), ("neuron", 4), ("weight", 12)])
def test_strength_is_shared_by_layer_neuron_or_weight(seed, share, count):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    method = kn.VariationalDropout(share, epochs=40, learning_rate=0.05, max_alpha=0.8)
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x[:, :1]))
    alpha = posterior.log_alpha()["0.weight"].exp()
    assert (alpha < 0.8).all()
    assert len(alpha.flatten().log().mul(1e9).round().unique()) == count
    if share == "neuron":
        torch.testing.assert_close(alpha, alpha[:, :1].expand(4, 3))


def test_noise_that_data_does_not_mind_grows_to_its_bound_and_no_further(seed):
    x = torch.randn(50, 2, dtype=torch.float64)
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[2.0, 1e-3]]))
    method = kn.VariationalDropout("weight", epochs=500, learning_rate=0.05)
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.3)), (x, 2 * x[:, :1]), seed=seed)
    needed, idle = posterior.log_alpha()["weight"][0].exp()
    assert needed < 0.05 and 0.5 < idle < 1.0


def test_factor_on_the_divergence_is_noted_and_weakens_the_noise(seed):
    problem = NoiseRegression.make(seed)
    alphas = {}
    for beta in (0.1, 1.0):
        method = kn.VariationalDropout(epochs=300, learning_rate=0.05, beta=beta)
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        alphas[beta] = posterior.diagnostics.terms["alpha.weight"]
        assert posterior.diagnostics.bayes is (beta == 1.0)
    assert alphas[0.1] < alphas[1.0]
