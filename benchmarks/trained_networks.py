"""Networks trained in plain PyTorch, and posteriors around them: does a posterior predict worse than its network?

Three networks: convolutions on the 8x8 digits of scikit-learn, a LeNet-5 on rows of MNIST, and a regression with one
hidden layer on Concrete (UCI). Each is trained by a loop in PyTorch, without any prior. Then Laplace and SWAG begin at
its weights, as the documentation says and without any setting; laplace-torch does the same, with a prior precision
chosen by its marginal likelihood. The data of MNIST and UCI are read from the folder that ``KNOWABLE_DATA`` names.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.image_fits import lenet5
from benchmarks.image_fits import load as load_images
from benchmarks.laplace import Batches, _laplace_torch
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import load, mean_and_error, scaler_of

if TYPE_CHECKING:
    from knowable.core.prediction.prediction import Prediction

SEEDS = 5
PLACES = ("kron", "diag", "last layer")
_HEADER = ("method", "NLL", "NLL, more than the network's", "ECE", "accuracy or RMSE", "seconds")
_NOTE = (
    "Test rows; means ± standard errors over {seeds} seeds of data, network and training; differences are taken seed "
    "by seed. The noise of the regression network is that of its training residuals. Seconds: fit and prediction."
)


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network with its data."""

    net: nn.Module
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def classes(self) -> bool:
        """Whether targets are labels."""
        return not self.y.is_floating_point()


@dataclass(frozen=True)
class Problem:
    """How a task is made.

    Attributes:
        title: For the table.
        epochs: Of training.
        learning_rate: Of Adam.
        snapshots: Of SWAG; None is its default.
    """

    title: str
    epochs: int
    learning_rate: float = 1e-3
    snapshots: int | None = None


PROBLEMS = {
    "digits": Problem("Convolutions on digits: 1,257 training rows, 540 test rows", epochs=30),
    "concrete": Problem("One hidden layer on Concrete: 927 training rows, 103 test rows", epochs=150),
    "mnist": Problem("LeNet-5 on MNIST: the first 10,000 training rows, 2,000 test rows", epochs=8, snapshots=20),
}


# --- the networks ----------------------------------------------------------------------------------------------------


