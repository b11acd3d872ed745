from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.function_space.function_space import (
    POOL,
    box,
    check_context,
    context_pool,
    process_divergence,
    some_rows,
)
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import expected_log_likelihood, flat_moments

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


@pytest.mark.slow
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
    assert "does not bound the evidence" in posterior.diagnostics.notes[0]
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


def test_a_network_prior_with_fewer_draws_than_context_points_is_refused():
    with pytest.raises(kn.InvalidArgument, match="prior has 10 draws, too few"):
        kn.FunctionSpaceVI(prior=kn.NetworkPrior(10), context_points=10)


# --- function context ------------------------------------------------------------------------------------------------


def model(inputs: int = 2) -> kn.Model:
    return kn.Model(nn.Linear(inputs, 1), kn.Gaussian(0.1))


def data(x: Tensor) -> kn.Data:
    return as_data((x, torch.zeros(len(x), 1)), model(x.shape[1]))


def pool(context, x: Tensor, *, margin: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return context_pool(context, data(x), model(x.shape[1]), margin=margin, generator=generator)


def test_box_is_filled_evenly_and_no_wider_than_its_margin(seed):
    x = torch.tensor([[0.0, -1.0], [2.0, 3.0], [1.0, 0.0]])
    points = pool("box", x, margin=0.25, seed=seed)
    low, high = torch.tensor([-0.5, -2.0]), torch.tensor([2.5, 4.0])
    assert points.shape == (POOL, 2)
    assert (points >= low).all() and (points <= high).all()
    # a mean of P uniform numbers has the standard error width / sqrt(12 P)
    error = (high - low) / (12 * POOL) ** 0.5
    assert ((points.mean(0) - (low + high) / 2).abs() < 5 * error).all()


def test_input_that_never_changes_stays_as_it_is():
    points = pool("box", torch.tensor([[0.0, 1.0], [2.0, 1.0]]), margin=0.5)
    assert (points[:, 1] == 1).all()


@pytest.mark.parametrize("as_loader", [False, True], ids=["tensors", "loader"])
def test_ends_and_rows_are_those_of_all_data(as_loader, seed, generator):
    x = torch.randn(50, 3)
    rows = data(x)
    if as_loader:
        rows = as_data(DataLoader(TensorDataset(x, torch.zeros(50, 1)), batch_size=8, shuffle=True), model(3))
    low, high = box(rows)
    assert torch.equal(low, x.amin(0)) and torch.equal(high, x.amax(0))
    some = some_rows(rows, 20, generator)
    assert some.shape == (20, 3)
    where = [(x == row).all(1).nonzero().item() for row in some]
    assert len(set(where)) == 20  # rows of the data, none twice
    assert torch.equal(some_rows(rows, 100, generator).sort(0).values, x.sort(0).values)


def test_every_row_is_as_likely_to_be_chosen(seed, generator):
    x = torch.arange(10.0).unsqueeze(1)
    rows = as_data(DataLoader(TensorDataset(x, torch.zeros(10, 1)), batch_size=3), model(1))
    trials = 600
    counts = torch.zeros(10)
    for _ in range(trials):
        counts[some_rows(rows, 4, generator).flatten().long()] += 1
    error = (trials * 0.4 * 0.6) ** 0.5  # binomial
    assert ((counts - 0.4 * trials).abs() < 5 * error).all()


def test_default_is_a_box_for_few_numbers_and_data_for_everything_else():
    few, many = torch.randn(12, 3), torch.randn(12, 17)
    assert len(pool("auto", few)) == POOL
    assert torch.equal(pool("auto", many).sort(0).values, many.sort(0).values)


def test_points_of_one_s_own_are_taken_whole_in_the_model_s_type():
    given = torch.randn(POOL + 5, 2, dtype=torch.float64)
    assert torch.equal(pool(given, torch.randn(4, 2)), given.float())


def test_function_of_one_s_own_is_asked_for_a_pool_with_the_generator():
    asked = []

    def draw(count, generator):
        asked.append(count)
        return torch.rand(count, 2, generator=generator)

    first, second = (pool(draw, torch.randn(4, 2), seed=3) for _ in range(2))
    assert asked == [POOL, POOL] and torch.equal(first, second)


@pytest.mark.parametrize("context", ["grid", 3, torch.zeros(0, 2), torch.tensor(1.0), torch.Tensor, None])
def test_what_is_no_context_is_refused_by_name(context):
    with pytest.raises(kn.KnowableError, match="context"):
        check_context(context)


def test_points_that_the_network_cannot_take_are_refused():
    with pytest.raises(kn.InvalidData):
        pool(torch.randn(5, 3), torch.randn(4, 2))
    with pytest.raises(kn.InvalidData, match="context"):
        pool(torch.full((5, 2), torch.nan), torch.randn(4, 2))
    with pytest.raises(kn.InvalidData, match="context"):
        pool(lambda count, generator: None, torch.randn(4, 2))


def test_words_have_no_box():
    words = kn.Model(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 1)), kn.Gaussian(0.1))
    x = torch.randint(0, 5, (8, 3))
    rows = as_data((x, torch.zeros(8, 1)), words)
    with pytest.raises(kn.Unsupported, match="context='data'"):
        context_pool("box", rows, words, margin=0.5, generator=torch.Generator())
    points = context_pool("auto", rows, words, margin=0.5, generator=torch.Generator())
    assert points.dtype == torch.int64 and len(points) == 8


