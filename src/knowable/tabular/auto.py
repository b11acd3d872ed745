"""Choosing a method, and how much work it does, by the size of the data, of the network, and a budget.

Work is counted in operations, never by the clock: the same data, seed and budget give the same fit on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from knowable.core.chains.settings import ChainSettings
from knowable.core.method import Method
from knowable.core.support.checks import check_choice, check_count
from knowable.core.training.settings import Trained
from knowable.inference.ensembles import DeepEnsemble
from knowable.inference.laplace import Laplace
from knowable.inference.sampling import MCLMC
from knowable.inference.variational import MeanFieldVI
from knowable.tabular.targets import TASKS


@dataclass(frozen=True)
class Effort:
    """How much work a budget allows."""

    operations: float  # of all gradients of chains, beyond which chains are not used
    warmup: int  # transitions of each chain
    draws: int  # of each chain, of a sampler that was asked for
    gradients: int  # of each chain, at most
    steps: float  # of training, as a multiple of the usual number


BUDGETS = {
    "quick": Effort(1.3e11, 200, 50, 4_000, 0.4),
    "normal": Effort(1.2e12, 300, 120, 10_000, 1.0),
    "thorough": Effort(1.2e13, 600, 600, 30_000, 3.0),
}
_CHAINS = 8
_OVERHEAD = 1e7  # operations that take as long as what a gradient costs whatever its size
_MEMBERS = 5
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
    budget: str = "normal",
    *,
    updates: bool = False,
) -> Choice:
    """Choose a method and its number of gradients.

    Chains where some thousand gradients of all of them are within the budget: they follow the posterior wherever it
    goes, and on small data that tells. None of their steps is rejected, which leaves a small bias and gives more draws.
    Else an ensemble of networks trained side by side; of large networks one with a Laplace approximation around it.

    Args:
        rows: Training rows.
        inputs: Numbers in a row.
        parameters: Weights of the network.
        task: ``"regression"`` or ``"classification"``.
        budget: ``"quick"``, ``"normal"`` or ``"thorough"``.
        updates: Whether the posterior is to become the prior of rows to come.

    Example:
        >>> choose(300, 6, 500, "regression").method
        MCLMC(chains=8, max_gradients=10000, warmup=300, adjusted=False)
        >>> choose(50_000, 20, 4_000, "classification").method
        DeepEnsemble(epochs=17, batch_size=128)
    """
    check_count("rows", rows)
    check_count("inputs", inputs)
    check_count("parameters", parameters)
    check_choice("task", task, TASKS)
    check_choice("budget", budget, BUDGETS)
    effort = BUDGETS[budget]
    size = f"{rows:,} rows, {inputs:,} inputs and {parameters:,} weights"
    within = f"the budget {budget!r}"
    if updates:
        return Choice(MeanFieldVI(), f"its posterior can be the prior of the rows to come ({size})")
    if effort.gradients * (_OVERHEAD + 6.0 * _CHAINS * rows * parameters) <= effort.operations:
        chains = MCLMC(chains=_CHAINS, adjusted=False, warmup=effort.warmup, max_gradients=effort.gradients)
        if budget == "thorough":
            chains = replace(chains, draws=effort.draws, max_gradients=None)
        return Choice(chains, f"{size} are few enough for chains that draw from the posterior within {within}")
    why = f"chains would need more work than {within} has"
    epochs, batch = training_length(rows, inputs, budget)
    if parameters <= _LARGE:
        return Choice(DeepEnsemble(members=_MEMBERS, epochs=epochs, batch_size=batch), f"{size}: {why}")
    return Choice(
        Laplace(epochs=epochs, batch_size=batch), f"{size}: {why}, and several such networks are slow to train"
    )


def with_budget(method: Method, rows: int, inputs: int, budget: str) -> Method:
    """A method at its defaults with the steps or draws of a budget; ``"normal"`` leaves it as it is."""
    effort = BUDGETS[budget]
    if budget == "normal":
        return method
    if isinstance(method, Trained):
        epochs, batch = training_length(rows, inputs, budget)
        return replace(method, epochs=epochs, batch_size=batch)
    if isinstance(method, ChainSettings):
        return replace(method, warmup=effort.warmup, draws=effort.draws)
    return method


def training_length(rows: int, inputs: int, budget: str) -> tuple[int, int]:
    """Epochs and rows of a step: 2,000 steps, and more for more rows and inputs, times the budget's factor."""
    batch = rows if rows <= 1024 else 128
    steps = BUDGETS[budget].steps * (2_000 + 20.0 * rows**0.5 + 10.0 * inputs)
    return max(1, round(steps * batch / rows)), batch