def task(name: str, seed: int, *, quick: bool = False) -> Task:
    """A network, trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net, rows = {"digits": _digits, "mnist": _mnist, "concrete": _concrete}[name](seed, quick)
        train(net, rows[0], rows[1], 1 if quick else PROBLEMS[name].epochs, PROBLEMS[name].learning_rate)
    return Task(net, *rows)


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, learning_rate: float) -> None:
    """What the owner of a network writes."""
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
    optimiser = torch.optim.Adam(net.parameters(), learning_rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimiser.step()
    net.eval()


def _digits(seed: int, quick: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    x, y = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target).long()
    order = torch.randperm(len(x))
    fitted, held = (order[:100], order[100:150]) if quick else (order[:1257], order[1257:])
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return net, (x[fitted], y[fitted], x[held], y[held])


def _mnist(seed: int, quick: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    images = load_images(rows=10_000, test=2_000)
    return lenet5(seed=seed), (images.x, images.y, images.inside, images.inside_y)


def _concrete(seed: int, quick: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    split = load("concrete", seed)
    scaler = scaler_of(split)
    inputs, targets = (split.x, split.test_x), (split.y, split.test_y)
    (x, test_x), (y, test_y) = map(scaler.scale_x, inputs), map(scaler.scale_y, targets)
    y, test_y = y.reshape(-1, 1), test_y.reshape(-1, 1)
    return nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)), (x, y, test_x, test_y)


# --- the contenders --------------------------------------------------------------------------------------------------


def contenders(problem: Problem) -> dict[str, Callable[[Task], Mapping[str, float]]]:
    """By their titles; the network comes first."""
    found: dict[str, Callable[[Task], Mapping[str, float]]] = {"the network": _network}
    for place in PLACES:
        found[f"Laplace, {place}"] = lambda each, place=place: _laplace(each, place)
    for place in ("all weights", "last layer"):
        found[f"SWAG, {place}"] = lambda each, place=place: _swag(each, place, problem.snapshots)
    for place in PLACES:
        found[f"laplace-torch, {place}"] = lambda each, place=place: _peer(each, place)
    return found


def _model(each: Task, place: str = "") -> Any:
    import knowable as kn

    likelihood = kn.Categorical() if each.classes else kn.Gaussian()
    return kn.Model(each.net, likelihood, random="last_layer" if place == "last layer" else "*")


def _scores(each: Task, prediction: Prediction) -> dict[str, float]:
    import knowable as kn

    return dict(kn.evaluate(prediction, each.test_y))


def _network(each: Task) -> dict[str, float]:
    import knowable as kn
    from knowable.core.method import FitJob
    from knowable.inference.point.trained import given_point

    point = given_point(FitJob.of(kn.MAP(), _model(each), (each.x, each.y)), "network")
    return _scores(each, point.predict(each.test_x))


def _laplace(each: Task, place: str) -> dict[str, float]:
    import knowable as kn

    method = kn.Laplace(structure="diag" if place == "diag" else "kron")
    posterior = method.fit(_model(each, place), (each.x, each.y), start="network", progress=False)
    found = _scores(each, posterior.predict(each.test_x))
    return {**found, "prior_scale": posterior.diagnostics["prior_scale"]}


def _swag(each: Task, place: str, snapshots: int | None) -> dict[str, float]:
    import knowable as kn

    method = kn.SWAG(start="network", snapshots=snapshots)
    posterior = method.fit(_model(each, place), (each.x, each.y), progress=False)
    return {**_scores(each, posterior.predict(each.test_x)), "share": posterior.diagnostics["share"]}


def _peer(each: Task, place: str) -> dict[str, float]:
    """As its documentation recommends: prior precision (and noise) by the marginal likelihood, probit for classes."""
    import knowable as kn

    laplace = _laplace_torch()
    kind = "classification" if each.classes else "regression"
    where = "last_layer" if place == "last layer" else "all"
    backend = laplace.curvature.BackPackGGN
    made = laplace.Laplace(
        each.net,
        kind,
        subset_of_weights=where,
        hessian_structure="diag" if place == "diag" else "kron",
        backend=backend,
    )
    made.fit(Batches(each.x, each.y, 100))
    if each.classes:
        made.optimize_prior_precision(method="marglik", pred_type="glm", link_approx="probit")
        probs = torch.cat([made(part, link_approx="probit").detach() for part in each.test_x.split(100)])
        log_probs = probs.clamp_min(1e-30).log()
        return _scores(each, kn.Categorical().predict(log_probs.unsqueeze(0), {}, torch.zeros(1)))
    log_prior, log_noise = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_noise], lr=1e-1)
    for _ in range(200):
        optimiser.zero_grad()
        (-made.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
        optimiser.step()
    mean, variance = made(each.test_x)
    scale = (variance.reshape(len(mean), 1) + made.sigma_noise.detach() ** 2).sqrt().detach()
    own = torch.distributions.Normal(mean.detach(), scale)
    error = (each.test_y - own.mean).square().mean().sqrt()
    return {"nll": -own.log_prob(each.test_y).mean().item(), "rmse": error.item()}


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Every contender on every network and seed; what is finished is not run again."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    names = ["digits"] if quick else list(PROBLEMS)
    keys = [(name, title, seed) for name in names for title in contenders(PROBLEMS[name]) for seed in range(SEEDS)]
    if quick:
        keys = [key for key in keys if key[2] == 0 and "torch" not in key[1]]
    tasks: dict[tuple[str, int], Task] = {}
    for name, title, seed in sorted(keys, key=lambda key: ("torch" in key[1], names.index(key[0]), key[2])):
        if not fnmatch(f"{name} {title}", only):
            continue
        key = f"{name} {title} {seed} {quick} {PROBLEMS[name]}"
        row = rows.get(key)
        if row is None:
            if (name, seed) not in tasks:
                tasks = {(name, seed): task(name, seed, quick=quick)}
            row = rows.add(key, _tried(contenders(PROBLEMS[name])[title], tasks[name, seed]))
        say(f"{name}, {title}, seed {seed}: {row.get('error') or round(row['nll'], 4)}")
        found.setdefault(name, {}).setdefault(title, {})[str(seed)] = row
    packages = ("knowable", "laplace-torch", "backpack-for-pytorch")
    return describe("trained_networks", quick=quick, packages=packages, networks=found)


def _tried(make: Callable[[Task], Mapping[str, float]], each: Task) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores = make(each)
        said = sorted({warning.category.__name__ for warning in caught if "knowable" in warning.category.__module__})
        return {**scores, "seconds": time.perf_counter() - begun, "warnings": said}
    except Exception as error:
        return {"error": one_line(error)}


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each network."""
    parts = [
        table(PROBLEMS[name].title, _HEADER, _lines(methods), _NOTE.format(seeds=max(map(len, methods.values()))))
        for name, methods in run["networks"].items()
    ]
    return page(run, *parts)


def _lines(methods: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    order = [title for title in contenders(PROBLEMS["digits"]) if title in methods]
    own = methods.get("the network", {})
    return [_cells(title, methods[title], own) for title in order]


def _cells(title: str, fits: Mapping[str, Any], network: Mapping[str, Any]) -> list[str]:
    good = {seed: row for seed, row in fits.items() if "error" not in row}
    if not good:
        return [title, f"failed: {next(iter(fits.values()))['error']}"]
    worse = [row["nll"] - network[seed]["nll"] for seed, row in good.items() if "nll" in network.get(seed, {})]
    right = [row.get("accuracy", row.get("rmse")) for row in good.values()]
    ece = [row["ece"] for row in good.values() if "ece" in row]
    return [
        title, _mean([row["nll"] for row in good.values()]), _mean(worse) if worse else "", _mean(ece) if ece else "",
        _mean(right), f"{sum(row['seconds'] for row in good.values()) / len(good):.1f}",
    ]  # fmt: skip


def _mean(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.4f} ± {error:.4f}"
