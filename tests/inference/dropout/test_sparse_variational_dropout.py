from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.dropout.sparse_variational_dropout import (
    SparseObjective,
    SparseVariationalDropout,
    noisy_names,
    with_log_uniform,
)
from knowable.testing.checks.resuming import check_interrupted_fit_resumes_exactly
from knowable.testing.subject import Subject
from tests.inference.dropout.networks import Recurrent
from tests.inference.dropout.noise_oracle import NoiseRegression

QUICK = {"epochs": 3, "batch_size": 16}
SLACK = 0.05  # nats that Adam's last, small steps leave; at most 0.01 was seen


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def rows(count: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3)
    return x, x[:, :1].sin()


# --- a linear model --------------------------------------------------------------------------------------------------


@functools.cache
def sparse_regression(seed: int) -> tuple[NoiseRegression, kn.NoisyWeights]:
    problem = NoiseRegression.make(seed, weights=(2.0, 0.0, -1.5)).without_news_from(1)
    method = kn.SparseVariationalDropout(epochs=900, learning_rate=0.05)
    return problem, method.fit(problem.model(), problem.data, seed=seed)


def test_input_that_is_pure_noise_is_pruned_and_real_ones_are_kept(seed):
    _, posterior = sparse_regression(seed)
    assert (posterior.log_alpha()["weight"][0] > 3).tolist() == [False, True, False]
    assert posterior.sparsity() == {"weight": pytest.approx(1 / 3)}
    assert posterior.diagnostics.history[-1]["sparsity.weight"] == pytest.approx(1 / 3)
    assert (posterior.signal_to_noise()["weight"][0] > 1).tolist() == [True, False, True]


def test_bound_is_the_best_of_all_that_numerical_optimisation_finds(seed):
    problem, posterior = sparse_regression(seed)
    theta, scale = posterior.loc["weight"][0], posterior.scale["weight"][0]
    kl = kn.LogUniform().kl_from_normal(theta, scale).item()
    found = problem.expected_log_likelihood(theta, scale.square()) - kl
    assert problem.best_sparse_bound() - found < SLACK


# --- a network -------------------------------------------------------------------------------------------------------


def digits_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))


@pytest.mark.slow
def test_most_weights_of_a_network_for_digits_go_and_its_accuracy_stays(seed):
    train, test = kn.datasets.digits().split(seed)
    model = kn.Model(digits_network(), kn.Categorical())
    posterior = kn.SparseVariationalDropout(epochs=300).fit(model, (train.x, train.y), seed=seed)
    assert all(share > 0.7 for share in posterior.sparsity().values())
    log_alpha = posterior.log_alpha()
    kept = sum(int((value <= 3).sum()) for value in log_alpha.values())
    assert kept < 0.05 * sum(value.numel() for value in log_alpha.values())
    pruned = {k: torch.where(log_alpha[k] > 3, 0.0, v) if k in log_alpha else v for k, v in posterior.mean().items()}
    output = posterior.model.forward(pruned, test.x)
    assert (output.argmax(1) == test.y).float().mean() > 0.92
    assert (posterior.predict(test.x).labels == test.y).float().mean() > 0.92


# --- which weights, and what becomes of the others -------------------------------------------------------------------


def test_weights_are_log_uniform_and_all_else_are_points_under_their_own_prior():
    model = kn.Model(perceptron(), kn.Gaussian(), {"*.bias": kn.Normal(0.3), "*": kn.LaplacePrior()})
    posterior = kn.SparseVariationalDropout(**QUICK).fit(model, rows())
    assert posterior.model.random_names == ["0.weight", "2.weight"]
    assert set(posterior.points) == {"0.bias", "2.bias", "likelihood.log_noise"}
    assert posterior.model.prior.prior_of("0.bias") == kn.Normal(0.3)
    assert any("prior of 0.weight, 2.weight by the log-uniform" in note for note in posterior.diagnostics.notes)
    assert posterior.log_evidence is None and "elbo" in posterior.diagnostics.terms


