"""Tasks one after the other: permuted MNIST and split MNIST, by posteriors that are the next task's prior.

Permuted MNIST (Goodfellow et al., 2014): each task has the pixels of MNIST in another order; all share one head of a
784-100-100-10 network. Split MNIST (Zenke et al., 2017): five tasks of two digits each, with a head each on a
784-256-256 network. Plain fine-tuning goes on from the weights of the task before, with nothing to hold them. No method
has a weight between old and new tasks; settings are fixed beforehand and the same for all. The images are read from the
folder that ``KNOWABLE_DATA`` names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

METHODS = (
    "fine-tuning", "Laplace, diag (EWC)", "Laplace, kron", "Laplace, kron, averaged", "MeanFieldVI (VCL)",
)  # fmt: skip
_HEADER = ("method", "rows kept of a task", "average accuracy", "forgetting", "first task now", "last task")
_PUBLISHED = {
    "permuted": "Published, 10 tasks: VCL 0.90, with 200 points 0.93 (Nguyen et al., 2018, from memory); FROMP with "
    "200 points 0.948; a reimplementation of VCL 0.901, with 200 points 0.935.",
    "split": "Published: VCL 0.976, with 40 points 0.988 (a reimplementation); FROMP 0.993; SI 0.97.",
}


@dataclass(frozen=True)
class Recipe:
    """How everything is trained.

    Attributes:
        tasks: Number of permuted tasks.
        rows: Training images of each.
        test: Test images of each.
        epochs: Of each task.
        batch_size: Images per step.
        width: Units of each hidden layer, of the permuted and of the split network.
        coreset: Rows kept of a task, where any are: of the permuted and of the split tasks.
        prior: Standard deviation of the normal prior.
        seed: Of everything.
    """

    tasks: int = 10
    rows: int = 60_000
    test: int = 10_000
    epochs: int = 5
    batch_size: int = 256
    width: tuple[int, int] = (100, 256)
    coreset: tuple[int, int] = (200, 40)
    prior: float = 0.2
    seed: int = 0


RECIPE = Recipe()
_QUICK = Recipe(tasks=2, rows=80, test=40, epochs=1, batch_size=40, width=(8, 8), coreset=(10, 4))


class SplitNetwork(nn.Module):
    """A body that all tasks share, and a head of two classes for each."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(width, 2) for _ in range(heads)])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The logits of every head."""
        hidden = self.body(x)
        return [head(hidden) for head in self.heads]


@dataclass(frozen=True, eq=False)
class Task:
    """Training and test rows, and the head (None where there is one for all)."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    output: int | None


def tasks_of(kind: str, recipe: Recipe, *, quick: bool) -> list[Task]:
    """The tasks in their order."""
    x, y, test_x, test_y = _noise(recipe) if quick else _mnist(recipe)
    if kind == "split":
        found = []
        for k in range(5):
            rows, test = (torch.isin(each, torch.tensor([2 * k, 2 * k + 1])) for each in (y, test_y))
            found.append(Task(x[rows], y[rows] - 2 * k, test_x[test], test_y[test] - 2 * k, k))
        return found
    orders = [torch.arange(784)]
    orders += [torch.randperm(784, generator=torch.Generator().manual_seed(k)) for k in range(1, recipe.tasks)]
    return [Task(x[:, order], y, test_x[:, order], test_y, None) for order in orders]


def _mnist(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(data_folder() / "mnist.npz") as file:
        images = (file[f"x_{part}"].reshape(-1, 784) for part in ("train", "test"))
        x, test_x = (torch.from_numpy(np.ascontiguousarray(each)).float() / 255 for each in images)
        y, test_y = (torch.from_numpy(file[f"y_{part}"]).long() for part in ("train", "test"))
    return x[: recipe.rows], y[: recipe.rows], test_x[: recipe.test], test_y[: recipe.test]


def _noise(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noise with a bright pixel whose place is the label, for quick runs."""
    generator = torch.Generator().manual_seed(0)
    count = recipe.rows + recipe.test
    x, y = torch.rand(count, 784, generator=generator), torch.arange(count) % 10
    x[torch.arange(count), y] += 2.0
    return x[: recipe.rows], y[: recipe.rows], x[recipe.rows :], y[recipe.rows :]


