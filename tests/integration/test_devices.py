"""Every method with a network on another device: data from the CPU, and everything else where the network is."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.compiling.engine import Engine
from knowable.core.model.data import as_data
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.training.loop import TrainingRun
from knowable.core.training.objective import Objective
from knowable.core.training.settings import TrainingSettings
from knowable.inference.point.point import PointObjective
from knowable.testing import Subject
from tests.conformance.test_conformance import SUBJECTS
from tests.simulated_device import SIMULATED, is_marked, mark, on_device, simulated_device

# chains of SVGD begin at the network, and not after a training of a thousand steps
METHODS = {**SUBJECTS, "svgd": Subject(kn.SVGD(chains=3, warmup=3, batch_size=8, start="network"))}
SOON = (
    "map", "laplace", "mean_field_vi", "natural_vi", "exact_linear", "deep_ensemble", "swag", "mc_dropout", "sgld",
    "hmc", "nuts", "infinite_width",
)  # fmt: skip
X, Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 1)


def _param(name: str):
    return pytest.param(METHODS[name], id=name, marks=() if name in SOON else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::knowable.errors.KnowableWarning")  # of so short a fit
@pytest.mark.parametrize("subject", [_param(name) for name in METHODS])
def test_fit_and_prediction_are_where_the_network_is(subject: Subject):
    x = subject.case().data[0]
    ordinary = subject.fit(subject.case()).predict(x, samples=4)
    with simulated_device():
        case = subject.case()
        on_device(case.net)
        posterior = subject.fit(case)
        prediction = posterior.predict(x, samples=4)
        assert prediction.mean.device == SIMULATED
        generator = torch.Generator(device=SIMULATED).manual_seed(0)
        if isinstance(posterior, FunctionPosterior):  # which has no weights
            assert posterior.sample_functions(x, 3, generator).device == SIMULATED
        else:
            for name, value in posterior.sample(3, generator).items():
                assert value.device == SIMULATED, name
            assert all(is_marked(value) for value in posterior.mean().values())
        mean, total = prediction.mean.cpu(), prediction.total.cpu()
    # real numbers, and random ones from generators of the same seeds: the same but for the order of summation
    torch.testing.assert_close(mean, ordinary.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, ordinary.total, rtol=1e-3, atol=1e-4)


# --- waiting for the device ------------------------------------------------------------------------------------------

OBJECTIVES = {
    "map": lambda model: PointObjective(model, 32, use_prior=True),
    "mean_field": lambda model: kn.MeanFieldVI().objective(model, X.to(model.device), 32),
    "natural": lambda model: kn.NaturalVI().objective(model, X.to(model.device), 32),
}
# the loss, which must be finite; and of variational methods the factor of the KL, in their hand-written gradient
WAITS = {"map": 1, "mean_field": 2, "natural": 2}


def _run(objective: Objective) -> TrainingRun:
    data = as_data((X, Y), objective.model)
    return TrainingRun(objective, data, TrainingSettings(epochs=100, batch_size=8), None, 0, Engine())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_steps_wait_for_the_device_no_more_often_than_they_must(name):
    with simulated_device() as waits:
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        run = _run(OBJECTIVES[name](kn.Model(on_device(net), kn.Gaussian(0.1))))
        batches = list(run.data.batches(8))
        run._one_step([(batches[0], len(batches[0][0]))])  # the first step has more to do
        waits.clear()
        for batch in batches:
            run._one_step([(batch, len(batch[0]))])
        assert len(waits) <= WAITS[name] * len(batches), waits


# --- the device itself -----------------------------------------------------------------------------------------------


def test_simulated_device_refuses_what_a_real_one_refuses():
    with simulated_device() as waits:
        here, there = torch.randn(4, 3), torch.randn(3, 2)
        mark(there)
        assert there.device == SIMULATED and there.T.device == SIMULATED and here.device.type == "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            here @ there
        with pytest.raises(RuntimeError, match="same device"):
            here[torch.zeros(2, dtype=torch.long, device=SIMULATED)]
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, generator=torch.Generator(), device=SIMULATED)
        product = here.to(there) @ there
        assert product.device == SIMULATED and product.cpu().device.type == "cpu"
        torch.testing.assert_close(product.cpu(), here @ there.cpu())
        assert there[torch.tensor([0, 1])].device == SIMULATED  # indices may be on the CPU
        assert (there * torch.tensor(2.0)).device == SIMULATED  # and single numbers
        waits.clear()
        float(there.sum())
        assert bool((there == there).all()) and len(waits) == 2


def test_gradients_and_batched_calls_are_on_the_device():
    with simulated_device():
        weight = torch.nn.Parameter(torch.randn(3, 2, device=SIMULATED))
        (X.to(weight) @ weight).square().sum().backward()
        assert weight.grad is not None and weight.grad.device == SIMULATED
        found = torch.func.vmap(lambda row: (row @ weight).sum())(X.to(weight))
        assert found.device == SIMULATED


def test_memory_of_a_prediction_is_that_of_the_device(monkeypatch):
    from knowable.core.posterior.monte_carlo import free_memory

    assert free_memory(torch.device("cpu")) == 2 * 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 8 * 10**9))
    assert free_memory(torch.device("cuda:0")) == 5 * 10**8
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**11, 10**11))
    assert free_memory(torch.device("cuda:0")) == 2 * 2**30
