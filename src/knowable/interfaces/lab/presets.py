"""Examples that the page offers: the figures of the lectures, each with what to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable import datasets

_BEYOND = 0.08  # of the range of the data, that is shown beside it


def presets() -> list[dict[str, Any]]:
    """Name, title, what to look at, and the state that the page takes."""
    return [
        _gap(), _between(), _underfit(), _shrinking(), _wide(), _mixing(), _maximise(), _moons(), _coin(), _attack(),
        _reject(),
    ]  # fmt: skip


def _preset(name: str, title: str, text: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "title": title, "text": text, "state": state}


def _gap() -> dict[str, Any]:
    data = datasets.sine_with_gap(40, noise=0.1, seed=1)
    return _preset(
        "gap", "A gap in the data",
        "Between −1 and 1 there are no points. The noise is the same everywhere; what should grow in the gap and "
        "outside is the epistemic part, the dark band. Add a point in the gap and see the band close.",
        points=_numbers(data.x, data.y), view=[-5, 5, -2.6, 2.6],
        methods=["exact_linear", "infinite_width", "laplace", "mean_field_vi"], judge="hmc", width=16,
    )  # fmt: skip


def _between() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    left, right = (low + span * torch.rand(18, generator=generator) for low, span in ((-1.6, 0.6), (0.9, 0.7)))
    x = torch.cat([left, right])
    y = torch.cos(2.2 * x + 0.5) + 0.08 * torch.randn(len(x), generator=generator)
    return _preset(
        "between", "In-between uncertainty",
        "Two clusters and nothing between them. Mean-field VI and MC dropout are surer there than HMC, the dashed "
        "band: of one layer of ReLU units it is proved that they cannot be unsure between clusters (Foong et al., "
        "2020). Laplace, with a full covariance, is unsure.",
        points=_numbers(x, y), view=[-2.6, 2.6, -2.6, 2.6], width=20, activation="tanh", noise=0.08,
        methods=["mean_field_vi", "mc_dropout", "laplace", "full_rank_vi"], judge="hmc",
    )  # fmt: skip


def _underfit() -> dict[str, Any]:
    data = datasets.sine_with_gap(24, noise=0.2, seed=2)
    return _preset(
        "underfit", "Mean field underfits",
        "Two wide layers, few data. Each of the many weights pays its own KL, and each alone has little to gain: "
        "mean-field VI returns to the prior and says nothing, where the others see at least the trend. Look at its "
        "weights, then lower β or the width.",
        points=_numbers(data.x, data.y), view=[-4, 4, -2.6, 2.6], width=100, depth=2, by_width=True, noise=0.3,
        methods=["map", "mean_field_vi", "laplace", "infinite_width"], judge=None,
    )  # fmt: skip


def _shrinking() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    x = 6 * torch.rand(200, generator=generator) - 3
    y = torch.sin(1.5 * x) + 0.3 * torch.randn(200, generator=generator)
    return _preset(
        "shrinking", "What more data takes away",
        "Move the number of points from 4 to 200. The epistemic band shrinks to nothing; the aleatoric one stays "
        "what it is, the noise of the outcomes.",
        points=_numbers(x, y), view=[-4, 4, -2.8, 2.8], use=10, noise=0.3, width=16,
        methods=["infinite_width", "laplace"], judge=None,
    )  # fmt: skip


def _wide() -> dict[str, Any]:
    x = torch.tensor([-2.0, -1.2, -0.4, 0.6, 1.3, 2.1])
    y = torch.tensor([-0.9, -1.1, -0.2, 0.8, 1.0, 0.3])
    return _preset(
        "wide", "From one network to a Gaussian process",
        "The prior of a weight is divided by the root of its layer's inputs, so that wide networks have a limit. "
        "At width 2 HMC and the limit differ; move the width up and they become the same.",
        points=_numbers(x, y), view=[-4, 4, -3.5, 3.5], width=2, by_width=True, prior=1.5, noise=0.1,
        methods=["hmc", "infinite_width"], judge=None,
    )  # fmt: skip


def _mixing() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    x = 4 * torch.rand(20, generator=generator) - 2
    y = torch.tanh(2 * x) + 0.15 * torch.randn(20, generator=generator)
    return _preset(
        "mixing", "Do the chains mix?",
        "A network of three units: swapping two of them, or the signs of both weights of one, changes no prediction. "
        "In the view Chains each chain finds its own corner of weight space; R-hat is of the function, on which they "
        "agree.",
        points=_numbers(x, y), view=[-3, 3, -2, 2], width=3, noise=0.15, panel="chains",
        methods=["hmc", "nuts", "sgld", "svgd"], judge=None,
    )  # fmt: skip


def _maximise() -> dict[str, Any]:
    x = torch.tensor([-3.4, -2.0, -0.7, 0.3, 2.3, 3.4])
    y = torch.sin(1.6 * x) + 0.3 * x
    return _preset(
        "maximise", "Where to evaluate next",
        "A function that is expensive to evaluate, to be maximised. Press Evaluate next: the dashed line is the upper "
        "confidence bound m + 2σ, and the mark is where it is largest. Click there to add the value.",
        points=_numbers(x, y), view=[-4, 4, -3, 3.5], noise=0.05, prior=1.0, width=24,
        methods=["infinite_width", "laplace"], judge=None,
    )  # fmt: skip


def _moons() -> dict[str, Any]:
    data = datasets.two_moons(80, noise=0.12, seed=1)
    return _preset(
        "moons", "Two classes",
        "Look at the epistemic map: one network is sure far from all data, where nothing is known. A posterior is "
        "not. Press 1 or 2 and click to add points of a class.",
        task="classes", points=_labels(data.x, data.y), view=_view(data.x, 0.5), width=12, prior=3.0,
        methods=["map", "laplace", "mean_field_vi", "deep_ensemble"], judge="hmc", layer="epistemic",
    )  # fmt: skip


def _coin() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    x = 0.7 * torch.randn(120, 2, generator=generator)
    y = torch.randint(0, 2, (120,), generator=generator)
    return _preset(
        "coin", "A coin flip is not ignorance",
        "The labels are coin flips. With many of them the prediction is one half and everyone knows it: aleatoric "
        "uncertainty of ln 2, and little that is epistemic. Use fewer points, and it becomes ignorance.",
        task="classes", points=_labels(x, y), view=[-3, 3, -3, 3], width=8, layer="aleatoric",
        methods=["map", "laplace", "mean_field_vi", "deep_ensemble"], judge=None,
    )  # fmt: skip


def _attack() -> dict[str, Any]:
    data = datasets.two_moons(100, noise=0.15, seed=4)
    return _preset(
        "attack", "An adversarial point",
        "Choose Attack and click a point: it is moved by at most ε so that its prediction becomes wrong. Compare how "
        "sure one network, an ensemble and a posterior are of the moved point.",
        task="classes", points=_labels(data.x, data.y), view=_view(data.x, 0.3), width=20, prior=3.0,
        methods=["map", "deep_ensemble", "laplace", "mc_dropout"], judge=None, layer="probability", tool="attack",
        epsilon=0.4,
    )  # fmt: skip


def _reject() -> dict[str, Any]:
    data = datasets.blobs(360, classes=3, noise=0.7, seed=2)
    return _preset(
        "reject", "Reject above a risk",
        "Three classes that overlap. Press Reject: half of the points are held out, and the certificate accepts only "
        "predictions of which at most so many are wrong. What is hatched is refused.",
        task="classes", points=_labels(data.x, data.y), view=_view(data.x, 0.2), width=12, layer="probability",
        methods=["laplace", "infinite_width"], judge=None, risk=0.15,
    )  # fmt: skip


def _numbers(x: Tensor, y: Tensor) -> list[list[float]]:
    return [[round(a, 3), round(b, 3)] for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)]


def _labels(x: Tensor, y: Tensor) -> list[list[float]]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # some of them are some of each class
    return [[round(a, 3), round(b, 3), int(c)] for (a, b), c in zip(x[order].tolist(), y[order].tolist(), strict=True)]


def _view(x: Tensor, beyond: float) -> list[float]:
    low, high = x.amin(0), x.amax(0)
    margin = (_BEYOND + beyond) * (high - low)
    return [round(float(each), 2) for pair in zip(low - margin, high + margin, strict=True) for each in pair]