# --- function space objective ----------------------------------------------------------------------------------------


def covariance(n: int, outputs: int) -> Tensor:
    root = torch.randn(outputs, n, n + 2, dtype=torch.float64)
    return root @ root.mT


def moments(n: int, outputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(outputs, n, dtype=torch.float64), covariance(n, outputs)


@pytest.mark.parametrize("shared", [False, True], ids=["a prior for each output", "one prior for all"])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_divergence_of_processes_is_that_of_torch_at_the_points(shared, jitter):
    mean, own = moments(4, 3)
    prior_mean, prior = moments(4, 1 if shared else 3)
    found = process_divergence(mean, own, prior_mean, prior, jitter=jitter)
    noise = jitter * prior.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(4, dtype=torch.float64)
    expected = kl_divergence(MultivariateNormal(mean, own + noise), MultivariateNormal(prior_mean, prior + noise))
    assert torch.allclose(found, expected)


def test_noise_never_adds_to_the_divergence():
    mean, own = moments(5, 2)
    prior_mean, prior = moments(5, 2)
    values = [process_divergence(mean, own, prior_mean, prior, jitter=each) for each in (0.0, 0.01, 0.1, 1.0)]
    assert all((less < more).all() for more, less in itertools.pairwise(values))


def test_covariance_that_is_none_gives_no_number_rather_than_an_error():
    mean, own = moments(3, 2)
    own[1] = -own[1]
    value = process_divergence(mean, own, mean, covariance(3, 2))
    assert torch.isfinite(value[0]) and torch.isnan(value[1])


# --- the objective ---------------------------------------------------------------------------------------------------


def linear_problem(seed: int) -> tuple[LinearGaussian, kn.FunctionSpaceVI]:
    """A linear model with the prior over functions that its prior over weights makes; d + 1 = 4 weights."""
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed, prior_scale=1.3)
    kernel = kn.LinearKernel(scale=1.3, bias=1.3)
    return problem, kn.FunctionSpaceVI(prior=kernel, context_points=12, jitter=1e-10)


def weight_divergence(loc: Tensor, std: Tensor, scale: float) -> float:
    each = torch.distributions.kl_divergence(
        torch.distributions.Normal(loc, std), torch.distributions.Normal(torch.zeros_like(loc), scale)
    )
    return each.sum().item()


def test_divergence_of_linear_functions_is_that_of_the_weights(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, len(problem.x), seed=seed)
    with torch.no_grad():
        objective.q[1] = torch.rand(4, dtype=torch.float64) - 1.5
    loc, scale = (
        {name: value.detach() for name, value in each.items()} for each in objective.normals.loc_and_scale(objective.q)
    )
    expected = weight_divergence(problem.as_flat(loc), problem.as_flat(scale), 1.3)
    # twelve points in general position determine four weights: only the jitter is between the two
    for _ in range(3):
        index = torch.randperm(len(objective.pool))[:12]
        assert objective.function_divergence(index).item() == pytest.approx(expected, rel=1e-4)


