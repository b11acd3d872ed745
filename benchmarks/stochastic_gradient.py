"""Time of a step of stochastic-gradient MCMC, over a plain step of SGD with momentum on the same network and batch.

With several chains the plain step trains as many networks, one after the other, so that the ratio is that of one chain.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Factory, Plan, Step
from benchmarks.networks import NETWORKS, SMALL_MLP, TRAIN_SIZE, Network

PACKAGES = ("posteriors",)
CASES = {
    "mlp": (NETWORKS["mlp"], (1, 4, 16)),
    "small_mlp": (SMALL_MLP, (1, 4, 16)),
    "lenet": (NETWORKS["lenet"], (1, 4)),
}
_BATCHES = 4  # that the rows of our own steps are drawn from
_STEP = 1e-9  # on the scale of all rows, small enough to go on forever
_QUICK_BATCH = 8
_NOTE = (
    "All steps are on one batch, with the log prior of a standard normal; the plain step has neither prior nor noise. "
    "Our own steps include drawing the batch; a run compiles them after 20,000, or from the start with "
    "``Engine(mode='compiled')``."
)


def cases(*, quick: bool) -> list[Case]:
    """A table for each network and number of chains."""
    found = []
    for name, (network, chains) in CASES.items():
        network = replace(network, batch_size=_QUICK_BATCH) if quick else network
        found += [_case(name, network, count, quick) for count in chains[: 2 if quick else None]]
    return found


def plain_step(network: Network, chains: int) -> Step:
    """SGD with momentum, fused, on as many networks."""
    x, y = network.data()
    nets = [network.make(seed=chain) for chain in range(chains)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9, fused=True) for net in nets]

    def step() -> Tensor:
        loss = torch.zeros(())
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def knowable_step(network: Network, chains: int, method: str, *, tuned: bool = False, mode: str = "traced") -> Step:
    """A step as the chain loop makes it; a tuned one has a diagonal mass, that of a long run is compiled."""
    import knowable as kn
    from knowable.core.chains.target import ModelTarget
    from knowable.core.model.data import Data
    from knowable.inference.sampling.mini_batches import MiniBatches

    model = kn.Model(network.make(), kn.Categorical(), kn.Normal(1.0))
    data = Data(network.data(_BATCHES * network.batch_size), _BATCHES * network.batch_size)
    target = ModelTarget(model, data, points={}, buffers=model.buffers(), mode=mode)
    target.size = TRAIN_SIZE
    start = torch.stack([target.layout.flatten(dict(network.make(seed=k).named_parameters())) for k in range(chains)])
    sampler: Any = {"sgld": kn.SGLD, "sghmc": kn.SGHMC}[method](
        step_size=_STEP, batch_size=network.batch_size, mass="diagonal" if tuned else "auto"
    )
    kernel = sampler.kernel(start.shape[1])
    state = kernel.init(target, start.detach(), generator=torch.Generator().manual_seed(0))
    run, batches = kernel.dynamics(state), MiniBatches(target, network.batch_size, state.batch_seed)

    def step() -> Tensor:
        nonlocal state
        state = replace(run(state, batches, state.batch_step, 1), batch_step=state.batch_step + 1)
        return state.value / TRAIN_SIZE

    return step


def posteriors_step(network: Network, method: str) -> Step:
    """The same with posteriors, updating in place."""
    import posteriors
    from torch.func import functional_call

    net = network.make()
    params = {name: value.detach() for name, value in net.named_parameters()}
    batch = network.data()

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        output = functional_call(net, params, (x,))
        prior = posteriors.diag_normal_log_prob(params, mean=0.0, sd_diag=1.0, normalize=False)
        return -F.cross_entropy(output, y) + prior / TRAIN_SIZE, output

    build: Callable[..., Any] = getattr(posteriors.sgmcmc, method).build
    transform = build(log_posterior, lr=1e-6, temperature=1 / TRAIN_SIZE)
    states = [transform.init(params)]

    def step() -> Tensor:
        states[0], _ = transform.update(states[0], batch, inplace=True)
        return states[0].log_posterior

    return step


def _case(name: str, network: Network, chains: int, quick: bool) -> Case:
    long_run = "traced" if quick else "compiled"  # compiling takes half a minute
    contenders: dict[str, Factory] = {"plain": partial(plain_step, network, chains)}
    for method in ("sgld", "sghmc"):
        contenders[f"knowable, {method.upper()}"] = partial(knowable_step, network, chains, method)
        contenders[f"knowable, {method.upper()}, compiled"] = partial(
            knowable_step, network, chains, method, mode=long_run
        )
        contenders[f"knowable, {method.upper()}, compiled, diagonal mass"] = partial(
            knowable_step, network, chains, method, tuned=True, mode=long_run
        )
        if chains == 1:
            contenders[f"posteriors, {method.upper()}"] = partial(posteriors_step, network, method)
    return Case(
        name=f"{name}_{chains}",
        title=f"{network.title}, batch {network.batch_size}, chains: {chains}",
        contenders=contenders,
        reference="plain",
        plan=Plan(rounds=11, inner=2, warmup=3),
        packages=PACKAGES,
        note=_NOTE,
    )
