"""Weights of rows: a row of weight 2 is that row twice, a row of weight 0 is not there."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.chains.target import ModelTarget
from knowable.core.method import Method
from knowable.core.model.data import as_data
from knowable.inference.laplace.laplace import STRUCTURES
from knowable.inference.point.own_parameters import most_probable
from knowable.inference.sampling.importance import JointDensity
from knowable.inference.sampling.initial_positions import Start
from knowable.inference.sampling.mini_batches import MiniBatches
from knowable.inference.variational.method import final_elbo

COUNTS = torch.tensor([1, 2, 0, 3, 1])


def problem(likelihood: kn.Likelihood, outputs: int = 1):
    """A network in double precision; rows with weights, and the same rows repeated."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long() if outputs > 1 else x.sum(1).sin()
    counts = COUNTS.repeat(4)
    repeated = x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0)
    return kn.Model(net, likelihood), kn.Data((x, y), weights=counts), repeated


def same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("noise", [0.3, None])
def test_the_exact_posterior_and_its_evidence_are_those_of_rows_repeated(noise):
    _, weighted, repeated = problem(kn.Gaussian())
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(noise))
    first, second = (kn.ExactLinear().fit(model, data) for data in (weighted, repeated))
    same(first.mean(), second.mean())
    torch.testing.assert_close(first.scale_tril, second.scale_tril, rtol=1e-7, atol=1e-9)
    assert float(first.log_evidence) == pytest.approx(float(second.log_evidence), rel=1e-9)


def test_the_exact_posterior_takes_weights_that_are_not_whole():
    """By the normal equations."""
    torch.manual_seed(1)
    x, y, w = torch.randn(9, 2).double(), torch.randn(9, 1).double(), torch.rand(9).double()
    model = kn.Model(nn.Linear(2, 1, bias=False).double(), kn.Gaussian(0.5), kn.Normal(2.0))
    found = kn.ExactLinear().fit(model, kn.Data((x, y), weights=w))
    precision = x.T @ (w[:, None] * x) / 0.25 + torch.eye(2) / 4
    expected = torch.linalg.solve(precision, x.T @ (w[:, None] * y) / 0.25)
    torch.testing.assert_close(found.mean()["weight"], expected.T)


@pytest.mark.filterwarnings("ignore:The posterior predicts worse")  # the weights were not trained
@pytest.mark.parametrize(
    ("structure", "curvature"),
    [("full", "hessian"), *itertools.product(sorted(STRUCTURES), ["ggn", "empirical_fisher"])],
)
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_curvature_is_that_of_rows_repeated(structure, curvature, outputs):
    model, weighted, repeated = problem(kn.Gaussian(0.3) if outputs == 1 else kn.Categorical(), outputs)
    method = kn.Laplace(structure=structure, curvature=curvature, start="network", tune="never", polish=0)
    first, second = (method.fit(model, data) for data in (weighted, repeated))
    same(first.std(), second.std())
    assert float(first.log_evidence) == pytest.approx(float(second.log_evidence), rel=1e-8)


def test_kronecker_factors_of_a_convolution_are_those_of_rows_repeated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double()
    x, y = torch.randn(5, 1, 3, 3).double(), torch.tensor([0, 1, 1, 0, 1])
    model, method = kn.Model(net, kn.Categorical()), kn.Laplace(start="network", tune="never")
    first = method.fit(model, kn.Data((x, y), weights=COUNTS))
    same(first.std(), method.fit(model, (x.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS))).std())


def test_the_noise_of_given_weights_is_that_of_rows_repeated():
    model, weighted, repeated = problem(kn.Gaussian())
    found = [
        most_probable(model, as_data(data, model), model.params(), model.buffers(), ["likelihood.log_noise"])
        for data in (weighted, repeated)
    ]
    same(*found)


def start_of(model: kn.Model) -> Start:
    return Start(torch.zeros(1, 1), points={}, buffers=model.buffers())


def test_the_log_joint_that_chains_see_is_that_of_rows_repeated():
    model, weighted, repeated = problem(kn.Gaussian(0.3))
    one, two = (
        ModelTarget(model, as_data(data, model), points={}, buffers=model.buffers()) for data in (weighted, repeated)
    )
    position = torch.randn(3, one.layout.size, dtype=torch.float64)
    for first, second in zip(one.value_and_grad(position), two.value_and_grad(position), strict=True):
        torch.testing.assert_close(first, second)
    torch.testing.assert_close(one.value(position), two.value(position))
    params = one.layout.views(position[0])
    x, y, w = as_data(weighted, model).tensors
    torch.testing.assert_close(model.log_joint(params, x, y, 20, weights=w), one.value(position)[0])


def test_the_likelihood_of_importance_sampling_is_that_of_rows_repeated():
    model, weighted, repeated = problem(kn.Categorical(), 3)
    one, two = (JointDensity(model, as_data(data, model), start_of(model)) for data in (weighted, repeated))
    position = torch.randn(3, one.layout.size, dtype=torch.float64)
    torch.testing.assert_close(one(position), two(position))


def test_gradients_of_mini_batches_with_weights_are_unbiased():
    """Their mean over many batches is the gradient of all rows, within five standard errors."""
    model, weighted, _ = problem(kn.Gaussian(0.3))
    target = ModelTarget(model, as_data(weighted, model), points={}, buffers=model.buffers())
    batches = MiniBatches(target, 4, seed=0)
    position = torch.randn(1, target.layout.size, dtype=torch.float64)
    found = torch.stack([batches.gradient(position, step)[1][0] for step in range(400)])
    error = found.std(0) / 400**0.5
    assert ((found.mean(0) - target.value_and_grad(position)[1][0]).abs() < 5 * error).all()


