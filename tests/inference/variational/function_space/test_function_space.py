from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import flat_moments

# as for mean-field inference, of which this is a special case: what Adam's last, small steps leave
SLACK = 0.15
QUICK = {"epochs": 400, "learning_rate": 0.04}


def make(seed: int, **changes: object) -> LinearGaussian:
    return LinearGaussian.make(**{"n": 30, "noise": 0.7, "seed": seed, **changes})  # type: ignore[arg-type]


def shortfall(problem: LinearGaussian, posterior: kn.DiagonalNormal) -> float:
    return problem.elbo() - problem.elbo(*flat_moments(problem, posterior))


def test_linear_model_with_its_own_kernel_is_mean_field_inference(seed):
    problem = make(seed)
    method = kn.FunctionSpaceVI(**QUICK, prior=kn.LinearKernel(), jitter=1e-6)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert 0 <= shortfall(problem, posterior) < SLACK
    # and so its function values: means exact, variances those of the best independent weights
    mean, std = flat_moments(problem, posterior)
    exact = problem.predictive(problem.x)[0]
    best = (problem.design.square() @ problem.mean_field_std.square()).sqrt()
    assert ((problem.design @ mean - exact).abs() < 0.55 * best * math.sqrt(4)).all()
    assert (((problem.design.square() @ std.square()).sqrt() / best).log().abs() < math.log(1.35)).all()


@pytest.mark.parametrize("as_loader", [False, True], ids=["tensors", "loader"])
def test_mini_batches_reach_it_too(seed, as_loader):
    problem = make(seed, n=60)
    data = DataLoader(TensorDataset(*problem.data), batch_size=20, shuffle=True) if as_loader else problem.data
    method = kn.FunctionSpaceVI(
        epochs=150, learning_rate=0.04, batch_size=20, prior=kn.LinearKernel(), context="data", jitter=1e-6
    )
    assert shortfall(problem, method.fit(problem.model(), data, seed=seed)) < SLACK


def test_functions_of_the_model_s_own_prior_are_the_default(seed):
    # variances of the four weights from 2,000 draws are good to some 3 %, and the divergence with them
    problem = make(seed)
    method = kn.FunctionSpaceVI(
        epochs=300, learning_rate=0.05, prior=kn.NetworkPrior(2_000), context=torch.randn(40, 3), jitter=1e-6
    )
    assert shortfall(problem, method.fit(problem.model(), problem.data, seed=seed)) < SLACK


def test_beta_leads_to_the_tempered_optimum_and_is_told(seed):
    problem = make(seed)
    method = kn.FunctionSpaceVI(**QUICK, prior=kn.LinearKernel(), jitter=1e-6, beta=3.0)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert shortfall(problem.tempered(3.0), posterior) < SLACK
    assert any("beta=3" in note for note in posterior.diagnostics.notes)


def test_no_bound_of_the_evidence_is_claimed(seed):
    problem = make(seed)
    posterior = kn.FunctionSpaceVI(epochs=5, prior=kn.LinearKernel()).fit(problem.model(), problem.data, seed=seed)
    assert posterior.log_evidence is None
    assert "no bound" in posterior.diagnostics.notes[0]
    assert {"expected_log_likelihood", "kl", "function_kl"} <= posterior.diagnostics.keys()
    assert isinstance(posterior, kn.DiagonalNormal)


# --- functions away from the data ------------------------------------------------------------------------------------


class Bumps(nn.Module):
    """Features that are Gaussian bumps, of width w, along the line."""

    def __init__(self, width: float):
        super().__init__()
        self.width = width
        self.register_buffer("centres", torch.linspace(-6, 6, 25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((x - self.centres) / self.width).square())


def test_far_from_the_data_the_spread_is_that_of_the_prior(seed):
    # independent weights on dense bumps of width w are a process with an RBF kernel of lengthscale w sqrt(2): the prior
    # is within reach, so that where no data is the best q is the prior
    net = nn.Sequential(Bumps(0.7), nn.Linear(25, 1, bias=False).double())
    x = torch.rand(40, 1, dtype=torch.float64) * 2 - 1
    y = torch.sin(3 * x) + 0.1 * torch.randn(40, 1, dtype=torch.float64)
    kernel = kn.RBFKernel(lengthscale=0.7 * math.sqrt(2), scale=1.5)
    method = kn.FunctionSpaceVI(**QUICK, prior=kernel, margin=1.5, context_points=24)
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, y), seed=seed)

    def spread(at: list[float]) -> Tensor:
        features = net[0](torch.tensor(at, dtype=torch.float64).unsqueeze(1))
        return (features.square() @ posterior.scale["1.weight"].square().T).sqrt()

    assert (spread([-3.5, -3.0, 3.0, 3.5]) / 1.5).log().abs().max() < math.log(1.2)
    assert spread([-0.5, 0.0, 0.5]).max() < 0.2


