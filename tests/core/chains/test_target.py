"""Tests of targets: the log joint of a model and the log density of a user, for all chains at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains import target as target_module
from knowable.core.chains.target import DensityTarget, ModelTarget, NormalDensity
from knowable.core.model.data import Data, as_data
from knowable.core.network.params import Layout
from knowable.priors import Flat, LaplacePrior, StudentTPrior
from tests.core.cases import DTYPE, Tied, diagonal_posterior, full_posterior, linear_data, linear_model, mlp


def model_target(model: kn.Model, data, **settings) -> ModelTarget:
    start = model.params()
    points = {name: start[name] for name in model.point_names}
    return ModelTarget(model, as_data(data, model), points=points, buffers=model.buffers(), **settings)


def chains(target, count: int = 3) -> Tensor:
    return torch.randn(count, target.layout.size, dtype=DTYPE)


def by_autograd(model: kn.Model, data, layout: Layout, position: Tensor) -> tuple[Tensor, Tensor]:
    """Log joints and gradients from the model's own ``log_joint``, one chain at a time."""
    start = model.params()
    x, y = as_data(data, model).tensors
    values, gradients = [], []
    for each in position:
        flat = each.clone().requires_grad_()
        value = model.log_joint({**start, **layout.views(flat)}, x, y, len(x))
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, flat)[0])
    return torch.stack(values), torch.stack(gradients)


def assert_log_joint(model: kn.Model, data, *, mode: str = "eager") -> None:
    """The target is the model's log joint, but for the constant that the prior of point estimates adds."""
    target = model_target(model, data, mode=mode)
    position = chains(target)
    value, gradient = target.value_and_grad(position)
    expected, slope = by_autograd(model, data, target.layout, position)
    torch.testing.assert_close(value - value[0], expected - expected[0], rtol=1e-9, atol=1e-9)
    if not model.point_names:
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(target.value(position), value, rtol=1e-9, atol=1e-9)


# a recording of the network alone, and the network with its prior itself: recording takes most of a second
PRIORS = pytest.mark.parametrize(
    ("prior", "mode"), [(kn.Normal(1.0), "auto"), (LaplacePrior(1.0), "eager")], ids=["closed form", "any prior"]
)