def test_prior_of_points_pulls_on_them(seed):
    data = rows()
    sizes = {}
    for scale in (0.01, 10.0):
        model = kn.Model(perceptron(), kn.Gaussian(0.1), {"*.bias": kn.Normal(scale), "*": kn.Normal(1.0)})
        posterior = kn.SparseVariationalDropout(epochs=200, start="network").fit(model, data, seed=seed)
        sizes[scale] = posterior.points["0.bias"].abs().max().item()
    assert sizes[0.01] < 0.5 * sizes[10.0]


def test_where_random_and_frozen_are_heeded():
    data = rows()
    some = kn.SparseVariationalDropout(**QUICK, where="2.*").fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    assert set(some.loc) == {"2.weight", "2.bias"} and "0.weight" in some.points
    last = kn.SparseVariationalDropout(**QUICK).fit(kn.Model(perceptron(), kn.Gaussian(0.1), random="last_layer"), data)
    assert set(last.loc) == {"2.weight"} and {"0.weight", "0.bias", "2.bias"} == set(last.points)
    net = perceptron()
    held = kn.SparseVariationalDropout(**QUICK).fit(kn.Model(net, kn.Gaussian(0.1), frozen="0.*"), data)
    assert set(held.loc) == {"2.weight"} and set(held.points) == {"2.bias"}


def test_recurrent_weights_are_drawn_and_fitted(seed):
    net = Recurrent()
    x = torch.randn(24, 5, 2)
    model = kn.Model(net, kn.Gaussian(0.1))
    output = model.forward(model.params(), x)
    method = kn.SparseVariationalDropout(epochs=4, batch_size=8)
    objective = method.objective(method.target(model), x, 24)
    assert any("weight_hh" in name for name in objective.normals.drawn.names)
    posterior = method.fit(model, (x, torch.zeros_like(output)), seed=seed)
    assert posterior.predict(x, samples=4).mean.shape == output.shape
    assert {name for name in posterior.loc if "weight_hh" in name}


def test_convolutions_and_linear_layers_are_sampled_locally():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    method = kn.SparseVariationalDropout()
    objective = method.objective(method.target(kn.Model(net, kn.Categorical())), torch.randn(4, 1, 4, 4), 4)
    assert objective.normals.drawn.names == () and set(objective.normals.local.names) == {"0.weight", "3.weight"}


# --- where it begins -------------------------------------------------------------------------------------------------


def test_a_trained_posterior_is_where_it_begins(seed):
    data = rows()
    mode = kn.MAP(epochs=50).fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    model = kn.Model(perceptron(), kn.Gaussian(0.1))
    posterior = kn.SparseVariationalDropout(epochs=1, learning_rate=1e-7, start=mode).fit(model, data)
    for name, value in posterior.mean().items():
        torch.testing.assert_close(value, mode.mean()[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.scale["0.weight"], torch.full((6, 3), 0.01), rtol=1e-4, atol=0)


def test_a_map_fit_before_it_is_one_under_the_models_own_prior(seed):
    data = rows()
    model = kn.Model(perceptron(), kn.Gaussian(0.1), kn.Normal(0.01))
    method = kn.SparseVariationalDropout(epochs=100, learning_rate=1e-7, start="map")
    assert all(value.isfinite().all() for value in method.fit(model, data).mean().values())


def test_means_of_zero_do_no_harm():
    net = perceptron()
    nn.init.zeros_(net[2].weight)
    posterior = kn.SparseVariationalDropout(epochs=20).fit(kn.Model(net, kn.Gaussian(0.1)), rows())
    assert all(value.isfinite().all() for value in (*posterior.loc.values(), *posterior.scale.values()))


# --- frames ----------------------------------------------------------------------------------------------------------


def test_a_watched_weight_leaves_a_frame_for_every_epoch(seed, tmp_path):
    model = kn.Model(perceptron(), kn.Gaussian(0.1))
    posterior = kn.SparseVariationalDropout(epochs=7, batch_size=10, watch="0.weight").fit(model, rows(), seed=seed)
    assert posterior.frames.shape == (7, 2, 6, 3) and posterior.frames.dtype == torch.float16
    last = torch.stack([posterior.loc["0.weight"], posterior.log_alpha()["0.weight"]])
    torch.testing.assert_close(posterior.frames[-1], last.to(torch.float16))
    assert not torch.equal(posterior.frames[0], posterior.frames[-1])
    again = kn.load(posterior.save(tmp_path / "saved"))
    assert isinstance(again, kn.NoisyWeights) and again.watched == "0.weight"
    assert torch.equal(again.frames, posterior.frames)
    assert kn.SparseVariationalDropout(**QUICK).fit(model, rows()).frames is None


def test_an_interrupted_fit_resumes_exactly_frames_and_all(tmp_path):
    data, watch = rows(), {"batch_size": 8, "watch": "0.weight"}

    def fit(**where):
        torch.manual_seed(0)
        return kn.SparseVariationalDropout(epochs=60, kl_warmup=20, **watch).fit(
            kn.Model(perceptron(), kn.Gaussian(0.1)), data, **where
        )

    whole = fit()
    count = 0

    class Stop(RuntimeError):
        pass

    original = SparseVariationalDropout.objective

    def failing(self, model, x, size, *, start=None):
        objective = original(self, model, x, size, start=start)
        end = objective.end_of_epoch

        def counted() -> None:
            nonlocal count
            count += 1
            if count == 41:
                raise Stop
            end()

        objective.end_of_epoch = counted
        return objective

    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseVariationalDropout, "objective", failing)
        with pytest.raises(Stop):
            fit(checkpoint=checkpoint)
    resumed = fit(checkpoint=checkpoint)
    assert torch.equal(resumed.frames, whole.frames) and len(whole.frames) == 60
    for name, value in whole.mean().items():
        assert torch.equal(resumed.mean()[name], value)