def test_fewer_points_than_weights_see_less_of_the_divergence(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, len(problem.x), seed=seed)
    order = torch.randperm(len(objective.pool))
    values = [objective.function_divergence(order[:n]).item() for n in (1, 2, 3, 4, 8)]
    assert values[0] < values[1] < values[2] < values[3]
    assert values[4] == pytest.approx(values[3], rel=1e-2)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_loss_is_the_bound_per_example_on_a_linear_model(seed, beta):
    problem, method = linear_problem(seed)
    x, y = problem.data
    method = kn.FunctionSpaceVI(prior=method.prior, context_points=12, jitter=1e-10, beta=beta, draws=4_000)
    objective = method.objective(problem.model(), x, len(x), seed=seed)
    loss, terms = objective(x, y)
    loc, scale = (problem.as_flat(each) for each in objective.normals.loc_and_scale(objective.q))
    fit = expected_log_likelihood(problem, loc, scale)
    kl = weight_divergence(loc, scale, 1.3)
    assert terms["kl"].item() == pytest.approx(kl, rel=1e-4)
    assert terms["function_kl"].item() == pytest.approx(kl, rel=1e-4)
    # scales are 0.02 at the start, so one draw of N log likelihoods has a standard deviation of a few times
    # sum |residual| * 0.02 / noise^2; the mean of 4,000 local draws is within five of its standard errors
    residual = (y - objective.model.forward(objective.model.params(), x)).abs().sum().item()
    error = 5 * residual * 0.02 * 4 / 0.7**2 / math.sqrt(4_000)
    assert loss.item() * 30 == pytest.approx(-(fit - beta * kl), abs=error)


def test_a_batch_stands_for_all_rows(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, 30, seed=seed)
    loss, terms = objective(problem.x[:10], problem.y[:10])
    rest = loss + terms["expected_log_likelihood"] / 30
    assert rest.item() == pytest.approx(terms["kl"].item() / 30, rel=1e-9)


def test_noise_of_the_likelihood_keeps_its_own_prior():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(), kn.Normal(1.0))
    objective = kn.FunctionSpaceVI(prior=kn.LinearKernel()).objective(model, x, 20)
    terms = objective(x, y)[1]
    loc, scale = objective.normals.loc_and_scale(objective.q)
    own = kl_divergence(
        torch.distributions.Normal(loc["likelihood.log_noise"], scale["likelihood.log_noise"]),
        torch.distributions.Normal(-1.0, 2.0),
    )
    assert (terms["kl"] - terms["function_kl"]).item() == pytest.approx(own.item(), rel=1e-4)


def test_weights_that_are_points_are_trained_through_the_divergence_and_their_prior():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = kn.Model(net, kn.Gaussian(0.3), kn.Normal(1.0), random="last_layer")
    objective = kn.FunctionSpaceVI(prior=kn.RBFKernel()).objective(model, x, 20)
    loss, terms = objective(x, y)
    loss.backward()
    assert {"log_prior_of_points", "function_kl"} <= terms.keys()
    assert objective.network_names == ["2.weight", "2.bias"]
    assert all(point.grad is not None and (point.grad != 0).any() for point in objective.points)


def test_some_outputs_stand_for_all_in_the_mean(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5)).double()
    x = torch.randn(20, 1, 4, 4, dtype=torch.float64)
    model = kn.Model(net, kn.Categorical())
    for prior in (kn.NetworkPrior(100), kn.RBFKernel()):  # one for each output, and one for all
        method = kn.FunctionSpaceVI(prior=prior, context_points=6, context_outputs=2, initial_scale=0.3)
        objective = method.objective(model, x, 20, seed=seed)
        index = torch.arange(6)
        every = objective.function_divergence(index)
        some = [
            objective.function_divergence(index, torch.tensor(pair)) for pair in itertools.combinations(range(5), 2)
        ]
        assert torch.stack(some).mean().item() == pytest.approx(every.item(), rel=1e-9)
        assert torch.stack(some).std() > 1e-3 * every
        drawn = {tuple(objective._some_outputs().tolist()) for _ in range(200)}
        assert {output for pair in drawn for output in pair} == set(range(5))
