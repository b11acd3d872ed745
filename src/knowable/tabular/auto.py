"""Choosing a method by the size of the data, the size of the network and the time there is."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.method import Method
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.inference.ensembles import DeepEnsemble
from knowable.inference.laplace import Laplace
from knowable.inference.sampling import MCLMC
from knowable.inference.variational import MeanFieldVI
from knowable.tabular.targets import TASKS

USUAL_BUDGET = 20.0  # seconds, which a fit has where none are given
_CHAINS = 8
_GRADIENTS = {"regression": 3_000, "classification": 10_000}  # of every chain, below which chains are not used
_FEW = 2_000  # rows, on which classifiers from different starts end as the same function
_STEPS = 5_000  # of training
_OVERHEAD = 1e-3  # seconds of a gradient, whatever its size
_OPERATIONS = 1e10  # a second, about what one core does in double precision
_LARGE = 100_000  # parameters, beyond which networks are trained one at a time


@dataclass(frozen=True)
class Choice:
    """A method, and why it was chosen.

    Attributes:
        method: The method.
        why: One sentence.
    """

    method: Method
    why: str

    def __str__(self) -> str:
        return f"{self.method!r}: {self.why}"


def choose(
    rows: int,
    inputs: int,
    parameters: int,
    task: str,
    budget: float | None = None,
    *,
    updates: bool = False,
    weighted: bool = False,
) -> Choice:
    """Choose a method.

    Chains where there is time for some thousand gradients of all of them: they follow the posterior wherever it goes,
    and on small data that tells. None of their steps is rejected, which leaves a small bias and gives more draws.
    Classifiers need more: where classes are far apart the posterior is wide, and paths through it are long. Else an
    ensemble of networks trained side by side; of large networks, and of classifiers for few rows (whose members would
    be all the same), one with a Laplace approximation around it.

    Args:
        rows: Training rows.
        inputs: Numbers in a row.
        parameters: Weights of the network.
        task: ``"regression"`` or ``"classification"``.
        budget: Seconds there are. None: twenty.
        updates: Whether the posterior is to become the prior of rows to come.
        weighted: Whether rows have weights that are not whole numbers.

    Example:
        >>> choose(300, 6, 500, "regression", budget=60).method
        MCLMC(chains=8, adjusted=False)
        >>> choose(50_000, 20, 4_000, "classification", budget=60).method
        DeepEnsemble()
        >>> choose(450, 35, 1_500, "classification").method
        Laplace()
    """
    check_count("rows", rows)
    check_count("inputs", inputs)
    check_count("parameters", parameters)
    check_choice("task", task, TASKS)
    time = USUAL_BUDGET if budget is None else check_number("budget", budget, above=0)
    size = f"{rows:,} rows, {inputs:,} inputs and {parameters:,} weights"
    within = f"{time:g} s"
    if updates:
        return Choice(MeanFieldVI(), f"its posterior can be the prior of the rows to come ({size})")
    needed = _GRADIENTS[task] * _gradient_seconds(rows, parameters, _CHAINS)
    if not weighted and needed <= time:
        return Choice(
            MCLMC(chains=_CHAINS, adjusted=False),
            f"{size} are few enough for chains that draw from the posterior in {within}",
        )
    why = "weights on rows that are not whole numbers" if weighted else f"chains would need some {needed:.0f} s"
    if task == "classification" and rows <= _FEW and not weighted:
        return Choice(Laplace(), f"{size}: {why}, there are {within}, and on few rows an ensemble hardly differs")
    if parameters <= _LARGE or weighted:
        return Choice(DeepEnsemble(members=_members(rows, parameters, time)), f"{size}: {why}, and there are {within}")
    return Choice(Laplace(), f"{size}: {why}, and several such networks are slow to train in {within}")


def _members(rows: int, parameters: int, time: float) -> int:
    """Five, or as many as there is time to train, but three at the least."""
    batch = rows if rows <= 1024 else 128  # as in training
    one = _STEPS * _gradient_seconds(batch, parameters, 1)
    return min(5, max(3, int(time / max(one, 1e-9))))


def _gradient_seconds(rows: int, parameters: int, copies: int) -> float:
    """What the gradient of ``copies`` networks takes, roughly: six operations for every weight and row."""
    return _OVERHEAD + 6.0 * copies * rows * parameters / _OPERATIONS
