"""Tests of optimisers and schedulers of torch in the loop: the steps are those of the same code outside of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import knowable as kn
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from tests.core.cases import linear_data
from tests.core.training_cases import Quadratic, run_quietly, settings_of, some_data


def plain_loop(net: nn.Module, x: Tensor, y: Tensor, optimiser, scheduler=None, *, epochs: int, rows: int) -> None:
    """MAP with noise 0.3 and a standard normal prior, in rows as they come."""
    made = optimiser(list(net.parameters()))
    schedule = None if scheduler is None else scheduler(made)
    for _ in range(epochs):
        for part, target in zip(x.split(rows), y.split(rows), strict=True):
            made.zero_grad()
            likelihood = torch.distributions.Normal(net(part)[:, 0], 0.3).log_prob(target[:, 0]).mean()
            prior = sum(torch.distributions.Normal(0.0, 1.0).log_prob(value).sum() for value in net.parameters())
            (-likelihood - prior / len(x)).backward()
            made.step()
            if schedule is not None:
                schedule.step()


@pytest.mark.parametrize(
    ("given", "outside", "scheduler"),
    [
        (torch.optim.NAdam, lambda params: torch.optim.NAdam(params, lr=0.02), None),
        (torch.optim.AdamW, lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.0), None),
        (functools.partial(torch.optim.RMSprop, lr=0.01),) * 2 + (None,),
        (
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=61),  # also moves the momentum
        ),
        (
            lambda params: torch.optim.Adagrad([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.02),
            lambda params: torch.optim.Adagrad([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.02),
            functools.partial(lr_scheduler.CosineAnnealingLR, T_max=60),  # computes each rate from the last
        ),
    ],
    ids=["nadam", "adamw", "rmsprop", "one_cycle", "groups"],
)  # fmt: skip
def test_steps_are_those_of_a_plain_loop(given, outside, scheduler, generator):
    x, y = linear_data(40, generator=generator)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.3), kn.Normal(1.0))
    # without a scheduler of the user's the rate falls in the second half: compare the first
    epochs, kept = (60, 60) if scheduler else (120, 60)
    training = kn.Training(optimiser=given, scheduler=scheduler)
    seen: list[Tensor] = []
    with_history(model, x, y, kn.MAP(epochs=epochs, learning_rate=0.02, training=training), seen)
    plain_loop(net, x, y, outside, scheduler, epochs=kept, rows=40)
    torch.testing.assert_close(seen[kept], nn.utils.parameters_to_vector(net.parameters()), rtol=1e-9, atol=1e-11)


def with_history(model: kn.Model, x: Tensor, y: Tensor, method: kn.MAP, seen: list[Tensor]) -> None:
    """Fit, and keep the weights of every call of the network in training, and those at the end."""
    inner = model.forward

    def forward(params, rows, **options):
        if options.get("training"):
            seen.append(torch.cat([params[name].detach().flatten().clone() for name in model.random_names]))
        return inner(params, rows, **options)

    model.forward = forward  # type: ignore[method-assign]
    posterior = method.fit(model, (x, y))
    seen.append(torch.cat([posterior.mean()[name].flatten() for name in model.random_names]))


def rates_of(data, **training) -> list[float]:
    """Learning rates of all steps."""
    seen = []

    class Watched(Quadratic):
        def update(self, optimiser):
            seen.append(optimiser.param_groups[0]["lr"])
            super().update(optimiser)

    run_quietly(Watched(), data, settings_of(epochs=4, batch_size=4, learning_rate=0.1, **training))
    return seen


def test_a_scheduler_steps_with_the_optimiser_or_with_the_epochs(generator):
    data = some_data(20, generator)  # five steps in an epoch
    halves = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)
    assert rates_of(data, scheduler=halves) == pytest.approx([0.1 * 0.5**k for k in range(20)])
    by_epoch = rates_of(data, scheduler=halves, scheduler_every="epoch")
    assert by_epoch == pytest.approx([0.1 * 0.5 ** (k // 5) for k in range(20)])


def test_warm_up_raises_the_rate_in_equal_parts(generator):
    data = some_data(20, generator)
    plain, warm = rates_of(data), rates_of(data, warmup=8)
    assert warm == pytest.approx([rate * min(1.0, (k + 1) / 8) for k, rate in enumerate(plain)])
    steady = functools.partial(lr_scheduler.ConstantLR, factor=1.0)
    both = rates_of(data, warmup=8, scheduler=steady)
    assert both == pytest.approx([0.1 * min(1.0, (k + 1) / 8) for k in range(20)])


class Counting(torch.optim.Optimizer):
    """SGD that keeps a number beside its tensors, as optimisers of other packages do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                state["count"] = state.get("count", 0) + 1
                assert isinstance(state["count"], int)
                state["nothing"] = None
                value.sub_(value.grad, alpha=group["lr"] / state["count"] ** 0.5)


