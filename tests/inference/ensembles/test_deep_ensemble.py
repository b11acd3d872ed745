"""Tests of deep ensembles: one member is MAP, each of several is a network trained alone, and they are kept apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.ensembles.deep_ensemble import input_range
from knowable.inference.point.point import fresh_start
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model, mlp, same_params

SHORT = {"epochs": 40, "batch_size": 8}


def _model(net: nn.Module | None = None, **settings) -> kn.Model:
    return kn.Model((net or mlp()).to(DTYPE), kn.Gaussian(), **settings)


def _dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1))


NETWORKS = {"mlp": mlp, "batch norm": batch_norm_net, "dropout": _dropout_net}


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("net", NETWORKS.values(), ids=NETWORKS)
def test_one_member_is_the_map_fit_to_the_bit(net, random):
    model, data = _model(net(), random=random), linear_data()
    ensemble = kn.DeepEnsemble(1, **SHORT).fit(model, data, seed=3)
    single = kn.MAP(**SHORT).fit(model, data, seed=3)
    assert same_params(ensemble.mean(), single.mean())
    assert same_params(ensemble.buffers, single.buffers)
    x = data[0]
    assert torch.equal(ensemble.predict(x).mean, single.predict(x).mean)


def test_members_trained_together_are_networks_trained_alone():
    # float64, 120 steps: the two ways differ by the order of sums alone
    model, data = _model(), linear_data()
    together = kn.DeepEnsemble(3, **SHORT).fit(model, data, seed=3)
    assert "together" in together.diagnostics.message
    for k in range(3):
        start = model if k == 0 else model.starting_at(*fresh_start(model, 3, k))
        alone = kn.MAP(**SHORT).fit(start, data, seed=3)
        for name, value in alone.mean().items():
            torch.testing.assert_close(together.stack[name][k], value, rtol=1e-8, atol=1e-8)


def test_members_trained_in_turn_are_networks_trained_alone_each_with_its_own_order():
    from knowable.core.support.randomness import derive_seed

    model, data = _model(batch_norm_net()), linear_data()
    posterior = kn.DeepEnsemble(2, **SHORT).fit(model, data, seed=3)
    assert "in turn" in posterior.diagnostics.message
    start = model.starting_at(*fresh_start(model, 3, 1))
    alone = kn.MAP(**SHORT).fit(start, data, seed=derive_seed(3, "member", 1))
    assert all(torch.equal(posterior.stack[name][1], value) for name, value in alone.mean().items())
    assert all(torch.equal(value[1], alone.buffers[name]) for name, value in posterior.buffer_stack.items())


def test_networks_with_batch_norm_keep_the_statistics_of_each_member(tmp_path):
    model, (x, y) = _model(batch_norm_net()), linear_data()
    posterior = kn.DeepEnsemble(3, **SHORT).fit(model, (x, y))
    means = posterior.buffer_stack["1.running_mean"]
    assert (torch.pdist(means) > 1e-3).all()
    prediction = posterior.predict(x)
    for k in range(3):
        params = {name: value[k] for name, value in posterior.stack.items()}
        buffers = {**posterior.buffers, **{name: value[k] for name, value in posterior.buffer_stack.items()}}
        torch.testing.assert_close(prediction.samples[k], model.forward(params, x, buffers=buffers))
    loaded = kn.load(posterior.save(tmp_path))
    assert torch.equal(loaded.predict(x).samples, prediction.samples)


@pytest.mark.parametrize(
    ("net", "way"), [(mlp, "together"), (batch_norm_net, "in turn"), (_dropout_net, "in turn")], ids=NETWORKS
)
def test_networks_are_trained_together_where_they_allow_it(net, way):
    posterior = kn.DeepEnsemble(2, epochs=2).fit(_model(net()), linear_data())
    assert posterior.diagnostics.message.startswith(f"2 members {way}: ended after 2 steps")
    assert (posterior.buffer_stack != {}) == (net is batch_norm_net)


def test_training_together_can_be_asked_for_or_declined():
    model, data = _model(), linear_data()
    assert "in turn" in kn.DeepEnsemble(2, epochs=2, vectorise=False).fit(model, data).diagnostics.message
    with pytest.raises(kn.Unsupported, match=r"vectorise=True: .* batch statistics or dropout"):
        kn.DeepEnsemble(2, epochs=2, vectorise=True).fit(_model(batch_norm_net()), data)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.GRU(2, 1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.unsqueeze(1))[0][:, -1]

    with pytest.raises(kn.Unsupported, match="vmap cannot take one of its operations"):
        kn.DeepEnsemble(2, epochs=2, vectorise=True).fit(_model(Last()), data)
    with pytest.raises(kn.Unsupported, match="precision='bfloat16' is for one network at a time"):
        kn.DeepEnsemble(2, epochs=2, vectorise=True).fit(model, data, engine=kn.Engine(precision="bfloat16"))
    large = nn.Sequential(nn.Linear(2, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 1))
    assert "in turn" in kn.DeepEnsemble(2, epochs=1).fit(_model(large), data).diagnostics.message
    assert "together" in kn.DeepEnsemble(2, epochs=1, vectorise=True).fit(_model(large), data).diagnostics.message


@pytest.mark.parametrize("vectorise", [True, False])
def test_point_estimates_are_trained_once_and_members_around_them(vectorise):
    model, data = _model(random="last_layer"), linear_data()
    posterior = kn.DeepEnsemble(3, vectorise=vectorise, **SHORT).fit(model, data, seed=1)
    points = kn.MAP(**SHORT).fit(model, data, seed=1).points
    assert same_params(posterior.points, points)
    assert len(posterior.stack["2.weight"].unique(dim=0)) == 3
    alone = kn.MAP(**SHORT).fit(model.with_fixed(points), data, seed=1)  # the first member begins as the network does
    torch.testing.assert_close(posterior.stack["2.weight"][0], alone.mean()["2.weight"], rtol=1e-8, atol=1e-8)


def test_members_of_a_linear_model_all_end_at_its_only_mode(generator):
    x, y = linear_data(generator=generator)
    posterior = kn.DeepEnsemble(4, epochs=600, learning_rate=0.1).fit(linear_model(noise=0.5), (x, y))
    design = torch.cat([x, torch.ones(20, 1, dtype=DTYPE)], 1)
    mode = torch.linalg.solve(design.T @ design / 0.25 + torch.eye(3, dtype=DTYPE), design.T @ y / 0.25).flatten()
    found = torch.cat([posterior.stack["weight"].flatten(1), posterior.stack["bias"]], 1)
    torch.testing.assert_close(found, mode.expand(4, 3), rtol=1e-4, atol=1e-4)
    assert posterior.diagnostics["disagreement"] < 1e-3


def test_the_report_says_how_far_members_differ(generator):
    x, y = linear_data(generator=generator)
    posterior = kn.DeepEnsemble(3, **SHORT).fit(_model(), (x, y))
    found = kn.diversity(posterior, x)
    for name, value in found.terms().items():
        assert posterior.diagnostics[name] == pytest.approx(value)
    held_out = kn.DeepEnsemble(3, **SHORT).fit(_model(), (x, y), validation=(x[:4], y[:4]))
    assert held_out.diagnostics["disagreement"] == pytest.approx(kn.diversity(held_out, x[:4]).disagreement)


# --- adversarial training --------------------------------------------------------------------------------------------


def test_adversarial_training_flattens_the_function(generator):
    # the inputs move against each weight's sign, so that a linear model pays for the sum of their sizes
    x, y = linear_data(generator=generator)
    settings = {"epochs": 300, "learning_rate": 0.1}
    plain, robust = (
        kn.DeepEnsemble(2, adversarial=share, **settings).fit(linear_model(noise=0.5), (x, y)) for share in (0.0, 0.3)
    )
    assert robust.mean()["weight"].abs().sum() < plain.mean()["weight"].abs().sum()
    assert "adversarial=0.3" in robust.diagnostics.notes[0]
    assert not any("adversarial" in note for note in plain.diagnostics.notes)


@pytest.mark.parametrize("share", [0.05])
def test_the_mode_of_adversarial_training_of_a_linear_model_minimises_its_known_loss(share, generator):
    # at inputs moved by e against the residual r the new residual is |r| + e |w|: the loss is a function of w alone
    x, y = linear_data(generator=generator)
    posterior = kn.DeepEnsemble(1, adversarial=share, epochs=800, learning_rate=0.1).fit(
        linear_model(noise=0.5, prior=kn.Normal(2.0)), (x, y)
    )
    reach = share * (x.amax(0) - x.amin(0))

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        residual = y.flatten() - x @ weight - bias
        moved = residual.abs() + (reach * weight.abs()).sum()
        squares = 0.5 * (residual.square() + moved.square()).mean() / (2 * 0.25)
        return squares + (weight.square().sum() + bias.square()) / (2 * 4.0) / 20

    weight, bias = posterior.mean()["weight"].flatten(), posterior.mean()["bias"].squeeze()
    best = loss(weight, bias)
    for _ in range(200):  # no neighbour is better by more than the optimiser leaves
        step = 0.02 * torch.randn(3, generator=generator, dtype=DTYPE)
        assert loss(weight + step[:2], bias + step[2]) > best - 1e-5


def test_the_reach_of_adversarial_inputs_is_a_share_of_their_range():
    x, y = linear_data()
    torch.testing.assert_close(input_range(kn.Data((x, y), 20)), x.amax(0) - x.amin(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    torch.testing.assert_close(input_range(kn.Data(loader, 20)), x.amax(0) - x.amin(0))


def test_adversarial_training_on_words_is_refused():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))
    data = torch.randint(5, (9, 2)), torch.randn(9)
    with pytest.raises(kn.InvalidData, match=r"adversarial perturbs inputs, .* x is torch\.int64"):
        kn.DeepEnsemble(2, adversarial=0.01).fit(kn.Model(net, kn.Gaussian()), data)


# --- interrupts and resuming -----------------------------------------------------------------------------------------


def _interrupting(monkeypatch, at: int) -> None:
    calls, score = [0], kn.Model.score

    def interrupted(self, *arguments):
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return score(self, *arguments)

    monkeypatch.setattr(kn.Model, "score", interrupted)


@pytest.mark.parametrize(("at", "kept"), [(250, 2), (50, 1)])  # 105 steps a member
def test_an_interrupt_leaves_the_members_that_are_whole_and_a_second_call_trains_the_others(
    at, kept, tmp_path, monkeypatch
):
    model, data = _model(batch_norm_net()), linear_data()
    method = kn.DeepEnsemble(3, epochs=35, batch_size=8)
    whole = method.fit(model, data, seed=2)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    with monkeypatch.context() as patch:
        _interrupting(patch, at)
        with pytest.warns(kn.Interrupted):
            partial = method.fit(model, data, seed=2, checkpoint=checkpoint)
    assert len(partial) == kept
    assert partial.diagnostics.interrupted and partial.diagnostics.converged is False
    assert f"{kept} of 3 members in turn: stopped from the keyboard" == partial.diagnostics.message
    resumed = method.fit(model, data, seed=2, checkpoint=checkpoint)
    assert same_params(resumed.stack, whole.stack) and same_params(resumed.buffer_stack, whole.buffer_stack)
    assert resumed.diagnostics.history == whole.diagnostics.history


def test_a_prior_with_a_scale_to_learn_is_refused():
    with pytest.raises(kn.Unsupported, match="DeepEnsemble cannot learn the prior's own scale"):
        kn.DeepEnsemble(2).fit(_model(prior=kn.EmpiricalBayes(kn.Normal())), linear_data())


def test_the_number_of_members_comes_first():
    assert kn.DeepEnsemble(7).members == 7
    assert kn.BayesianBootstrap(7).members == 7
    assert kn.MultiSWAG(7).members == 7
    assert kn.EnsembleOf(kn.MAP(), 7).members == 7


# --- likelihoods and priors ------------------------------------------------------------------------------------------

TARGETS = {
    "noise that depends on the input": (kn.HeteroscedasticGaussian(), 2, lambda y: y),
    "outliers": (kn.StudentT(), 1, lambda y: y),
    "labels": (kn.Categorical(), 3, lambda y: (y.flatten() > 0).long() + (y.flatten() > 1)),
    "yes or no": (kn.Bernoulli(), 1, lambda y: (y > 0).to(DTYPE)),
    "counts": (kn.Poisson(), 1, lambda y: y.abs().round()),
}


@pytest.mark.parametrize(("likelihood", "outputs", "target"), TARGETS.values(), ids=TARGETS)
def test_members_of_every_likelihood_train_together_as_they_do_alone(likelihood, outputs, target):
    x, y = linear_data()
    model = kn.Model(mlp(outputs=outputs).to(DTYPE), likelihood, {"*.bias": kn.Flat(), "*": kn.StudentTPrior()})
    together = kn.DeepEnsemble(2, epochs=10).fit(model, (x, target(y)), seed=3)
    assert "together" in together.diagnostics.message
    alone = kn.MAP(epochs=10).fit(model.starting_at(*fresh_start(model, 3, 1)), (x, target(y)), seed=3)
    for name, value in alone.mean().items():
        torch.testing.assert_close(together.stack[name][1], value, rtol=1e-8, atol=1e-8)
    assert torch.isfinite(together.predict(x).log_prob(target(y))).all()


def test_rows_that_count_more_count_more_for_every_member():
    x, y = linear_data()
    weights = torch.rand(20, dtype=DTYPE)
    model = _model()
    together = kn.DeepEnsemble(2, **SHORT).fit(model, kn.Data((x, y), 20, weights), seed=3)
    alone = kn.MAP(**SHORT).fit(model, kn.Data((x, y), 20, weights), seed=3)
    for name, value in alone.mean().items():
        torch.testing.assert_close(together.stack[name][0], value, rtol=1e-8, atol=1e-8)
