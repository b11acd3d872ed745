"""What methods that put multiplicative noise on weights have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knowable.core.checks import check_count
from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.final_bound import final_bound
from knowable.core.model import Model
from knowable.core.training import TrainingResult
from knowable.core.variational_method import VariationalFit
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.noisy_model import noisy_names, prior_notes, with_log_uniform


@dataclass(frozen=True, repr=False)
class NoiseMethod(VariationalFit):
    """Noise on the weights under a log-uniform prior, that the method brings with it; points elsewhere.

    Args:
        draws: Draws per step.
        where: Names or globs of the weights that are noisy, of those that are random in the model. None: all with two
            dimensions or more.
    """

    draws: int = 1
    where: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("draws", self.draws)
        object.__setattr__(self, "where", check_where(self.where))

    def target(self, model: Model) -> Model:
        """The model with the log-uniform prior on the noisy weights, and points elsewhere."""
        return with_log_uniform(model, noisy_names(model, self.where))

    def _evidence(self, objective: Any, rows: Data, seed: int) -> tuple[LogEvidence | None, dict[str, float]]:
        return final_bound(objective, rows, seed)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*super()._notes(model, size, result), *prior_notes(model, noisy_names(model, self.where)))