@pytest.mark.parametrize(
    "training",
    [
        {"optimiser": Counting, "warmup": 150},
        {
            "optimiser": torch.optim.NAdam,
            "scheduler": functools.partial(lr_scheduler.MultiStepLR, milestones=[30, 130]),
        },
        {
            "optimiser": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            "scheduler": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=400),
            "scheduler_every": "epoch",
        },
    ],
    ids=["own", "milestones", "one_cycle"],
)
def test_an_interrupted_run_is_taken_up_with_its_optimiser_and_scheduler(tmp_path, generator, training):
    data, settings = some_data(20, generator), settings_of(epochs=60, batch_size=4, learning_rate=0.05, **training)
    whole, stopped, resumed = Quadratic(), Quadratic(fail_at={271: RuntimeError("killed")}), Quadratic()
    run_quietly(whole, data, settings)
    with pytest.raises(RuntimeError, match="killed"):
        run_quietly(stopped, data, settings, checkpoint=kn.Checkpoint(tmp_path, seconds=0))
    run_quietly(resumed, data, settings, checkpoint=kn.Checkpoint(tmp_path, seconds=0))
    assert 0 < len(resumed.batches) < len(whole.batches)
    assert torch.equal(whole.theta, resumed.theta)


@pytest.mark.parametrize("method", [kn.MeanFieldVI, kn.NaturalVI, kn.Laplace, kn.SWAG, kn.DeepEnsemble, kn.MCDropout])
def test_methods_take_any_optimiser_and_scheduler(method, generator):
    x, y = linear_data(20, generator=generator)
    model = kn.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), kn.Gaussian())
    training = kn.Training(
        optimiser=torch.optim.RAdam,
        scheduler=functools.partial(lr_scheduler.ExponentialLR, gamma=0.9),
        warmup=3,
        clip=1.0,
    )
    posterior = method(epochs=3, batch_size=10, training=training).fit(model, (x, y))
    assert posterior.predict(x).mean.isfinite().all()


@pytest.mark.parametrize(
    ("training", "error", "says"),
    [
        ({"optimiser": torch.optim.LBFGS}, Unsupported, "takes the loss several times"),
        ({"optimiser": lambda params: torch.optim.LBFGS(params)}, Unsupported, "takes the loss several times"),
        ({"optimiser": nn.Linear}, InvalidType, "class of torch.optim, got Linear"),
        ({"optimiser": lambda params: 3}, InvalidType, "must make a torch.optim.Optimizer, got int"),
        ({"optimiser": lambda params: torch.optim.SGD(params[:1], lr=0.1)}, InvalidArgument, "all the parameters"),
        (
            {"optimiser": lambda params: torch.optim.AdamW(params, weight_decay=0.02)},
            InvalidArgument,
            r"weight_decay=0.02, and the prior is a weight decay: it would count twice",
        ),
        ({"scheduler": lr_scheduler.ExponentialLR}, InvalidType, "scheduler must be a function that makes one"),
        ({"scheduler": "cosine"}, InvalidType, "scheduler must be a function that makes one"),
        ({"scheduler": lambda optimiser: 3}, InvalidType, "must make a torch.optim.lr_scheduler, got int"),
        ({"scheduler": lambda made: lr_scheduler.ReduceLROnPlateau(made)}, Unsupported, "needs a score at every step"),
        ({"scheduler_every": "week"}, InvalidArgument, "scheduler_every must be one of 'step', 'epoch'"),
        ({"warmup": -1}, InvalidArgument, "warmup must be a whole number >= 0"),
    ],
)  # fmt: skip
def test_optimisers_that_cannot_be_used_are_refused(training, error, says, generator):
    x, y = linear_data(10, generator=generator)
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian())
    with pytest.raises(error, match=says):
        kn.MAP(epochs=1, training=kn.Training(**training)).fit(model, (x, y))


def test_settings_read_the_same_in_another_process():
    training = kn.Training(optimiser=torch.optim.NAdam, scheduler=lambda made: lr_scheduler.ConstantLR(made))
    assert "0x" not in repr(training) and "optimiser=NAdam" in repr(training)


def test_a_scheduler_and_cycles_of_the_rate_are_refused():
    training = kn.Training(scheduler=lambda made: lr_scheduler.ConstantLR(made))
    x, y = linear_data(10)
    with pytest.raises(InvalidArgument, match="falls in cycles"):
        kn.SnapshotEnsemble(cycles=2, epochs=4, training=training).fit(
            kn.Model(nn.Linear(2, 1).double(), kn.Gaussian()), (x, y)
        )
