"""Tests of the Laplace posteriors' predictions: slow Jacobians and dense covariances are the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.laplace import function_covariance
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.likelihoods.categorical import average_log_softmax
from knowable.testing import network_case
from knowable.testing.networks import ONE_INPUT
from tests.inference.laplace.oracle import expansion_of, jacobians

STRUCTURES = ["full", "kron", "diag", "lowrank"]
DTYPE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::knowable.WorseThanNetwork")  # the networks are not trained


def fitted(name: str, structure: str, **settings) -> tuple[LaplacePosterior, Tensor]:
    case = network_case(name, rows=6, dtype=DTYPE)
    method = kn.Laplace(structure=structure, rank=4, tune="never", **settings)
    posterior = method.fit(case.model(), case.data, start="network")
    assert isinstance(posterior, LaplacePosterior)
    return posterior, case.x


def dense_covariance(posterior: LaplacePosterior, layout: Layout) -> Tensor:
    prior = posterior.as_prior()
    joint = prior.joint_normal(layout)
    return (layout.flatten(prior.normal.precision_diagonal()).diag() if joint is None else joint[1]).inverse()


def slow_covariances(posterior: LaplacePosterior, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), dtype=torch.long)
    model = posterior.model
    if not isinstance(model.likelihood, kn.Categorical):
        y = torch.zeros(model.forward(posterior.mean(), x, buffers=posterior.buffers).shape, dtype=DTYPE)
    elif x.dim() == 2:
        y = torch.zeros(x.shape, dtype=torch.long)  # a label for each step
    expansion = expansion_of(model, (x, y), params=posterior.mean())
    jacobian = jacobians(expansion)
    return jacobian @ dense_covariance(posterior, expansion.layout) @ jacobian.mT


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ONE_INPUT)
def test_outputs_are_normal_with_the_slow_covariance(name, structure):
    posterior, x = fitted(name, structure)
    mean = posterior.model.forward(posterior.mean(), x, buffers=posterior.buffers)
    outputs = posterior._closed_form(x, 5, 0, None, mean[0].numel())
    expected = slow_covariances(posterior, x)
    torch.testing.assert_close(outputs.covariance, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(outputs.mean, mean)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_adds_the_noise(structure):
    posterior, x = fitted("mlp", structure)
    prediction = posterior.predict(x)
    variance = slow_covariances(posterior, x).squeeze(-1)
    noise = posterior.points["likelihood.log_noise"].exp() ** 2
    torch.testing.assert_close(prediction.epistemic, variance)
    torch.testing.assert_close(prediction.variance, variance + noise)


def test_classes_are_averaged_over_normal_logits():
    posterior, x = fitted("batchnorm_cnn", "kron")
    prediction = posterior.predict(x)
    logits = posterior.model.forward(posterior.mean(), x, buffers=posterior.buffers)
    expected = average_log_softmax(logits, slow_covariances(posterior, x))
    torch.testing.assert_close(prediction.log_mean_probs, expected)


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "lstm", "transformer", "tied"])
def test_drawn_functions_are_linear_in_the_drawn_weights(name):
    posterior, x = fitted(name, "diag", prediction="linearised_sampling")
    draws = posterior.draw_block(0, 3, 3, 0)
    layout = Layout.of({key: posterior.mean()[key] for key in posterior.loc})
    y = posterior.model.forward(posterior.mean(), x, buffers=posterior.buffers)
    target = y.argmax(1) if isinstance(posterior.model.likelihood, kn.Categorical) else y
    expansion = expansion_of(posterior.model, (x, target), params=posterior.mean())
    away = layout.flatten(draws) - layout.flatten(posterior.mean())
    expected = y.flatten(1) + torch.einsum("nod,kd->kno", jacobians(expansion), away)
    network = posterior.model.network_params(draws)
    for vectorise in (True, False):
        found = posterior.run_draws(network, x, first=0, seed=0, vectorise=vectorise)
        torch.testing.assert_close(found.flatten(2), expected)


def test_an_operation_without_forward_derivative_is_pulled_back_twice():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.layer(x))

    net = Net().double()
    x = torch.randn(5, 2, dtype=DTYPE)
    model = kn.Model(net, kn.Gaussian(0.1))
    posterior = kn.Laplace(prediction="linearised_sampling").fit(model, (x, x[:, :1]), start="network")
    draws = posterior.draw_block(0, 2, 2, 0)
    design = torch.cat([x, torch.ones(5, 1, dtype=DTYPE)], 1)
    inner = net.layer(x).detach()
    away = torch.cat([draws["layer.weight"] - net.layer.weight, draws["layer.bias"].unsqueeze(-1) - net.layer.bias], -1)
    expected = inner**2 + 2 * inner * (design @ away.squeeze(1).T).T.unsqueeze(-1)
    torch.testing.assert_close(posterior.run_draws(draws, x, first=0, seed=0, vectorise=False), expected.detach())


def test_sampling_runs_the_network_itself():
    posterior, x = fitted("mlp", "kron", prediction="sampling")
    draws = posterior.draw_block(0, 4, 4, posterior.seed)
    expected = torch.stack([
        posterior.model.forward({k: v[i] for k, v in draws.items()}, x, buffers=posterior.buffers) for i in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(posterior.predict(x, samples=4).samples, expected)


def test_all_three_ways_agree_where_the_network_is_linear():
    # 4,000 draws: variances err by sqrt(2 / 4000) of themselves, 5 of those
    posterior, x = fitted("linear", "full")
    exact = posterior.predict(x)
    for way in ("linearised_sampling", "sampling"):
        found = posterior.with_prediction(way).predict(x, samples=4000)
        assert ((found.epistemic / exact.epistemic - 1).abs() < 5 * (2 / 4000) ** 0.5).all()
    assert posterior.prediction == "linearised"


def test_the_way_of_predicting_is_kept_on_disk(tmp_path):
    posterior, x = fitted("mlp", "lowrank", prediction="linearised_sampling")
    posterior.save(tmp_path / "saved")
    loaded = kn.load(tmp_path / "saved")
    assert loaded.prediction == "linearised_sampling"
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)


def test_an_unknown_way_is_refused():
    posterior, _ = fitted("linear", "full")
    with pytest.raises(kn.InvalidArgument, match="prediction must be one of 'linearised', 'linearised_sampling'"):
        posterior.with_prediction("linear")


# --- many outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_head_with_very_many_outputs_has_exact_variances(structure):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 150)).double()
    x, y = torch.randn(8, 3, dtype=DTYPE), torch.randint(0, 2, (8, 150))
    model = kn.Model(net, kn.Bernoulli(), random="last_layer")
    posterior = kn.Laplace(structure=structure, max_columns=5).fit(model, (x, y), start="network")
    expansion = expansion_of(model, (x, y))
    jacobian = jacobians(expansion)
    variance = torch.einsum("nod,de,noe->no", jacobian, dense_covariance(posterior, expansion.layout), jacobian)
    expected = (net(x) / (1 + torch.pi / 8 * variance).sqrt()).sigmoid()
    prediction = posterior.predict(x, samples=3)
    torch.testing.assert_close(prediction.probs, expected.detach())
    assert prediction.samples.shape == (3, 8, 150)


class Segments(nn.Module):
    """Three classes at every one of 64 pixels."""

    def __init__(self, kernel: int = 1):
        super().__init__()
        self.features, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.features(x)))


def test_dense_outputs_are_predicted_from_drawn_functions():
    x, y = torch.randn(4, 1, 8, 8, dtype=DTYPE), torch.randint(0, 3, (4, 8, 8))
    model = kn.Model(Segments().double(), kn.Categorical())
    posterior = kn.Laplace(max_columns=8).fit(model, (x, y), start="network")
    prediction = posterior.predict(x, samples=6)
    assert prediction.probs.shape == (4, 3, 8, 8)
    torch.testing.assert_close(
        prediction.samples, posterior.with_prediction("linearised_sampling").predict(x, samples=6).samples
    )
    torch.testing.assert_close(prediction.probs, prediction.samples.mean(0))
    assert torch.isfinite(prediction.log_prob(y)).all()


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_head_over_pixels_averages_classes_in_closed_form(structure, kernel):
    net = Segments(kernel).double()
    x, y = torch.randn(3, 1, 8, 6, dtype=DTYPE), torch.randint(0, 3, (3, 8, 6))
    model = kn.Model(net, kn.Categorical(), random="last_layer")
    posterior = kn.Laplace(structure=structure, max_columns=8).fit(model, (x, y), start="network")
    expansion = expansion_of(model, (x, y))
    jacobian = jacobians(expansion)
    covariance = jacobian @ dense_covariance(posterior, expansion.layout) @ jacobian.mT  # of all pixels of a row
    prediction = posterior.predict(x, samples=5)
    torch.testing.assert_close(prediction.probs, average_log_softmax(net(x), covariance).exp().detach())
    drawn = posterior.with_prediction("linearised_sampling").predict(x, samples=5)
    torch.testing.assert_close(prediction.samples, drawn.samples)
    one_by_one = torch.cat([posterior.predict(row, samples=5, max_memory=2**20).probs for row in x.split(1)])
    torch.testing.assert_close(prediction.probs, one_by_one)


def test_a_head_over_many_pixels_has_its_curvature_to_all_digits():
    # a common shift of all logits changes no probability: rounding must not make its curvature negative
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, 1, 128, 128, generator=generator) + 3.0
    y = (3 * (x[:, 0] - 3.0)).long().clamp(0, 2)
    net = Segments()
    model = kn.Model(net, kn.Categorical(), kn.Normal(1.0), random="last_layer")
    posterior = kn.Laplace(structure="full").fit(model, (x, y), start="network")
    double = kn.Model(copy.deepcopy(net).double(), kn.Categorical(), kn.Normal(1.0), random="last_layer")
    exact = kn.Laplace(structure="full").fit(double, (x.double(), y), start="network")
    covariances = [each.normal.covariance_matrix().double() for each in (posterior, exact)]
    torch.testing.assert_close(*covariances, rtol=2e-3, atol=1e-4)  # of entries up to 1/3
    assert "random combinations" not in " ".join(posterior.diagnostics.notes)


def test_a_head_of_many_classes_over_pixels_is_predicted_from_draws(monkeypatch):
    monkeypatch.setattr(function_covariance, "_MOST_IN_A_PLACE", 2)
    x, y = torch.randn(3, 1, 8, 8, dtype=DTYPE), torch.randint(0, 3, (3, 8, 8))
    model = kn.Model(Segments().double(), kn.Categorical(), random="last_layer")
    prediction = kn.Laplace(max_columns=8).fit(model, (x, y), start="network").predict(x, samples=6)
    torch.testing.assert_close(prediction.probs, prediction.samples.mean(0))


def test_a_head_over_pixels_has_exact_variances():
    x, y = torch.randn(3, 1, 8, 8, dtype=DTYPE), torch.randint(0, 2, (3, 3, 8, 8))
    net = Segments().double()
    model = kn.Model(net, kn.Bernoulli(), random="last_layer")
    posterior = kn.Laplace().fit(model, (x, y), start="network")
    expansion = expansion_of(model, (x, y))
    jacobian = jacobians(expansion)
    variance = torch.einsum("nod,de,noe->no", jacobian, dense_covariance(posterior, expansion.layout), jacobian)
    logits = net(x) / (1 + torch.pi / 8 * variance.view(3, 3, 8, 8)).sqrt()
    torch.testing.assert_close(posterior.predict(x, samples=2).probs, logits.sigmoid().detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_head_has_the_slow_covariance(structure, bias):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=bias)).double()
    x, y = torch.randn(8, 3, dtype=DTYPE), torch.arange(8) % 4
    model = kn.Model(net, kn.Categorical(), random="last_layer")
    posterior = kn.Laplace(structure=structure, rank=4).fit(model, (x, y), start="network")
    assert isinstance(posterior, LaplacePosterior)
    expansion = expansion_of(posterior.model, (x, y))
    jacobian = jacobians(expansion)
    expected = jacobian @ dense_covariance(posterior, expansion.layout) @ jacobian.mT
    torch.testing.assert_close(
        posterior._closed_form(x, 2, 0, None, expected.shape[-1]).covariance, expected, rtol=1e-6, atol=1e-8
    )


def test_many_outputs_under_low_rank_have_the_slow_covariance():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 20)).double()  # more than go together
    x, y = torch.randn(20, 3, dtype=DTYPE), torch.arange(20)
    posterior = kn.Laplace(structure="lowrank", rank=3).fit(kn.Model(net, kn.Categorical()), (x, y), start="network")
    assert isinstance(posterior, LaplacePosterior)
    expansion = expansion_of(posterior.model, (x, y))
    jacobian = jacobians(expansion)
    expected = jacobian @ dense_covariance(posterior, expansion.layout) @ jacobian.mT
    torch.testing.assert_close(
        posterior._closed_form(x, 2, 0, None, expected.shape[-1]).covariance, expected, rtol=1e-6, atol=1e-8
    )
