"""Continual learning: one task after the other, the posterior of each the prior of the next (Nguyen et al., 2018)."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.method import Method
from knowable.core.model.data import Data, as_data
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.network.outputs import Output, as_said
from knowable.core.network.params import expand_params
from knowable.core.posterior.cached_features import rebound
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import classes_of, load_posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction
from knowable.core.storage.folder import is_folder, read_folder, tensor_fingerprint, write_folder
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.figure import COLOURS, INK, new_figure
from knowable.core.support.randomness import derive_seed
from knowable.decisions.coreset import Coreset
from knowable.errors import InvalidArgument, ModelWarning, NeedsClasses, Unsupported
from knowable.evaluation.inputs import by_row
from knowable.evaluation.scores import accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KIND = "continual"
_TEST_ROWS = 1_000  # of the training data, to score where there is no test data


class ContinualLearner:
    r"""Learns tasks one after the other, without the data of those before.

    .. math:: q_t(\theta) \approx p(D_t \mid \theta)\, q_{t-1}(\theta) \,/\, Z_t

    Yesterday's posterior is today's prior, on the full-data scale, so there is no weight between old and new to choose.
    With ``MeanFieldVI`` this is variational continual learning (VCL), with ``Laplace`` online Laplace (Kronecker or, as
    in EWC, diagonal), with ``ExactLinear`` it is exact.

    With a ``coreset``, so many rows of each task are kept apart from :math:`q_t`, and count before predictions, when a
    copy of it is fitted to all rows kept. Every row counts once.

    Args:
        model: The model of the first task. Later tasks have its network, likelihood, and random parameters. A network
            with a head for each task returns several outputs, of which :meth:`learn` is told which.
        method: The method that fits each task. Its posterior must have a density: ``MeanFieldVI``, ``NaturalVI``,
            ``Laplace``, ``ExactLinear`` and the like.
        coreset: How many rows to keep of each task, or a :class:`Coreset`; None keeps none.
        seed: Fixes every random choice.
        checkpoint: A folder. What was learned is saved after each task, and a task that is being learned now and then.
            A process that was stopped runs the same lines again: tasks that were learned are read, and the result is
            that of a run that was not stopped.

    Attributes:
        posterior: What predicts: after the coresets of all tasks, if there are any.
        propagated: The prior of the next task.
        tasks: The tasks learned so far.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(60, 3)
        >>> y = (x @ torch.tensor([1.0, -1.0, 0.5]) > 0).long()
        >>> model = kn.Model(torch.nn.Linear(3, 2), kn.Categorical())
        >>> learner = kn.ContinualLearner(model, kn.Laplace(structure="full"))
        >>> for rows in (slice(0, 30), slice(30, 60)):
        ...     _ = learner.learn((x[rows], y[rows]))
        >>> len(learner.accuracies), len(learner.accuracies[-1])
        (2, 2)
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        coreset: int | Coreset | None = None,
        *,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        self.model = check_type("model", model, Model, "a knowable Model")
        self.method = check_type("method", method, Method, "a method, such as kn.MeanFieldVI()")
        self.coreset = coreset if isinstance(coreset, Coreset) or coreset is None else Coreset(coreset)
        self.seed = check_count("seed", seed, at_least=0)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.tasks: list[Task] = []
        self.propagated: Posterior | None = None
        self.posterior: Posterior | None = None

    # --- learning ----------------------------------------------------------------------------------------------------

    def learn(self, data: Any, *, test: Any = None, output: Output | None = None, progress: bool | None = None) -> Task:
        """Learn one task.

        Args:
            data: Its data, as for ``fit``.
            test: Rows to score predictions on, now and after every later task. None: rows of the data themselves, at
                most 1,000, for which accuracies are those on training data.
            output: Which output of the network is this task's head: a name or a place. None: the model's own, and the
                tasks share one head.
            progress: Show a progress bar; None shows it only on a terminal.

        Returns:
            The task, with the scores of all tasks after it.
        """
        number = len(self.tasks)
        model = self._model(output)
        rows = as_data(data, model, batch_size=getattr(self.method, "batch_size", None))
        scored = rows if test is None else as_data(test, model, name="test")
        scored = Data(scored.some(_TEST_ROWS, seed=self.seed)[:2] if test is None else scored.tensors[:2])
        task = Task(number, output, scored, on_training_rows=test is None)
        identity = self._identity(rows, task)
        if self._restored(task, identity):
            return task
        others, task.kept = self._apart(rows, number)
        untrained = self.model if output is None else self.model.with_output(output)
        task.untrained = task.before = task.score(Particles(untrained, expand_params(untrained.params(), 1)))
        if self.posterior is not None:
            task.before = task.score(self.posterior)
        self.propagated = self._fitted(model, others, f"task-{number}/fit", progress)
        self.propagated.as_prior()  # or say at once that it cannot be one
        self.tasks.append(task)
        self.posterior = self._after_coresets(progress)
        task.scores = [each.score(self.posterior) for each in self.tasks]
        self._save(identity)
        return task

    def _model(self, output: Output | None) -> Model:
        """The model of the next task: under the last posterior, once there is one."""
        model = self.model if self.propagated is None else self.propagated.model.with_prior(self.propagated)
        return model if output is None else model.with_output(output)

    def _fitted(self, model: Model, rows: Data, part: str, progress: bool | None) -> Posterior:
        method = self.method if self.propagated is None else self.method.continued()
        folder = None if self.checkpoint is None else self.checkpoint / part
        with warnings.catch_warnings():
            if model.network.output is not None:  # what other heads know is, so far, the prior
                warnings.filterwarnings("ignore", "No gradient of the likelihood reaches", ModelWarning)
            return method.fit(model, rows, seed=derive_seed(self.seed, part), progress=progress, checkpoint=folder)

    def _apart(self, rows: Data, number: int) -> tuple[Data, Data | None]:
        """The rows without those that are kept, and these."""
        if self.coreset is None:
            return rows, None
        if not rows.in_memory or rows.weighted:
            raise Unsupported("coreset needs data in memory without row weights. Pass (x, y), or leave coreset out.")
        x, y = rows.tensors[:2]
        chosen = self.coreset.indices(x, seed=derive_seed(self.seed, "coreset", number))
        others = torch.ones(len(x), dtype=torch.bool, device=x.device)
        others[chosen] = False
        return Data((x[others], y[others])), Data((x[chosen], y[chosen]))

    def _after_coresets(self, progress: bool | None) -> Posterior:
        """The posterior after the rows that were kept of every task; those with the same head in one fit."""
        assert self.propagated is not None
        posterior = self.propagated
        for head, output in enumerate(self._outputs()):
            kept = [task.kept.tensors for task in self.tasks if task.output == output and task.kept is not None]
            if kept:
                x, y = (torch.cat(each) for each in zip(*kept, strict=True))
                model = posterior.model.with_prior(posterior)
                model = model if output is None else model.with_output(output)
                posterior = self._fitted(model, Data((x, y)), f"task-{len(self.tasks) - 1}/coreset-{head}", progress)
        return posterior

    # --- predictions -------------------------------------------------------------------------------------------------

    def predict(self, x: Any, *, task: int | None = None, samples: int = 64) -> Prediction:
        """The predictive distribution at ``x``.

        Args:
            x: Inputs.
            task: Number of the task they are from, counted from 0; not needed where all tasks share one head.
            samples: Number of posterior draws.
        """
        if self.posterior is None:
            raise InvalidArgument("Nothing was learned yet: call learn(data) first.")
        if task is None and len(self._outputs()) > 1:
            raise InvalidArgument(
                "task must be given: the tasks have heads of their own. If it is not known, task_of(x) finds the head "
                "that is surest of each row."
            )
        number = 0 if task is None else check_count("task", task, at_least=0, at_most=len(self.tasks) - 1)
        return self._headed(self.tasks[number].output).predict(x, samples=samples)

    def task_of(self, x: Any, *, samples: int = 64) -> Tensor:
        """The task each row seems to be from: of the head whose prediction is least uncertain, ``(rows,)``."""
        if self.posterior is None:
            raise InvalidArgument("Nothing was learned yet: call learn(data) first.")
        outputs, every = self._outputs(), [task.output for task in self.tasks]
        totals = [by_row(self._headed(output).predict(x, samples=samples).total).mean(1) for output in outputs]
        first = torch.tensor([every.index(output) for output in outputs], device=totals[0].device)
        return first[torch.stack(totals).argmin(0)]

    def _outputs(self) -> list[Any]:
        """The heads, in the order of their first tasks."""
        every = [task.output for task in self.tasks]
        return [output for place, output in enumerate(every) if output not in every[:place]]

    def _headed(self, output: Output | None) -> Posterior:
        """The posterior that predicts, at one head."""
        assert self.posterior is not None
        return at_head(self.posterior, output)

    # --- scores ------------------------------------------------------------------------------------------------------

    @property
    def accuracies(self) -> list[list[float]]:
        """Accuracy on tasks 0 to t after learning task t, one row for each t."""
        return [[score.accuracy for score in task.scores] for task in self._classified()]

    @property
    def log_likelihoods(self) -> list[list[float]]:
        """Mean log likelihood of a test row of tasks 0 to t after learning task t, one row for each t."""
        return [[score.log_likelihood for score in task.scores] for task in self.tasks]

    @property
    def average_accuracy(self) -> float:
        """Mean accuracy on all tasks, now."""
        last = self.accuracies[-1]
        return sum(last) / len(last)

    @property
    def forgetting(self) -> float:
        """How much accuracy on earlier tasks has fallen from its best, on average (Chaudhry et al., 2018)."""
        table = self.accuracies
        lost = [max(row[k] for row in table[k:]) - table[-1][k] for k in range(len(table) - 1)]
        return sum(lost) / len(lost) if lost else 0.0

    @property
    def backward_transfer(self) -> float:
        """Accuracy on earlier tasks now less that just after each was learned, on average (Lopez-Paz et al., 2017)."""
        table = self.accuracies
        moved = [table[-1][k] - table[k][k] for k in range(len(table) - 1)]
        return sum(moved) / len(moved) if moved else 0.0

    @property
    def forward_transfer(self) -> float:
        """Accuracy on each task before it was learned less that of the untrained network, on average."""
        gained = [task.before.accuracy - task.untrained.accuracy for task in self._classified()[1:]]
        return sum(gained) / len(gained) if gained else 0.0

    def _classified(self) -> list[Task]:
        if any(math.isnan(score.accuracy) for task in self.tasks for score in task.scores):
            raise Unsupported("Accuracies are of labels; these tasks have numbers. See log_likelihoods.")
        return self.tasks

    def plot(self) -> Figure:
        """Accuracy (or mean log likelihood) on each task as more are learned, and the average.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        labels = not any(math.isnan(task.before.accuracy) for task in self.tasks)
        table = self.accuracies if labels else self.log_likelihoods
        return new_figure(5.5, 3.2, lambda figure: _draw(figure, table, "accuracy" if labels else "log likelihood"))

    def __repr__(self) -> str:
        known = f"{len(self.tasks)} task{'s' * (len(self.tasks) != 1)}"
        if self.tasks and not math.isnan(self.tasks[0].before.accuracy):
            known += f", average accuracy={self.average_accuracy:.3f}, forgetting={self.forgetting:.3f}"
        if any(task.on_training_rows for task in self.tasks):
            known += ", scored on training rows"
        kept = "" if self.coreset is None else f", {self.coreset!r}"
        return f"ContinualLearner({type(self.method).__name__}{kept}: {known})"

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _identity(self, rows: Data, task: Task) -> dict[str, str]:
        data = tensor_fingerprint(*tensors_of(*rows.tensors)) if rows.in_memory else str(rows.size)
        test = tensor_fingerprint(*tensors_of(*task.test.tensors))
        return {
            "method": repr(self.method), "model": repr(self.model), "coreset": repr(self.coreset),
            "seed": str(self.seed), "output": repr(task.output), "data": data, "test": test,
        }  # fmt: skip

    def _save(self, identity: dict[str, str]) -> None:
        """Write the last task: first its posteriors, then, in one step, what says that it was learned."""
        if self.checkpoint is None:
            return
        task = self.tasks[-1]
        folder = self.checkpoint / f"task-{task.number}"
        assert self.propagated is not None and self.posterior is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeedsClasses)  # this learner knows them
            self.propagated.save(folder / "propagated", overwrite=True)
            if self.posterior is not self.propagated:
                self.posterior.save(folder / "posterior", overwrite=True)
        kept = [] if task.kept is None else tensors_of(*task.kept.tensors)
        content = {
            "identity": identity,
            "scores": [asdict(score) for score in task.scores],
            "before": asdict(task.before), "untrained": asdict(task.untrained),
        }  # fmt: skip
        write_folder(folder / "task", _KIND, content, {f"kept.{k}": each for k, each in enumerate(kept)})

    def _restored(self, task: Task, identity: dict[str, str]) -> bool:
        """Whether the task was learned by an earlier process; then everything is as after it."""
        if self.checkpoint is None or not is_folder(self.checkpoint / f"task-{task.number}" / "task"):
            return False
        folder = self.checkpoint / f"task-{task.number}"
        content, tensors = read_folder(folder / "task", _KIND)
        different = [key for key, value in identity.items() if content["identity"].get(key) != value]
        if different:
            raise InvalidArgument(
                f"checkpoint {str(self.checkpoint)!r} holds another task {task.number}: {', '.join(different)} differ. "
                f"Give another folder or delete this one."
            )
        task.scores = [TaskScore(**each) for each in content["scores"]]
        task.before, task.untrained = TaskScore(**content["before"]), TaskScore(**content["untrained"])
        if tensors:
            task.kept = Data((tensors["kept.0"], tensors["kept.1"]))
        self.tasks.append(task)
        self.propagated = self._loaded(folder / "propagated")
        self.posterior = self._loaded(folder / "posterior") if is_folder(folder / "posterior") else self.propagated
        return True

    def _loaded(self, folder: Path) -> Posterior:
        output = as_said(self.model.network.output)
        function: Any = output if callable(output) else None
        return load_posterior(folder, self.model.net, classes_of(self.model), function)


@dataclass(frozen=True)
class TaskScore:
    """Scores of predictions on one task.

    Attributes:
        accuracy: Share of labels that are right; NaN where targets are numbers.
        log_likelihood: Mean log likelihood of a row.
    """

    accuracy: float = math.nan
    log_likelihood: float = math.nan


@dataclass
class Task:
    """A task that was learned.

    Attributes:
        number: Counted from 0.
        output: Its head; None where the tasks share one.
        test: What it is scored on.
        on_training_rows: Whether these are rows that it was trained on.
        kept: Its coreset, or None.
        scores: Of all tasks up to this one, after learning it.
        before: Of this task, before learning it.
        untrained: Of this task, by the network as it was before any task.
    """

    number: int
    output: Any
    test: Data
    on_training_rows: bool
    kept: Data | None = None
    scores: list[TaskScore] = field(default_factory=list)
    before: TaskScore = TaskScore()
    untrained: TaskScore = TaskScore()

    def score(self, posterior: Posterior) -> TaskScore:
        """Scores of this task's test rows."""
        x, y = self.test.tensors[:2]
        prediction = at_head(posterior, self.output).predict(x)
        right = accuracy(prediction, y) if isinstance(prediction, ClassPrediction) else math.nan
        return TaskScore(right, prediction.log_prob(y).double().mean().item())


def at_head(posterior: Posterior, output: Output | None) -> Posterior:
    """The same posterior, of another output of the network."""
    return posterior if output is None else rebound(posterior, posterior.model.with_output(output))


def _draw(figure: Figure, table: Sequence[Sequence[float]], what: str) -> None:
    axes = figure.subplots()
    after = range(1, len(table) + 1)
    for k in range(len(table)):
        values = [table[t][k] for t in range(k, len(table))]
        colour = COLOURS[k % len(COLOURS)]
        axes.plot(after[k:], values, color=colour, marker="o", markersize=3, linewidth=1, label=f"task {k}")
    means = [sum(row) / len(row) for row in table]
    axes.plot(after, means, color=INK, linewidth=2.2, label="average")
    axes.set_xticks(after)
    axes.set(xlabel="tasks learned", ylabel=what)
    axes.legend(ncols=1 + len(table) // 8, loc="center left", bbox_to_anchor=(1.0, 0.5))
