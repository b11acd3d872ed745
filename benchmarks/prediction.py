"""Monte Carlo prediction: K = 64 draws for 1,000 inputs of the MLP, and the memory it takes.

The reference is what one writes by hand: a loop that draws the weights of a mean-field posterior and runs the network.
All contenders predict with draws from the same means and scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.harness import Case, Plan, Step
from benchmarks.networks import NETWORKS, classification_data

if TYPE_CHECKING:
    import knowable as kn

_CAPS = (None, "500MB", "100MB", "20MB")
_SCALE = 0.02


@dataclass(frozen=True)
class Job:
    """What is to be predicted: ``draws`` sets of weights, ``rows`` inputs."""

    draws: int
    rows: int

    def inputs(self) -> Tensor:
        return classification_data(self.rows, NETWORKS["mlp"].input_shape)[0]


def cases(*, quick: bool) -> list[Case]:
    """One table: the loops and knowable under several caps on memory."""
    job = Job(draws=4, rows=50) if quick else Job(draws=64, rows=1_000)
    ours = {
        "knowable" if cap is None else f"knowable, max_memory={cap}": partial(knowable_prediction, job, cap)
        for cap in _CAPS
    }
    return [
        Case(
            name="mlp",
            title=f"{NETWORKS['mlp'].title}: {job.draws} draws for {job.rows:,} inputs",
            contenders={
                "loop that draws": partial(drawing_loop, job),
                "loop over kept draws": partial(keeping_loop, job),
                **ours,
            },
            reference="loop that draws",
            plan=Plan(rounds=11, inner=1, warmup=2),
            note="What a prediction takes beyond what it was given is peak less built: compare that with max_memory.",
        )
    ]


def knowable_prediction(job: Job, max_memory: str | None) -> Step:
    """``posterior.predict`` called again and again, as a service would."""
    posterior, x = mean_field_posterior(), job.inputs()
    return lambda: posterior.predict(x, samples=job.draws, max_memory=max_memory).samples


def mean_field_posterior() -> kn.DiagonalNormal:
    """What a mean-field fit returns, at given means and scales: the fit is not what is timed."""
    import knowable as kn

    net = NETWORKS["mlp"].make()
    model = kn.Model(net, kn.Categorical(), kn.Normal(1.0))
    means = _means(net)
    return kn.DiagonalNormal(model, means, {name: torch.full_like(mean, _SCALE) for name, mean in means.items()})


def drawing_loop(job: Job) -> Step:
    """Draw all weights, run the network, add its probabilities; ``job.draws`` times."""
    net, x = NETWORKS["mlp"].make(), job.inputs()
    means = _means(net)

    @torch.no_grad()
    def step() -> Tensor:
        return sum(_probabilities(net, _draw(means), x) for _ in range(job.draws)) / job.draws  # type: ignore

    return step


def keeping_loop(job: Job) -> Step:
    """The same loop over draws that were made before."""
    net, x = NETWORKS["mlp"].make(), job.inputs()
    means = _means(net)
    kept = [_draw(means) for _ in range(job.draws)]

    @torch.no_grad()
    def step() -> Tensor:
        return sum(_probabilities(net, draw, x) for draw in kept) / job.draws  # type: ignore

    return step


def _means(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


def _draw(means: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mean + _SCALE * torch.randn_like(mean) for name, mean in means.items()}


def _probabilities(net: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(net, params, (x,)).softmax(-1)