class Recurrent(nn.Module):
    """An LSTM, which ``vmap`` cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


# --- the log joint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "traced", "auto"])
def test_a_networks_target_is_the_models_log_joint(mode):
    assert_log_joint(kn.Model(mlp().to(DTYPE), kn.Gaussian()), linear_data(), mode=mode)


@pytest.mark.parametrize(
    "prior",
    [
        kn.Normal(0.7, loc=0.3),
        LaplacePrior(0.5),
        StudentTPrior(3.0),
        Flat(),
        {"*weight": kn.Normal(2.0), "*": LaplacePrior(0.3)},
        {"*weight": kn.Normal(2.0), "*": kn.Normal(0.1)},
        {"likelihood*": kn.Normal(0.4), "*": kn.Normal(0.1)},
    ],
    ids=str,
)
def test_any_prior_is_part_of_the_target(prior):
    mode = "traced" if isinstance(prior, LaplacePrior) else "eager"  # normal ones are recorded above
    assert_log_joint(kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior), linear_data(), mode=mode)


@pytest.mark.parametrize("earlier", [diagonal_posterior, full_posterior])
def test_a_posterior_as_prior_is_part_of_the_target(earlier):
    net = mlp().to(DTYPE)
    prior = earlier(kn.Model(net, kn.Gaussian()))
    assert_log_joint(kn.Model(net, kn.Gaussian(), prior), linear_data())


def test_a_posterior_with_points_as_prior_is_part_of_the_target():
    net = mlp().to(DTYPE)
    prior = diagonal_posterior(kn.Model(net, kn.Gaussian(), random="last_layer"))
    assert_log_joint(kn.Model(net, kn.Gaussian(), prior), linear_data())


@pytest.mark.parametrize("prior", [kn.Normal(1.0), LaplacePrior(1.0)], ids=str)
def test_point_estimates_and_frozen_parameters_stay_where_they_are(prior):
    assert_log_joint(kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior, random="last_layer"), linear_data())
    assert_log_joint(kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior, frozen="0.*"), linear_data())


def test_weights_used_twice_are_one_parameter():
    x = torch.randn(10, 2, dtype=DTYPE)
    assert_log_joint(kn.Model(Tied().to(DTYPE), kn.Gaussian(0.5)), (x, x))


def test_batch_normalisation_uses_its_running_statistics():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE)
    net[1].running_mean = torch.randn(4, dtype=DTYPE)
    net[1].running_var = torch.rand(4, dtype=DTYPE) + 0.5
    assert_log_joint(kn.Model(net, kn.Gaussian(0.5)), linear_data())


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_networks_that_vmap_refuses_are_run_one_by_one(mode):
    x = torch.randn(6, 5, 2, dtype=DTYPE)
    assert_log_joint(kn.Model(Recurrent().to(DTYPE), kn.Gaussian(0.5)), (x, x[:, 0, :1]), mode=mode)


def test_attention_and_dropout_are_in_evaluation_mode():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 1)).to(DTYPE).train()
    x = torch.randn(6, 3, 4, dtype=DTYPE)
    assert_log_joint(kn.Model(net, kn.Gaussian(0.5)), (x, x[:, 0, :1]))


def test_classes_are_scored_as_classes():
    x = torch.randn(12, 2, dtype=DTYPE)
    assert_log_joint(kn.Model(mlp(outputs=3).to(DTYPE), kn.Categorical()), (x, torch.arange(12) % 3))


# --- blocks of chains and rows ---------------------------------------------------------------------------------------


@PRIORS
@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 17, pytest.param(40, marks=pytest.mark.slow)]
)
def test_chains_in_blocks_are_the_chains(count, prior, mode):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior), linear_data()
    target = model_target(model, data, mode=mode)
    position = chains(target, count)
    value, gradient = target.value_and_grad(position)
    assert gradient.shape == position.shape and value.shape == (count,)
    for k in (0, count // 2, count - 1):
        alone = model_target(model, data, mode=mode).value_and_grad(position[k : k + 1])
        torch.testing.assert_close(value[k : k + 1], alone[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradient[k : k + 1], alone[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(target.value(position), value, rtol=1e-9, atol=1e-9)


@PRIORS
@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 20_000])
def test_rows_in_blocks_are_the_rows(budget, prior, mode, monkeypatch):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior), linear_data(37)
    whole = model_target(model, data, mode=mode)
    position = chains(whole)
    monkeypatch.setattr(target_module, "_BLOCK_BYTES", budget)
    cut = model_target(model, data, mode=mode)
    assert len(cut.rows(3)) > 1
    assert sum(len(x) for x, _ in cut.rows(3)) == 37
    for left, right in zip(whole.value_and_grad(position), cut.value_and_grad(position), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cut.value(position), whole.value(position), rtol=1e-9, atol=1e-9)


@PRIORS
def test_a_loader_gives_the_same_target_as_its_tensors(prior, mode):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior), linear_data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=7, shuffle=True)
    position = chains(model_target(model, data, mode=mode))
    expected, found = (model_target(model, each, mode=mode).value_and_grad(position) for each in (data, loader))
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


# --- mini-batches ----------------------------------------------------------------------------------------------------


@PRIORS
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_batches_of_equal_size_average_to_the_whole(prior, mode, temperature):
    # each batch stands for all rows: over a partition into equal batches the mean is exact
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(), prior), linear_data(20)
    target = model_target(model, data, temperature=temperature, mode=mode)
    position = chains(target)
    x, y = target.data.tensors
    found = [target.value_and_grad(position, (a, b)) for a, b in zip(x.split(5), y.split(5), strict=True)]
    value, gradient = target.value_and_grad(position)
    torch.testing.assert_close(torch.stack([v for v, _ in found]).mean(0), value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack([g for _, g in found]).mean(0), gradient, rtol=1e-9, atol=1e-9)


def test_a_batch_of_all_rows_is_the_whole():
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian()), linear_data(20)
    target = model_target(model, data)
    position = chains(target, 20)
    for left, right in zip(
        target.value_and_grad(position, target.data.tensors), target.value_and_grad(position), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


# --- temperature and counting ----------------------------------------------------------------------------------------


def density_target(**settings) -> DensityTarget:
    layout = Layout.of({"w": torch.zeros(2, 2), "s": torch.zeros(())})
    return DensityTarget(lambda p: -(p["w"] ** 2).sum() - (p["s"] - 1) ** 4, layout, **settings)


@pytest.mark.parametrize("temperature", [4.0, torch.tensor([1.0, 2.0, 8.0], dtype=DTYPE)], ids=["all", "each"])
def test_a_temperature_divides_values_and_gradients(temperature):
    plain, warm = density_target(), density_target(temperature=1.0)
    warm.temperature = temperature
    position = chains(plain)
    value, gradient = plain.value_and_grad(position)
    column = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    found = warm.value_and_grad(position)
    torch.testing.assert_close(found[0], value / temperature)
    torch.testing.assert_close(found[1], gradient / column)
    torch.testing.assert_close(warm.value(position), value / temperature)


def test_a_density_takes_its_parameters_by_name_and_shape():
    target = density_target()
    position = chains(target)
    value, gradient = target.value_and_grad(position)
    torch.testing.assert_close(value, -(position[:, :4] ** 2).sum(1) - (position[:, 4] - 1) ** 4)
    torch.testing.assert_close(gradient[:, :4], -2 * position[:, :4])
    torch.testing.assert_close(gradient[:, 4], -4 * (position[:, 4] - 1) ** 3)


@pytest.mark.parametrize("wrong", [lambda p: 0.0, lambda p: None, lambda p: p["w"], lambda p: (p["s"], p["s"])])
def test_a_density_that_is_not_one_number_is_refused(wrong):
    target = DensityTarget(wrong, Layout.of({"w": torch.zeros(2), "s": torch.zeros(())}))
    with pytest.raises(kn.KnowableError, match="log_density must return one number"):
        target.value_and_grad(torch.zeros(2, 3))


def test_gradients_are_counted_for_every_chain():
    target = density_target()
    target.value_and_grad(chains(target, 3))
    target.value_and_grad(chains(target, 2))
    assert target.gradients == 5
    model = model_target(linear_model(), linear_data())
    model.value_and_grad(chains(model, 40))
    assert model.gradients == 40


# --- the normal prior in closed form ---------------------------------------------------------------------------------


@pytest.mark.parametrize("simple", [True, False])
def test_independent_normals_have_the_density_of_torchs(simple):
    mean = torch.zeros(4, dtype=DTYPE) if simple else torch.randn(4, dtype=DTYPE)
    scale = torch.full((4,), 0.7, dtype=DTYPE) if simple else torch.rand(4, dtype=DTYPE) + 0.5
    density = NormalDensity(mean, scale**-2)
    position = torch.randn(3, 4, dtype=DTYPE, requires_grad=True)
    exact = torch.distributions.Normal(mean, scale).log_prob(position).sum(1)
    (slope,) = torch.autograd.grad(exact.sum(), position)
    exact, position = exact.detach(), position.detach()
    torch.testing.assert_close(density.value(position), exact)
    value, gradient = density.add_to(position, torch.ones(3, dtype=DTYPE), torch.ones(3, 4, dtype=DTYPE))
    torch.testing.assert_close(value, 1 + exact)
    torch.testing.assert_close(gradient, 1 + slope)


class Unused(nn.Module):
    """A network with a parameter that its output does not depend on, and one that is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.level = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.level.expand(len(x), 1)


