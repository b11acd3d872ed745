"""Tests of variational inference with flows: shapes that no normal has, and bounds that are what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.network.params import Layout
from knowable.core.posterior.saving import load_posterior
from knowable.inference.variational.flow import Flow, FlowModule, FlowPosterior, NormalisingFlow
from knowable.inference.variational.flow_layers import KINDS, CouplingLayer, make_layers
from knowable.testing import BananaRegression, LinearGaussian
from tests.core.cases import DTYPE, linear_data, linear_model, mlp, same_params

DRAWS = 4000
CORRELATED = pytest.mark.parametrize("correlated", [False, True], ids=["scaled", "correlated"])


def divergence(
    problem: BananaRegression | LinearGaussian, posterior: kn.Posterior, seed: int
) -> tuple[float, float]:  # fmt: skip
    """KL(q ‖ posterior) from draws of q, and its standard error."""
    draws = posterior.sample(DRAWS, torch.Generator().manual_seed(seed))
    if isinstance(problem, BananaRegression):
        exact = problem.log_posterior(problem.as_flat(draws))
    else:
        normal = torch.distributions.MultivariateNormal(problem.mean, problem.covariance)
        exact = normal.log_prob(problem.as_flat(draws))
    ratio = posterior.log_prob(draws) - exact
    return ratio.mean().item(), ratio.std().item() / math.sqrt(DRAWS)


@pytest.mark.slow
def test_a_flow_follows_a_banana_as_no_normal_can(seed):
    # after 500 steps a flow is still on its way: over 14 seeds its KL was 0.17 to 0.29; after 1,500 it is 0.09 to 0.15,
    # where the normal has 0.42
    problem = BananaRegression()
    settings = {"epochs": 1500, "learning_rate": 0.03, "draws": 4}
    normal = kn.FullRankVI(**settings).fit(problem.model(), problem.data, seed=seed)
    flow = kn.FlowVI(**settings).fit(problem.model(), problem.data, seed=seed)
    lost = problem.divergence(normal.loc, normal.covariance)
    kl, error = divergence(problem, flow, seed)
    assert -4 * error < kl < 0.5 * lost - 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planar", "real_nvp"])
def test_more_steps_and_draws_bring_a_flow_closer_to_a_banana(seed, kind):
    problem = BananaRegression()
    method = kn.FlowVI(epochs=2000, learning_rate=0.02, draws=16, kind=kind)
    kl, error = divergence(problem, method.fit(problem.model(), problem.data, seed=seed), seed)
    assert kl < 0.15 + 4 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", [BananaRegression(), LinearGaussian.make(n=30, noise=0.7)], ids=["bent", "linear"])
def test_bound_and_divergence_make_up_the_evidence(seed, problem, kind):
    # they do wherever the fit has got to
    method = kn.FlowVI(epochs=60, learning_rate=0.05, draws=2, kind=kind, initial_scale=0.1)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    (kl, error), bound = divergence(problem, posterior, seed), posterior.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - problem.log_evidence) < 4 * math.hypot(bound.standard_error, error)


def test_a_flow_may_have_some_of_the_weights(seed):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1)), linear_data()
    posterior = kn.MeanFieldVI(epochs=3, families={"2.*": kn.families.Flow("planar", 2)}).fit(model, data, seed=seed)
    assert isinstance(posterior, kn.ProductPosterior)
    part = posterior.part_of("2.bias")
    assert isinstance(part, FlowPosterior) and part.layout.names == ("2.weight", "2.bias")
    assert isinstance(posterior.part_of("0.weight"), kn.DiagonalNormal)
    draws = posterior.sample(3)
    torch.testing.assert_close(
        posterior.log_prob(draws), part.log_prob(draws) + posterior.part_of("0.weight").log_prob(draws)
    )
    turned = kn.FlowVI(epochs=3, families={"0.*": kn.families.MeanField()}).fit(model, data, seed=seed)
    assert isinstance(turned.part_of("2.weight"), FlowPosterior)  # type: ignore[attr-defined]


def test_settings_reach_the_family():
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
    (part,) = kn.FlowVI(kind="radial", layers=3).objective(model, torch.zeros(3, 2), 3).parts
    assert [layer.kind for layer in part.flow.layers] == ["radial"] * 3  # type: ignore[attr-defined]


# --- flow family -----------------------------------------------------------------------------------------------------


LAYOUT = Layout(("weight", "bias"), (torch.Size([1, 2]), torch.Size([1])))
LOC = torch.tensor([0.5, -1.0, 2.0], dtype=DTYPE)


def trained(kind: str) -> FlowModule:
    """A flow somewhere after its start."""
    module = Flow(kind, hidden=4).build(LAYOUT, LOC, 0.3)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_as_independent_normals(seed, kind):
    module = Flow(kind).build(LAYOUT, LOC, 0.3)
    values, log_density = module.draw(50)
    normal = torch.distributions.Normal(LOC, 0.3)
    torch.testing.assert_close(log_density, normal.log_prob(values).sum(-1))
    assert values.shape == (50, 3) and module.layout is LAYOUT
    assert ((values - LOC) / 0.3).abs().max() < 6


@pytest.mark.parametrize("kind", KINDS)
def test_densities_of_draws_are_those_of_the_posterior(seed, kind):
    module = trained(kind)
    values, log_density = module.draw(20)
    posterior = module.posterior(linear_model(), seed=4)
    torch.testing.assert_close(posterior.log_prob(LAYOUT.views(values)), log_density, rtol=1e-6, atol=1e-8)
    assert posterior.seed == 4


@pytest.mark.parametrize("kind", KINDS)
def test_draws_and_densities_are_differentiable_in_every_parameter(seed, kind):
    module = trained(kind)
    values, log_density = module.draw(5)
    (values.square().sum() + log_density.sum()).backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in module.parameters())
    assert module.entropy() is None and module.moments() is None


@pytest.mark.parametrize("kind", ["radial", "real_nvp"])
def test_the_gradient_along_the_path_is_the_gradient(seed, kind):
    # of E[log q], which both estimate without bias: their means over repetitions agree within 5 standard errors
    module, repeats = trained(kind), 50
    params = list(module.parameters())
    found = []
    for along in (False, True):
        each = []
        for _ in range(repeats):
            values, log_density = module.draw(500)
            density = module.held_log_density(values) if along else log_density
            gradients = torch.autograd.grad(density.mean(), params, materialize_grads=True)
            each.append(torch.cat([gradient.flatten() for gradient in gradients]))
        found.append(torch.stack(each))
    error = sum(each.var(0) / repeats for each in found).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() <= 5 * error + 1e-12).all()
    assert module.prefers_path


def test_held_densities_are_those_of_the_draws_and_hold_the_flow(seed):
    module = trained("real_nvp")
    values, log_density = module.draw(7)
    held = module.held_log_density(values.detach())
    torch.testing.assert_close(held, log_density.detach())
    assert not held.requires_grad
    assert trained("planar").held_log_density(values) is None


def test_layers_and_width_are_as_asked_or_suit_the_size():
    def shape(family: Flow, size: int) -> tuple[int, int]:
        layout = Layout(("w",), (torch.Size([size]),))
        layers = family.build(layout, torch.zeros(size), 0.1).flow.layers
        return len(layers), layers[0].hidden if isinstance(layers[0], CouplingLayer) else 0

    assert shape(Flow(), 2) == shape(Flow("radial"), 5) == (8, 0)
    assert shape(Flow(), 10_001) == (4, 0)
    assert shape(Flow("real_nvp"), 2) == (4, 32)
    assert shape(Flow("real_nvp"), 1000) == (4, 4)
    assert shape(Flow("real_nvp"), 10_000) == (4, 1)
    assert shape(Flow("real_nvp", layers=3, hidden=7), 10_000) == (3, 7)


@pytest.mark.parametrize("knobs", [{"kind": "glow"}, {"layers": 0}, {"hidden": 0}, {"layers": 2.5}], ids=str)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises((kn.InvalidArgument, kn.InvalidType), match=next(iter(knobs))):
        Flow(**knobs)


# --- normalising flow ------------------------------------------------------------------------------------------------


def flow_of(
    kind: str, size: int, *, layers: int = 3, spread: float = 0.5, correlated: bool = False
) -> NormalisingFlow:  # fmt: skip
    """A flow that has been trained to something."""
    made = make_layers(kind, size, layers, hidden=4, like=torch.zeros(0, dtype=DTYPE))
    loc, scale = torch.randn(size, dtype=DTYPE), 0.5 + torch.rand(size, dtype=DTYPE)
    flow = NormalisingFlow(loc, scale, made, correlated=correlated)
    with torch.no_grad():
        for value in (flow.loc, flow.log_scale, flow.mix) if flow.mix is not None else ():
            value.add_(0.5 * torch.randn_like(value))
        for layer in flow.layers:
            for value in layer.parameters():
                value.add_(spread * torch.randn_like(value))
    return flow


def grid(low: float, high: float, count: int) -> tuple[Tensor, float]:
    """Points of a square ``(count², 2)`` and the area that each stands for."""
    axis = torch.linspace(low, high, count, dtype=DTYPE)
    return torch.cartesian_prod(axis, axis), ((high - low) / (count - 1)) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_density_integrates_to_one(seed, kind):
    # the rectangle rule on smooth densities that vanish at the border errs by far less than a hundredth; what lies
    # outside of the square is checked by draws
    flow = flow_of(kind, 2, spread=0.3)
    with torch.no_grad():
        values, area = grid(-25.0, 25.0, 1001)
        assert flow(torch.randn(20_000, 2, dtype=DTYPE))[0].abs().max() < 25
        assert flow.inverse(values)[1].exp().sum().item() * area == pytest.approx(1.0, abs=0.01)


@CORRELATED
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_know_their_density_and_their_noise(seed, kind, size, correlated):
    flow, noise = flow_of(kind, size, correlated=correlated), torch.randn(30, size, dtype=DTYPE)
    values, log_density = flow(noise)
    back, again = flow.inverse(values)
    torch.testing.assert_close(back, noise, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(again, log_density, rtol=1e-6, atol=1e-8)


@CORRELATED
@pytest.mark.parametrize("kind", KINDS)
def test_the_density_is_that_of_a_change_of_variables(seed, kind, correlated):
    flow, noise = flow_of(kind, 3, correlated=correlated), torch.randn(5, 3, dtype=DTYPE)
    _, log_density = flow(noise)
    for row, found in zip(noise, log_density, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda each: flow(each.unsqueeze(0))[0][0], row)
        normal = -0.5 * row.square().sum() - 1.5 * math.log(2 * math.pi)
        torch.testing.assert_close(found, normal - torch.linalg.slogdet(jacobian)[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_absorbs_what_was_learned_and_the_flow_stays_the_same(seed, kind):
    flow, noise = flow_of(kind, 4, correlated=True), torch.randn(9, 4, dtype=DTYPE)
    before, base = flow(noise), flow.base.clone()  # type: ignore[union-attr]
    flow.absorb()
    torch.testing.assert_close(flow(noise), before)
    assert not torch.allclose(flow.base, base) and flow.mix.abs().sum() == 0  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_can_be_any_normal(seed, kind):
    problem = LinearGaussian.make(n=30, d=2, noise=0.1, seed=seed)
    module = trained(kind)
    module.fit_normal(problem.mean, problem.precision)
    values, log_density = module.draw(20)
    exact = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    torch.testing.assert_close(log_density, exact.log_prob(values))


def test_many_weights_have_no_correlations_and_no_nearest_normal():
    layout = Layout(("w",), (torch.Size([301]),))
    module = Flow().build(layout, torch.zeros(301), 0.1)
    assert module.flow.base is None and not module.prefers_path
    with pytest.raises(kn.Unsupported, match="nearest to a normal"):
        module.fit_normal(torch.zeros(301), torch.eye(301))


@CORRELATED
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_flow_is_a_mean_field_normal(seed, kind, correlated):
    loc, scale = torch.randn(4, dtype=DTYPE), torch.rand(4, dtype=DTYPE) + 0.1
    flow = NormalisingFlow(loc, scale, make_layers(kind, 4, 3, hidden=4, like=loc), correlated=correlated)
    noise = torch.randn(6, 4, dtype=DTYPE)
    values, log_density = flow(noise)
    torch.testing.assert_close(values, loc + scale * noise)
    torch.testing.assert_close(log_density, torch.distributions.Normal(loc, scale).log_prob(values).sum(-1))
    assert flow.size == 4


# --- flow posterior --------------------------------------------------------------------------------------------------


def posterior_of(
    kind: str, model: kn.Model | None = None, *, spread: float = 0.5, correlated: bool = False, **common
) -> FlowPosterior:  # fmt: skip
    model = model or linear_model()
    start = model.params()
    layout = Layout.of({name: start[name] for name in reversed(model.random_names)})  # not the model's own order
    flow = flow_of(kind, layout.size, spread=spread, correlated=correlated).to(model.dtype)
    return FlowPosterior(model, layout, flow, points={name: start[name] for name in model.point_names}, **common)


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_of_draws_is_that_of_the_flow(seed, kind):
    posterior = posterior_of(kind)
    values, expected = posterior._draws(7, torch.Generator().manual_seed(seed))
    draws = posterior.sample(7, torch.Generator().manual_seed(seed))
    torch.testing.assert_close(posterior.layout.flatten(draws), values)
    torch.testing.assert_close(posterior.log_prob(draws), expected, rtol=1e-6, atol=1e-8)
    one = {name: value[0] for name, value in draws.items()}
    torch.testing.assert_close(posterior.log_prob(one), expected[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_in_single_precision_the_density_is_nearly_that_in_double(seed, kind):
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
    posterior = posterior_of(kind, model)
    values, expected = posterior._draws(20, torch.Generator().manual_seed(seed))
    found = posterior.log_prob(posterior.layout.views(values))
    assert found.dtype == torch.float32
    # draws are rounded to 24 bits, which the steepest of three layers enlarges
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_moments_of_a_flow_that_only_stretches_and_shifts_are_known(seed):
    # a coupling layer whose small network is constant: the second number is exp(s) z + t
    posterior = posterior_of("real_nvp", spread=0.0)
    flow = posterior.flow
    with torch.no_grad():
        flow.layers[0].outward_bias[:] = torch.tensor([[[0.4]], [[1.5]]], dtype=DTYPE)  # s, t of the odd number
    loc, scale = flow.loc, flow.log_scale.exp()
    raw = 2 * math.tanh(0.2)
    mean, std = (posterior.layout.flatten(each) for each in (posterior.mean(), posterior.std()))
    move, stretch = torch.tensor([0.0, 1.5, 0.0], dtype=DTYPE), torch.tensor([0.0, raw, 0.0], dtype=DTYPE).exp()
    torch.testing.assert_close(mean, loc + scale * move)  # what is odd cancels in pairs of draws
    # the standard deviation of 8192 pairs errs by 1 / sqrt(2 · 8192) of itself; 5 of those
    assert ((std / (scale * stretch) - 1).abs() < 5 / math.sqrt(2 * 8192)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_draws(seed, kind, generator):
    posterior, n = posterior_of(kind, correlated=True), 40_000
    draws = posterior.sample(n, generator)
    mean, std = posterior.mean(), posterior.std()
    for name, value in draws.items():
        # both sides are draws: 16,384 (as many or better, being in pairs) and n. The error of a standard deviation
        # depends on the fourth moment, here that of the draws
        share = math.sqrt(1 / 16_384 + 1 / n)
        assert ((value.mean(0) - mean[name]).abs() < 5 * share * std[name]).all()
        kurtosis = ((value - value.mean(0)) / value.std(0)).pow(4).mean(0)
        # pairs of opposite noise have nearly equal squares: half as many draws for the fixed ones
        share = math.sqrt(2 / 16_384 + 1 / n)
        assert ((value.std(0) / std[name] - 1).abs() < 5 * share * 0.5 * kurtosis.sqrt()).all()


def test_moments_are_computed_once_and_are_the_callers_own(seed):
    posterior = posterior_of("planar")
    first = posterior.mean()
    first["bias"].fill_(7.0)
    assert not torch.equal(posterior.mean()["bias"], first["bias"])
    assert same_params(posterior.mean(), posterior.mean())


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_changes_nothing(kind, random, tmp_path):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random=random)
    correlated = random == "*"
    posterior = posterior_of(
        kind, model, correlated=correlated, seed=5, log_evidence=kn.LogEvidence(-3.0, "bound", 0.1)
    )
    before = torch.get_rng_state()
    loaded = load_posterior(posterior.save(tmp_path / "saved"))
    assert torch.equal(before, torch.get_rng_state())  # loading draws nothing
    assert type(loaded) is FlowPosterior and loaded.layout == posterior.layout
    draws = [each.sample(5, torch.Generator().manual_seed(0)) for each in (loaded, posterior)]
    assert same_params(*draws)
    assert torch.equal(loaded.log_prob(draws[0]), posterior.log_prob(draws[0]))
    assert same_params(loaded.mean(), posterior.mean()) and same_params(loaded.std(), posterior.std())
    x = torch.randn(4, 2, dtype=DTYPE)
    assert torch.equal(loaded.predict(x, 9).samples, posterior.predict(x, 9).samples)
    assert repr(loaded) == repr(posterior)


def test_the_flow_is_a_copy(seed):
    model = linear_model()
    layout = Layout.of(model.params())
    flow = flow_of("radial", layout.size)
    posterior = FlowPosterior(model, layout, flow)
    before = posterior.mean()
    with torch.no_grad():
        flow.loc.add_(1.0)
    assert same_params(posterior.mean(), before)
    assert not any(value.requires_grad for value in posterior.sample(2).values())


def test_a_flow_is_no_prior_and_wants_all_its_parameters():
    posterior = posterior_of("planar")
    with pytest.raises(kn.Unsupported, match="cannot be the prior"):
        posterior.as_prior()
    with pytest.raises(kn.InvalidArgument, match="params lacks bias"):
        posterior.log_prob({"weight": torch.zeros(1, 2, dtype=DTYPE)})
