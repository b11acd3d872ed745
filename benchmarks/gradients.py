"""Gradients of a network's log joint for many chains at once: ours and JAX's ``jit(vmap(value_and_grad))``.

What is timed is one call that gives values and gradients of all chains, over all rows, in float32. Ours is the target
that every sampler runs on, with its chains in blocks; the two take turns in one process.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import QUICK, Case, Outcome, Plan, Spread, Step, measure
from benchmarks.study import Rows, describe, page, say, table

CHAINS = (4, 16, 64)
REFERENCE = "JAX"
_HEADER = ("network", "chains", "contender", "gradients/s", "quartiles", "best", "times JAX", "times JAX, quartiles")
_NOTE = (
    "Gradients x chains per second: median, quartiles and best over the rounds; times JAX is taken within each round."
)
_MILLISECONDS = 60.0  # of a turn, so that threads of the last one are asleep


@dataclass(frozen=True)
class Network:
    """A fully connected network with synthetic data.

    Attributes:
        widths: Units of every layer.
        activation: ``"tanh"`` or ``"relu"``.
        rows: Size of the data.
        classes: Whether the outputs are logits of classes, or one number with noise 0.3.
    """

    widths: tuple[int, ...]
    activation: str
    rows: int
    classes: bool = False

    @property
    def title(self) -> str:
        """For the table."""
        return f"{'-'.join(map(str, self.widths))} {self.activation}, N = {self.rows:,}"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Standard normal inputs, and targets that depend on them or labels that do not."""
        generator = np.random.default_rng(0)
        x = generator.standard_normal((self.rows, self.widths[0])).astype(np.float32)
        if self.classes:
            return x, generator.integers(0, self.widths[-1], self.rows)
        return x, (np.sin(2 * x[:, 0]) + 0.3 * generator.standard_normal(self.rows)).astype(np.float32)

    def positions(self, chains: int) -> np.ndarray:
        """Where the gradient is taken, ``(chains, D)``."""
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        dimension = sum(inputs * outputs + outputs for inputs, outputs in pairs)
        return 0.1 * np.random.default_rng(1).standard_normal((chains, dimension)).astype(np.float32)


NOISE = 0.3
NETWORKS = {
    "tanh": Network((10, 50, 50, 1), "tanh", 500),
    "relu": Network((10, 50, 50, 1), "relu", 500),
    "images": Network((784, 100, 10), "relu", 2000, classes=True),
}
_SMALL = {
    "tanh": Network((3, 4, 1), "tanh", 9),
    "relu": Network((3, 4, 1), "relu", 9),
    "images": Network((5, 4, 3), "relu", 9, True),
}


def cases(*, quick: bool) -> list[Case]:
    """A case for every network and number of chains."""
    networks = _SMALL if quick else NETWORKS
    return [
        Case(
            name=f"{name}-{chains}",
            title=f"{network.title}|{chains}",
            contenders={
                REFERENCE: partial(jax_step, network, chains),
                "knowable, compiled": partial(knowable_step, network, chains, "compiled"),
                "knowable, traced": partial(knowable_step, network, chains, "traced"),
            },
            reference=REFERENCE,
            plan=Plan(rounds=15, inner=_inner(name, chains), warmup=3),
            packages=("jax", "jaxlib"),
        )
        for name, network in networks.items()
        for chains in (CHAINS[:1] if quick else CHAINS)
    ]


def _inner(name: str, chains: int) -> int:
    """Steps of a turn, from about how long one takes."""
    each = (8.0 if name == "images" else 0.25) * chains
    return max(1, round(_MILLISECONDS / each))


def jax_step(network: Network, chains: int) -> Step:
    """One call of JAX on all chains."""
    import jax

    x, y = network.data()
    batched = jax.jit(jax.vmap(jax.value_and_grad(partial(jax_log_joint, network, x, y))))
    positions = jax.device_put(network.positions(chains))

    def step() -> float:
        values, _ = jax.block_until_ready(batched(positions))
        return float(values[0])

    return step


