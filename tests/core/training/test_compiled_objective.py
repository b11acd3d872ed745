"""A compiled loss is the loss: the same value and gradient to rounding, or the objective's own where it cannot be."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.compiling.engine import Engine
from knowable.core.compiling.recorder import traced
from knowable.core.model.data import as_data
from knowable.core.training.loop import train
from knowable.core.training.objective import CompiledObjective, Objective, may_be_compiled
from knowable.inference.point.point import PointObjective
from knowable.inference.variational.mean_field import MeanFieldObjective
from tests.core.cases import batch_norm_net, linear_data, mlp
from tests.core.training_cases import settings_of


def objective_of(kind: str, net: nn.Module | None = None) -> Objective:
    torch.manual_seed(3)
    model = kn.Model(mlp().double() if net is None else net, kn.Gaussian())
    if kind == "point":
        return PointObjective(model, 40, use_prior=True)
    x = linear_data()[0]
    return MeanFieldObjective(model, x, 40, estimator=kind, draws=2, initial_scale=0.1)


def loss_and_gradient(call, objective: Objective, data: tuple[Tensor, ...]) -> tuple[Tensor, dict, list[Tensor]]:
    torch.manual_seed(7)
    loss, terms = call(*data)
    return loss.detach(), terms, list(torch.autograd.grad(loss, list(objective.parameters())))


@pytest.fixture
def _no_compiler(monkeypatch):
    """Recorded, and run as recorded: quick, and the same graph that a compiler is given."""
    monkeypatch.setattr("knowable.core.compiling.recorder.compiled", traced)


def check_same(kind: str) -> None:
    objective, data = objective_of(kind), linear_data()
    recorded = CompiledObjective(objective)
    loss, terms, gradient = loss_and_gradient(recorded, objective, data)
    expected, expected_terms, expected_gradient = loss_and_gradient(objective, objective, data)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    assert list(terms) == list(expected_terms)
    torch.testing.assert_close(terms, expected_terms, rtol=1e-10, atol=1e-12)


# the same noise: what differs is the order of additions, some 1e-15 of sums of a few hundred terms in float64
KINDS = ["point", "auto", "weight", "flipout", "score", "local_score"]


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_loss_has_the_value_terms_and_gradient_of_the_objective(kind):
    check_same(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loss_has_the_value_terms_and_gradient_of_the_objective(kind):
    check_same(kind)


@pytest.mark.usefixtures("_no_compiler")
def test_noise_of_a_recorded_loss_is_new_at_every_step():
    objective, data = objective_of("weight"), linear_data()
    recorded = CompiledObjective(objective)
    losses = {recorded(*data)[0].item() for _ in range(4)}
    assert len(losses) == 4


@pytest.mark.usefixtures("_no_compiler")
def test_recording_takes_no_random_number_from_the_run():
    # else a run that is taken up again, and records at another step, would not end with the same bits
    objective, data = objective_of("weight"), linear_data()
    recorded = CompiledObjective(objective)
    torch.manual_seed(0)
    first = [recorded(*data)[0].item() for _ in range(2)]  # recorded at the first step
    torch.manual_seed(0)
    assert [recorded(*data)[0].item() for _ in range(2)] == first


def test_network_whose_buffers_training_changes_is_not_recorded():
    net, data = batch_norm_net().double(), linear_data()
    objective, plain = objective_of("point", net), objective_of("point", net)
    recorded = CompiledObjective(objective)
    for _ in range(2):
        assert torch.equal(recorded(*data)[0], plain(*data)[0])
        assert all(torch.equal(value, objective.net_buffers[name]) for name, value in plain.net_buffers.items())


class Branching(nn.Module):
    """Looks at a number before it decides what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else -self.layer(x)


def test_network_that_looks_at_numbers_runs_its_own_code():
    objective, data = objective_of("point", Branching().double()), linear_data()
    recorded = CompiledObjective(objective)
    loss, _, gradient = loss_and_gradient(recorded, objective, data)
    expected, _, expected_gradient = loss_and_gradient(objective, objective, data)
    assert torch.equal(loss, expected)
    assert all(torch.equal(*pair) for pair in zip(gradient, expected_gradient, strict=True))


def test_loss_that_is_still_being_changed_is_not_recorded():
    torch.manual_seed(3)
    x, y = linear_data()
    objective = MeanFieldObjective(kn.Model(mlp().double(), kn.Gaussian()), x, 40, kl_warmup=5)
    recorded, losses = CompiledObjective(objective), []
    for objective.epoch in (1.0, 4.5):  # the same noise; what differs is the weight of the KL
        loss, _, gradient = loss_and_gradient(recorded, objective, (x, y))
        expected, _, expected_gradient = loss_and_gradient(objective, objective, (x, y))
        assert torch.equal(loss, expected)
        assert all(torch.equal(*pair) for pair in zip(gradient, expected_gradient, strict=True))
        losses.append(loss.item())
    assert losses[0] != losses[1]


def test_only_a_class_that_says_so_itself_is_recorded():
    class Changing(PointObjective):
        pass

    model = kn.Model(mlp(), kn.Gaussian())
    assert may_be_compiled(PointObjective(model, 10, use_prior=True))
    assert not may_be_compiled(Changing(model, 10, use_prior=True))


METHODS = [
    kn.MAP(epochs=40),
    kn.MeanFieldVI(epochs=40, kl_warmup=10),
    kn.MeanFieldVI(epochs=20, training=kn.Training(clip=0.5), draws=2),
]


def check_same_fit(method) -> None:
    # 40 steps of Adam carry rounding errors of 1e-15 to 1e-9 at the most
    torch.manual_seed(0)
    model, data = kn.Model(mlp().double(), kn.Gaussian()), linear_data()
    plain, fused = (method.fit(model, data, engine=Engine(mode=mode)) for mode in ("auto", "compiled"))
    torch.testing.assert_close(fused.mean(), plain.mean(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(fused.std(), plain.std(), rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_recorded_fit_ends_where_the_plain_one_does(method):
    check_same_fit(method)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compiled_fit_ends_where_the_plain_one_does(method):
    check_same_fit(method)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_compiler")
def test_recorded_fit_that_is_taken_up_again_ends_with_the_same_bits(tmp_path):
    torch.manual_seed(0)
    model, (x, y) = kn.Model(mlp().double(), kn.Gaussian()), linear_data()
    data, ends = as_data((x, y), model), []
    for folder, stops in ((None, False), (tmp_path / "run", True), (tmp_path / "run", False)):
        torch.manual_seed(1)
        objective = MeanFieldObjective(model, x, 20)
        if stops:
            objective.end_of_epoch = Stop(150)
        saver = None if folder is None else kn.Checkpoint(folder, seconds=0)
        with pytest.raises(RuntimeError, match="stopped") if stops else nullcontext():
            train(objective, data, settings_of(epochs=250), checkpoint=saver, engine=Engine(mode="compiled"))
        ends.append(objective.q.detach().clone())
    assert torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[1])


class Stop:
    """Raises when it is called once too often."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("stopped")