@pytest.mark.parametrize("net", [mlp(), Unused()], ids=["mlp", "unused"])
@pytest.mark.parametrize("count", [1, 3])
def test_asking_again_gives_the_same_and_leaves_the_positions_alone(net, count):
    target = model_target(kn.Model(net.to(DTYPE), kn.Gaussian(0.5)), linear_data())
    position = chains(target, count)
    kept = position.clone()
    first = [each.clone() for each in target.value_and_grad(position)]
    again = target.value_and_grad(position)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(position, kept)
    expected = by_autograd(target.model, target.data.tensors, target.layout, position)
    for left, right in zip(first, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_priors_that_are_not_normal_have_no_such_form():
    for prior in (LaplacePrior(1.0), Flat(), {"weight": kn.Normal(1.0), "*": StudentTPrior(3.0)}):
        model = linear_model(prior=prior)
        assert NormalDensity.of(model, Layout.of(model.params())) is None


@pytest.mark.parametrize("prior", [kn.Normal(1.0), LaplacePrior(1.0)], ids=str)
def test_fewer_rows_than_were_announced_stand_for_all_of_them(prior):
    # as in every other method, where a batch stands for all rows; the prior counts once
    model, (x, y) = linear_model(prior=prior), linear_data(20)
    target = ModelTarget(model, Data([(x, y)], 40), points={}, buffers=model.buffers())
    position = chains(target)
    expected = torch.stack([model.log_joint(target.layout.views(each), x, y, 40) for each in position])
    torch.testing.assert_close(target.value(position), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(target.value_and_grad(position)[0], expected, rtol=1e-9, atol=1e-9)