def evaluate(kind: str, method: str, kept: int, recipe: Recipe, *, quick: bool) -> dict[str, Any]:
    """Learn all tasks, and score them after the last one."""
    import knowable as kn

    tasks = tasks_of(kind, recipe, quick=quick)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = SplitNetwork(recipe.width[1], 5) if kind == "split" else _single_head(recipe.width[0])
    training: dict[str, Any] = {"epochs": recipe.epochs, "batch_size": recipe.batch_size}
    model = kn.Model(net, kn.Categorical(), kn.Normal(recipe.prior), output=None if kind == "permuted" else 0)
    if method == "fine-tuning":
        return _fine_tuned(model, tasks, training, recipe.seed)
    methods = {
        "Laplace, diag (EWC)": kn.Laplace(structure="diag", **training),
        "Laplace, kron": kn.Laplace(structure="kron", **training),
        "Laplace, kron, averaged": kn.Laplace(structure="kron", rounds=1, **training),
        "MeanFieldVI (VCL)": kn.MeanFieldVI(**training),
    }
    learner = kn.ContinualLearner(model, methods[method], kept or None, seed=recipe.seed)
    for task in tasks:
        learner.learn((task.x, task.y), test=(task.test_x, task.test_y), output=task.output, progress=False)
        say(f"  {kind}, {method}, {kept}: {learner!r}")
    return {"accuracies": learner.accuracies, "forgetting": learner.forgetting}


def _single_head(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _fine_tuned(model: Any, tasks: list[Task], training: dict[str, Any], seed: int) -> dict[str, Any]:
    """Maximum likelihood from task to task, each from the weights of the last."""
    import knowable as kn

    rows: list[list[float]] = []
    for number, task in enumerate(tasks):
        here = model if task.output is None else model.with_output(task.output)
        fitted = kn.MaximumLikelihood(**training).fit(here, (task.x, task.y), seed=seed, progress=False)
        model = model.starting_at(fitted.mean(), fitted.buffers)
        rows.append([_accuracy(model, each) for each in tasks[: number + 1]])
    lost = [max(row[k] for row in rows[k:]) - rows[-1][k] for k in range(len(tasks) - 1)]
    return {"accuracies": rows, "forgetting": sum(lost) / len(lost)}


@torch.no_grad()
def _accuracy(model: Any, task: Task) -> float:
    here = model if task.output is None else model.with_output(task.output)
    logits = here.forward(here.params(), task.test_x, buffers=here.buffers())
    return (logits.argmax(1) == task.test_y).double().mean().item()


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods, with and without rows that are kept; ``only`` is a glob of ``permuted: Laplace, kron``."""
    recipe = _QUICK if quick else RECIPE
    found: dict[str, dict[str, Any]] = {"permuted": {}, "split": {}}
    for place, kind in enumerate(found):
        for method in METHODS:
            for kept in (0,) if method == "fine-tuning" else (0, recipe.coreset[place]):
                if fnmatch(f"{kind}: {method}, {kept}", only) or fnmatch(f"{kind}: {method}", only):
                    found[kind][f"{method}|{kept}"] = _row(kind, method, kept, recipe, quick, rows)
    return describe("continual", quick=quick, packages=(), recipe=asdict(recipe), kinds=found)


def _row(kind: str, method: str, kept: int, recipe: Recipe, quick: bool, rows: Rows) -> dict[str, Any]:
    key = f"{kind}, {method}, {kept}, {recipe}" + ", quick" * quick
    known = rows.get(key)
    if known is not None:
        return known
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
            row: dict[str, Any] = {"error": None, **evaluate(kind, method, kept, recipe, quick=quick)}
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{kind}, {method}, {kept}: {row['accuracies'][-1] if row['error'] is None else row}")
    return rows.add(key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each kind of tasks."""
    recipe = run["recipe"]
    titles = {
        "permuted": f"Permuted MNIST, {recipe['tasks']} tasks, 784-100-100-10, one head, {recipe['epochs']} epochs",
        "split": f"Split MNIST, 5 tasks, a head each, {recipe['epochs']} epochs",
    }
    parts = [
        table(titles[kind], _HEADER, [_cells(name, row) for name, row in methods.items()], _PUBLISHED[kind])
        for kind, methods in run["kinds"].items()
        if methods
    ]
    return page(run, *parts)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    method, _, kept = name.partition("|")
    if row["error"] is not None:
        return [method, kept, f"failed: {row['error']}"]
    last = row["accuracies"][-1]
    return [
        method, kept, f"{sum(last) / len(last):.4f}", f"{row['forgetting']:.4f}", f"{last[0]:.4f}", f"{last[-1]:.4f}",
    ]  # fmt: skip