def test_interruptions_of_the_suite_are_survived_while_watching():
    check_interrupted_fit_resumes_exactly(
        Subject(kn.SparseVariationalDropout(epochs=2, batch_size=8, watch="net.0.weight"))
    )


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "model", "error", "wanted"),
    [
        ({"watch": "0.bias"}, {}, kn.InvalidArgument, "watch='0.bias' is not among the noisy weights: 0.weight"),
        ({"where": "9.*"}, {}, kn.InvalidArgument, r"where='9\.\*' matches no parameter"),
        ({}, {"random": "*.bias"}, kn.InvalidArgument, "no random weight matrix"),
        ({}, {"prior": kn.EmpiricalBayes(kn.Normal(1.0))}, kn.Unsupported, "a prior whose scale is learned"),
    ],
)
def test_models_that_make_no_sense_are_refused(settings, model, error, wanted):
    with pytest.raises(error, match=wanted):
        kn.SparseVariationalDropout(**QUICK, **settings).fit(kn.Model(perceptron(), kn.Gaussian(0.1), **model), rows())


# --- sparse objective -------------------------------------------------------------------------------------------------


def build(**settings: object) -> SparseObjective:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    target = with_log_uniform(kn.Model(net, kn.Gaussian(0.1)), ["0.weight", "2.weight"])
    return SparseObjective(target, torch.randn(5, 3, dtype=torch.float64), 5, **settings)  # type: ignore[arg-type]


def test_loss_is_the_likelihood_the_divergence_and_the_prior_of_points(seed):
    objective = build(initial_scale=0.2)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    torch.manual_seed(seed)
    loss, terms = objective(x, y)
    loc, scale = objective.loc_and_scale()
    kl = sum(kn.LogUniform().kl_from_normal(loc[name], scale[name]) for name in loc)
    points = sum(kn.Normal(1.0).log_prob(value).sum() for value in objective.point_params().values())
    torch.testing.assert_close(terms["kl"], kl.detach())
    torch.testing.assert_close(loss, (kl - points - terms["expected_log_likelihood"]) / 5)


def test_records_say_which_share_is_drowned_in_noise():
    objective = build(initial_scale=1.0)
    with torch.no_grad():
        objective.layout.views(objective.q[0])["0.weight"].copy_(torch.full((4, 3), 1e-3))
        objective.layout.views(objective.q[0])["2.weight"].copy_(torch.tensor([[1.0, 0.0, 1.0, 0.5]]))
    assert objective.summary() == {"sparsity.0.weight": 1.0, "sparsity.2.weight": 0.25}