@pytest.mark.parametrize(
    "method",
    [
        kn.MeanFieldVI(estimator="weight"),
        kn.MeanFieldVI(estimator="score", draws=2),
        kn.FullRankVI(),
        kn.FlowVI(),
        kn.MatrixNormalVI(),
        kn.MomentVI(),
    ],
    ids=lambda method: repr(method),
)
def test_the_elbo_is_that_of_rows_repeated(method):
    """The same draws of the weights give the same bound; and so, up to the optimiser's scale, the same loss."""
    model, weighted, repeated = problem(kn.Gaussian(0.3))
    bounds, losses = [], []
    for data in (weighted, repeated):
        rows = as_data(data, model)
        torch.manual_seed(0)
        objective = method.objective(model, rows.tensors[0][:5], rows.size)
        bounds.append(float(final_elbo(objective, rows, seed=0)[0]))
        torch.manual_seed(1)
        loss, terms = objective(*rows.tensors)
        losses.append((loss.item() * rows.size, terms["expected_log_likelihood"].item()))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


# --- classes ---------------------------------------------------------------------------------------------------------


def test_class_weights_are_the_weights_of_cross_entropy():
    """Up to the sum of the weights, by which torch divides."""
    model, data, _ = problem(kn.Categorical(), 3)
    x, y = data.source
    given = torch.tensor([0.5, 2.0, 3.0])
    rows = as_data(kn.Data((x, y), class_weights=given), model)
    params = model.params()
    found = model.score(model.forward(params, x), y, params, rows.weights).sum() / rows.weights.sum()
    expected = -nn.CrossEntropyLoss(weight=given.double())(model.forward(params, x), y)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("likelihood", [kn.Categorical(), kn.Bernoulli()])
def test_balanced_classes_count_the_same_and_sum_to_the_number_of_rows(likelihood):
    net = nn.Linear(2, 1 if isinstance(likelihood, kn.Bernoulli) else 2)
    y = torch.tensor([0, 0, 0, 0, 0, 1])
    rows = as_data(kn.Data((torch.randn(6, 2), y), class_weights="balanced"), kn.Model(net, likelihood))
    assert rows.weights is not None
    torch.testing.assert_close(rows.weights, torch.tensor([0.6] * 5 + [3.0]))


def test_class_weights_multiply_row_weights():
    model, data, _ = problem(kn.Categorical(), 3)
    rows = as_data(dataclasses.replace(data, class_weights=[1.0, 2.0, 4.0]), model)
    expected = data.weights * torch.tensor([1.0, 2.0, 4.0])[data.source[1]]
    assert torch.equal(rows.weights, expected.double())


@pytest.mark.parametrize("wrap", [lambda rows: DataLoader(rows, batch_size=7, shuffle=True), lambda rows: Rows(rows)])
def test_a_loader_and_a_dataset_have_class_weights_too(wrap):
    model, data, _ = problem(kn.Categorical(), 3)
    x, y = data.source
    given = [1.0, 2.0, 4.0]
    loaded = as_data(kn.Data(wrap(TensorDataset(x, y)), class_weights=given), model)
    expected = as_data(kn.Data((x, y), class_weights=given), model)
    for first, second in zip(loaded.tensors, expected.tensors, strict=True):
        assert torch.equal(first, second)
    assert loaded.size == 20 and loaded.weighted
    method, engine = kn.Metropolis(chains=1, draws=3, warmup=3, start="network"), kn.Engine(mode="eager")
    same(*(method.fit(model, each, engine=engine).mean() for each in (loaded, expected)))


class Rows(torch.utils.data.Dataset):
    """Rows one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda x, y: kn.Data((x, y), class_weights=[1.0, 2.0]), "2 numbers, for the labels 0 to 1, but y has the la"),
        (lambda x, y: kn.Data((x, y), class_weights="equal"), "must be one of 'balanced'; got 'equal'"),
        (lambda x, y: kn.Data((x, y), class_weights=[-1.0, 2.0, 1.0]), "0 or above and not all 0, or 'balanced'"),
        (
            lambda x, y: kn.Data(DataLoader(TensorDataset(x, y)), class_weights="balanced"),
            "which a loader does not say. Pass a weight for each class",
        ),
        (lambda x, y: (x, y, torch.ones(20)), r"Weights of rows go beside them: kn.Data\(\(x, y\), weights=w\)"),
    ],
)
def test_weights_that_cannot_be_are_refused(make, wanted):
    model, data, _ = problem(kn.Categorical(), 3)
    with pytest.raises(kn.KnowableError, match=wanted):
        kn.MAP(epochs=1).fit(model, make(*data.source))


def test_numbers_have_no_class_weights():
    model, data, _ = problem(kn.Gaussian())
    with pytest.raises(kn.Unsupported, match="class_weights need one label in each row"):
        kn.MAP(epochs=1).fit(model, kn.Data(data.source, class_weights="balanced"))


def test_a_method_of_ones_own_that_does_not_count_weights_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Own(Method):
        def _fit(self, job):
            raise AssertionError

    model, data, _ = problem(kn.Gaussian())
    with pytest.raises(kn.Unsupported, match="Own does not support row weights"):
        Own().fit(model, data)
