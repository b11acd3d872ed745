"""Time of a training step of every variational method, over that of ``MeanFieldVI`` and over the plain network's.

The methods are those of the registry, with their own defaults, and a step is what the training loop makes of it:
forward and backward pass, update, and the loop's own book-keeping. ``NaturalVI`` is also held against Adam on the plain
network and against ivon-opt, which does the same for one scalar weight decay.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.harness import Case, Factory, Plan, Step
from benchmarks.networks import NETWORKS, SMALL_MLP, Network
from benchmarks.peers import ivon
from benchmarks.step_time import plain_step

if TYPE_CHECKING:
    from knowable.core.training.loop import TrainingRun

FAMILIES = ("variational", "functional")
_ENDLESS = 10**9  # epochs: the learning rate is that of the beginning
_QUICK_BATCH = 8
_NOTE_METHODS = (
    "A method that is not made for a network says so in its row. MixtureVI has five components, each a network of its "
    "own: a fifth of its ratio is that of one component."
)
_NOTE_NATURAL = (
    "Everybody makes one gradient of the network at one draw of its weights; plain is fused Adam without draws."
)


def cases(*, quick: bool) -> list[Case]:
    """A table of all methods for three networks, and one of natural steps beside plain ones for three."""
    networks = {"small_mlp": SMALL_MLP, **NETWORKS}
    if quick:
        networks = {name: replace(network, batch_size=_QUICK_BATCH) for name, network in networks.items()}
    by_method = [_methods(name, networks[name]) for name in ("small_mlp", "mlp", "lenet")]
    return by_method + [_natural(name, networks[name]) for name in ("mlp", "lenet", "resnet")]


def method_names() -> list[str]:
    """Classes of all variational methods there are, ``MeanFieldVI`` first."""
    from knowable.registry import METHODS

    names = [entry.cls_name for entry in METHODS.values() if entry.family in FAMILIES]
    return sorted(names, key=lambda name: name != "MeanFieldVI")


def method_step(network: Network, name: str, **settings: Any) -> Step:
    """A step of the method as its training loop makes it."""
    import knowable as kn

    x, y = network.data()
    method = getattr(kn, name)(epochs=_ENDLESS, learning_rate=1e-3, **settings)
    run = run_of(method, kn.Model(network.make(), kn.Categorical(), kn.Normal(1.0)), (x, y))

    def step() -> None:
        if not run._one_step([((x, y), len(x))]):
            raise FloatingPointError("the loss left the finite numbers")

    return step


def run_of(method: Any, model: Any, data: Any) -> TrainingRun:
    """What a fit hands to the training loop, caught before the first step."""
    from knowable.core.training.loop import TrainingRun

    def caught(run: TrainingRun, *_: Any) -> None:
        raise _Caught(run)

    with patch.object(TrainingRun, "epoch_of_steps", caught):
        try:
            method.fit(model, data, progress=False)
        except _Caught as found:
            return found.run
    raise TypeError(f"{type(method).__name__} did not come to the training loop")


class _Caught(BaseException):
    """Carries a run out of a fit."""

    def __init__(self, run: TrainingRun):
        super().__init__()
        self.run = run


def _methods(name: str, network: Network) -> Case:
    contenders: dict[str, Factory] = {each: partial(method_step, network, each) for each in method_names()}
    return Case(
        name=f"methods_{name}",
        title=f"All methods: {network.title}, batch {network.batch_size}",
        contenders={"plain": partial(plain_step, network), **contenders},
        reference="MeanFieldVI",
        plan=_plan(name),
        note=_NOTE_METHODS,
    )


def _natural(name: str, network: Network) -> Case:
    return Case(
        name=f"natural_{name}",
        title=f"Natural steps: {network.title}, batch {network.batch_size}",
        contenders={
            "plain": partial(plain_step, network),
            "NaturalVI": partial(method_step, network, "NaturalVI"),
            "MeanFieldVI, weight": partial(method_step, network, "MeanFieldVI", estimator="weight"),
            "ivon-opt": partial(ivon, network),
        },
        reference="plain",
        plan=_plan(name),
        packages=("ivon-opt",),
        note=_NOTE_NATURAL,
    )


def _plan(name: str) -> Plan:
    return Plan(rounds=25, inner=10, warmup=5) if name == "small_mlp" else Plan(rounds=21, inner=3, warmup=3)
