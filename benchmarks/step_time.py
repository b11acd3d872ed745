"""Time of a training step: knowable's mean-field VI and the peers, over the plain network's step.

The plain step is the network, cross-entropy and fused Adam. All others add weight uncertainty to it: one draw a step,
the KL to a standard normal prior weighed by 1/N, the same Adam on twice as many parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case, Step
from benchmarks.networks import NETWORKS, TRAIN_SIZE, Network
from benchmarks.peers import PACKAGES, adam, peer_factories, training_step

ESTIMATORS = ("auto", "weight", "local", "flipout")
_QUICK_BATCH = 8
_NOTE = (
    "All have one draw a step and the KL over N. Where weights are shared between positions (convolutions), noise "
    "drawn for every position (local) approximates the objective that the others estimate without bias."
)


def cases(*, quick: bool) -> list[Case]:
    """One table for each network."""
    networks = {
        name: replace(network, batch_size=_QUICK_BATCH) if quick else network for name, network in NETWORKS.items()
    }
    return [_case(name, network) for name, network in networks.items()]


def plain_step(network: Network) -> Step:
    """The network without uncertainty."""
    net = network.make()
    x, y = network.data()
    return training_step(net.parameters(), lambda: F.cross_entropy(net(x), y))


def knowable_step(network: Network, estimator: str) -> Step:
    """A step of ``MeanFieldVI`` as its training loop makes it."""
    import knowable as kn

    x, y = network.data()
    model = kn.Model(network.make(), kn.Categorical(), kn.Normal(1.0))
    objective = kn.MeanFieldVI(estimator=estimator).objective(model, x, TRAIN_SIZE)
    optimizer = adam(objective.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss, _ = objective(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _case(name: str, network: Network) -> Case:
    ours = {f"knowable, {estimator}": partial(knowable_step, network, estimator) for estimator in ESTIMATORS}
    return Case(
        name=name,
        title=f"{network.title}, batch {network.batch_size}",
        contenders={"plain": partial(plain_step, network), **ours, **peer_factories(network)},
        reference="plain",
        packages=PACKAGES,
        note=_NOTE,
    )
