"""Time of a training step of an ensemble, over that of as many plain networks, one after the other.

The plain step is the network, a squared error (or cross-entropy) and fused Adam, eight times. Our own steps are those
of the training loop, with a likelihood (its noise learned), a prior, and the loop's own book-keeping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.harness import Case, Plan, Step
from benchmarks.peers import adam

MEMBERS = 8
ROWS = 500
_NOTE = (
    "In turn: a step of each network, one after the other. Compiled steps are timed after the seconds that compiling "
    "takes. The vmap step is written by hand, with torch.func and one fused Adam over the stacked parameters."
)


@dataclass(frozen=True)
class Problem:
    """Data and a network for it; one output is a number, more are classes."""

    title: str
    sizes: tuple[int, ...]
    batch: int

    def make(self, seed: int = 0) -> nn.Module:
        """The network."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.sizes, self.sizes[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self) -> tuple[Tensor, Tensor]:
        """A batch."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch, self.sizes[0], generator=generator)
        if self.sizes[-1] == 1:
            return x, torch.randn(self.batch, 1, generator=generator)
        return x, torch.randint(0, self.sizes[-1], (self.batch,), generator=generator)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """What is minimised without a prior."""
        return F.mse_loss if self.sizes[-1] == 1 else F.cross_entropy


PROBLEMS = {
    "small": Problem("8-50-1, batch 500", (8, 50, 1), 500),
    "small_batch": Problem("8-50-1, batch 32", (8, 50, 1), 32),
    "middle": Problem("16-50-50-10, batch 128", (16, 50, 50, 10), 128),
    "wide": Problem("784-100-10, batch 128", (784, 100, 10), 128),
}


def cases(*, quick: bool) -> list[Case]:
    """A table for each network."""
    chosen = dict(list(PROBLEMS.items())[1:2]) if quick else PROBLEMS
    return [_case(name, problem) for name, problem in chosen.items()]


def plain_step(problem: Problem) -> Step:
    """As many networks, one after the other."""
    x, y = problem.data()
    nets = [problem.make(seed) for seed in range(MEMBERS)]
    optimizers = [adam(net.parameters()) for net in nets]

    def step() -> Tensor:
        loss = torch.zeros(())
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = problem.loss(net(x), y)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def vmap_step(problem: Problem) -> Step:
    """What one writes by hand: the stacked networks under vmap, one backward pass, one fused Adam."""
    x, y = problem.data()
    base = problem.make()
    stacked, _ = stack_module_state([problem.make(seed) for seed in range(MEMBERS)])  # type: ignore[arg-type]
    params = {name: nn.Parameter(value.detach()) for name, value in stacked.items()}
    optimizer = adam(params.values())

    def step() -> Tensor:
        optimizer.zero_grad()
        each = vmap(lambda own: problem.loss(functional_call(base, own, (x,)), y))(params)
        each.sum().backward()
        optimizer.step()
        return each.detach().mean()

    return step


def knowable_step(problem: Problem, mode: str) -> Step:
    """A step of ``DeepEnsemble`` as its training loop makes it: ``"in turn"``, or together in a mode of the engine."""
    import knowable as kn
    from knowable.core.compiling.engine import Engine
    from knowable.core.model.data import as_data
    from knowable.core.training.loop import TrainingRun
    from knowable.core.training.settings import TrainingSettings
    from knowable.inference.ensembles.side_by_side import EnsembleObjective
    from knowable.inference.point.point import PointObjective
    from knowable.inference.sampling.initial_positions import initial_weights

    x, y = problem.data()
    model = kn.Model(problem.make(), kn.Gaussian() if problem.sizes[-1] == 1 else kn.Categorical())
    data = as_data((x, y), model)
    if mode == "in turn":
        objectives = [PointObjective(model, ROWS, use_prior=True) for _ in range(MEMBERS)]
    else:
        blank = EnsembleObjective(model, ROWS, torch.zeros(1, 1))
        positions = initial_weights(model, blank.layout, MEMBERS, 0)
        objectives = [EnsembleObjective(model, ROWS, positions, mode=mode)]
    training = TrainingSettings(epochs=10**9, learning_rate=1e-3)
    runs = [TrainingRun(each, data, training, None, 0, Engine()) for each in objectives]

    def step() -> Tensor:
        for run in runs:
            run._one_step([(data.tensors, data.size)])
        return runs[-1].params[0].detach().sum()

    return step


def _case(name: str, problem: Problem) -> Case:
    ways = {"in turn": "in turn", "together": "traced", "together, compiled": "compiled", "together, eager": "eager"}
    return Case(
        name=name,
        title=f"{MEMBERS} networks {problem.title}",
        contenders={
            "plain, in turn": partial(plain_step, problem),
            "plain, vmap": partial(vmap_step, problem),
            **{f"knowable, {way}": partial(knowable_step, problem, mode) for way, mode in ways.items()},
        },
        reference="plain, in turn",
        plan=Plan(rounds=25, inner=10, warmup=10),
        note=_NOTE,
    )