def test_classification_has_a_prior_for_every_logit(seed):
    x = torch.randn(60, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    method = kn.FunctionSpaceVI(epochs=200, learning_rate=0.02, prior=kn.RBFKernel(scale=2.0))
    posterior = method.fit(kn.Model(net, kn.Categorical()), (x, y), seed=seed)
    prediction = posterior.predict(x)
    assert (prediction.labels == y).float().mean() > 0.8
    assert (prediction.epistemic > 0).all()


# --- at the door -----------------------------------------------------------------------------------------------------


def test_begins_at_another_posterior(seed):
    problem = make(seed)
    model = problem.model()
    exact = kn.ExactLinear().fit(model, problem.data)
    method = kn.FunctionSpaceVI(epochs=1, learning_rate=1e-9, prior=kn.LinearKernel(), start=exact)
    posterior = method.fit(model, problem.data, seed=seed)
    assert torch.allclose(problem.as_flat(posterior.mean()), problem.mean, atol=1e-6)


def test_begins_at_the_mode_under_the_model_s_own_prior():
    problem = make(0)
    mode = kn.MAP(epochs=300, learning_rate=0.05).fit(problem.model(), problem.data).mean()
    starts = []

    class Watched(kn.FunctionSpaceVI):
        def objective(self, *args, start=None, **knobs):
            starts.append(start)
            return super().objective(*args, start=start, **knobs)

    method = Watched(epochs=300, learning_rate=0.05, prior=kn.LinearKernel(), start="map")
    method.fit(problem.model(), problem.data)
    torch.testing.assert_close(starts[0], mode)


def test_warm_up_raises_both_divergences():
    problem = make(0)
    model = kn.Model(problem.model().net, kn.Gaussian())  # the noise has a divergence of its own
    method = kn.FunctionSpaceVI(epochs=100, prior=kn.LinearKernel(), kl_warmup=4)
    objective, found = method.objective(model, problem.x, len(problem.x)), []
    for epoch in (0.0, 4.0):
        objective.epoch = epoch
        torch.manual_seed(0)
        found.append(objective(*problem.data))
    (early, terms), (late, _) = found
    assert (late - early).item() == pytest.approx(0.8 * terms["kl"].item() / len(problem.x), rel=1e-6)


def test_checkpoint_of_other_context_points_is_refused(seed, tmp_path):
    problem = make(seed)
    first = torch.randn(1000, 3)
    second = first.clone()
    second[300:600] += 1  # printed they look the same
    fits = [kn.FunctionSpaceVI(epochs=2, prior=kn.LinearKernel(), context=each) for each in (first, second)]
    fits[0].fit(problem.model(), problem.data, checkpoint=tmp_path)
    assert repr(fits[0]) == repr(fits[1])
    with pytest.raises(kn.InvalidArgument, match="context"):
        fits[1].fit(problem.model(), problem.data, checkpoint=tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"prior": "rbf"},
        {"prior": kn.NetworkPrior(10), "context_points": 10},
        {"context": "grid"},
        {"context_points": 0},
        {"margin": -0.1},
        {"jitter": 0.0},
        {"start": "mode"},
        {"start": 3},
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused_by_name(changes):
    with pytest.raises(kn.KnowableError, match=next(iter(changes))):
        kn.FunctionSpaceVI(**changes)


def test_models_it_has_no_meaning_for_are_refused():
    x, y = torch.randn(10, 2), torch.randn(10, 1)
    learned = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="scale is learned"):
        kn.FunctionSpaceVI(epochs=1).fit(learned, (x, y))
    noise_only = kn.Model(nn.Linear(2, 1), kn.Gaussian(), random="likelihood.*")
    with pytest.raises(kn.Unsupported, match="random weights"):
        kn.FunctionSpaceVI(epochs=1).fit(noise_only, (x, y))
    exact = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1)), (x, y))
    fixed_noise = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), prior=exact)
    posterior = kn.FunctionSpaceVI(epochs=1, prior=kn.LinearKernel()).fit(fixed_noise, (x, y))
    assert isinstance(posterior, kn.DiagonalNormal)
