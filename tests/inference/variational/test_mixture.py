"""Tests of mixtures: one component is mean field, two find two modes, and the bounds are what they are said to be."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.prediction.components import normal_log_prob
from knowable.testing import LinearGaussian
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model, mlp, same_params
from tests.inference.variational.oracle import flat_moments

QUICK = {"epochs": 600, "learning_rate": 0.03}
SLACK = 0.15  # what Adam's last steps leave of a bound, in nats: see test_mean_field.py


class Squared(nn.Module):
    """x w²: w and -w are the same function, so that the posterior has two modes of the same shape."""

    def __init__(self, start: float = 0.8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.square()


NOISE = 0.5
X = torch.linspace(0.5, 1.5, 10, dtype=DTYPE).unsqueeze(1)


def two_modes(seed: int) -> tuple[kn.Model, tuple[Tensor, Tensor], float]:
    """A model of one weight whose posterior has two modes, its data, and the log evidence by integration."""
    generator = torch.Generator().manual_seed(seed)
    y = X + NOISE * torch.randn(X.shape, generator=generator, dtype=DTYPE)  # w is 1 or -1
    w = torch.linspace(-6, 6, 24_001, dtype=DTYPE)
    log_joint = normal_log_prob(w, 0.0, 1.0) + normal_log_prob(y, X * w.square(), NOISE).sum(0)
    evidence = log_joint.logsumexp(0).item() + math.log(12 / 24_000)
    return kn.Model(Squared(), kn.Gaussian(NOISE)), (X, y), evidence


@functools.cache
def fitted(seed: int) -> tuple[kn.Mixture, kn.DiagonalNormal, float]:
    """Two components and one on the same two modes, and the log evidence."""
    model, data, evidence = two_modes(seed)
    start = kn.Particles(model, {"w": torch.tensor([[0.8], [-0.8]], dtype=DTYPE)})
    mixture = kn.MixtureVI(2, **QUICK, draws=4, start=start).fit(model, data, seed=seed)
    single = kn.MeanFieldVI(**QUICK, draws=4).fit(model, data, seed=seed)
    return mixture, single, evidence


def test_two_components_find_both_modes(seed):
    mixture, _, _ = fitted(seed)
    first, second = (member.loc["w"].item() for member in mixture.members)
    assert first > 0.5 and second < -0.5
    # mirror images of each other: a normal that is off by δ of its own standard deviations costs δ² / 2 nats
    spread = mixture.members[0].scale["w"].item()
    assert abs(first + second) < 2 * math.sqrt(2 * SLACK) * spread


def test_two_modes_are_worth_log_two(seed):
    mixture, single, evidence = fitted(seed)
    assert mixture.diagnostics["separation"] == pytest.approx(math.log(2), abs=0.01)  # modes are ten sds apart
    gain, error = mixture.log_evidence - single.log_evidence, mixture.log_evidence.standard_error
    assert abs(gain - math.log(2)) < 4 * math.hypot(error, single.log_evidence.standard_error) + SLACK
    # each mode is nearly normal, so that little is lost
    assert evidence - SLACK - 4 * error < mixture.log_evidence < evidence + 4 * error


def test_bound_and_divergence_make_up_the_evidence(seed):
    # KL(q ‖ posterior) by integration over the one weight
    mixture, _, evidence = fitted(seed)
    _, (x, y), _ = two_modes(seed)
    w = torch.linspace(-4, 4, 16_001, dtype=DTYPE)
    log_q = mixture.log_prob({"w": w.unsqueeze(1)})
    log_p = normal_log_prob(w, 0.0, 1.0) + normal_log_prob(y, x * w.square(), NOISE).sum(0) - evidence
    kl = (log_q.exp() * (log_q - log_p)).sum().item() * 8 / 16_000
    bound = mixture.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - evidence) < 4 * bound.standard_error


def test_report_has_the_bounds_apart(seed):
    mixture, _, _ = fitted(seed)
    terms = mixture.diagnostics.terms
    own = [float(member.log_evidence) for member in mixture.members]  # type: ignore[arg-type]
    assert terms["mean_elbo"] == pytest.approx(sum(own) / 2)
    assert terms["elbo"] == pytest.approx(terms["mean_elbo"] + terms["separation"])
    assert terms["elbo"] == pytest.approx(terms["expected_log_likelihood"] - terms["kl"])
    assert terms["elbo"] == pytest.approx(float(mixture.log_evidence))  # type: ignore[arg-type]
    assert all(member.log_evidence.kind == "bound" for member in mixture.members)  # type: ignore[union-attr]


def test_each_component_reaches_the_closed_form_optimum(seed):
    # a posterior with one mode: all components end there, and mixing them gains nothing
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    posterior = kn.MixtureVI(3, **QUICK).fit(problem.model(), problem.data, seed=seed)
    for member in posterior.members:
        assert problem.elbo() - problem.elbo(*flat_moments(problem, member)) < SLACK / 3  # local: see test_mean_field
    # components that are each δ nats from the optimum differ by about 4 δ of KL at the most
    assert posterior.diagnostics["separation"] < SLACK
    assert abs(posterior.log_evidence - problem.elbo()) < 4 * posterior.log_evidence.standard_error + SLACK


@pytest.mark.parametrize("net", [mlp, batch_norm_net])
@pytest.mark.parametrize("settings", [{}, {"start": "map"}, {"clip": 0.1}, {"kl_warmup": 3}], ids=str)
def test_one_component_is_mean_field(net, settings):
    model, data = kn.Model(net().to(DTYPE), kn.Gaussian()), linear_data()
    settings = {"epochs": 10, "batch_size": 8, **settings}
    mixture = kn.MixtureVI(1, **settings).fit(model, data, seed=3)
    single = kn.MeanFieldVI(**settings).fit(model, data, seed=3)
    (member,) = mixture.members
    assert same_params(member.mean(), single.mean()) and same_params(member.std(), single.std())
    assert same_params(mixture.buffers, single.buffers)
    assert repr(mixture.log_evidence) == repr(single.log_evidence)


@pytest.mark.slow
def test_together_or_in_turn_ends_at_the_same_bound(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    for vectorise in (True, False):
        posterior = kn.MixtureVI(2, **QUICK, vectorise=vectorise).fit(problem.model(), problem.data, seed=seed)
        for member in posterior.members:
            assert problem.elbo() - problem.elbo(*flat_moments(problem, member)) < SLACK / 3


def test_learned_scale_of_the_prior_and_points_are_shared(seed):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), kn.EmpiricalBayes(kn.Normal(1.0)), random="2.*")
    start = model.params()
    for vectorise in (True, False):
        posterior = kn.MixtureVI(2, epochs=20, vectorise=vectorise).fit(model, linear_data(), seed=seed)
        assert set(posterior.points) == set(model.point_names)
        for member in posterior.members:
            assert all(torch.equal(member.points[name], value) for name, value in posterior.points.items())
        assert all(not torch.equal(value, start[name]) for name, value in posterior.points.items())


# --- where components begin ------------------------------------------------------------------------------------------

STILL = {"epochs": 1, "learning_rate": 1e-12}


def test_components_begin_at_the_network_and_at_new_weights(seed):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1))
    posterior = kn.MixtureVI(3, **STILL).fit(model, linear_data(), seed=seed)
    first, second, third = (member.loc["0.weight"] for member in posterior.members)
    torch.testing.assert_close(first, model.params()["0.weight"], rtol=0.0, atol=1e-9)
    for one, other in ((first, second), (first, third), (second, third)):
        assert (one - other).abs().min() > 1e-6
    assert all((member.scale["0.weight"] - 0.02).abs().max() < 1e-9 for member in posterior.members)


def test_components_begin_at_the_modes(seed):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.3)), linear_data()
    posterior = kn.MixtureVI(2, epochs=100, start="map").fit(model, data, seed=seed)
    mode = kn.MAP(epochs=100).fit(model, data, seed=seed).mean()
    still = kn.MixtureVI(2, **STILL, start=posterior).fit(model, data, seed=seed)  # a mixture's members' means
    for before, after in zip(posterior.members, still.members, strict=True):
        torch.testing.assert_close(after.loc, before.loc, rtol=0.0, atol=1e-9)
    assert mode.keys() == posterior.members[0].loc.keys()


def test_components_begin_at_atoms_and_then_at_draws(seed):
    model, data = linear_model(), linear_data()
    stack = {name: torch.stack([value + 1, value + 2]) for name, value in model.params().items()}
    atoms = kn.Particles(model, stack)
    posterior = kn.MixtureVI(3, **STILL, start=atoms).fit(model, data, seed=seed)
    for k in range(2):
        torch.testing.assert_close(posterior.members[k].loc["weight"], stack["weight"][k], rtol=0.0, atol=1e-9)
    drawn = posterior.members[2].loc["weight"]
    assert any((drawn - each).abs().max() < 1e-9 for each in stack["weight"])
    exact = kn.ExactLinear().fit(model, data)
    posterior = kn.MixtureVI(2, **STILL, start=exact).fit(model, data, seed=seed)
    first, second = (member.loc["weight"] for member in posterior.members)
    torch.testing.assert_close(first, exact.mean()["weight"], rtol=0.0, atol=1e-9)
    assert (first - second).abs().max() > 1e-6


# --- what it says and refuses ----------------------------------------------------------------------------------------


def test_improper_prior_has_no_evidence_to_bound(seed):
    model = linear_model(prior=kn.Flat())
    posterior = kn.MixtureVI(2, epochs=3).fit(model, linear_data(), seed=seed)
    assert posterior.log_evidence is None
    assert {"elbo", "mean_elbo", "separation"} <= posterior.diagnostics.terms.keys()


def test_beta_is_told(seed):
    posterior = kn.MixtureVI(2, epochs=2, beta=0.5).fit(linear_model(), linear_data(), seed=seed)
    assert "beta=0.5" in posterior.diagnostics.notes[0] and "beta=0.5" in posterior.diagnostics.method


def test_precision_and_networks_that_vmap_does_not_take_go_in_turn():
    model, data = kn.Model(mlp(), kn.Gaussian(0.1)), tuple(each.float() for each in linear_data())
    method = kn.MixtureVI(2, epochs=2)
    posterior = method.fit(model, data, engine=kn.Engine("bfloat16"))
    assert len(posterior) == 2
    with pytest.raises(kn.Unsupported, match="precision='bfloat16' is for one network at a time"):
        kn.MixtureVI(2, epochs=2, vectorise=True).fit(model, data, engine=kn.Engine("bfloat16"))
    with pytest.raises(kn.Unsupported, match="batch statistics or dropout"):
        kn.MixtureVI(2, epochs=2, vectorise=True).fit(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), data)


def test_members_of_a_normalised_network_have_statistics_of_their_own(seed):
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1))
    posterior = kn.MixtureVI(2, epochs=5).fit(model, linear_data(), seed=seed)
    first, second = (member.buffers["1.running_mean"] for member in posterior.members)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "knobs",
    [
        {"components": 0},
        {"estimator": "score"},
        {"draws": 0},
        {"beta": 0.0},
        {"kl_warmup": -1},
        {"initial_scale": 0.0},
        {"start": "mode"},
        {"vectorise": 1},
        {"epochs": 4, "kl_warmup": 3},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises((kn.InvalidArgument, kn.InvalidType), match=list(knobs)[-1]):
        kn.MixtureVI(**knobs)