def jax_log_joint(network: Network, x: Any, y: Any, flat: Any) -> Any:
    """The log joint of one flat position up to a constant, in JAX."""
    import jax
    import jax.numpy as jnp

    hidden, first = x, 0
    act = {"tanh": jnp.tanh, "relu": jax.nn.relu}[network.activation]
    for number, (inputs, outputs) in enumerate(zip(network.widths[:-1], network.widths[1:], strict=True)):
        weight = flat[first : first + inputs * outputs].reshape(outputs, inputs)
        first += inputs * outputs
        hidden = hidden @ weight.T + flat[first : first + outputs]
        first += outputs
        hidden = act(hidden) if number < len(network.widths) - 2 else hidden
    prior = -0.5 * (flat**2).sum()
    if network.classes:
        return prior + jnp.take_along_axis(jax.nn.log_softmax(hidden), y[:, None], 1).sum()
    return prior - 0.5 * ((hidden[:, 0] - y) ** 2).sum() / NOISE**2


def knowable_step(network: Network, chains: int, mode: str) -> Step:
    """One call of the target on all chains."""
    target, positions = knowable_target(network, mode), torch.from_numpy(network.positions(chains))
    target.function.direct = 1000  # as if in the middle of a run

    def step() -> Tensor:
        return target.value_and_grad(positions)[0]

    return step


def knowable_target(network: Network, mode: str) -> Any:
    """The log joint as the samplers get it."""
    import knowable as kn
    from knowable.core.chains.target import ModelTarget
    from knowable.core.model.data import as_data

    layers: list[nn.Module] = []
    for inputs, outputs in zip(network.widths[:-1], network.widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.Tanh() if network.activation == "tanh" else nn.ReLU()]
    likelihood = kn.Categorical() if network.classes else kn.Gaussian(noise=NOISE)
    model = kn.Model(nn.Sequential(*layers[:-1]), likelihood, kn.Normal(1.0))
    x, y = (torch.from_numpy(each) for each in network.data())
    data = as_data((x, y if network.classes else y.unsqueeze(-1)))
    return ModelTarget(model, data, points={}, buffers=model.buffers(), mode=mode)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Every case, by turns; ``only`` is a glob of cases such as ``tanh-*``."""
    found, packages = [], ("jax", "jaxlib")
    for case in cases(quick=quick):
        if not fnmatch(case.name, only):
            continue
        key = f"{case.name}, {torch.get_num_threads()} threads" + ", quick" * quick
        row = rows.get(key) or rows.add(key, _measured(case, QUICK if quick else case.plan))
        found.append(row)
        said = [f"{name} {each['rate']['median']:,.0f}" for name, each in row["contenders"].items() if each["rate"]]
        say(f"{case.name}: {', '.join(said) or 'all failed'}")
    return describe("gradients", quick=quick, packages=packages, cases=found)


def _measured(case: Case, plan: Plan) -> dict[str, Any]:
    title, _, chains = case.title.partition("|")
    outcomes = measure(case.contenders, plan)
    reference = outcomes[case.reference]
    contenders = {name: rates(outcome, reference, int(chains)) for name, outcome in outcomes.items()}
    return {"name": case.name, "network": title, "chains": int(chains), "plan": asdict(plan), "contenders": contenders}


def rates(outcome: Outcome, reference: Outcome, chains: int) -> dict[str, Any]:
    """Gradients x chains per second and how many times the reference's, from times of a call in milliseconds."""
    if outcome.error is not None or not outcome.milliseconds:
        return {"error": outcome.error or "no times", "rate": None, "times": None, "milliseconds": []}
    rate = Spread.of([1e3 * chains / value for value in outcome.milliseconds])
    ratio = None
    if reference.error is None and reference.milliseconds:
        pairs = zip(reference.milliseconds, outcome.milliseconds, strict=True)
        ratio = asdict(Spread.of([theirs / ours for theirs, ours in pairs]))
    best = 1e3 * chains / min(outcome.milliseconds)
    return {
        "error": None, "rate": {**asdict(rate), "best": best}, "times": ratio,
        "milliseconds": [round(value, 5) for value in outcome.milliseconds],
    }  # fmt: skip


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each contender of each case."""
    rows = [_cells(case, name, each) for case in run["cases"] for name, each in case["contenders"].items()]
    return page(run, table("Values and gradients of all chains", _HEADER, rows, _NOTE))


def _cells(case: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> list[str]:
    where = [case["network"], str(case["chains"]), name]
    rate, times = row["rate"], row["times"]
    if rate is None:
        return [*where, f"failed: {row['error']}"]
    cells = [f"{rate['median']:,.0f}", f"{rate['lower']:,.0f}–{rate['upper']:,.0f}", f"{rate['best']:,.0f}"]
    if times is None:
        return [*where, *cells]
    return [*where, *cells, f"{times['median']:.2f}", f"{times['lower']:.2f}–{times['upper']:.2f}"]