def test_frames_are_kept_of_one_weight_alone():
    objective = build(watch="2.weight")
    objective.end_of_epoch()
    frames = objective.posterior().frames
    assert frames is not None and frames.shape == (1, 2, 1, 4)
    unwatched = build()
    unwatched.end_of_epoch()
    assert unwatched.snapshots == [] and unwatched.posterior().frames is None


# --- noisy weights ----------------------------------------------------------------------------------------------------


def posterior(**about: object) -> kn.NoisyWeights:
    model = kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), random="weight")
    loc, scale = torch.tensor([[1.0, 0.01, 0.0]]), torch.tensor([[0.1, 1.0, 0.5]])
    points = {"bias": torch.zeros(1)}
    return kn.NoisyWeights(model, {"weight": loc}, {"weight": scale}, points=points, **about)  # type: ignore[arg-type]


def test_sparsity_is_the_share_of_weights_above_the_threshold():
    assert posterior().sparsity() == {"weight": 2 / 3}


def test_frames_come_back_from_disk(tmp_path):
    frames = torch.randn(4, 2, 1, 3).to(torch.float16)
    saved = posterior(watched="weight", frames=frames)
    found = kn.load(saved.save(tmp_path / "saved"))
    assert isinstance(found, kn.NoisyWeights) and found.watched == "weight"
    assert torch.equal(found.frames, frames) and torch.equal(found.loc["weight"], saved.loc["weight"])


def test_without_frames_there_are_none_on_disk_either(tmp_path):
    found = kn.load(posterior().save(tmp_path / "saved"))
    assert isinstance(found, kn.NoisyWeights) and found.frames is None and found.watched is None


# --- noisy model ------------------------------------------------------------------------------------------------------


def convolution(**settings: object) -> kn.Model:
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1))
    return kn.Model(net, kn.Gaussian(), **settings)  # type: ignore[arg-type]


def test_matrices_and_kernels_are_noisy_unless_others_are_named():
    assert noisy_names(convolution(), None) == ["0.weight", "3.weight"]
    assert noisy_names(convolution(), ("3.*", "0.bias")) == ["0.bias", "3.weight", "3.bias"]
    assert noisy_names(convolution(frozen="0.*"), None) == ["3.weight"]
    assert noisy_names(convolution(random="last_layer"), "*") == ["3.weight", "3.bias"]
    with pytest.raises(kn.InvalidArgument, match="no random weight matrix or kernel"):
        noisy_names(convolution(random="*bias"), None)
    with pytest.raises(kn.InvalidArgument, match="where='likelihood"):
        noisy_names(convolution(), "likelihood.*")


def test_the_rest_are_points_and_the_users_model_is_left_alone():
    own = convolution(prior={"*.bias": kn.Normal(0.2), "*": kn.LaplacePrior()})
    target = with_log_uniform(own, ["3.weight"])
    assert target.random_names == ["3.weight"] and target.prior.prior_of("3.weight") == kn.LogUniform()
    assert target.prior.prior_of("0.weight") == kn.LaplacePrior() and "0.weight" in target.point_names
    assert "3.bias" in own.random_names and own.prior.prior_of("3.weight") == kn.LaplacePrior()
    assert target.net is own.net and target.likelihood is own.likelihood


def test_posteriors_as_priors_and_learned_scales_are_refused():
    x = torch.randn(8, 1, 4)
    posterior = kn.MeanFieldVI(epochs=1).fit(convolution(), (x, x[:, 0, :1]))
    with pytest.raises(kn.Unsupported, match="the posterior to the method as start="):
        with_log_uniform(convolution(prior=posterior), ["3.weight"])
    with pytest.raises(kn.Unsupported, match="scale is learned"):
        with_log_uniform(convolution(prior=kn.EmpiricalBayes(kn.Normal(1.0))), ["3.weight"])


def test_replaced_priors_are_named():
    x = torch.randn(8, 1, 4)
    own = convolution(prior={"0.*": kn.LogUniform(), "*": kn.Normal(1.0)}, random=["0.weight", "3.weight"])
    (note,) = kn.GaussianDropout(epochs=1).fit(own, (x, x[:, 0, :1])).diagnostics.notes
    assert "replaced the prior of 3.weight by" in note
    assert not kn.GaussianDropout(epochs=1, where="0.weight").fit(own, (x, x[:, 0, :1])).diagnostics.notes
