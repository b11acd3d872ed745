"""The Python that fits what the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from knowable.interfaces.lab.methods import offer_of
from knowable.interfaces.lab.picture import CURVE, MAP
from knowable.interfaces.lab.problem import Problem, bumps

_ACTIVATIONS = {"tanh": "nn.Tanh()", "relu": "nn.ReLU()", "silu": "nn.SiLU()", "erf": "kn.Erf()"}

_CURVES = """
figure, axes = plt.subplots(1, len(posteriors), figsize=(5 * len(posteriors), 4), squeeze=False)
for ax, (name, posterior) in zip(axes[0], posteriors.items()):
    prediction = posterior.predict(grid, samples=200)
    mean = prediction.mean.flatten()
    for variance, label in ((prediction.total, "with noise"), (prediction.epistemic, "epistemic")):
        spread = 2 * variance.clamp_min(0).sqrt().flatten()
        ax.fill_between(grid.flatten(), mean - spread, mean + spread, alpha=0.25, label=label)
    ax.plot(grid, mean)
    ax.scatter(x, y, s=12, color="black")
    ax.set(title=name, xlim=({left}, {right}), ylim=({bottom}, {top}))
axes[0, 0].legend()
figure.savefig("lab.png")
"""

_MAPS = """
figure, axes = plt.subplots(2, len(posteriors), figsize=(4 * len(posteriors), 7), squeeze=False)
extent = ({left}, {right}, {bottom}, {top})
for column, (name, posterior) in zip(axes.T, posteriors.items()):
    prediction = posterior.predict(grid, samples=200)
    shown = (("probability of class 1", prediction.probs[:, 1]), ("epistemic, nats", prediction.epistemic))
    for ax, (label, values) in zip(column, shown):
        ax.imshow(values.reshape({side}, {side}), origin="lower", extent=extent, aspect="auto")
        ax.scatter(x[:, 0], x[:, 1], c=y, s=12, edgecolors="white", cmap="tab10")
        ax.set_title(f"{{name}}: {{label}}")
figure.savefig("lab.png")
"""


def script(problem: Problem, methods: Sequence[str]) -> str:
    """A program that makes the same model, fits it by the same methods, and draws what they predict."""
    offers = {name: offer_of(name, problem) for name in methods}
    linear = [name for name, offer in offers.items() if offer.linear]
    plain = [name for name, offer in offers.items() if not offer.linear]
    lines = ["import torch", "from matplotlib import pyplot as plt", "from torch import nn", "",
             "import knowable as kn", "", *_data(problem), ""]  # fmt: skip
    if plain:
        lines += [f"torch.manual_seed({problem.seed})", f"net = {_network(problem)}",
                  f"model = kn.Model(net, {_likelihood(problem)}, {_prior(problem)})", ""]  # fmt: skip
    if linear:
        _, width = bumps(problem.view, problem.width)
        left, right = problem.view[:2]
        lines += [f"centres = torch.linspace({left}, {right}, {problem.width}).unsqueeze(1)",
                  f"bumps = kn.features.RBF(centres, width={width}).linear()",
                  f"linear = kn.Model(bumps, {_likelihood(problem)}, kn.Normal({problem.prior}))", ""]  # fmt: skip
    lines.append("posteriors = {}")
    for offer in offers.values():
        model = "linear" if offer.linear else "model"
        made = f"kn.{offer.make(problem)!r}.fit({model}, (x, y), seed={problem.seed})"
        lines += [f"posteriors[{offer.label!r}] = {made}", f"print(posteriors[{offer.label!r}].diagnostics)"]
    left, right, bottom, top = problem.view
    if problem.task == "regression":
        lines += ["", f"grid = torch.linspace({left}, {right}, {CURVE}).unsqueeze(1)"]
        return "\n".join(lines) + _CURVES.format(left=left, right=right, bottom=bottom, top=top)
    lines += ["", f"across, up = torch.linspace({left}, {right}, {MAP}), torch.linspace({bottom}, {top}, {MAP})",
              f"grid = torch.stack([across.repeat({MAP}), up.repeat_interleave({MAP})], 1)"]  # fmt: skip
    return "\n".join(lines) + _MAPS.format(left=left, right=right, bottom=bottom, top=top, side=MAP)


def _data(problem: Problem) -> list[str]:
    rows = [f"    {list(point)!r}," for point in problem.points]
    names = "x, y = points[:, :1], points[:, 1:]"
    if problem.task == "classes":
        names = "x, y = points[:, :2], points[:, 2].long()"
    return ["points = torch.tensor([", *rows, "])", names]


def _network(problem: Problem) -> str:
    sizes = [1 if problem.task == "regression" else 2, *[problem.width] * problem.depth]
    layers = [f"nn.Linear({a}, {b}), {_ACTIVATIONS[problem.activation]}" for a, b in pairwise(sizes)]
    outputs = 1 if problem.task == "regression" else problem.classes
    return f"nn.Sequential({', '.join(layers)}, nn.Linear({problem.width}, {outputs}))"


def _likelihood(problem: Problem) -> str:
    if problem.task == "classes":
        return "kn.Categorical()"
    return "kn.Gaussian()" if problem.noise is None else f"kn.Gaussian({problem.noise})"


def _prior(problem: Problem) -> str:
    scales = problem.priors()
    if "*" in scales:
        return f"kn.Normal({scales['*']})"
    return "{" + ", ".join(f"{name!r}: kn.Normal({scale!r})" for name, scale in scales.items()) + "}"
